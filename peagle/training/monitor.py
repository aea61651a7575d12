"""What a training run reports: running statistics on the device, OUT/train.jsonl, and a progress line."""

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import Tensor

from peagle.meter import say
from peagle.training.evaluate import Evaluation
from peagle.training.log_file import LogFile
from peagle.training.loggers import Loggers
from peagle.training.served import Served
from peagle.training.statistics import DepthReport, DepthStatistics

_GIB = 1024**3


class Running:
    """Sums over the steps since the last report, kept on the device: adding a step waits for nothing."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.depths_4K = torch.zeros(4, num_depths, dtype=torch.int64, device=device)
        self.counts_2 = torch.zeros(2, dtype=torch.int64, device=device)  # of the run: positions, supervised rows
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.gradient_norm = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)  # first step with a NaN or infinity

    def add(self, step: int, loss: Tensor, gradient_norm: Tensor, counters: Tensor) -> None:
        """Add one step (1-based number). `counters`: positions, supervised rows and the table of depths, in one."""
        self.counts_2 += counters[:2].long()
        self.depths_4K += counters[2:].view_as(self.depths_4K).long()
        self.loss += loss.detach()
        self.gradient_norm += gradient_norm
        self.steps += 1
        bad = ~(loss.detach().isfinite() & gradient_norm.isfinite()) & (self.bad_step < 0)
        self.bad_step.masked_fill_(bad, step)

    def state(self) -> dict[str, Tensor]:
        """The tensors by name, for a checkpoint."""
        return dict(vars(self))

    def report(self) -> "StepReport":
        """Read everything (waits for the device) and start over; `bad_step` and the counts of the run stay."""
        loss, norm, steps, bad = torch.stack(
            (self.loss, self.gradient_norm, self.steps.double(), self.bad_step.double())
        ).tolist()
        depths = DepthStatistics(self.depths_4K).report()
        for tensor in (self.depths_4K, self.loss, self.gradient_norm, self.steps):
            tensor.zero_()
        return StepReport(int(steps), loss / max(1, steps), norm / max(1, steps), int(bad), depths)

    def totals(self) -> tuple[int, int]:
        """Positions and supervised rows of the run so far (waits for the device)."""
        positions, rows = self.counts_2.tolist()
        return positions, rows


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

    `seconds` is training time: neither loading nor evaluations and checkpoints on the way.
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
    rows_per_second: float
    mfu: float | None
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
            f"AL {self.acceptance_length:.2f} · {self.positions_per_second:,.0f} positions/s · "
            f"{self.rows_per_second:,.0f} rows/s · {'' if self.mfu is None else f'MFU {self.mfu:.0%} · '}"
            f"data wait {self.data_wait_share:.0%} · {self.memory_gib:.1f} GiB"
        )


class Monitor:
    """Appends to the log file and shows progress: a live line on a terminal, a line per report elsewhere."""

    def __init__(self, log: LogFile, console: Console, loggers: Loggers) -> None:
        """`loggers` are told whatever the log file is."""
        # Steps whose evaluation the log holds: a resumed run may repeat one.
        self._held_out, self._served = (
            {record["step"] for record in log.kept if key in record} for key in ("held_out", "served")
        )
        self._log, self._console, self._loggers = log, console, loggers
        columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        self._loggers.close()
        self._log.flush()
        if self._log.waiting:
            self.note(f"{self._log.waiting} lines of {self._log.path} could not be written ({self._log.problem})")

    @property
    def log_waits(self) -> bool:
        """Whether the disk does not take the log at the moment."""
        return self._log.waiting > 0

    def step(self, entry: LogEntry, done: float) -> None:
        """Report training; `done` is the share of the run that lies behind, above 0."""
        self._append(entry.record())
        remaining = entry.seconds * (1.0 - done) / done
        eta = f"ETA {int(remaining // 60)}:{int(remaining % 60):02d}"
        # A narrow terminal cuts the line at its end.
        self._progress.update(self._task, completed=done, description=f"{eta} · {entry.line()}")
        if not self._console.is_terminal:
            self.note(f"{entry.line()} · {eta}")

    def held_out(self, step: int, evaluation: Evaluation) -> None:
        """Report an evaluation after `step`; the log keeps one per step, whatever had to run again."""
        if step not in self._held_out:
            self._append({"step": step, "held_out": _rounded(asdict(evaluation))})
            self._held_out.add(step)
        self.note(
            f"step {step:,} · held out: loss {evaluation.loss:.4f} · accuracy {_shares(evaluation.depths.accuracy)} · "
            f"chains {_shares(evaluation.depths.prefix_accuracy)} · AL {evaluation.acceptance_length:.2f}"
        )

    def served(self, step: int, served: Served) -> None:
        """Report what decoding the held-out prompts after `step` accepted; one per step, like `held_out`."""
        if step not in self._served:
            self._append({"step": step, "served": _rounded(asdict(served))})
            self._served.add(step)
        self.note(
            f"step {step:,} · decoded {served.prompts} prompts, K = {served.num_speculative_tokens}: "
            f"AL {served.acceptance_length:.2f} · accepted {_shares(served.accepted_share_per_position)}"
        )

    def note(self, line: str) -> None:
        """Say something beside the progress line."""
        say(self._console, line)

    def _append(self, record: dict[str, Any]) -> None:
        waited = self.log_waits
        self._log.append(record)
        if self.log_waits and not waited:
            self.note(
                f"{self._log.path} cannot be written ({self._log.problem}): its lines wait in memory and training goes "
                "on; free some space"
            )
        if waited and not self.log_waits:
            self.note(f"{self._log.path} is written again, nothing is missing")
        self._loggers.log(record)


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
