"""Signals that wait for the end of a step."""

import signal
import subprocess
import sys

import pytest

from peagle.training.interrupt import Interrupt


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["ctrl-c", "sigterm"]
)
def test_the_first_signal_only_asks(number, ending):
    before = signal.getsignal(number)
    notices = []
    with Interrupt(notices.append) as interrupt:
        assert not interrupt.asked
        signal.raise_signal(number)
        assert interrupt.asked
        assert notices == ["finishing this step, then saving; Ctrl-C again stops at once"]
        with pytest.raises(ending) as raised:
            interrupt.leave()
    assert getattr(raised.value, "code", 143) == 143
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_waits(first):
    with Interrupt(lambda note: None) as interrupt:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt if first == signal.SIGINT else SystemExit):
        interrupt.leave()


def test_among_several_ranks_a_second_ctrl_c_is_torchruns_echo():
    notices = []
    with Interrupt(notices.append, patient=True) as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.leave()


def test_the_status_of_a_process_that_was_terminated():
    code = (
        "import sys, typer; from peagle.exits import run; from peagle.training.interrupt import Interrupt\n"
        "import signal\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def work():\n"
        "    with Interrupt(lambda note: None) as interrupt:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        interrupt.leave()\n"
        "sys.exit(run(app, ['--']))\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 143
