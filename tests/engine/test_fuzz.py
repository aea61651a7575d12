"""Thousands of random requests through a tiny KV pool: whatever happens around one, it says what it says alone.

`PEAGLE_FUZZ_RESULT` names a file to which each run appends what it did, a line of JSON.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.engine.engine import LLM
from peagle.engine.request import Request, RequestOutput
from peagle.engine.warm_up import WarmUp
from peagle.kernels.backend import INVARIANT
from peagle.sampling import SamplingParams
from tests.engine.tiny import expect_triton, force_drafts, sized_llm, tiny_llm

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
]
PENALTIES = [{"presence_penalty": 1.2}, {"frequency_penalty": -0.7}, {"repetition_penalty": 1.5}]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Fuzz:
    """Random requests. Many share the beginnings of a few texts, some are aborted at a random step."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    abort_after: list[int | None]  # engine steps after submission


def random_requests(count: int, seed: int) -> Fuzz:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(2, 95, 40).tolist() for _ in range(5)]
    prompts, params, aborts = [], [], []
    for i in range(count):
        shared = texts[rng.integers(5)][: rng.integers(0, 36)]
        prompts.append(shared + rng.integers(2, 95, rng.integers(1, 12)).tolist())
        asked = dict(SAMPLING[rng.integers(len(SAMPLING))])
        if rng.random() < 0.3:
            asked["stop_token_ids"] = rng.integers(2, 95, 3).tolist()
        if rng.random() < 0.2:
            asked["stop"] = [LETTERS[rng.integers(26)], "".join(LETTERS[j] for j in rng.integers(26, size=2))]
        if rng.random() < 0.1:
            asked |= PENALTIES[rng.integers(3)]
        if rng.random() < 0.1:
            asked["logprobs"] = 2
        params.append(SamplingParams(max_tokens=int(rng.integers(1, 25)), seed=i, **asked))
        aborts.append(int(rng.integers(0, 12)) if rng.random() < 0.1 else None)
    return Fuzz(prompts, params, aborts)


