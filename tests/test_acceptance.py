"""Acceptance length has one definition; these tests state it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.acceptance import acceptance_row
from peagle.acceptance import AcceptanceStats
from peagle.bench.acceptance import SuiteAcceptance, looping_tokens
from peagle.engine.request import RequestOutput
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm


def test_a_worked_example():
    stats = AcceptanceStats()
    for accepted in (3, 0, 1):
        stats.record(accepted, drafted=3)
    assert (stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 4)
    assert stats.accepted_per_position == [2, 1, 1]
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert AcceptanceStats().acceptance_length == 1.0


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=30), st.integers(0, 30))
def test_shares_add_up_and_sums_do_not_depend_on_the_split(rounds: list[tuple[int, int]], cut: int):
    rounds = [(min(accepted, drafted), drafted) for accepted, drafted in rounds]
    whole, first, second = AcceptanceStats(), AcceptanceStats(), AcceptanceStats()
    for i, (accepted, drafted) in enumerate(rounds):
        whole.record(accepted, drafted)
        (first if i < cut else second).record(accepted, drafted)
    first.add(second)
    assert first == whole
    assert sum(whole.acceptance_per_position) == pytest.approx(whole.acceptance_length - 1)
    assert whole.accepted_per_position == sorted(whole.accepted_per_position, reverse=True)


def test_the_engine_counts_what_it_emits():
    """Every token of a request is its first, a round's own, or an accepted draft; rounds are in order."""
    prompts = random_prompts(5, seed=2)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    llm = tiny_llm(4)
    llm.set_speculation(False)
    plain = llm.generate(prompts, params)
    assert all(o.stats == AcceptanceStats() and o.rounds == [] for o in plain)
    llm.set_speculation(True)
    force_drafts(llm, plain, seed=1, right=0.6)
    for output in llm.generate(prompts, params):
        starts = [first for first, _ in output.rounds]
        ends = [first + accepted + 1 for first, accepted in output.rounds]
        assert starts[0] == 1
        assert starts[1:] == ends[:-1]
        assert ends[-1] - len(output.token_ids) in (0, 1)  # the last round may end before its own token
        assert output.stats.num_accepted_tokens == sum(accepted for _, accepted in output.rounds)
        assert output.stats.num_rounds == len(output.rounds)


def test_looping_text_is_told_from_fresh_text():
    fresh = list(range(30))
    assert not any(looping_tokens(fresh))
    looped = [*fresh, *fresh]
    assert looping_tokens(looped) == [False] * 41 + [True] * 19  # from the twelfth repeated token on
    assert sum(looping_tokens([7] * 20)) == 8


def test_rounds_that_begin_in_looping_text_are_left_out():
    tokens = [*range(20), *range(20)]
    stats = AcceptanceStats()
    rounds = [(1, 2), (4, 0), (35, 2), (38, 1)]
    for _, accepted in rounds:
        stats.record(accepted, 2)
    suite = SuiteAcceptance()
    suite.add(RequestOutput("", [], "", tokens, "length", stats, rounds, 1.0), num_drafts=2)
    row = acceptance_row(suite, "suite", 2, 0.0)
    assert row.acceptance_length == 1 + 5 / 4
    assert row.acceptance_length_without_loops == 1 + 2 / 2
    assert row.looping_token_share == 9 / 40
    assert (row.prompts, row.rounds, row.tokens) == (1, 4, 40)
