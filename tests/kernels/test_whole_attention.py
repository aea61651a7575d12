"""Attention of a whole prompt by a library against the same over the paged cache."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.engine import build, kv_cache
from peagle.engine.kv_cache import PagedAttend, PagedCache, WholeAttend
from peagle.engine.warm_up import WarmUp
from peagle.kernels import whole_attention as module
from peagle.kernels.backend import INVARIANT
from peagle.kernels.paged_attention import AttentionPlan, RectanglePlan, WholePlan, plan_attention
from peagle.kernels.rope import rope_tables
from peagle.models.layers import Attention, CachedAttend, RopeSpec, rope_inverse_frequencies
from peagle.sampling import SamplingParams
from tests.engine.test_graphs import OnGpu
from tests.engine.test_prompt_graphs import llm_of
from tests.engine.tiny import random_prompts, tiny_llm, tiny_spec
from tests.kernels.interpreter import INTERPRETED, run_interpreted

BLOCK, CPU = 4, torch.device("cpu")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
HEADS = [(9, 3, 64), (14, 2, 64), (32, 8, 128)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the CPU take every pass over a whole prompt for the library's; the rows of each call of it."""
    rows: list[int] = []

    def counted(query: Tensor, *args: Any) -> Tensor:
        rows.append(len(query))
        return module.whole_attention(query, *args)

    monkeypatch.setattr(kv_cache, "whole_attention", counted)
    monkeypatch.setattr(kv_cache, "takes_whole", lambda *_: True)
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    return rows


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args: empty(*args).fill_(torch.nan))


