"""How far a load is: a bar on a terminal, a line now and then elsewhere. Both have rate, failures and time left."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from peagle.bench.client import Answer
from peagle.meter import say

if TYPE_CHECKING:
    from rich.console import Console

_LINE_SECONDS = 10.0  # between lines of a log
_BAR_SECONDS = 1.0  # between figures of a bar


class LoadProgress:
    """Counts the answers it is called with, and the tokens of those under way, as a context manager around the load."""

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
        self._start = time.perf_counter()
        self._done = self._tokens = self._chunks = self._failed = 0
        self._ended: set[int] = set()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def __call__(self, answer: Answer) -> None:
        """Count an answer that ended."""
        self._done += 1
        self._tokens += answer.tokens
        self._chunks += len(answer.chunks)
        self._failed += answer.failure is not None
        self._ended.add(id(answer))
        self._bar.update(self._task, advance=1)

    async def watch(self, answers: Sequence[Answer]) -> None:
        """Show now and then how far it is, until cancelled: the first answer may take minutes to end."""
        while True:
            await asyncio.sleep(_BAR_SECONDS if self._console.is_terminal else _LINE_SECONDS)
            self.show(answers)

    def show(self, answers: Sequence[Answer]) -> None:
        """Show how far it is now."""
        seconds = max(1e-9, time.perf_counter() - self._start)
        rate = f"{self._streamed(answers) / seconds:,.0f} tok/s" + (f", {self._failed} failed" if self._failed else "")
        self._bar.update(self._task, rate=rate)
        if not self._console.is_terminal:
            left = seconds / self._done * (self._count - self._done) if self._done else None
            end = "time left unknown yet" if left is None else f"about {left:.0f} s left"
            line = f"{self._what}: {self._done} of {self._count}, {rate}, {end}"
            say(self._console, line)

    def _streamed(self, answers: Sequence[Answer]) -> float:
        """Tokens so far. Of an answer under way only chunks are known: they hold what those of ended answers held."""
        chunks = sum(len(answer.chunks) for answer in answers if id(answer) not in self._ended)
        return self._tokens + chunks * (self._tokens / self._chunks if self._chunks else 1.0)