class Canaries:
    """Blocks at both ends of the pool and in its middle that no request gets, full of random bits."""

    def __init__(self, llm: LLM) -> None:
        """Before the engine runs anything: no block table may hold them."""
        pool, step = llm.core.scheduler.pool, llm.core._speculative
        self.held = [1, pool.num_blocks // 2, pool.num_blocks]
        pool.release([block for block in pool.allocate(pool.num_blocks) or () if block not in self.held])
        self._slots = (torch.tensor(self.held)[:, None] * pool.block_size + torch.arange(pool.block_size)).flatten()
        caches = [step._target_cache, *([step._draft_side.cache] if step._draft_side else [])]
        whole = [part for cache in caches for part in (cache.keys, cache.values)]
        self._bits = [part.view({2: torch.int16, 4: torch.int32}[part.element_size()]) for part in whole]
        self._written = [self._random_bits(bits) for bits in self._bits]
        for bits, written in zip(self._bits, self._written, strict=True):
            bits[:, :, self._slots] = written

    def _random_bits(self, bits: Tensor) -> Tensor:
        limits, shape = torch.iinfo(bits.dtype), bits[:, :, self._slots].shape
        return torch.randint(limits.min, limits.max, shape, dtype=bits.dtype).to(bits.device)

    @property
    def are_untouched(self) -> bool:
        return all(torch.equal(b[:, :, self._slots], w) for b, w in zip(self._bits, self._written, strict=True))


@dataclass
class Driven:
    """How the requests of a fuzz ended, how many tokens each had whenever it lost its blocks, and the steps it took."""

    outputs: list[RequestOutput]
    preempted: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0


def drive(llm: LLM, fuzz: Fuzz, seed: int) -> Driven:
    """Submit in random bursts, step, abort."""
    rng, core, driven = np.random.default_rng(seed), llm.core, Driven([])
    preempt = core.scheduler._preempt

    def noted(request: Request) -> None:
        driven.preempted.setdefault(request.index, []).append(len(request.output_ids))
        preempt(request)

    core.scheduler._preempt = noted  # type: ignore[method-assign]
    requests = [llm.make_request(p, s, index=i) for i, (p, s) in enumerate(zip(fuzz.prompts, fuzz.params, strict=True))]
    submitted, due = 0, {}
    while submitted < len(requests) or core.has_work:
        if submitted < len(requests) and (rng.random() < 0.4 or not core.has_work):
            for request in requests[submitted : submitted + int(rng.integers(1, 9))]:
                core.add(request)
                if (after := fuzz.abort_after[request.index]) is not None:
                    due.setdefault(driven.steps + after, []).append(request)
                submitted += 1
        for request in due.pop(driven.steps, []):
            if request.finish_reason is None:
                core.abort(request)
        core.step()
        driven.steps += 1
    driven.outputs = [request.output(llm.tokenizer) for request in requests]
    return driven


def alone(llm: LLM, prompt: list[int], params: SamplingParams, preempt_at: Sequence[int] = ()) -> RequestOutput:
    """The same request in an engine that has nobody else. It loses its blocks when it has as many tokens as said."""
    core, request, due = llm.core, llm.make_request(prompt, params), set(preempt_at)
    core.add(request)
    while core.has_work:
        core.step()
        if request.slot >= 0 and len(request.output_ids) in due:
            due.remove(len(request.output_ids))
            core.scheduler.running.remove(request)
            core.scheduler._preempt(request)
    return request.output(llm.tokenizer)


def says_the_same(output: RequestOutput, expected: RequestOutput) -> bool:
    """Or the beginning of it, where it was aborted. Log-probabilities are summed by torch, in an order of its own."""
    count = len(output.token_ids)
    if (output.logprobs is None) != (expected.logprobs is None) or output.token_ids != expected.token_ids[:count]:
        return False
    if output.logprobs is not None:
        ours, theirs = ([t.logprob for t in out.logprobs or ()][:count] for out in (output, expected))
        if len(ours) != count or not np.allclose(ours, theirs, atol=1e-4):
            return False
    ends = [(len(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in (output, expected)]
    return output.finish_reason == "abort" or ends[0] == ends[1]


@dataclass
class Report:
    """What a run did, as `PEAGLE_FUZZ_RESULT` gets it. `different` counts the requests that said what they do not say
    alone, with the first ten of them."""

    head: str
    num_drafts: int
    device: str
    kernels: str
    dtype: str
    seed: int
    requests: int
    tokens: int
    steps: int
    aborted: int
    preemptions: int
    preempted_requests: int
    preempted_with_tokens: int
    run_alone: int
    equal: int = 0
    different: int = 0
    first_different: list[int] = field(default_factory=list)
    blocks_left: int = 0
    canaries: int = 0
    canaries_untouched: bool = False
    seconds: float = 0.0

    def write(self) -> None:
        if path := os.environ.get("PEAGLE_FUZZ_RESULT"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"test": "fuzz", "torch": torch.__version__, **vars(self)}) + "\n")


def check(llm: LLM, plain: LLM, lone: LLM, count: int, seed: int, num_alone: int) -> None:
    """`llm` under stress against two engines that decode plainly: `plain` has room for all, `lone` for one request.

    All requests are judged by `plain`, and `num_alone` of them, which `lone` answers too, by both.
    """
    started, fuzz = time.perf_counter(), random_requests(count, seed)
    canaries = Canaries(llm)
    for reference in (plain, lone):
        reference.set_speculation(False)
    expected = plain.generate(fuzz.prompts, fuzz.params)
    force_drafts(llm, expected, seed)
    WarmUp(llm, llm.make_request).run(lambda: False)
    driven = drive(llm, fuzz, seed)
    outputs, pool, weight = driven.outputs, llm.core.scheduler.pool, llm.target.model.embed_tokens.weight
    report = Report(
        head="p-eagle" if llm.drafter.config.parallel else "eagle-3",
        num_drafts=llm.num_speculative_tokens,
        device=torch.cuda.get_device_name() if weight.is_cuda else "cpu",
        kernels=llm.core._kernels if llm.core._speculative._attention != INVARIANT else INVARIANT,
        dtype=str(weight.dtype).removeprefix("torch."),
        seed=seed,
        requests=count,
        tokens=sum(len(output.token_ids) for output in outputs),
        steps=driven.steps,
        aborted=sum(output.finish_reason == "abort" for output in outputs),
        preemptions=llm.core.scheduler.num_preemptions,
        preempted_requests=len(driven.preempted),
        preempted_with_tokens=sum(any(lengths) for lengths in driven.preempted.values()),
        run_alone=num_alone,
        blocks_left=pool.num_blocks - pool.num_free,
        canaries=len(canaries.held),
        canaries_untouched=canaries.are_untouched,
    )
    chosen = set(np.random.default_rng(seed).choice(count, num_alone, replace=False).tolist())
    for i, (prompt, params) in enumerate(zip(fuzz.prompts, fuzz.params, strict=True)):
        same = says_the_same(outputs[i], expected[i])
        if i in chosen:
            same &= says_the_same(alone(lone, prompt, params), expected[i])
        report.equal += same
        report.different += not same
        report.first_different += [i] * (not same and len(report.first_different) < 10)
    report.seconds = round(time.perf_counter() - started, 1)
    report.write()
    assert report.canaries_untouched
    assert not report.different, report.first_different
    assert 0 < report.aborted < count / 5
    assert report.preempted_with_tokens > 20  # the pool was tight indeed
    assert report.blocks_left == report.canaries
    assert not llm.core.scheduler.running
    assert not llm.core.scheduler.waiting


@pytest.mark.parametrize(("parallel", "drafts"), [(True, 3), (False, 2)])
def test_a_tiny_pool(parallel: bool, drafts: int):
    plain = tiny_llm(layers=2, max_num_seqs=64, enable_prefix_caching=False)
    lone = tiny_llm(layers=2, max_num_seqs=1)
    llm = tiny_llm(
        drafts, layers=2, parallel=parallel, block_size=2, num_kv_blocks=83, max_num_seqs=12, max_num_batched_tokens=48
    )  # fmt: skip
    check(llm, plain, lone, 1000, seed=int(parallel), num_alone=100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parallel", "drafts"), [(True, 5), (False, 3)])
def test_on_gpu(parallel: bool, drafts: int):
    """In bfloat16, as served, so with `kernels="invariant"`: else a near tie may fall the other way in another batch,
    and an answer that differs would have to be judged. With it not a bit may differ."""
    settings = {"block_size": 4, "max_model_len": 128, "kernels": INVARIANT}
    plain = sized_llm("small", 3, max_num_seqs=128, enable_prefix_caching=False, graphs=False, **settings)
    lone = sized_llm("small", 3, max_num_seqs=1, max_num_batched_tokens=128, async_scheduling=False, **settings)
    llm = sized_llm(
        "small", drafts, parallel=parallel, num_kv_blocks=53, max_num_seqs=16, max_num_batched_tokens=128, **settings
    )  # fmt: skip
    expect_triton(llm)
    expect_triton(lone)
    expect_triton(plain, captured=False)
    check(llm, plain, lone, 10_000, seed=7 + parallel, num_alone=500)
