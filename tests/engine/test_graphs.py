"""Steps as CUDA graphs: the buckets, and on a GPU the same tokens as the eager twin without one wait of the host."""

import numpy as np
import pytest
import torch

from peagle.engine.graphs import bucket_sizes
from peagle.engine.slots import SamplingMode
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 48, 64, 100, 256])
def test_buckets_hold_every_batch_with_little_padding(most: int):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for batch in range(1, most + 1):
        bucket = min(size for size in sizes if size >= batch)
        assert bucket < 1.5 * batch + 1


def test_a_step_of_padding_alone_changes_nothing():
    """The padding row of the state stays zero, and so do the slots of others."""
    llm = tiny_llm(3)
    llm.generate(random_prompts(3), SamplingParams(max_tokens=9, temperature=0.0))
    state = llm.core._state
    before = [t.clone() for t in (state.last_token, state.num_computed, state.drafts, state.tables)]
    for num_drafts in (0, 2, 3):
        llm.core.run_padding(5, num_drafts)
    after = [state.last_token, state.num_computed, state.drafts, state.tables]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
    assert not state.last_token[-1]
    assert not state.num_computed[-1]


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("ahead", [True, False])
    def test_captured_equals_eager(self, parallel: bool, ahead: bool):
        prompts = random_prompts(13, seed=1)
        params = [
            SamplingParams(max_tokens=30, temperature=[0.0, 0.9][i % 2], seed=i, top_k=[0, 0, 7][i % 3])
            for i in range(len(prompts))
        ]
        plain = tiny_llm(5, device="cuda", graphs=False)
        plain.set_speculation(False)
        expected = plain.generate(prompts, params)
        for graphs in (True, False):
            llm = tiny_llm(5, parallel=parallel, device="cuda", graphs=graphs, async_scheduling=ahead)
            own = llm.generate(prompts, params)
            assert [o.token_ids for o in own] == [o.token_ids for o in expected]
            llm = tiny_llm(5, parallel=parallel, device="cuda", graphs=graphs, async_scheduling=ahead)
            force_drafts(llm, expected, seed=0)  # before anything is captured
            forced = llm.generate(prompts, params)
            assert [o.token_ids for o in forced] == [o.token_ids for o in expected]
            assert sum(o.stats.num_accepted_tokens for o in forced) > 50

    @pytest.mark.parametrize("ahead", [True, False])
    def test_what_a_captured_step_shows(self, ahead: bool):
        """Drafts and log-probabilities as the eager twin has them, and tokens as if nobody had asked."""
        prompts = random_prompts(9, seed=1)
        params = [
            SamplingParams(
                max_tokens=30, temperature=[0.0, 0.9][i % 2], seed=i, show_drafts=i % 3 > 0,
                logprobs=[None, 0, 4][i % 3], prompt_logprobs=[None, 2][i % 2],
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        bare = [SamplingParams(max_tokens=30, temperature=p.temperature, seed=p.seed) for p in params]
        expected = tiny_llm(5, device="cuda", graphs=False).generate(prompts, bare)
        eager, captured = (
            tiny_llm(5, device="cuda", graphs=graphs, async_scheduling=ahead).generate(prompts, params)
            for graphs in (False, True)
        )
        for a, b, plain in zip(eager, captured, expected, strict=True):
            assert a.token_ids == b.token_ids == plain.token_ids
            assert a.trace == b.trace
            for one, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
                assert (one is None) == (other is None)
                for left, right in zip(one or (), other or (), strict=True):
                    assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
                    assert [v for _, v in left.top] == pytest.approx([v for _, v in right.top], abs=1e-3)

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("shows", [False, True])
    def test_steady_decode_never_waits(self, parallel: bool, shows: bool):
        llm = tiny_llm(3, parallel=parallel, device="cuda")
        core = llm.core
        params = SamplingParams(
            max_tokens=90, temperature=0.7, seed=0, ignore_eos=True, show_drafts=shows, logprobs=5 if shows else None
        )
        core.run_padding(4, 3, SamplingMode(drawn=True, shows_drafts=shows, scores=shows))
        for i, prompt in enumerate(random_prompts(4, seed=2)):
            core.add(llm.make_request(prompt, params, index=i))
        for _ in range(4):
            core.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                core.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(len(r.output_ids) >= 10 for r in core.scheduler.running)
        core.abort_all()

    def test_without_memory_for_a_graph_the_step_runs_eagerly(self, monkeypatch, caplog):
        llm = tiny_llm(3, device="cuda")
        expected = llm.generate(random_prompts(3), SamplingParams(max_tokens=9, temperature=0.0))

        def no_memory(*args: object, **kwargs: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(torch.cuda, "graph", no_memory)
        short = tiny_llm(3, device="cuda")
        outputs = short.generate(random_prompts(3), SamplingParams(max_tokens=9, temperature=0.0))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert "no memory for the CUDA graph" in caplog.text


def test_slots_are_copied_only_when_they_change():
    graphs = tiny_llm(3).core._graphs
    assert graphs is None  # the CPU has none
    from peagle.engine.graphs import DecodeGraphs

    seen = []
    graphs = DecodeGraphs(lambda slot_B, k, mode: seen.append(slot_B.clone()), 6, torch.device("cpu"), enabled=False)
    for slots in ([4, 1], [4, 1], [1, 4], [2]):
        graphs.run(np.array(slots), 3, SamplingMode())
    assert [s.tolist() for s in seen] == [[4, 1], [4, 1], [1, 4], [2]]
    graphs.run(np.array([1, 2, 3, 4, 5]), 3, SamplingMode())
    assert seen[-1].tolist() == [1, 2, 3, 4, 5, -1]
