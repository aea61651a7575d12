"""Progress of many answers where there is no terminal."""

import io
from types import SimpleNamespace

from rich.console import Console

from peagle.bench import answer_meter
from peagle.bench.answer_meter import AnswerMeter


def lines_of(monkeypatch, seconds_per_answer):
    """What is printed of ten answers of two stages, on a clock that moves by so much with each."""
    now, text = [0.0], io.StringIO()
    monkeypatch.setattr(answer_meter, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    meter = AnswerMeter(Console(file=text), 10)
    with meter:
        for stage in ("first", "second"):
            meter.stage(stage)
            for _ in range(5):
                now[0] += seconds_per_answer
                meter.finish(SimpleNamespace(token_ids=[1, 2]))
    return text.getvalue().splitlines()


def test_quick_stages_have_a_line_each(monkeypatch):
    assert lines_of(monkeypatch, 1) == [
        "first: 0 of 10 answers done",
        "second: 5 of 10 answers done, about 5 s left",
    ]


def test_long_stages_say_now_and_then_how_far_they_are(monkeypatch):
    lines = lines_of(monkeypatch, 15)
    assert lines[1] == "first: 2 of 10 answers done, about 120 s left"
    assert [line.split(" of ")[0] for line in lines] == [
        "first: 0", "first: 2", "first: 4", "second: 5", "second: 7", "second: 9",
    ]  # fmt: skip
