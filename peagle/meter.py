"""What a long job says: how far it is, a bar on a terminal and a line now and then elsewhere, and plain lines."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between the lines of a log


def say(console: Console, text: str) -> None:
    """Print text as it stands: no markup, no colours, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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

    @property
    def seconds(self) -> float:
        """Since the job began."""
        return time.perf_counter() - self._begun

    def stage(self, what: str) -> None:
        """What is done from now on is called so; a log gets a line."""
        self._what = what
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._say_how_far()

    def advance(self, pieces: int = 1, tokens: int = 0) -> None:
        """So many more pieces are done, of so many tokens."""
        self._done += pieces
        self._tokens += tokens
        self._bar.update(self._task, advance=pieces, rate=self._rate)
        is_time = time.perf_counter() - self._said >= LINE_SECONDS
        if is_time and not self._console.is_terminal and self._done < self._total:
            self._say_how_far()

    def say(self, text: str) -> None:
        """Print one line as it stands."""
        say(self._console, text)

    @property
    def _rate(self) -> float:
        return self._tokens / max(self.seconds, 1e-9)

    def _say_how_far(self) -> None:
        self._said = time.perf_counter()
        left = self.seconds * (self._total / self._done - 1) if self._done else 0.0
        pace = f", {self._rate:,.0f} tokens/s, about {left:,.0f} s left" if self._done else ""
        self.say(f"{self._what}: {self._done:,} of {self._total:,}{pace}")
