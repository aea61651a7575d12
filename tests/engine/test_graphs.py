"""Steps as CUDA graphs: the buckets, and on a GPU the same tokens as the eager twin without one wait of the host."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from peagle.engine import build
from peagle.engine.core import EngineCore
from peagle.engine.engine import LLM
from peagle.engine.graphs import (
    COMMON_MODES,
    EVERYTHING,
    Captured,
    DecodeGraphs,
    Key,
    bucket_sizes,
)
from peagle.engine.outputs import StepOutput
from peagle.engine.request import RequestOutput
from peagle.engine.slots import SamplingMode
from peagle.engine.speculation import draft_counts
from peagle.engine.warm_up import WarmUp
from peagle.kernels import fused_linear, stream_linear
from peagle.kernels.logprobs import RowLogprobs
from peagle.models.spec import MoESpec
from peagle.sampling import SamplingParams
from peagle.structured.matcher import AnyText
from tests.engine.tiny import SHAPES, expect_triton, force_drafts, random_prompts, sized_llm, tiny_llm

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


def all_modes() -> list[SamplingMode]:
    """Every mode that a batch can have: filters are of drawn requests, and masks need the drafts."""
    every = [SamplingMode(*flags) for flags in itertools.product((False, True), repeat=len(SamplingMode._fields))]
    return [m for m in every if m.drawn >= m.filtered and m.shows_drafts >= m.masked]


class FakeGraphs(DecodeGraphs):
    """On the CPU. A step's output is a number for its key, and who ran it."""

    def __init__(self, max_graphs: int) -> None:
        super().__init__(self._eager, 6, torch.device("cpu"), enabled=True, max_graphs=max_graphs)
        self.ran: list[tuple[str, Key]] = []
        self.has_memory = True

    def _eager(self, slot_B: torch.Tensor, num_drafts: int, mode: SamplingMode) -> StepOutput:
        self.ran.append(("eager", Key(len(slot_B), num_drafts, mode)))
        return StepOutput(slot_B)

    def _capture(self, key: Key) -> Captured | None:
        class Graph:
            replay = staticmethod(lambda: self.ran.append(("graph", key)))

        if not self.has_memory:
            return None
        self.ran.append(("capture", key))
        return Captured(Graph(), StepOutput(torch.tensor(0)))  # type: ignore[arg-type]

    def ask(self, mode: SamplingMode, size: int = 2, num_drafts: int = 3) -> list[tuple[str, Key]]:
        """What a step leads to."""
        self.ran.clear()
        self.run(np.arange(size), num_drafts, mode)
        return list(self.ran)


PLAIN, DRAWN, SCORED = SamplingMode(), SamplingMode(drawn=True), SamplingMode(scores=True)


def test_everything_stands_in_for_every_mode():
    assert all(EVERYTHING.includes(mode) for mode in all_modes())
    assert all(mode in all_modes() for mode in COMMON_MODES)
    assert not PLAIN.includes(DRAWN)
    assert DRAWN.includes(PLAIN)
    assert not DRAWN.includes(SCORED)
    assert EVERYTHING.describe() == "drawn, filtered, penalised, masked, shows_drafts, scores"
    assert PLAIN.describe() == "greedy"


def test_until_settled_every_mode_has_its_own_graph():
    graphs = FakeGraphs(100)
    for mode in (EVERYTHING, *all_modes()[:-1]):
        assert graphs.ask(mode) == [("capture", Key(2, 3, mode)), ("graph", Key(2, 3, mode))]
        assert graphs.ask(mode) == [("graph", Key(2, 3, mode))]


def test_settled_graphs_stand_in_and_nothing_is_captured():
    graphs = FakeGraphs(100)
    for mode in COMMON_MODES:
        graphs.ask(mode)
    graphs.settle()
    for mode in all_modes():
        ((how, by),) = graphs.ask(mode)
        assert how == "graph"
        assert by.mode.includes(mode)
        assert sum(by.mode) == min(sum(m) for m in COMMON_MODES if m.includes(mode)), "a costlier one than needed"
    assert graphs.num_captured == len(COMMON_MODES)
    # Another size or K has no graph to stand in: it gets its own.
    assert graphs.ask(SCORED, size=3) == [("capture", Key(3, 3, SCORED)), ("graph", Key(3, 3, SCORED))]
    assert graphs.ask(PLAIN, num_drafts=0)[0][0] == "capture"


