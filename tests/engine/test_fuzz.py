"""Thousands of random requests through a tiny KV pool: whatever happens around one, it says what it says alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, tiny_llm

CANARY = 12345.0


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
        sampling = [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 1.1, "top_k": 20},
            {"temperature": 0.9, "top_p": 0.9},
        ][rng.integers(4)]
        stop = rng.integers(2, 95, 3).tolist() if rng.random() < 0.3 else ()
        params.append(
            SamplingParams(max_tokens=int(rng.integers(1, 25)), seed=i, stop_token_ids=tuple(stop), **sampling)
        )
        aborts.append(int(rng.integers(0, 12)) if rng.random() < 0.1 else None)
    return Fuzz(prompts, params, aborts)


def drive(llm: LLM, fuzz: Fuzz, seed: int) -> list[Request]:
    """Submit in random bursts, step, abort; the requests as they ended."""
    rng, core = np.random.default_rng(seed), llm.core
    requests = [llm.make_request(p, s, index=i) for i, (p, s) in enumerate(zip(fuzz.prompts, fuzz.params, strict=True))]
    submitted, step, due = 0, 0, {}
    while submitted < len(requests) or core.has_work:
        if submitted < len(requests) and (rng.random() < 0.4 or not core.has_work):
            for request in requests[submitted : submitted + int(rng.integers(1, 9))]:
                core.add(request)
                if (after := fuzz.abort_after[request.index]) is not None:
                    due.setdefault(step + after, []).append(request)
                submitted += 1
        for request in due.pop(step, []):
            if request.finish_reason is None:
                core.abort(request)
        core.step()
        step += 1
    return requests


def check(llm: LLM, reference: LLM, count: int, seed: int, right: float = 0.8) -> None:
    """`llm` under stress against `reference`, which decodes plainly and has room for all."""
    fuzz = random_requests(count, seed)
    plain = reference.generate(fuzz.prompts, fuzz.params)
    force_drafts(llm, plain, seed, right)
    caches = [llm.core._speculative._target_cache, llm.core._speculative._draft_side.cache]
    for cache in caches:  # the slot after the last block belongs to nobody
        cache.keys[:, :, -1] = CANARY
    requests = drive(llm, fuzz, seed)
    aborted = 0
    for request, expected in zip(requests, plain, strict=True):
        if request.finish_reason == "abort":
            aborted += 1
            assert request.output_ids == expected.token_ids[: len(request.output_ids)]
        else:
            assert request.output_ids == expected.token_ids
            assert request.finish_reason == expected.finish_reason
    assert 0 < aborted < count / 5
    assert llm.core.scheduler.num_preemptions > 20  # the pool was tight indeed
    pool = llm.core.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not llm.core.scheduler.running
    assert not llm.core.scheduler.waiting


@pytest.mark.parametrize("parallel", [True, False])
def test_a_tiny_pool(parallel: bool):
    reference = tiny_llm(3, layers=2, max_num_seqs=64, enable_prefix_caching=False)
    reference.set_speculation(False)
    llm = tiny_llm(
        3, layers=2, parallel=parallel, block_size=2, num_kv_blocks=110, max_num_seqs=12, max_num_batched_tokens=48
    )  # fmt: skip
    check(llm, reference, 1000, seed=int(parallel))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)  # one of them took 280 s on an H200 beside the other
@pytest.mark.parametrize("graphs", [True, False])
def test_on_gpu(graphs: bool):
    reference = tiny_llm(3, max_num_seqs=64, enable_prefix_caching=False, device="cuda")
    reference.set_speculation(False)
    llm = tiny_llm(
        3, num_kv_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, graphs=graphs, device="cuda"
    )  # fmt: skip
    check(llm, reference, 10_000, seed=7)
