"""Passes over prompts as CUDA graphs: the same tokens as run eagerly, in Triton's interpreter and on a GPU."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.speed_shapes import SHAPES
from peagle.config import EngineConfig
from peagle.drafters.init import new_drafter
from peagle.engine import build, prompt_rows
from peagle.engine.engine import LLM
from peagle.engine.graphs import Captured, GraphPool
from peagle.engine.memory import EngineLoad
from peagle.engine.outputs import StepOutput
from peagle.engine.prompt_graphs import MODES, PromptGraphs
from peagle.engine.prompt_rows import prompt_shapes
from peagle.engine.scheduler import Chunk
from peagle.engine.slots import SamplingMode
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import spec_from_hf
from peagle.models.target import Target
from peagle.sampling import SamplingParams
from tests.engine.tiny import random_prompts, random_weights, tiny_spec, tiny_tokenizer
from tests.kernels.conftest import numpy_scalars, wide_tiles  # noqa: F401, fixtures
from tests.kernels.interpreter import INTERPRETED, run_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K = 3


class Repeating(GraphPool):
    """On the CPU: a graph is its body, run again, whose output is where it was."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        super().__init__(self.device)
        self.what: list[str] = []
        self.has_memory = True

    def capture(self, body: Any, what: str) -> Captured | None:
        self.what.append(what)
        if not self.has_memory:
            return None
        out: StepOutput = body()
        replay = lambda: out.tokens_BW.copy_(body().tokens_BW)  # noqa: E731
        return Captured(SimpleNamespace(replay=replay), out)  # type: ignore[arg-type]


def llm_of(parallel: bool, device: str = "cpu", window: int | None = None, **engine: Any) -> LLM:
    """Two layers whose heads the attention kernel takes, a head of two, steps of few tokens of prompts."""
    spec = tiny_spec(
        num_layers=2, head_dim=16, num_heads=3, num_kv_heads=1, rope=RopeSpec(theta=1e4, head_dim=16)
    )  # fmt: skip
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, 0)
    target = Target("tiny", Path("tiny"), spec, model.to(device), tiny_tokenizer())
    head = new_drafter(
        model, num_layers=2, tap_ids=(0, 1, 2), mask_token_id=95 if parallel else None, seed=1, target_init=False,
        sliding_window=window, sliding_layers=window and (1,),
    )  # fmt: skip
    settings = {
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64 if device == "cuda" else 16,
        "kernels": "triton",
    }
    config = EngineConfig(**{**settings, "attention": "triton", "device": device, **engine})
    return LLM.from_parts(target, head.to(device).eval().requires_grad_(False), K, config, pack=False)


def with_graphs(llm: LLM, pool: GraphPool) -> PromptGraphs:
    """Give a CPU's engine graphs of prompts, as `build_core` does on a GPU."""
    core, config = llm.core, EngineConfig(max_num_batched_tokens=16)
    assert llm.drafter is not None
    load = EngineLoad(config, llm.target.spec, llm.drafter.config, K, torch.float32)
    core._prompt_graphs = graphs = build.prompt_graphs(core._speculative, load, core._sizes, pool)
    run = graphs.run

    def copied(*args: Any) -> StepOutput | None:  # as a GPU's output is on its way to the host before the next run
        out = run(*args)
        return out and out.each(torch.clone)

    graphs.run = copied  # type: ignore[method-assign]
    return graphs


