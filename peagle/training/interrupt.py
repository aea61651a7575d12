"""Ctrl-C that waits for the step to end, so that no half-applied update is ever saved."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Interrupt:
    """Within the `with` block the first SIGINT only sets `asked`; a second one raises KeyboardInterrupt at once.

    Off the main thread Python delivers no signals, and this does nothing.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        """`notice` tells the user that the first one was seen."""
        self.asked = False
        self._notice = notice
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._notice()