def test_no_more_graphs_than_planned(caplog):
    graphs = FakeGraphs(2)
    graphs.ask(PLAIN)
    graphs.ask(EVERYTHING, size=1)
    for _ in range(2):
        assert graphs.ask(DRAWN) == [("eager", Key(2, 3, DRAWN))]
        assert graphs.ask(DRAWN, size=1) == [("graph", Key(1, 3, EVERYTHING))]
        assert graphs.ask(PLAIN) == [("graph", Key(2, 3, PLAIN))]
    assert graphs.num_captured == 2
    assert [record.message for record in caplog.records] == [
        "2 steps are captured as CUDA graphs, as many as memory was planned for: those of 2 requests with 3 drafts and "
        "drawn run without one, slower"
    ]


def test_without_memory_for_its_graph_a_wider_one_runs():
    graphs = FakeGraphs(100)
    graphs.ask(EVERYTHING)
    graphs.has_memory = False
    assert graphs.ask(DRAWN) == [("graph", Key(2, 3, EVERYTHING))]
    assert graphs.ask(DRAWN, size=3) == [("eager", Key(3, 3, DRAWN))]
    assert graphs.num_captured == 1


def mixed_params(i: int) -> SamplingParams:
    """All kinds of requests in turn."""
    kind = i % 6
    return SamplingParams(
        max_tokens=12, temperature=0.0 if kind in (0, 3) else 0.9, seed=i, top_p=0.7 if kind == 2 else 1.0,
        presence_penalty=0.8 if kind == 3 else 0.0, logprobs=3 if kind == 4 else None, show_drafts=kind == 5,
    )  # fmt: skip


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, other in zip(outputs, expected, strict=True):
        assert ours.token_ids == other.token_ids
        assert ours.trace == other.trace
        assert (ours.logprobs is None) == (other.logprobs is None)


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_that_does_more_changes_nothing(alone: bool):
    """Requests of each kind, side by side and alone: their steps as they are, and as steps of every kind at once."""
    prompts = random_prompts(6 if alone else 12, seed=3)
    params = [mixed_params(i) for i in range(len(prompts))]
    llm, plain = tiny_llm(3), tiny_llm(3)
    vocab = llm.target.spec.vocab_size
    llm.core.keep_history(vocab)
    llm.core.keep_masks(vocab)
    modes, run = [], llm.core._run_decode

    def more(slots, num_drafts, mode, most_computed):
        modes.append(mode)
        out = run(slots, num_drafts, EVERYTHING, most_computed)
        return out.only(drafts=mode.shows_drafts, logprobs=mode.scores)

    llm.core._run_decode = more
    batches = [[i] for i in range(len(prompts))] if alone else [range(len(prompts))]
    for batch in batches:
        given = [prompts[i] for i in batch], [params[i] for i in batch]
        assert_same(llm.generate(*given), plain.generate(*given))
    assert EVERYTHING not in modes
    assert len(set(modes)) > 4 * alone


@pytest.mark.parametrize(("drafts", "scores"), [(False, False), (True, False), (False, True)])
def test_what_a_wider_graph_shows_besides_is_dropped(drafts: bool, scores: bool):
    core = tiny_llm(3).core
    part = torch.zeros(1)

    class Wider:
        run = staticmethod(lambda *_: StepOutput(part, part, RowLogprobs(*(part,) * len(RowLogprobs._fields))))

    core._graphs = Wider()
    out = core._run_decode(np.array([0]), 3, SamplingMode(shows_drafts=drafts, scores=scores), lambda: [0])
    assert (out.drafts_BK is not None, out.logprobs is not None) == (drafts, scores)


def test_any_text_is_no_grammar():
    llm, params = tiny_llm(3), SamplingParams(max_tokens=20, temperature=0.9, seed=1)
    expected = tiny_llm(3).generate([[5, 6]], params)[0].token_ids
    request = llm.make_request([5, 6], params)
    llm.core.keep_masks(llm.target.spec.vocab_size)
    request.matcher = AnyText()
    llm.core.add(request)
    while llm.core.has_work:
        llm.core.step()
    assert request.output_ids == expected


@pytest.mark.parametrize("kinds", ["all", "basic"])
def test_warming_up_leaves_nothing_out(kinds: str, monkeypatch):
    """What a GPU's warm-up does, on the CPU: every mode, size and K, and penalties and masks are there."""
    llm = tiny_llm(3, max_num_seqs=3)
    ran, run = [], llm.core.run_padding
    monkeypatch.setattr(llm.core, "run_padding", lambda *key: ran.append(key) or run(*key))
    warm_up = WarmUp(llm, llm.make_request, kinds)
    warm_up._capture(lambda: False)
    modes = COMMON_MODES if kinds == "all" else COMMON_MODES[:2]
    assert sorted(ran) == sorted((size, 3, mode) for size in (1, 2, 3) for mode in modes)
    assert [sum(mode) for _, _, mode in ran] == sorted((sum(mode) for _, _, mode in ran), reverse=True)
    assert (llm.core._state.history is not None) == (llm.core._state.masks is not None) == (kinds == "all")
    warm_up._capture_page()
    warm_up._compile_all_kinds()
    ran.clear()
    warm_up._capture(lambda: len(ran) == 2)
    assert len(ran) == 2
    assert not llm.core.has_work
    assert llm.core.num_graphs == 0


