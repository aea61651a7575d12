"""The rounds that a request shows are those that took place, and nobody is the worse for it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm

PROMPTS = random_prompts(7, seed=6)
PARAMS = [
    SamplingParams(max_tokens=10 + 4 * i, temperature=[0.0, 0.8][i % 2], seed=i, show_drafts=i % 3 > 0)
    for i in range(len(PROMPTS))
]


@cache
def plain_outputs() -> list[RequestOutput]:
    llm = tiny_llm()
    llm.set_speculation(False)
    return [llm.generate([p], replace(s, show_drafts=False))[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def watch_rounds(llm: LLM) -> dict[int, list[list[int]]]:
    """What each request really verifies, by its index."""
    seen: dict[int, list[list[int]]] = {i: [] for i in range(len(PROMPTS))}
    verify, scheduler = llm.core._verify, llm.core.scheduler

    def watched(slot_B, num_drafts, mode, host=None):
        if num_drafts:
            by_slot = {request.slot: request for request in scheduler.running}
            for slot in slot_B.tolist():
                seen[by_slot[slot].index].append(llm.core._state.drafts[slot, :num_drafts].tolist())
        return verify(slot_B, num_drafts, mode, host)

    llm.core._verify = watched
    return seen


def check(output: RequestOutput, verified: list[list[int]]) -> None:
    assert [(r.first_index, r.accepted) for r in output.trace] == output.rounds
    assert [r.drafts for r in output.trace] == verified[: len(output.trace)]
    for r in output.trace:
        said = output.token_ids[r.first_index :]
        assert r.drafts[: r.accepted] == said[: r.accepted]
        if r.token is None:
            assert len(said) == r.accepted
            continue
        assert r.token == said[r.accepted]
        assert r.accepted == len(r.drafts) or r.token != r.drafts[r.accepted]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "engine", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"num_kv_blocks": 40}, {"parallel": False}]
)
@pytest.mark.parametrize("k", [4])
def test_rounds_are_shown_as_they_were(k: int, engine: dict, ahead: int):
    plain = plain_outputs()
    llm = tiny_llm(k, **engine)
    llm.core._steps_ahead = ahead
    force_drafts(llm, plain, seed=k)
    seen = watch_rounds(llm)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for index, (output, params) in enumerate(zip(outputs, PARAMS, strict=True)):
        if params.show_drafts:
            check(output, seen[index])
            assert output.trace
        elif not params.show_drafts:
            assert output.trace == []


@pytest.mark.parametrize("ahead", [0, 1])
def test_rounds_of_a_changing_k(ahead: int):
    """Drafts of an earlier round, or of who had the slot before, are shown where they were verified."""
    plain = plain_outputs()
    llm = tiny_llm(5, max_num_seqs=3)
    llm.core._steps_ahead, rng = ahead, np.random.default_rng(ahead)
    llm.core.policy.choose = lambda *_: int(rng.integers(0, 6))
    seen = watch_rounds(llm)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for index, (output, params) in enumerate(zip(outputs, PARAMS, strict=True)):
        if params.show_drafts:
            check(output, seen[index])
            assert {len(r.drafts) for r in output.trace} > {1, 3}


def test_nothing_is_drafted_without_a_head():
    llm = tiny_llm(3)
    llm.set_speculation(False)
    output = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=5, show_drafts=True, seed=0))[0]
    assert output.trace == []
    assert output.rounds == []


def test_a_round_that_the_end_cuts_short():
    """More drafts are right than tokens are asked for: those behind the end were never said."""
    long = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    llm = tiny_llm(5)
    llm.set_speculation(False)
    plain = llm.generate(PROMPTS[:1], long)
    llm.set_speculation(True)
    force_drafts(llm, plain, seed=0, right=1.0)
    endings = set()
    for most in range(8, 20):
        output = llm.generate(PROMPTS[:1], replace(long, max_tokens=most, show_drafts=True))[0]
        assert output.token_ids == plain[0].token_ids[:most]
        assert [(r.first_index, r.accepted) for r in output.trace] == output.rounds
        last = output.trace[-1]
        assert last.accepted == min(len(last.drafts), most - last.first_index)
        assert (last.token is None) == (most - last.first_index <= len(last.drafts))
        endings.add(last.accepted)
    assert endings == {1, 2, 3, 4, 5}
