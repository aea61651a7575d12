"""Ctrl-C and SIGTERM that wait for the step to end, so that no half-applied update is ever saved."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

TERMINATED_STATUS = 128 + signal.SIGTERM


class Interrupt:
    """Within the `with` block a SIGINT or SIGTERM only sets `asked`, and whoever runs the block stops when it can.

    A second Ctrl-C raises KeyboardInterrupt at once. A second SIGTERM does not: launchers send it to a whole group and
    again to each member, and those in a hurry follow up with SIGKILL. Off the main thread Python delivers no signals,
    and this does nothing.
    """

    def __init__(self, note: Callable[[str], None], *, patient: bool = False) -> None:
        """`note` tells the user. `patient`: torchrun passes every Ctrl-C on to ranks that
        the terminal has sent it to already, so a second one is not taken for impatience."""
        self._patient = patient
        self._note = note
        self._number: int | None = None
        self._main = threading.current_thread() is threading.main_thread()

    @property
    def asked(self) -> bool:
        """Whether somebody wants the block to end."""
        return self._number is not None

    def leave(self) -> NoReturn:
        """Raise what ends the process in the way it was asked to: KeyboardInterrupt, or SystemExit with status 143."""
        if self._number == signal.SIGTERM:
            raise SystemExit(TERMINATED_STATUS)
        raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if self._main:
            self._previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._main:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGINT and not self._patient:
                raise KeyboardInterrupt
            return
        self._number = number
        self._note("finishing this step, then saving" + ("" if self._patient else "; Ctrl-C again stops at once"))
