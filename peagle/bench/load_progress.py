"""How far a load is: a bar on a terminal, a line now and then elsewhere. Both have rate, failures and time left."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from peagle.bench.client import Answer

if TYPE_CHECKING:
    from rich.console import Console

_LINE_SECONDS = 30.0  # between lines of a log


class LoadProgress:
    """Counts the answers it is called with, as a context manager around the load."""

    def __init__(self, console: "Console", what: str, count: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), TextColumn("left"),
        )  # fmt: skip
        # Few refreshes: drawing the bar takes time from the streams.
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=2)
        self._task = self._bar.add_task(what, total=count, rate="")
        self._console, self._what, self._count = console, what, count
        self._start = self._said = time.perf_counter()
        self._done = self._tokens = self._failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, answer: Answer) -> None:
        """Count one answer."""
        self._done += 1
        self._tokens += answer.tokens
        self._failed += answer.failure is not None
        now = time.perf_counter()
        seconds = max(1e-9, now - self._start)
        rate = f"{self._tokens / seconds:,.0f} tok/s" + (f", {self._failed} failed" if self._failed else "")
        self._bar.update(self._task, advance=1, rate=rate)
        if not self._console.is_terminal and now - self._said >= _LINE_SECONDS:
            self._said = now
            left = seconds / self._done * (self._count - self._done)
            line = f"{self._what}: {self._done} of {self._count}, {rate}, about {left:.0f} s left"
            self._console.print(line, highlight=False, soft_wrap=True)
