"""The meter of long jobs: lines with rate and time left where there is no terminal, a bar where there is one."""

from io import StringIO

from rich.console import Console

from peagle import meter
from peagle.meter import Meter


def run(monkeypatch, *, terminal):
    """Ten pieces of 20 tokens, four seconds each."""
    now = [100.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    said = StringIO()
    with Meter(Console(file=said, force_terminal=terminal, width=120), "answers", 10) as counting:
        for _ in range(10):
            now[0] += 4.0
            counting.advance(tokens=20)
    return said.getvalue()


def test_a_log_gets_a_line_now_and_then_and_none_at_the_end(monkeypatch):
    assert run(monkeypatch, terminal=False).splitlines() == [
        "answers: 3 of 10, 5 tokens/s, about 28 s left",
        "answers: 6 of 10, 5 tokens/s, about 16 s left",
        "answers: 9 of 10, 5 tokens/s, about 4 s left",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    shown = run(monkeypatch, terminal=True)
    assert "10/10" in shown
    assert "about" not in shown


def test_a_stage_has_a_line_at_once(monkeypatch):
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    now, said = [100.0], StringIO()
    with Meter(Console(file=said, width=120), "answers", 4) as counting:
        for stage in ("first", "second"):
            counting.stage(stage)
            now[0] += 3.0
            counting.advance(2, tokens=30)
    assert said.getvalue().splitlines() == ["first: 0 of 4", "second: 2 of 4, 10 tokens/s, about 3 s left"]
