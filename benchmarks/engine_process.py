"""Objects in processes of their own, an engine each, as a server is.

So what one engine does to the process, to its memory and graphs, is not in another's figures. Side by side:
all of a group are loaded and warm, and one is asked at a time.
"""

import argparse
import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from benchmarks.speed_shapes import Setup
from peagle.bench.profile import Profile
from peagle.bench.stepping import Window
from peagle.drafters.eagle3 import DrafterConfig
from peagle.errors import PeagleError
from peagle.exits import explain
from peagle.models.spec import ModelSpec

_END_SECONDS = 20.0


class OwnProcess:
    """What `make(*arguments)` makes in another process, whose methods are called from here; ended by `close`."""

    def __init__(self, label: str, make: Callable[..., Any], *arguments: Any) -> None:
        """Begins; `ready` waits until it is made. `make` is a function or a class of a module, for the other process to
        find; `label` stands in messages."""
        context = get_context("spawn")
        self._label = label
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_answer, args=(other, make, arguments), daemon=True)
        self._process.start()
        other.close()

    def ready(self) -> Self:
        """This process, once all is made. Raises PeagleError where it could not be."""
        self._result()
        return self

    def call(self, method: str, *arguments: Any) -> Any:
        """What the method returns there."""
        self._pipe.send((method, arguments))
        return self._result()

    def close(self) -> None:
        """End the process, whatever it is at: it keeps nothing. Its memory is free afterwards."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _result(self) -> Any:
        try:
            problem, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_SECONDS)
            problem = f"its process ended with status {self._process.exitcode}"
        if problem is not None:
            raise PeagleError(f"{self._label}: {problem}")
        return result


def _answer(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the other process: make it, then call what is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    try:
        made = make(*arguments)
        gc.collect()
        gc.freeze()  # as a server does: to look through all that was loaded takes tens of milliseconds at any moment
        pipe.send((None, None))
        while True:
            method, asked = pipe.recv()
            pipe.send((None, getattr(made, method)(*asked)))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # whatever it is, the process that asked must know
        pipe.send((explain(error) or repr(error), None))


@dataclass(frozen=True, slots=True)
class Models:
    """What an engine runs, as far as costs depend on it."""

    spec: ModelSpec
    drafter: DrafterConfig | None


class Measured(Protocol):
    """An engine of `benchmarks.engine_speed` that is warm."""

    def models(self) -> Models: ...

    def window(self, concurrency: int) -> Window:
        """Decode so many requests to the end; the steps in which all did."""

    def profile(self, concurrency: int) -> tuple[Profile, Window]:
        """Steps with the profiler, and as many before them without."""


class OwnEngine(OwnProcess):
    """A `Measured` engine in a process of its own."""

    def __init__(
        self, make: Callable[[argparse.Namespace, Setup], Measured], args: argparse.Namespace, setup: Setup
    ) -> None:
        super().__init__(setup.label, make, args, setup)

    def models(self) -> Models:
        """As in `Measured`."""
        models: Models = self.call("models")
        return models

    def window(self, concurrency: int) -> Window:
        """As in `Measured`."""
        window: Window = self.call("window", concurrency)
        return window

    def profile(self, concurrency: int) -> tuple[Profile, Window]:
        """As in `Measured`."""
        both: tuple[Profile, Window] = self.call("profile", concurrency)
        return both
