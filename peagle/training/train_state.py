"""Checkpoints of a training run: safetensors and JSON, written whole or not at all.

OUT/checkpoint/ holds model.safetensors (all parameters of the drafter), optimizer.safetensors (moments and running
statistics) and state.json. COD draws and the data order are functions of (seed, epoch, step), so the place in the data
is all the random state there is.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peagle.config import TrainConfig
from peagle.drafters.storage import refuse_foreign
from peagle.errors import PeagleError
from peagle.training.batches import Batch, Place
from peagle.training.lock import lock_output
from peagle.training.monitor import Running
from peagle.training.shards import write_atomic

# Settings that change neither what a run computes nor in which order: free to differ on resume.
OPERATIONAL_KEYS = frozenset({"log_interval", "save_interval", "cache_features", "compact", "int8"})
Recipe = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps done, the next pack, totals, and seconds of training in all parts of the run."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    positions: int = 0
    rows: int = 0  # supervised rows
    seconds: float = 0.0
    finished: bool = False

    @property
    def place(self) -> Place:
        """The next pack."""
        return Place(step=self.step, epoch=self.epoch, index=self.index)

    def after(self, batch: Batch) -> "RunState":
        """The state once `batch` is trained on; an index past the end of the epoch means the start of the next one."""
        return replace(
            self,
            step=self.step + 1,
            epoch=batch.epoch,
            index=batch.index + 1,
            positions=self.positions + batch.positions,
            rows=self.rows + len(batch.rows.live_L),
        )


def make_recipe(config: TrainConfig, base_model: str, data_hash: str) -> Recipe:
    """Everything that decides what a run computes, as plain JSON values."""
    return {"base_model": base_model, "data_hash": data_hash, **json.loads(json.dumps(asdict(config)))}


def check_same_recipe(recipe: Recipe, saved: Recipe, out: Path) -> None:
    """PeagleError naming the first setting in which a checkpoint differs from this run."""
    for key in sorted(recipe.keys() | saved.keys()):
        if key not in OPERATIONAL_KEYS and recipe.get(key) != saved.get(key):
            raise PeagleError(
                f"{out} holds a run with {key} = {saved.get(key)!r}, this one has {recipe.get(key)!r}: "
                "give the same settings to resume it, or choose another output directory"
            )


def prepare_output(out: Path) -> None:
    """Make sure that OUT can be written, by this process alone, and that OUT/head may be. Raises PeagleError."""
    probe = out / ".writable"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        lock_output(out)
    except OSError as error:
        raise PeagleError(f"output directory {out} cannot be written ({error.strerror}): choose another one") from None
    refuse_foreign(out / "head")
    for stale in out.glob("checkpoint.*.new"):  # of a run that was killed while it saved
        shutil.rmtree(stale, ignore_errors=True)


def find_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of OUT, or None. A kill between the two renames of a save leaves only the old one."""
    candidates = (out / "checkpoint", out / "checkpoint.old")
    return next((directory for directory in candidates if (directory / "state.json").is_file()), None)


def save_checkpoint(
    out: Path,
    drafter: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    running: Running,
    state: RunState,
    recipe: Recipe,
) -> None:
    """Write beside the old checkpoint, then swap by renaming: at any moment one of the two is whole."""
    current, old = out / "checkpoint", out / "checkpoint.old"
    new = out / f"checkpoint.{uuid.uuid4().hex[:8]}.new"
    tensors = {f"running.{name}": tensor for name, tensor in running.state().items()} | _moments(optimizers)
    try:
        new.mkdir()
        save_file(_storable(drafter.state_dict()), new / "model.safetensors")
        save_file(_storable(tensors), new / "optimizer.safetensors")
        write_state(new, state, recipe)
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(current, old)
        os.replace(new, current)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise PeagleError(
            f"checkpoint {current} cannot be written ({error}): free some space and run the same command to resume"
        ) from None


def write_state(directory: Path, state: RunState, recipe: Recipe) -> None:
    """Write or replace state.json of a checkpoint in one step. Raises PeagleError."""
    values = {"run": asdict(state), "recipe": recipe}
    write_atomic(directory / "state.json", (json.dumps(values, indent=1) + "\n").encode())


def read_state(directory: Path) -> tuple[RunState, Recipe]:
    """State and recipe of a checkpoint. Raises PeagleError when they cannot be read."""
    try:
        values = json.loads((directory / "state.json").read_text())
        return RunState(**values["run"]), values["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, error) from None


def load_checkpoint(
    directory: Path, drafter: nn.Module, optimizers: Sequence[torch.optim.Optimizer], running: Running
) -> None:
    """Restore parameters, optimiser state and running statistics in place. Raises PeagleError for a damaged one."""
    try:
        drafter.load_state_dict(load_file(directory / "model.safetensors"))
        tensors = load_file(directory / "optimizer.safetensors")
        for name, tensor in running.state().items():
            tensor.copy_(tensors.pop(f"running.{name}"))
        _restore_moments(optimizers, tensors)
    except (OSError, SafetensorError, RuntimeError, LookupError, ValueError) as error:
        raise _damaged(directory, error) from None


def _damaged(directory: Path, error: Exception) -> PeagleError:
    reason = " ".join(str(error).split())[:200]
    return PeagleError(f"checkpoint {directory} is damaged ({reason}): remove it to start afresh")


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detached and contiguous, as safetensors wants them."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _moments(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Optimiser states as "optimizer.parameter.quantity" -> tensor, the first two by number."""
    return {
        f"{number}.{parameter}.{quantity}": tensor
        for number, optimizer in enumerate(optimizers)
        for parameter, quantities in optimizer.state_dict()["state"].items()
        for quantity, tensor in quantities.items()
    }


def _restore_moments(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `_moments`. Rates and groups are not stored: the recipe gives them."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, tensor in tensors.items():
        number, parameter, quantity = name.split(".", 2)
        states[int(number)].setdefault(int(parameter), {})[quantity] = tensor
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
