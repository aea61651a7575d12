"""How far a long job is: a bar with rate and time left on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between the lines of a log


class Meter:
    """Counts `total` pieces of a job that is called `what`, and its tokens; use it as a context."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._done = self._tokens = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, rate=0.0)
        self._begun = self._said = time.perf_counter()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, pieces: int = 1, tokens: int = 0) -> None:
        """So many more pieces are done, of so many tokens."""
        self._done += pieces
        self._tokens += tokens
        now = time.perf_counter()
        rate = self._tokens / max(now - self._begun, 1e-9)
        self._bar.update(self._task, advance=pieces, rate=rate)
        if self._console.is_terminal or now - self._said < LINE_SECONDS or self._done >= self._total:
            return
        self._said = now
        left = (now - self._begun) * (self._total / max(self._done, 1) - 1)
        line = f"{self._what}: {self._done:,} of {self._total:,}, {rate:,.0f} tokens/s, about {left:,.0f} s left"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
