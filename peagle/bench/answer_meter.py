"""How far a run of many answers is: a bar with the time left, or, where there is no terminal, a line now and then."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from peagle.engine.request import RequestOutput

_SAY_EVERY = 20.0  # seconds between lines within a stage, without a terminal


class AnswerMeter:
    """Counts answers of all stages of a run, `total` of them; use it as a context."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done, self._tokens = console, total, 0, 0
        self._begun = self._said = time.perf_counter()
        self._stage = "loading"
        self._progress = Progress(
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
        self._task = self._progress.add_task("loading", total=total, rate=0.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self._begun

    def stage(self, name: str) -> None:
        """Say what is being answered now, and what is left."""
        self._stage = name
        self._progress.update(self._task, description=name)
        if self._progress.disable:
            self._say_how_far()

    def finish(self, output: RequestOutput) -> None:
        """One more answer."""
        self._done += 1
        self._tokens += len(output.token_ids)
        self._progress.update(self._task, advance=1, rate=self._tokens / max(self.seconds, 1e-9))
        if self._progress.disable and time.perf_counter() - self._said > _SAY_EVERY:
            self._say_how_far()

    def say(self, text: str) -> None:
        """Print one line as it stands."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _say_how_far(self) -> None:
        self._said = time.perf_counter()
        left = f", about {self.seconds * (self._total / self._done - 1):,.0f} s left" if self._done else ""
        self.say(f"{self._stage}: {self._done} of {self._total} answers done{left}")
