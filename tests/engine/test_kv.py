"""The drafter's cache holds exactly what a from-scratch pass would put there, whatever was accepted."""

import pytest
import torch
from torch import Tensor

from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.models.layers import Attend
from peagle.sampling import SamplingParams
from tests.engine.tiny import drafts_of, force_drafts, random_prompts, tiny_llm
from tests.helpers import causal_attend


def recording(attend: Attend, store: dict[int, tuple[Tensor, Tensor]]) -> Attend:
    def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store[layer] = (k, v)
        return attend(layer, q, k, v)

    return record


def drafter_kv_from_scratch(llm: LLM, tokens: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of rows (x_{i+1}, g_i) for all tokens but the last, one causal pass."""
    drafter, target = llm.drafter, llm.target.model
    assert drafter is not None
    ids, n = torch.tensor(tokens), len(tokens) - 1
    _, taps = target(ids[:-1], torch.arange(n), causal_attend([n]), drafter.config.tap_ids)
    store: dict[int, tuple[Tensor, Tensor]] = {}
    features = drafter.combine(taps)
    drafter(drafter.embed_tokens(ids[1:]), features, torch.arange(n), recording(causal_attend([n]), store))
    return store


def slots_of(llm: LLM, request: Request, first: int, end: int) -> Tensor:
    table = llm.core._state.host_tables[request.slot]
    return torch.tensor([table[p // 4] * 4 + p % 4 for p in range(first, end)])


@pytest.mark.parametrize(
    ("parallel", "k", "chunk"), [*((True, k, c) for k in (1, 3, 5) for c in (7, 8192)), (False, 1, 7), (False, 5, 7)]
)
def test_cache_equals_recomputation_and_poison_is_never_read(parallel: bool, k: int, chunk: int):
    prompts = random_prompts(6, seed=3)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    llm = tiny_llm(k, dtype=torch.float64, parallel=parallel, max_num_batched_tokens=chunk)
    llm.set_speculation(False)
    plain = llm.generate(prompts, params)
    llm.set_speculation(True)
    force_drafts(llm, plain, seed=k, right=0.7)
    drafter_cache = llm.core._speculative._draft_side.cache
    caches = (llm.core._speculative._target_cache, drafter_cache)
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    advance, checked = llm.core._advance, []

    def check(request: Request, line: list[int], num_drafts: int | None, now: float) -> None:
        advance(request, line, num_drafts, now)
        if request.finish_reason is None:
            done = request.num_computed
            tokens = (request.prompt_ids + plain[request.index].token_ids)[: done + 1]
            kv = drafter_kv_from_scratch(llm, tokens)
            slots = slots_of(llm, request, 0, done)
            for layer, (keys, values) in kv.items():
                for cached, computed in ((drafter_cache.keys, keys), (drafter_cache.values, values)):
                    cached_RMD = cached[layer][:, slots].transpose(0, 1)
                    torch.testing.assert_close(cached_RMD, computed, rtol=0, atol=1e-10)
            checked.append(done)
            stale = slots_of(llm, request, done, min(done + 2 * k, len(request.blocks) * 4))
            for cache in caches:  # rows of drafts, mask rows and rejected rows: nobody may read them again
                cache.keys[:, :, stale] = torch.nan
                cache.values[:, :, stale] = torch.nan

    llm.core._advance = check
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert len(checked) > 6 * 30 / (k + 1)


@pytest.mark.parametrize("parallel", [True, False])
def test_more_drafts_do_not_change_the_first_ones(parallel: bool):
    """No draft's row sees one of a later draft, so drafting deeper is a pure extension."""
    prompts = random_prompts(4, seed=5)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    drafts = {}
    for k in (2, 3, 7):
        llm = tiny_llm(k, dtype=torch.float64, parallel=parallel)
        llm.generate(prompts, params)
        drafts[k] = drafts_of(llm)[:4]
    assert (drafts[7][:, :3] == drafts[3]).all()
    assert (drafts[3][:, :2] == drafts[2]).all()