PARAMS = [
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=3, temperature=0.9, seed=1),
    SamplingParams(max_tokens=3, temperature=1.2, top_p=0.8, top_k=9, seed=2),
]


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def small_shapes(monkeypatch):
    """Of 16 rows: the interpreter takes long for more."""
    monkeypatch.setattr(prompt_rows, "_ROWS", (16,))
    monkeypatch.setattr(prompt_rows, "_REQUESTS", (2, 4))


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles", "small_shapes")
@pytest.mark.parametrize(("parallel", "window"), [(True, 6), (False, None)])
def test_interpreted_passes_say_what_they_say_eagerly(parallel: bool, window: int | None):
    """Chunks of long prompts, prompts found in the cache and several at once; the slots of others stay as they are."""
    prompts = [[*range(5, 24)], [40, 41, 42], [9], [*range(5, 21), 7, 8, 9], [6], [11, 12], [13], [14], [15]]
    params = [PARAMS[i % 3] for i in range(len(prompts))]
    expected = llm_of(parallel, window=window, kernels="torch", attention="torch").generate(prompts, params)
    llm = llm_of(parallel, window=window)
    graphs = with_graphs(llm, Repeating())
    assert [s.requests for s in llm.core.warm_up_prompts()] == [4, 2]
    assert graphs.num_captured == 2 * len(MODES)
    eager = llm.core._speculative.run
    ragged = []

    def run(rows: Any, num_drafts: int, mode: SamplingMode) -> StepOutput:
        if rows.next_prompt_B is not None and len(rows.slot_B) not in (2, 4):
            ragged.append(len(rows.slot_B))
        return eager(rows, num_drafts, mode)

    llm.core._speculative.run = run  # type: ignore[method-assign]
    outputs = [*llm.generate(prompts[:3], params[:3]), *llm.generate(prompts[3:], params[3:])]  # 5 of these: two passes
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.stats.num_accepted_tokens for o in outputs] == [o.stats.num_accepted_tokens for o in expected]
    assert set(ragged) <= {1}  # a chunk that fills a step leaves no room for padding


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles", "small_shapes")
def test_interpreted_padding_alone_changes_nothing():
    llm = llm_of(True)
    llm.generate([[5, 6, 7], [8]], PARAMS[0])
    state, caches = llm.core._state, [llm.core._speculative._target_cache, llm.core._speculative._draft_side.cache]
    tensors = [state.last_token, state.num_computed, state.drafts, state.tables]
    tensors += [t for cache in caches for t in (cache.keys[:, :, :-1], cache.values[:, :, :-1])]
    before = [t.numpy().tobytes() for t in tensors]  # a CPU's cache holds anything where nobody wrote
    with_graphs(llm, Repeating())
    list(llm.core.warm_up_prompts())
    assert [t.numpy().tobytes() for t in tensors] == before


class FakeGraphs(PromptGraphs):
    """Whose captures are of nothing."""

    def __init__(self) -> None:
        self.pool = Repeating()
        super().__init__(
            lambda *_: StepOutput(torch.zeros(1)), prompt_shapes(256), (), self.pool.device, self.pool, 400
        )


def chunks(*num_rows: int, scored: int = 0) -> Any:
    request = SimpleNamespace(slot=0, token_ids=[3] * 999, num_scored=lambda *_: scored)
    return [Chunk(request, 0, n, is_last=True) for n in num_rows]


def test_a_shape_is_captured_once_it_was_needed_a_few_times():
    graphs = FakeGraphs()
    assert [graphs.run(chunks(40), MODES[0]) is not None for _ in range(6)] == [False, False, False, True, True, True]
    assert graphs.pool.what == ["prompts of 64 tokens"]
    assert graphs.run(chunks(80), MODES[0]) is None  # another shape
    assert graphs.run(chunks(40), MODES[1]) is None  # another mode
    assert graphs.num_captured == 1


def test_nothing_is_captured_once_settled():
    graphs = FakeGraphs()
    list(zip(graphs.warm_up(), range(2), strict=False))
    before = graphs.num_captured
    graphs.settle()
    for _ in range(6):
        assert graphs.run(chunks(40), MODES[0]) is None
    assert graphs.num_captured == before > 0


def test_what_fits_no_graph_runs_eagerly():
    graphs = FakeGraphs()
    list(graphs.warm_up())
    assert graphs.run(chunks(40), SamplingMode(drawn=True)) is not None  # by the graph that filters as well
    assert graphs.run(chunks(257), MODES[0]) is None
    assert graphs.run(chunks(*[5] * 8), MODES[0]) is None
    assert graphs.run(chunks(40, scored=1), MODES[0]) is None
    for more in ({"penalised": True}, {"scores": True}, {"masked": True, "shows_drafts": True}):
        assert graphs.run(chunks(40), SamplingMode(**more)) is None