class OnGpu:
    """A core that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, core: EngineCore) -> None:
        self._core, self.num_settled = core, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._core, name)

    def settle(self) -> None:
        self.num_settled += 1


@pytest.mark.parametrize(("kinds", "ends", "settled"), [("all", False, 1), ("basic", False, 0), ("all", True, 0)])
def test_a_warm_engine_settles_once_a_step_of_every_kind_is_there(kinds: str, ends: bool, settled: int, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    llm = tiny_llm(3, max_num_seqs=2)
    warm_up = WarmUp(llm, llm.make_request, kinds)
    warm_up._core = core = OnGpu(llm.core)
    lengths, answer = [], warm_up._answer
    monkeypatch.setattr(warm_up, "_answer", lambda r: lengths.append(len(r.prompt_ids)) or answer(r))
    warm_up.run(lambda: ends)
    assert core.num_settled == settled
    assert ends or {2, 4, 10, 40} < set(lengths)
    assert max(lengths, default=0) < llm.max_model_len
    assert not llm.core.has_work


EXPERTS = MoESpec(num_experts=4, experts_per_token=2, gate_alpha=1.0, gate_limit=1.0)


@pytest.mark.parametrize(("moe", "expected"), [(None, False), (EXPERTS, True)])
def test_a_long_prompt_warms_up_only_what_begins_there(moe: MoESpec | None, expected: bool, monkeypatch):
    monkeypatch.setattr("peagle.engine.warm_up._EXPERT_ROWS", 45)
    llm = tiny_llm(3, max_num_seqs=2)
    llm.target = replace(llm.target, spec=replace(llm.target.spec, moe=moe))
    warm_up = WarmUp(llm, llm.make_request)
    lengths = []
    monkeypatch.setattr(warm_up, "_answer", lambda request: lengths.append(len(request.prompt_ids)))
    warm_up._compile_lengths()
    assert {2, 4, 10, 40} < set(lengths)
    assert (45 in lengths) == expected


@pytest.mark.parametrize("k", [1, 5])
def test_there_are_never_more_graphs_than_memory_was_planned_for(k: int, monkeypatch):
    plan, planned, allowed = build.plan_memory, [], []

    class Core(EngineCore):
        def __init__(self, *args, **kwargs) -> None:
            allowed.append(kwargs["max_graphs"])
            super().__init__(*args, **kwargs)

    def spied(*args, **kwargs):
        planned.append(kwargs["num_graphs"])
        return plan(*args, **kwargs)

    monkeypatch.setattr(build, "plan_memory", spied)
    monkeypatch.setattr(build, "EngineCore", Core)
    tiny_llm(k, max_num_seqs=4)
    # Sizes 1, 2, 3 and 4, each K that may be chosen, three modes; and the page's.
    assert allowed == planned == [4 * len(draft_counts(k)) * 3 + 4]


def test_modes_that_there_is_room_for(monkeypatch):
    core = tiny_llm(3, max_num_seqs=3).core
    assert core.modes_with_room(COMMON_MODES, 4) == COMMON_MODES
    for most, count in ((100, 5), (12 * 5, 5), (12 * 3 + 4, 3), (12, 1), (1, 1)):
        monkeypatch.setattr(core, "_graphs", FakeGraphs(most))
        assert core.modes_with_room(COMMON_MODES, 4) == COMMON_MODES[:count]


def gpu_llm(k: int, **settings: Any) -> LLM:
    """In float32, with heads that attention's kernels take and prompts in a few captured shapes."""
    llm = tiny_llm(k, head_dim=16, max_num_batched_tokens=128, device="cuda", **settings)
    expect_triton(llm, captured=settings.get("graphs", True))
    return llm


def steady_decode(llm: LLM, *, shows: bool = False) -> None:
    """Ten steps of four requests in which the host must not wait for the device."""
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
    assert [len(r.output_ids) >= 10 for r in core.scheduler.running] == [True] * 4
    core.abort_all()


