"""What a training run reports: running statistics on the device, OUT/train.jsonl, and a progress line."""

import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import Tensor

from peagle.training.evaluate import Evaluation
from peagle.training.loss import DepthReport, DepthStatistics
from peagle.training.shards import write_atomic

_GIB = 1024**3


class Running:
    """Sums over the steps since the last report, kept on the device: adding a step waits for nothing."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.depths_4K = torch.zeros(4, num_depths, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)  # first step with a NaN or infinity

    def add(self, step: int, loss: Tensor, gradient_norm: Tensor, statistics: DepthStatistics) -> None:
        """Add one step (1-based number)."""
        self.depths_4K += statistics.table_4K
        self.loss += loss.detach()
        self.gradient_norm += gradient_norm
        self.steps += 1
        bad = ~(loss.detach().isfinite() & gradient_norm.isfinite()) & (self.bad_step < 0)
        self.bad_step.masked_fill_(bad, step)

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, for a checkpoint."""
        return dict(vars(self))

    def report(self) -> "StepReport":
        """Read everything (waits for the device) and start over; `bad_step` stays."""
        loss, norm, steps, bad = torch.stack(
            (self.loss, self.gradient_norm, self.steps.double(), self.bad_step.double())
        ).tolist()
        depths = DepthStatistics(self.depths_4K).report()
        for tensor in (self.depths_4K, self.loss, self.gradient_norm, self.steps):
            tensor.zero_()
        return StepReport(int(steps), loss / max(1, steps), norm / max(1, steps), int(bad), depths)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Means over `steps` steps. `bad_step` is the first step of the run with a NaN or infinity, -1 if there is none."""

    steps: int
    loss: float
    gradient_norm: float
    bad_step: int
    depths: DepthReport


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """One line of train.jsonl. Counts and seconds are totals of the run, the rest covers the steps since the last line.

    `seconds` is training time, evaluation and checkpoints included, loading and the feature cache not.
    """

    step: int
    epoch: int
    seconds: float
    positions: int
    rows: int
    loss: float
    depth_accuracy: list[float]
    prefix_accuracy: list[float]
    acceptance_length: float
    learning_rate_factor: float
    gradient_norm: float
    positions_per_second: float
    data_wait_share: float
    memory_gib: float

    def record(self) -> dict[str, Any]:
        """The entry as JSON values, floats rounded to what they mean except the loss."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value if name == "loss" else _rounded(value) for name, value in values.items()}

    def line(self) -> str:
        """The entry as one line for people."""
        return (
            f"step {self.step:,} · loss {self.loss:.4f} · accuracy {_shares(self.depth_accuracy)} · "
            f"AL {self.acceptance_length:.2f} · {self.positions_per_second:,.0f} positions/s"
        )


class Monitor:
    """Appends to the log file and shows progress: a live line on a terminal, a line per report elsewhere."""

    def __init__(self, file: Path, console: Console, *, keep_to_step: int) -> None:
        """Lines of an earlier part of the run beyond `keep_to_step` are dropped: those steps will run again."""
        kept = _truncate(file, keep_to_step)
        self._evaluated = {record["step"] for record in kept if "held_out" in record}
        self._file, self._console = file, console
        columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step(self, entry: LogEntry, done: float) -> None:
        """Report training; `done` is the share of the run that lies behind, above 0."""
        self._append(entry.record())
        remaining = entry.seconds * (1.0 - done) / done
        line = f"{entry.line()} · ETA {int(remaining // 60)}:{int(remaining % 60):02d}"
        self._progress.update(self._task, completed=done, description=line)
        if not self._console.is_terminal:
            self.note(line)

    def held_out(self, step: int, evaluation: Evaluation) -> None:
        """Report an evaluation after `step`; the log keeps one per step, whatever had to run again."""
        if step not in self._evaluated:
            self._append({"step": step, "held_out": _rounded(asdict(evaluation))})
            self._evaluated.add(step)
        self.note(
            f"step {step:,} · held out: loss {evaluation.loss:.4f} · accuracy {_shares(evaluation.depths.accuracy)} · "
            f"chains {_shares(evaluation.depths.prefix_accuracy)} · AL {evaluation.acceptance_length:.2f}"
        )

    def note(self, line: str) -> None:
        """Say something beside the progress line."""
        self._console.print(line, soft_wrap=True, highlight=False)

    def _append(self, record: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _truncate(file: Path, keep_to_step: int) -> list[dict[str, Any]]:
    """Drop the lines beyond a step, and torn ones, which a kill in the middle of a write leaves; returns the rest."""
    if not file.exists():
        return []
    records = [_parsed(line) for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    kept = [record for record in records if record is not None and record["step"] <= keep_to_step]
    write_atomic(file, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
    return kept


def _parsed(line: str) -> dict[str, Any] | None:
    """The record of a line, None when it is not a whole one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def _rounded(value: Any) -> Any:  # any JSON value
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: by torch on a GPU, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
