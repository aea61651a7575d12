"""The demo's bookkeeping: both ways of every prompt, alternating order, honest verdicts."""

from io import StringIO
from types import SimpleNamespace

import torch
from rich.console import Console

from peagle.acceptance import AcceptanceStats
from peagle.demo import PROMPTS, load_demo, run_demo


class FakeLLM:
    """Plain decoding takes two seconds for four tokens, drafting one; prompts in `broken` come out different."""

    def __init__(self, broken=(), drafted_seconds=1.0):
        self.broken, self.drafted_seconds, self.drafting, self.calls = broken, drafted_seconds, None, []

    def set_speculation(self, enabled):
        self.drafting = enabled

    def chat(self, conversations, params, *, on_delta):
        assert params.temperature == 0
        prompt = conversations[0][0]["content"]
        self.calls.append((prompt, self.drafting))
        on_delta(0, "shown" if self.drafting else "hidden")
        stats = AcceptanceStats()
        if self.drafting:
            stats.record(1, 2)
        last = 9 if self.drafting and prompt in self.broken else 4
        seconds = self.drafted_seconds if self.drafting else 2.0
        return [SimpleNamespace(token_ids=[1, 2, 3, last], seconds=seconds, stats=stats)]


def demo(llm):
    text = StringIO()
    comparisons = run_demo(llm, Console(file=text, width=100), max_tokens=4)
    return comparisons, text.getvalue()


def test_both_ways_in_alternating_order():
    llm = FakeLLM()
    comparisons, text = demo(llm)
    measured = llm.calls[2:]  # after the two warm-up calls
    assert [drafts for _, drafts in measured] == [True, False, False, True, True, False]
    assert [prompt for prompt, _ in measured[::2]] == [prompt for _, prompt in PROMPTS]
    assert all(c.identical for c in comparisons)
    assert text.count("shown") == len(PROMPTS)
    assert "hidden" not in text
    assert "slower" not in text
    last_row = next(line for line in text.splitlines() if line.strip().startswith("all"))
    assert last_row.split() == ["all", "2.0", "4.0", "2.00x", "2.00", "100", "0", "yes"]


def test_a_difference_is_told():
    comparisons, text = demo(FakeLLM(broken=[PROMPTS[1][1]]))
    assert [c.identical for c in comparisons] == [True, False, True]
    assert "identical outputs: NO" in text
    assert next(line for line in text.splitlines() if line.strip().startswith("all")).split()[-1] == "NO"


def test_on_one_thread_unless_it_is_told_otherwise(monkeypatch):
    asked = []
    monkeypatch.setattr("peagle.engine.engine.LLM", lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    load_demo()
    assert not asked
    monkeypatch.delenv("OMP_NUM_THREADS")
    load_demo()
    assert asked == [1]


def test_drafts_that_made_it_slower():
    _, text = demo(FakeLLM(drafted_seconds=2.5))
    assert "0.80x" in text
    assert "OMP_NUM_THREADS=1" in text