def noted(module: ModuleType, ran: set[str]) -> Callable[..., bool]:
    """Its `_use_triton`, which tells `ran` when it says yes."""
    ask, name = module._use_triton, module.__name__.rpartition(".")[2]

    def use_triton(*args: Any, **options: Any) -> bool:
        yes = ask(*args, **options)
        ran.update([name] * yes)
        return yes

    return use_triton


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
        plain = gpu_llm(5, graphs=False)
        plain.set_speculation(False)
        expected = plain.generate(prompts, params)
        for graphs in (True, False):
            llm = gpu_llm(5, parallel=parallel, graphs=graphs, async_scheduling=ahead)
            own = llm.generate(prompts, params)
            assert [o.token_ids for o in own] == [o.token_ids for o in expected]
            llm = gpu_llm(5, parallel=parallel, graphs=graphs, async_scheduling=ahead)
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
        expected = gpu_llm(5, graphs=False).generate(prompts, bare)
        eager, captured = (
            gpu_llm(5, graphs=graphs, async_scheduling=ahead).generate(prompts, params) for graphs in (False, True)
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
        steady_decode(gpu_llm(3, parallel=parallel), shows=shows)

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_steady_decode_in_bfloat16_never_waits(self, shape: str, parallel: bool, monkeypatch):
        """With the linear layers that a large model streams in 16 bits; a small one's are fused with their norms."""
        ran: set[str] = set()
        for module in (fused_linear, stream_linear):
            monkeypatch.setattr(module, "_use_triton", noted(module, ran))
        llm = sized_llm(shape, 3, parallel=parallel, max_num_seqs=8, num_kv_blocks=200)
        expect_triton(llm)
        steady_decode(llm)
        assert ("fused_linear" if shape == "small" else "stream_linear") in ran

    @pytest.mark.parametrize("parallel", [True, False])
    def test_a_warm_engine_captures_nothing_more(self, parallel: bool):
        """Whatever is asked, alone and side by side, and it is answered as by the eager twin."""
        llm = gpu_llm(3, parallel=parallel)
        WarmUp(llm, llm.make_request).run(lambda: False)
        graphs = llm.core._graphs
        assert graphs is not None
        captured = graphs.num_captured
        assert len(bucket_sizes(llm.core.max_num_seqs)) * len(COMMON_MODES) <= captured <= graphs.max_graphs
        prompts = random_prompts(12, seed=3)
        params = [mixed_params(i) for i in range(len(prompts))]
        eager = gpu_llm(3, parallel=parallel, graphs=False)
        for batch in ([i] for i in range(len(prompts))):
            given = [prompts[i] for i in batch], [params[i] for i in batch]
            assert_same(llm.generate(*given), eager.generate(*given))
        assert_same(llm.generate(prompts, params), eager.generate(prompts, params))
        structured = [llm.make_request(prompt, mixed_params(i), index=i) for i, prompt in enumerate(prompts)]
        for request in structured[::2]:
            request.matcher = AnyText()
        for request in structured:
            llm.core.add(request)
        while llm.core.has_work:
            llm.core.step()
        expected = eager.generate(prompts, params)
        assert [r.output_ids for r in structured] == [o.token_ids for o in expected]
        assert graphs.num_captured == captured

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_kernels_that_start_early_change_nothing(self, shape: str, parallel: bool, monkeypatch):
        """Not a token of a request alone, of a few, or of many."""
        from peagle.kernels.early_launch import launches_early

        params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
        answers = []
        try:
            for early in ("0", "1"):
                monkeypatch.setenv("PEAGLE_EARLY_LAUNCH", early)
                launches_early.cache_clear()
                llm = sized_llm(shape, 7, parallel=parallel, max_num_seqs=24, num_kv_blocks=400)
                outputs = [llm.generate(random_prompts(count, seed=4), params) for count in (1, 2, 8, 24)]
                answers.append([output.token_ids for some in outputs for output in some])
        finally:
            launches_early.cache_clear()
        assert answers[0] == answers[1]

    def test_without_memory_for_a_graph_the_step_runs_eagerly(self, monkeypatch, caplog):
        llm = gpu_llm(3)
        expected = llm.generate(random_prompts(3), SamplingParams(max_tokens=9, temperature=0.0))

        def no_memory(*args: object, **kwargs: object) -> None:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(torch.cuda, "graph", no_memory)
        short = gpu_llm(3)
        outputs = short.generate(random_prompts(3), SamplingParams(max_tokens=9, temperature=0.0))
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert "no memory for the CUDA graph" in caplog.text


def test_slots_are_copied_only_when_they_change():
    graphs = tiny_llm(3).core._graphs
    assert graphs is None  # the CPU has none
    seen = []
    graphs = DecodeGraphs(lambda slot_B, k, mode: seen.append(slot_B.clone()), 6, torch.device("cpu"), enabled=False)
    for slots in ([4, 1], [4, 1], [1, 4], [2]):
        graphs.run(np.array(slots), 3, SamplingMode())
    assert [s.tolist() for s in seen] == [[4, 1], [4, 1], [1, 4], [2]]
    graphs.run(np.array([1, 2, 3, 4, 5]), 3, SamplingMode())
    assert seen[-1].tolist() == [1, 2, 3, 4, 5, -1]
