"""Ctrl-C while a result is written: whoever is impatient shall not lose it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM)  # what asks a run to end


def ignore_signals() -> None:
    """From here on SIGINT and SIGTERM do nothing, as far as this thread may say so."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)


def ended_by(number: signal.Signals) -> BaseException:
    """What ends the process as that signal asks, with its exit status."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def signals_put_back() -> Iterator[None]:
    """After the block SIGINT and SIGTERM do what they did before it."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM ends what runs as Ctrl-C does, with its own exit status."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise ended_by(signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
