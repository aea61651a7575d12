"""Output never depends on the drafter, on K, or on who shares the batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from peagle.engine.request import RequestOutput
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import drafts_of, force_drafts, random_prompts, tiny_llm

PROMPTS = random_prompts(10)


def sampled(temperature: float, **more: object) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=40, temperature=temperature, seed=100 + i, **more) for i in range(len(PROMPTS))]


def plain_outputs(params: list[SamplingParams]) -> list[RequestOutput]:
    """Each prompt alone, one token a step."""
    llm = tiny_llm()
    llm.set_speculation(False)
    return [llm.generate([prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]


@cache
def plain_at(temperature: float, **more: object) -> list[RequestOutput]:
    return plain_outputs(sampled(temperature, **more))


@pytest.mark.parametrize(
    ("parallel", "k"), [(True, 1), (True, 2), (True, 3), (True, 7), (True, 16), (False, 1), (False, 2), (False, 7)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_nothing(parallel: bool, k: int, temperature: float):
    params, plain = sampled(temperature), plain_at(temperature)
    llm = tiny_llm(k, parallel=parallel)
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in plain]
    force_drafts(llm, plain, seed=k)
    forced = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in forced] == [o.token_ids for o in plain]
    assert [(o.text, o.finish_reason) for o in forced] == [(o.text, o.finish_reason) for o in plain]
    assert sum(o.stats.num_accepted_tokens for o in forced) > 50  # drafts did take part
    alone = [llm.generate([p], s)[0].token_ids for p, s in zip(PROMPTS[:3], params[:3], strict=True)]
    assert alone == [o.token_ids for o in plain[:3]]


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"num_kv_blocks": 40},
        {"num_kv_blocks": 40, "max_num_batched_tokens": 5, "parallel": False},
    ],
)
def test_chunks_slots_and_scarce_blocks_change_nothing(engine: dict[str, int]):
    params, plain = sampled(0.8, top_k=20, top_p=0.9), plain_at(0.8, top_k=20, top_p=0.9)
    llm = tiny_llm(3, **engine)
    force_drafts(llm, plain, seed=1)
    outputs = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.num_accepted_tokens for o in outputs) > 50
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


def test_mixed_sampling_in_one_batch():
    mixed = [
        SamplingParams(max_tokens=20 + i, temperature=[0.0, 0.7, 1.3][i % 3], seed=i, top_k=[0, 5][i % 2], top_p=0.95)
        for i in range(len(PROMPTS))
    ]
    plain = plain_outputs(mixed)
    llm = tiny_llm(4)
    force_drafts(llm, plain, seed=2)
    outputs = llm.generate(PROMPTS, mixed)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.num_accepted_tokens for o in outputs) > 50


@pytest.mark.parametrize("parallel", [True, False])
def test_drafts_do_not_depend_on_how_the_prompt_was_cut(parallel: bool):
    """A chunk's last drafter row needs the next prompt token; a wrong one would spoil drafts and nothing else."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    whole, cut = (tiny_llm(3, dtype=torch.float64, parallel=parallel, max_num_batched_tokens=n) for n in (8192, 5))
    for prompt in PROMPTS[:4]:
        drafts = []
        for llm in (whole, cut):
            llm.generate([prompt], params)
            drafts.append(drafts_of(llm)[drafts_of(llm).any(dim=1)])
        assert (drafts[0] == drafts[1]).all()


@pytest.mark.parametrize("parallel", [True, False])
def test_requests_at_the_length_limit_finish_exactly(parallel: bool):
    """Prompts of every length up to the context, so that drafts reach past its end in every possible way."""
    limit = 40
    prompts = [random_prompts(1, seed=n, longest=2)[0] * n for n in range(1, limit)]
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    llm = tiny_llm(5, max_model_len=limit, parallel=parallel)
    outputs = llm.generate(prompts, params)
    llm.set_speculation(False)
    for prompt, output, plain in zip(prompts, outputs, llm.generate(prompts, params), strict=True):
        assert len(output.token_ids) == limit - len(prompt)
        assert output.finish_reason == "length"
        assert output.token_ids == plain.token_ids
    force_drafts(llm, outputs, seed=0, right=0.95)
    llm.set_speculation(True)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in outputs]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_draft_is_drawn_with_the_noise_of_its_verification(parallel: bool):
    """With flat logits on both sides only the noise decides, so every draft must be accepted."""
    llm = tiny_llm(4, parallel=parallel)
    for model in (llm.target.model, llm.drafter):
        model.logits = lambda hidden_RH: torch.zeros(len(hidden_RH), 96)
    params = SamplingParams(max_tokens=31, temperature=1.0, seed=3, ignore_eos=True)
    output = llm.generate(PROMPTS[:1], params)[0]
    assert output.stats.acceptance_length == 5.0


