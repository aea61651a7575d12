"""Where the log goes besides train.jsonl: TensorBoard, W&B, trackio. Each is imported only when it is asked for."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from peagle.errors import PeagleError, one_line

PROJECT = "peagle"
RUN_ID_FILE = "run_id"


class MetricLogger(Protocol):
    """Takes the numbers of a step. Steps of a resumed run follow those before it."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a logger says of a run: its folder, its settings, and the step it starts behind (0, or that of a resume)."""

    out: Path
    recipe: Mapping[str, Any]
    step: int

    def identity(self) -> str:
        """An id that stays the same when the run is resumed, kept in OUT/run_id."""
        file = self.out / RUN_ID_FILE
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12] + "\n")
        return file.read_text().strip()


class TensorBoardLogger:
    """Event files in OUT/tensorboard."""

    def __init__(self, module: ModuleType, run: RunInfo) -> None:
        # What an earlier part of the run wrote of the steps that run again now is hidden.
        self._writer = module.SummaryWriter(str(run.out / "tensorboard"), purge_step=run.step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in OUT/wandb until `wandb sync`."""

    def __init__(self, module: ModuleType, run: RunInfo) -> None:
        self._run = module.init(
            project=PROJECT,
            name=run.out.name,
            id=run.identity(),
            resume="allow",
            dir=str(run.out),
            config=dict(run.recipe),
        )
        # W&B refuses a step below its newest, as after a kill; ours is a value of its own and the axis of the plots.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """A run of trackio, kept where trackio keeps its projects."""

    def __init__(self, module: ModuleType, run: RunInfo) -> None:
        self._module = module
        name = f"{run.out.name}-{run.identity()}"
        module.init(project=PROJECT, name=name, config=dict(run.recipe), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


@dataclass(frozen=True, slots=True)
class _Kind:
    package: str  # what must be installed
    module: str  # what is imported of it
    build: Callable[[ModuleType, RunInfo], MetricLogger]


_KINDS: Mapping[str, _Kind] = {
    "tensorboard": _Kind("tensorboard", "torch.utils.tensorboard", TensorBoardLogger),
    "wandb": _Kind("wandb", "wandb", WandbLogger),
    "trackio": _Kind("trackio", "trackio", TrackioLogger),
}


def check_loggers(names: Sequence[str]) -> None:
    """PeagleError unless every named logger is known and its package installed: before anything slow begins."""
    for name in names:
        if name not in _KINDS:
            raise PeagleError(f"logger {name!r} is not known: use {', '.join(_KINDS)}, or leave it out")
        if find_spec(_KINDS[name].package) is None:
            raise PeagleError(f"logger {name!r} needs a package that is missing: pip install 'peagle[{name}]'")


class Loggers:
    """The loggers of a run as one. One that fails is reported once and left out from then on: no log is worth a run."""

    def __init__(self, names: Sequence[str], run: RunInfo, note: Callable[[str], None]) -> None:
        """`note` tells the user. Raises PeagleError for a logger that cannot start, such as one without a login."""
        check_loggers(names)
        self._note = note
        self._open: dict[str, MetricLogger] = {}
        for name in dict.fromkeys(names):
            kind = _KINDS[name]
            try:
                self._open[name] = kind.build(import_module(kind.module), run)
            except Exception as error:  # a package of others: anything
                self.close()
                raise PeagleError(
                    f"logger {name!r} did not start ({one_line(error)}): set it up, or leave it out"
                ) from error

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a line of train.jsonl on, flattened; `record["step"]` is the step."""
        values = flat_numbers({name: value for name, value in record.items() if name != "step"})
        self._each(lambda logger: logger.log(record["step"], values))

    def close(self) -> None:
        """Let every logger finish."""
        self._each(lambda logger: logger.close())
        self._open.clear()

    def _each(self, call: Callable[[MetricLogger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                call(logger)
            except Exception as error:  # as above
                del self._open[name]
                self._note(f"logger {name} failed and is left out from here on ({one_line(error)})")


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested mappings and lists, named by their path: {"a": {"b": [1, 2]}} -> a/b/0 and a/b/1."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, list | tuple):
            value = dict(zip(map(str, range(len(value))), value, strict=True))
        if isinstance(value, Mapping):
            flat |= flat_numbers(value, f"{path}/")
        elif isinstance(value, int | float):
            flat[path] = float(value)
    return flat
