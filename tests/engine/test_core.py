"""What the core keeps while K changes and slots change hands."""

from collections.abc import Sequence

import torch

from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.sampling import SamplingParams
from tests.engine.test_kv import slots_of
from tests.engine.tiny import random_prompts, tiny_llm

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


class Scripted:
    """K by a script, the last forever; `max_drafts` is 5. Keeps what it is told."""

    max_drafts = 5

    def __init__(self, *drafts: int) -> None:
        self.drafts, self.told = list(drafts), list[tuple[int, int]]()
        self.fresh = list[bool]()

    def choose(self, num_running: int, fresh: bool = True) -> int:
        self.fresh.append(fresh)
        return self.drafts.pop(0) if len(self.drafts) > 1 else self.drafts[0]

    def record(self, accepted: Sequence[int], num_drafts: int, others: Sequence[int] = ()) -> None:
        self.told.append((num_drafts, len(accepted)))


def begin(llm: LLM, policy: Scripted, prompt: list[int]) -> Request:
    """A request in its first step."""
    llm.core.policy = policy
    request = llm.make_request(prompt, PARAMS)
    llm.core.add(request)
    llm.core.step()
    return request


def test_the_drafter_sees_prompts_even_while_nothing_is_drafted():
    llm = tiny_llm(5)
    cache = llm.core._speculative._draft_side.cache
    cache.keys.fill_(torch.nan)
    request = begin(llm, Scripted(0), list(range(10, 30)))
    assert cache.keys[:, :, slots_of(llm, request, 0, 20)].isfinite().all()
    llm.core.abort_all()


def test_requests_with_gaps_in_the_drafters_cache_do_not_count():
    llm, policy = tiny_llm(5), Scripted(5, 5, 0, 5, 5)
    begin(llm, policy, [5, 6, 7])
    while llm.core.has_work:
        llm.core.step()
    assert policy.told[:3] == [(5, 1), (0, 0), (5, 0)]
    assert policy.fresh[:4] == [False, True, True, False]  # nobody yet, after the prompt, after a draft, with a gap


def test_room_for_the_largest_k_is_there_from_the_start():
    llm = tiny_llm(5)
    request = begin(llm, Scripted(1), list(range(10, 30)))
    assert len(request.blocks) * 4 >= 20 + 2 * 5 + 1
    llm.core.abort_all()


def test_a_slot_keeps_no_block_of_the_request_before():
    llm = tiny_llm(3, max_num_seqs=1)
    for prompt in (random_prompts(1, seed=1, longest=60)[0] * 3, [5]):
        llm.generate([prompt], PARAMS)
        state = llm.core._state
        assert state.tables.tolist() == state.host_tables.tolist()