@pytest.mark.parametrize("parallel", [True, False])
def test_a_sliding_window_changes_drafts_and_nothing_else(parallel: bool):
    """Windows beyond the context, within it, and only as long as a chain."""
    params, plain = sampled(0.0), plain_at(0.0)
    drafted = []
    for window in (None, 1000, 11, 5):
        llm = tiny_llm(4, parallel=parallel, window=window)
        assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in plain]
        drafted.append(drafts_of(llm).tolist())
        force_drafts(llm, plain, seed=3)
        forced = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in forced] == [o.token_ids for o in plain]
        assert sum(o.stats.num_accepted_tokens for o in forced) > 50
    assert drafted[0] == drafted[1]
    assert drafted[1] != drafted[2] != drafted[3]
    with pytest.raises(PeagleError, match="at most 4"):
        tiny_llm(5, parallel=parallel, window=5)


@cache
def penalised() -> tuple[list[SamplingParams], list[RequestOutput], list[RequestOutput]]:
    """Requests of all kinds, what they say, and what they say without penalties."""
    kinds = [
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"logit_bias": {7: 4.0, 11: -100.0}},
        {"min_p": 0.2},
    ]
    bare = [SamplingParams(max_tokens=40, temperature=[0.0, 0.9][i % 2], seed=i) for i in range(len(PROMPTS))]
    params = [replace(p, **kinds[i % 4]) for i, p in enumerate(bare)]
    return params, plain_outputs(params), plain_outputs(bare)


@pytest.mark.parametrize(
    ("parallel", "engine"),
    [(True, {}), (True, {"num_kv_blocks": 40}), (True, {"max_num_batched_tokens": 9}), (False, {})],
)
def test_penalties_count_drafts_as_said(parallel: bool, engine: dict[str, int]):
    """Also where requests are preempted and begin again with what they said before."""
    params, plain, bare = penalised()
    assert sum(a.token_ids != b.token_ids for a, b in zip(plain, bare, strict=True)) > 6  # they do act
    llm = tiny_llm(4, parallel=parallel, **engine)
    force_drafts(llm, plain, seed=2)
    outputs = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert sum(o.stats.num_accepted_tokens for o in outputs) > 50


@pytest.mark.parametrize("parallel", [True, False])
def test_a_step_ahead_changes_nothing(parallel: bool):
    """The host behind by one step and by two, as on a GPU: ends, preemption and chunks come late and harm nothing."""
    params = [
        SamplingParams(max_tokens=5 + 4 * i, temperature=[0.0, 0.8][i % 2], seed=i, stop_token_ids=(40 + i,))
        for i in range(len(PROMPTS))
    ]
    plain = plain_outputs(params)
    for ahead in (1, 2):
        llm = tiny_llm(3, parallel=parallel, num_kv_blocks=40, max_num_seqs=4, max_num_batched_tokens=12)
        llm.core._steps_ahead = ahead
        force_drafts(llm, plain, seed=ahead)
        outputs = llm.generate(PROMPTS, params)
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [(o.token_ids, o.finish_reason) for o in plain]
        assert sum(o.stats.num_accepted_tokens for o in outputs) > 20
        pool = llm.core.scheduler.pool
        assert pool.num_free == pool.num_blocks


def test_k_may_change_in_any_step():
    """Stale drafts, cache that the drafter never saw, and fewer or more rows than the step before: never another token.
    The drafter's cache starts as NaN here, which it may then read."""
    params, plain = sampled(0.8), plain_at(0.8)
    for ahead in (0, 1):
        llm = tiny_llm(5)
        core, rng = llm.core, np.random.default_rng(ahead)
        core._steps_ahead = ahead
        core._speculative._draft_side.cache.keys.fill_(torch.nan)
        core.policy.choose = lambda *_, rng=rng: int(rng.integers(0, 6))
        outputs = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
