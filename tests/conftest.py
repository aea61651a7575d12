"""What all tests need of their process."""

import signal

import pytest

from tests.kernels.interpreter import INTERPRETED, hasten

# A job in the background ignores Ctrl-C, and so would every process that a test starts to send it one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter takes minutes where a test of our own would hang: on a slow machine five were too few."""
    for item in items:
        if item.name == "test_in_the_interpreter":
            item.add_marker(pytest.mark.timeout(900))


def pytest_configure() -> None:
    if INTERPRETED:
        hasten()