class Pass:
    """A cache of one layer, and requests of (new rows, keys) whose earlier keys are in it."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        device: str = "cpu",
        window: int | None = None,
        sinks: bool = False,
        kernels: str = "torch",
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.device = heads, torch.device(device)
        self.rows, self.keys = (np.array(column) for column in zip(*shapes, strict=True))
        blocks = -(-self.keys // BLOCK)
        ids = np.random.default_rng(0).permutation(int(blocks.sum()))
        self.tables = np.zeros((len(shapes), int(blocks.max())), dtype=np.int64)
        for line, count in zip(self.tables, blocks, strict=True):
            line[:count], ids = ids[:count], ids[count:]
        sizes = tiny_spec(num_layers=1, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
        self.cache = PagedCache(
            sizes, int(blocks.sum()) * BLOCK, dtype=dtype, device=self.device, windows=(window,), kernels=kernels,
            sinks=(torch.randn(heads[0]).to(device, dtype),) if sinks else None,
        )  # fmt: skip
        self.cache.keys.normal_(), self.cache.values.normal_()
        self.positions = [np.arange(end - count, end) for count, end in shapes]
        slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t, p in zip(self.tables, self.positions, strict=True)]
        self.slots, self.limit = (torch.from_numpy(np.concatenate(x)).to(device) for x in (slots, self.positions))
        # Slices of a wider projection: rows are further apart than they are long.
        qkv = torch.randn(int(self.rows.sum()), heads[0] + 2 * heads[1], heads[2]).to(device, dtype)
        self.qkv = qkv.split((heads[0], heads[1], heads[1]), 1)

    def plan(self, backend: str) -> AttentionPlan:
        heads, kv_heads, dim = self.heads
        return plan_attention(
            self.rows, self.keys, self.tables, BLOCK,
            heads_per_kv=heads // kv_heads, head_dim=dim, device=self.device, backend=backend,
        )  # fmt: skip

    def attend(self, backend: str) -> PagedAttend | WholeAttend:
        return self.cache.attend(self.slots, self.limit, self.plan(backend))


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert expected.isfinite().all()
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 37, 256, 300])
def test_equals_the_paged_form(heads: tuple[int, int, int], rows: int, calls: list[int]):
    """Also where the memory behind the rows holds NaN."""
    one = Pass([(rows, rows)], heads, torch.float64)
    whole, paged = one.attend("library"), one.attend("torch")
    assert isinstance(whole, WholeAttend)
    assert isinstance(paged, PagedAttend)
    out = whole(0, *one.qkv)
    torch.testing.assert_close(one.cache.keys[0][:, one.slots].transpose(0, 1), one.qkv[1], rtol=0, atol=0)
    torch.testing.assert_close(one.cache.values[0][:, one.slots].transpose(0, 1), one.qkv[2], rtol=0, atol=0)
    torch.testing.assert_close(out, paged(0, *one.qkv), rtol=0, atol=1e-12)
    assert calls == [rows]


def test_a_library_sees_a_few_sizes(monkeypatch: pytest.MonkeyPatch):
    """Those it was asked to plan for, and no other layout: it would plan anew."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*parts: Tensor, **more: Any) -> Tensor:
        seen.append(tuple((part.shape, part.stride(), part.dtype) for part in parts))
        return attend(*parts, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    one = Pass([(1, 1)], (4, 2, 16), torch.bfloat16)
    monkeypatch.setattr(module, "LEAST_ROWS", 1024)
    assert list(module.plan_lengths(1400)) == [1024, 1280, 1536]
    assert not module.plan_lengths(700)
    for rows in module.plan_lengths(1400):
        one.cache.plan_whole(rows)
    planned = set(seen)
    seen.clear()
    for rows in (1024, 1025, 1279, 1280, 1400):
        module.whole_attention(*torch.randn(rows, 8, 16).to(torch.bfloat16).split((4, 2, 2), 1))
    assert set(seen) == planned


@pytest.mark.parametrize("attention", ["library", "triton"])
def test_a_warm_engine_has_its_plans(attention: str, calls: list[int], monkeypatch: pytest.MonkeyPatch):
    """Of the target and of the drafter, whose rows are K - 1 more than the longest prompt's; before it serves."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    monkeypatch.setattr(build, "resolve_kernels", lambda *_: "torch")
    llm = tiny_llm(3, max_num_seqs=2, max_num_batched_tokens=14, attention=attention)
    monkeypatch.setattr(module, "LEAST_ROWS", 8)
    monkeypatch.setattr(module, "PLAN_ROWS", 4)
    warm_up = WarmUp(llm, llm.make_request)
    warm_up._core = OnGpu(llm.core)
    monkeypatch.setattr(warm_up, "_answer", lambda _: None)
    warm_up.run(lambda: False)
    assert calls == ([8, 8, 12, 12, 16, 16, 20, 20] if attention == "library" else [])


def test_no_plans_for_layers_that_do_not_take_it():
    llm = tiny_llm(3, attention="library", max_num_batched_tokens=4096)
    assert not list(llm.core.warm_up_whole_prompts())


def test_which_passes_are_planned_for_it(monkeypatch: pytest.MonkeyPatch):
    def plan(*shapes: tuple[int, int], backend: str = "library") -> AttentionPlan:
        return Pass(list(shapes), (2, 1, 8), torch.float32).plan(backend)

    monkeypatch.setattr(module, "LEAST_ROWS", 20)
    planned = plan((21, 21))
    assert isinstance(planned, WholePlan)
    assert isinstance(planned.paged, RectanglePlan)
    for shapes in ([(19, 19)], [(30, 31)], [(30, 30)] * 2, [(40, 40), (1, 1)]):  # short, keys before it, or not alone
        assert isinstance(plan(*shapes), RectanglePlan)
    monkeypatch.setattr("peagle.kernels.paged_attention.use_triton", lambda *_: True)
    monkeypatch.setattr("peagle.kernels.paged_attention.can_tile", lambda _: True)
    assert isinstance(plan((30, 30)), WholePlan)
    for backend in ("triton", INVARIANT):
        assert not isinstance(plan((30, 30), backend=backend), WholePlan)


def test_which_layers_take_it(monkeypatch: pytest.MonkeyPatch):
    for changes in ({"dtype": torch.float32}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "sinks": True}):
        one = Pass([(30, 30)], (2, 1, 8), **changes)
        monkeypatch.setattr(module, "LEAST_ROWS", 1)
        attend = one.attend("library")
        assert isinstance(attend, PagedAttend)  # of the CPU, whatever they are
        assert isinstance(attend.plan, WholePlan)
        assert relative_error(attend(0, *one.qkv), one.attend("torch")(0, *one.qkv)) == 0
    monkeypatch.setattr(module, "cuda_generation", lambda _: 9)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert isinstance(Pass([(30, 30)], (2, 1, 8), torch.bfloat16).attend("library"), WholeAttend)
    assert isinstance(Pass([(30, 30)], (2, 1, 8), torch.bfloat16, sinks=True).attend("library"), PagedAttend)
    assert isinstance(Pass([(30, 30)], (2, 1, 8), torch.bfloat16, window=5).attend("library"), PagedAttend)
    for dim, dtype, takes in ((64, torch.float16, True), (80, torch.bfloat16, True), (64, torch.float32, False),
                              (60, torch.bfloat16, False), (256, torch.bfloat16, False)):  # fmt: skip
        assert module.takes_whole(dim, dtype, CPU) == takes
    monkeypatch.setattr(module, "cuda_generation", lambda _: 8)
    assert not module.takes_whole(64, torch.float16, CPU)


@pytest.mark.parametrize(("hidden", "expected"), [(4096, "library"), (576, "auto")])
def test_by_default_it_is_for_models_whose_prompts_wait_for_products(hidden: int, expected: str):
    spec = tiny_spec(hidden_size=hidden, intermediate_size=3 * hidden, num_heads=hidden // 64, head_dim=64)
    assert build._attention("auto", spec) == expected
    assert build._attention("triton", spec) == "triton"


@pytest.mark.parametrize("changes", [{}, {"parallel": False}, {"window": 5}, {"max_num_batched_tokens": 16}])
def test_turned_off_no_token_changes(changes: dict[str, Any], calls: list[int]):
    """Prompts alone, in one chunk and in several; then together, with a prefix in the cache."""
    prompts, params = random_prompts(8, longest=40), SamplingParams(max_tokens=12, temperature=0.0)
    prompts[3:5] = [prompts[2] + [7] * 9, prompts[2] + [8] * 9]

    def answers(attention: str) -> list[list[int]]:
        llm = tiny_llm(3, attention=attention, **changes)
        return [o.token_ids for some in (*([p] for p in prompts), prompts) for o in llm.generate(some, params)]

    with_library = answers("library")
    count = len(calls)
    layers = 4 if "window" in changes else 5  # the target's, and the first of the drafter's
    assert count >= layers
    assert count % layers == 0
    assert answers("torch") == with_library
    assert len(calls) == count


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_keys_are_rotated_and_written_apart(calls: list[int]):
    """With Triton's kernels around it a layer hands its keys over, and the cache gets the same ones."""
    prompts, params = random_prompts(1, longest=7), SamplingParams(max_tokens=2, temperature=0.0)

    def answers(attention: str) -> list[list[int]]:
        llm = llm_of(True, attention=attention, max_num_batched_tokens=64)
        return [o.token_ids for o in llm.generate(prompts, params)]

    with_library, rows = answers("library"), len(prompts[0])
    assert calls == [rows, rows, rows + 2]  # two layers of the target; the drafter's first has mask rows as well
    assert answers("triton") == with_library
    assert len(calls) == 3


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 1024, 1025, 2303])
def test_on_gpu(where: str, heads: tuple[int, int, int], rows: int, monkeypatch: pytest.MonkeyPatch):
    """bfloat16 rounds in a different order in either form: 1e-2, as for the tiles."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    one = Pass([(rows, rows)], heads, torch.bfloat16, where, kernels="triton")
    whole = one.attend("library")
    assert isinstance(whole, WholeAttend)
    out = whole(0, *one.qkv)
    assert out.is_contiguous()
    assert relative_error(out, one.attend("torch")(0, *one.qkv)) < 1e-2


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float32}, {"sinks": True}, {"shapes": [(900, 907)]}, {"window": 100}]
)
def test_on_gpu_what_it_does_not_take(where: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    settings = {"shapes": [(900, 900)], "dtype": torch.bfloat16, "heads": (9, 3, 64), **changes}
    one = Pass(device=where, kernels="triton", **settings)
    attend = one.attend("library")
    assert isinstance(attend, PagedAttend)
    assert relative_error(attend(0, *one.qkv), one.attend("torch")(0, *one.qkv)) < 1e-2


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("heads", HEADS)
def test_on_gpu_a_layer_comes_out_as_over_the_cache(
    where: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
):
    """From the projections on: keys are rotated in place and written in a launch of their own; the cache gets the same
    keys, but for roundings."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    one = Pass([(1025, 1025)], heads, torch.bfloat16, where, kernels="triton")
    layer = Attention(0, 96, 96, *heads, head_norm_eps=1e-6).to(where, torch.bfloat16).eval().requires_grad_(False)
    layer.kernels = "triton"
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e4, head_dim=heads[2])).to(where)
    tables = rope_tables(one.limit, inv_freq, torch.bfloat16, backend="torch")
    x = torch.randn(1025, 96, device=where, dtype=torch.bfloat16)

    def run(backend: str, kind: Callable[[Any], bool]) -> tuple[Tensor, Tensor]:
        attend = one.attend(backend)
        assert kind(attend)
        with torch.inference_mode():
            out = layer(x, *tables, attend)
        return out, torch.cat((one.cache.keys[0][:, one.slots], one.cache.values[0][:, one.slots])).clone()

    whole, whole_written = run("library", lambda attend: not isinstance(attend, CachedAttend))
    paged, paged_written = run("triton", lambda attend: isinstance(attend, CachedAttend))
    assert relative_error(whole, paged) < 1e-2
    assert relative_error(whole_written, paged_written) < 2e-3