def test_many_prompts_are_passes_of_as_many_as_have_a_graph():
    graphs = FakeGraphs()
    sizes = lambda parts: [[c.num_rows for c in part] for part in parts]  # noqa: E731
    assert sizes(graphs.split(chunks(*[5] * 16), MODES[0])) == [[5] * 7, [5] * 7, [5] * 2]  # soon captured
    assert sizes(graphs.split(chunks(200, 50, 60, 90), MODES[0])) == [[200, 50], [60, 90]]
    assert sizes(graphs.split(chunks(200, 50, 60, 91), MODES[0])) == [[200, 50, 60, 91]]  # more is faster in one go
    for whole in (chunks(5, 256, 5), chunks(*[5] * 16, scored=1)):
        assert sizes(graphs.split(whole, MODES[0])) == [[c.num_rows for c in whole]]
    assert len(graphs.split(chunks(*[5] * 16), SamplingMode(penalised=True))) == 1
    graphs.settle()
    assert len(graphs.split(chunks(*[5] * 16), MODES[0])) == 1
    graphs = FakeGraphs()
    graphs.pool.has_memory = False
    list(graphs.warm_up())
    assert len(graphs.split(chunks(*[5] * 16), MODES[0])) == 1


def test_large_models_run_bursts_of_prompts_in_one_go():
    rows = {
        name: build.most_to_split(spec_from_hf(SHAPES[name])) for name in ("smollm2-135m", "qwen3-8b", "gpt-oss-20b")
    }
    assert rows["smollm2-135m"] > 8192
    assert rows["qwen3-8b"] < 512
    assert rows["gpt-oss-20b"] == 0


def test_without_memory_passes_run_eagerly_and_are_not_tried_again():
    graphs = FakeGraphs()
    graphs.pool.has_memory = False
    list(graphs.warm_up())
    tried = len(graphs.pool.what)
    assert graphs.run(chunks(40), MODES[0]) is None
    assert len(graphs.pool.what) == tried
    assert graphs.num_captured == 0


@pytest.mark.parametrize(
    ("attention", "head_dim", "has"), [("auto", 64, True), ("torch", 64, False), ("auto", 80, False)]
)
def test_graphs_of_prompts_need_attention_in_tiles(attention: str, head_dim: int, has: bool, monkeypatch, caplog):
    monkeypatch.setattr(build, "use_triton", lambda backend, device: backend != "torch")  # as on a GPU
    caplog.set_level("INFO")
    load = EngineLoad(EngineConfig(attention=attention), tiny_spec(head_dim=head_dim), None, 0, torch.float32)
    assert build._has_tiles(load, torch.device("cuda")) is has
    assert ("prompts run without CUDA graphs" in caplog.text) is not has


def test_without_a_gpu_there_are_no_graphs_of_prompts():
    assert EngineConfig().prompt_graphs
    assert llm_of(True, kernels="torch", attention="auto").core._prompt_graphs is None


@pytest.mark.parametrize("parallel", [True, False])
class TestOnGpu:
    pytestmark = gpu

    def test_same_tokens_as_eagerly(self, parallel: bool):
        prompts = random_prompts(40, seed=1, longest=100)
        params = [PARAMS[i % 3] for i in range(len(prompts))]
        expected = llm_of(parallel, "cuda", dtype="float32", prompt_graphs=False).generate(prompts, params)
        llm = llm_of(parallel, "cuda", dtype="float32", prompt_graphs=True)
        outputs = llm.generate(prompts, params)
        assert llm.core._prompt_graphs is not None
        assert llm.core._prompt_graphs.num_captured > 0
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]

    @torch.inference_mode()
    def test_warm_and_settled_nothing_is_captured_and_nothing_waits(self, parallel: bool):
        llm = llm_of(parallel, "cuda", dtype="float32", prompt_graphs=True)
        list(llm.core.warm_up([K]))
        list(llm.core.warm_up_prompts())
        llm.generate(random_prompts(4, longest=60), PARAMS[0])
        llm.core.settle()
        before = llm.core.num_graphs
        requests = [llm.make_request(ids, PARAMS[0]) for ids in random_prompts(3, seed=2, longest=15)]
        for request in requests:
            llm.core.add(request)
        schedule = llm.core.scheduler.schedule(K, K)
        assert [c.is_last for c in schedule.chunks] == [True] * 3  # all fit one pass with its padding
        torch.cuda.set_sync_debug_mode("error")
        try:
            llm.core._launch(schedule, K)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.core.has_work:
            llm.core.step()
        assert llm.core.num_graphs == before
