"""Checkpoints of a training run: safetensors and JSON, written whole or not at all.

OUT/checkpoint/ holds model.safetensors (all parameters of the drafter), optimizer.safetensors (moments, running
statistics, averaged weights) and state.json; OUT/checkpoint-STEP/ are earlier ones that are kept. COD draws and the
data order are functions of (seed, epoch, step), so the place in the data is all the random state there is.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.config import TrainConfig
from peagle.drafters.storage import refuse_foreign
from peagle.errors import PeagleError, is_out_of_memory, one_line
from peagle.files import open_output, remove_stale, save_tensors, write_atomic
from peagle.training.batches import Batch, Place
from peagle.training.distributed import Ranks
from peagle.training.ema import WeightAverage
from peagle.training.monitor import Running
from peagle.training.optim import MasterOptimizer
from peagle.training.placement import Placement

# Settings that, rounding aside, change neither what a run computes nor in which order: free to differ on resume.
OPERATIONAL_KEYS = frozenset(
    {"log_interval", "save_interval", "keep", "logger", "parallel", "compact", "int8", "cache_features", "features"}
    | {"partition", "segments", "chunk_rows", "checkpoint_activations", "loss_chunk"}
    | {"eval_interval", "serve_tokens", "serve_k", "graphs"}
)
Recipe = dict[str, Any]


class CheckpointNotWritten(PeagleError):
    """The disk did not take a checkpoint. The one before it is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands: steps and packs done, the next pack, totals, and seconds of training in all parts of the
    run."""

    step: int = 0
    pack: int = 0
    epoch: int = 0
    index: int = 0
    positions: int = 0
    rows: int = 0  # supervised rows
    seconds: float = 0.0
    finished: bool = False

    @property
    def place(self) -> Place:
        """The next pack."""
        return Place(pack=self.pack, epoch=self.epoch, index=self.index)

    def after(self, batch: Batch, ranks: int = 1) -> "RunState":
        """The state once each of the `ranks` has trained on a pack, the first of them on `batch`.

        An index past the end of the epoch counts on in the next one.
        """
        return replace(self, pack=self.pack + ranks, epoch=batch.epoch, index=batch.index + ranks)


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
    """Make sure that OUT can be written, by this process alone, and that the heads in it may be. Raises PeagleError."""
    open_output(out)
    for name in ("checkpoint", "checkpoint.old"):
        if (out / name).is_file():
            raise PeagleError(f"{out / name} is a file where checkpoints go: move it away")
    remove_stale(out / "checkpoint")
    for name in ("head", "best"):
        refuse_foreign(out / name)


def find_checkpoint(out: Path) -> Path | None:
    """The newest whole checkpoint of OUT, or None. A kill between the two renames of a save leaves only older ones."""
    candidates = (out / "checkpoint", out / "checkpoint.old", *_numbered(out))
    return next((directory for directory in candidates if (directory / "state.json").is_file()), None)


def require_checkpoint(out: Path) -> None:
    """PeagleError unless OUT holds a run to go on with."""
    if find_checkpoint(out) is None:
        raise PeagleError(f"{out} holds no checkpoint to go on from: leave --resume out to start a run, or correct OUT")


def _numbered(out: Path) -> list[Path]:
    """The earlier checkpoints OUT/checkpoint-STEP, newest first."""
    found = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda path: -int(path.name.removeprefix("checkpoint-")))


def resume_point(out: Path, recipe: Recipe, ranks: Ranks) -> tuple[Path | None, RunState]:
    """The checkpoint that a run of this recipe goes on from, None at its beginning, and where it stands.

    Raises PeagleError for a checkpoint of another recipe, and where a rank sees another one than rank 0.
    """
    checkpoint = find_checkpoint(out)
    state, saved = (RunState(), recipe) if checkpoint is None else read_state(checkpoint)
    if ranks.share([state.step, state.finished]) != [state.step, state.finished]:
        raise PeagleError(f"rank {ranks.rank} does not see the checkpoint that rank 0 sees in {out}: share that folder")
    check_same_recipe(recipe, saved, out)
    return checkpoint, state


def save_checkpoint(
    out: Path,
    placement: Placement,
    optimizers: Sequence[MasterOptimizer],
    running: Running,
    state: RunState,
    recipe: Recipe,
    *,
    average: WeightAverage | None = None,
    keep: int = 1,
) -> None:
    """Write beside the old checkpoint, then swap by renaming: at any moment one of the two is whole.

    `keep` is how many checkpoints are left afterwards, the new one included. All ranks must call this, to hand in
    what they hold; rank 0 writes it, as whole tensors that any number of ranks can resume from.
    """
    tensors = _extras(placement, running, average) | _moments(optimizers)
    model = placement.state()
    if not placement.ranks.is_main:
        return
    current, old = out / "checkpoint", out / "checkpoint.old"
    new = out / f"checkpoint.{uuid.uuid4().hex[:8]}.new"
    try:
        new.mkdir()
        save_tensors(new / "model.safetensors", model)
        save_tensors(new / "optimizer.safetensors", tensors)
        write_state(new, state, recipe)
        if current.exists():
            aside = _aside(current, state) if keep > 1 else old
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(current, aside)
        os.replace(new, current)
        for surplus in (old, *_numbered(out)[keep - 1 :]):
            shutil.rmtree(surplus, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointNotWritten(
            f"checkpoint {current} cannot be written ({error}): free some space and run the same command to resume"
        ) from None


def _aside(current: Path, state: RunState) -> Path:
    """Where the checkpoint `current` goes when one of `state` takes its place: kept, if it is of another step."""
    step = read_state(current)[0].step
    return current.with_name("checkpoint.old" if step == state.step else f"checkpoint-{step}")


def write_recipe(out: Path, recipe: Recipe) -> None:
    """Write or replace OUT/recipe.json in one step. Raises PeagleError."""
    write_atomic(out / "recipe.json", (json.dumps(recipe, indent=2) + "\n").encode())


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
    directory: Path,
    placement: Placement,
    optimizers: Sequence[MasterOptimizer],
    running: Running,
    average: WeightAverage | None = None,
) -> None:
    """Restore parameters, optimiser state, statistics and averages in place. Raises PeagleError for a damaged one."""
    try:
        placement.load(load_file(directory / "model.safetensors"))
        tensors = load_file(directory / "optimizer.safetensors")
        for name, tensor in running.state().items():
            tensor.copy_(tensors.pop(f"running.{name}"))
        for name, tensor in _averages(average).items():
            tensor.copy_(placement.part(name, tensors.pop(f"ema.{name}")))
        _restore_moments(optimizers, tensors)
    except (OSError, SafetensorError, RuntimeError, LookupError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise _damaged(directory, error) from None


def _damaged(directory: Path, error: Exception) -> PeagleError:
    return PeagleError(
        f"checkpoint {directory} is damaged ({one_line(error)}): remove it to go on from an older one, or to start "
        "afresh"
    )


def _extras(placement: Placement, running: Running, average: WeightAverage | None) -> dict[str, Tensor]:
    """What is saved beside moments, by name: "running.NAME" and "ema.NAME"."""
    return {f"running.{name}": tensor for name, tensor in running.state().items()} | {
        f"ema.{name}": placement.whole(name, tensor) for name, tensor in _averages(average).items()
    }


def _averages(average: WeightAverage | None) -> Mapping[str, Tensor]:
    return {} if average is None else average.state()


def _moments(optimizers: Sequence[MasterOptimizer]) -> dict[str, Tensor]:
    """Whole optimiser states as "optimizer.parameter.quantity" -> tensor, the first two by number."""
    return {
        f"{number}.{parameter}.{quantity}": optimizer.whole(parameter, tensor)
        for number, optimizer in enumerate(optimizers)
        for parameter, quantities in optimizer.state_dict()["state"].items()
        for quantity, tensor in quantities.items()
    }


def _restore_moments(optimizers: Sequence[MasterOptimizer], tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `_moments`. Rates and groups are not stored: the recipe gives them."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, tensor in tensors.items():
        number, parameter, quantity = name.split(".", 2)
        part = optimizers[int(number)].part(int(parameter), tensor)
        states[int(number)].setdefault(int(parameter), {})[quantity] = part
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
