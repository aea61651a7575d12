"""Engines of `benchmarks.engine_speed`, each in a process of its own, as a server is.

In a process with several engines CUDA graphs run slower (docs/decisions.md), so side by side means process by process:
all of a group are loaded and warm, and one is asked at a time.
"""

import argparse
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


@dataclass(frozen=True, slots=True)
class Models:
    """What an engine runs, as far as costs depend on it."""

    spec: ModelSpec
    drafter: DrafterConfig | None


class Measured(Protocol):
    """An engine that is warm."""

    @property
    def models(self) -> Models: ...

    def window(self, concurrency: int) -> Window:
        """Decode so many requests to the end; the steps in which all did."""

    def profile(self, concurrency: int) -> tuple[Profile, Window]:
        """Steps with the profiler, and as many before them without."""


Make = Callable[[argparse.Namespace, Setup], Measured]  # a function of a module, for another process to find


class OwnProcess:
    """An engine in another process, which `make` makes there; ended by `close`."""

    def __init__(self, make: Make, args: argparse.Namespace, setup: Setup) -> None:
        """Begins; `ready` waits until it is warm."""
        context = get_context("spawn")
        self._setup = setup
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_answer, args=(other, make, args, setup), daemon=True)
        self._process.start()
        other.close()

    def ready(self) -> Self:
        """This engine, once it is warm. Raises PeagleError where it could not be made."""
        self.models: Models = self._result()
        return self

    def window(self, concurrency: int) -> Window:
        """As in `Measured`."""
        window: Window = self._ask("window", concurrency)
        return window

    def profile(self, concurrency: int) -> tuple[Profile, Window]:
        """As in `Measured`."""
        both: tuple[Profile, Window] = self._ask("profile", concurrency)
        return both

    def close(self) -> None:
        """End the process, whatever it is at: it keeps nothing. Its memory is free afterwards."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _ask(self, what: str, concurrency: int) -> Any:
        self._pipe.send((what, concurrency))
        return self._result()

    def _result(self) -> Any:
        try:
            problem, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_SECONDS)
            problem = f"its process ended with status {self._process.exitcode}"
        if problem is not None:
            raise PeagleError(f"{self._setup.label}: {problem}")
        return result


def _answer(pipe: Connection, make: Make, args: argparse.Namespace, setup: Setup) -> None:
    """In the other process: make the engine, then measure what is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    try:
        engine = make(args, setup)
        pipe.send((None, engine.models))
        while True:
            what, concurrency = pipe.recv()
            pipe.send((None, getattr(engine, what)(concurrency)))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # whatever it is, the process that asked must know
        pipe.send((explain(error) or repr(error), None))
