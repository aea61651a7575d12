"""Attention of whole prompts by a library against the same over the paged cache; on the CPU a twin stands in for it."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.engine import kv_cache
from peagle.engine.kv_cache import PagedAttend, PagedCache, WholeAttend
from peagle.kernels import whole_attention as module
from peagle.kernels.backend import INVARIANT
from peagle.kernels.paged_attention import AttentionPlan, RectanglePlan, WholePlan, plan_attention
from peagle.kernels.rope import rope_tables
from peagle.models.layers import Attention, CachedAttend, RopeSpec, rope_inverse_frequencies
from peagle.sampling import SamplingParams
from tests.engine.test_prompt_graphs import llm_of
from tests.engine.tiny import random_prompts, tiny_llm, tiny_spec
from tests.kernels.interpreter import INTERPRETED, run_interpreted

BLOCK, CPU = 4, torch.device("cpu")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
HEADS = [(9, 3, 64), (14, 2, 64), (32, 8, 128)]


def twin(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """What aten's operator does with these arguments: any request, any window, fewer key heads than query heads."""
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert (dropout_p, return_debug_mask) == (0.0, False)
    lengths_q, lengths_k = cum_seq_q.diff().tolist(), cum_seq_k.diff().tolist()
    assert max(lengths_q) <= max_q
    assert max(lengths_k) <= max_k
    parts, group = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True):
        row, at = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None]
        unseen = at > row if is_causal else at < 0
        if window_size_left is not None and window_size_left >= 0:
            unseen = unseen | (at < row - window_size_left)
        if window_size_right is not None and window_size_right >= 0:
            unseen = unseen | (at > row + window_size_right)
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
        parts.append((scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return (torch.cat(parts),)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the CPU take every pass over whole prompts for the library's, and the twin for the library; the rows of
    each call of it."""
    rows: list[int] = []

    def counted(query: Tensor, *args: Any, **more: Any) -> tuple[Tensor, ...]:
        rows.append(len(query))
        return twin(query, *args, **more)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", counted)
    monkeypatch.setattr(kv_cache, "takes_whole", lambda *_: True)
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    return rows


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


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lengths", [(1,), (37,), (3, 1, 21, 16)])
def test_equals_the_paged_form(
    heads: tuple[int, int, int], window: int | None, lengths: tuple[int, ...], calls: list[int]
):
    one = Pass([(n, n) for n in lengths], heads, torch.float64, window=window)
    whole, paged = one.attend("library"), one.attend("torch")
    assert isinstance(whole, WholeAttend)
    assert isinstance(paged, PagedAttend)
    out = whole(0, *one.qkv)
    torch.testing.assert_close(one.cache.keys[0][:, one.slots].transpose(0, 1), one.qkv[1], rtol=0, atol=0)
    torch.testing.assert_close(one.cache.values[0][:, one.slots].transpose(0, 1), one.qkv[2], rtol=0, atol=0)
    torch.testing.assert_close(out, paged(0, *one.qkv), rtol=0, atol=1e-12)
    assert calls == [sum(lengths)]


def test_which_passes_are_planned_for_it(monkeypatch: pytest.MonkeyPatch):
    def plan(*shapes: tuple[int, int], backend: str = "library") -> AttentionPlan:
        return Pass(list(shapes), (2, 1, 8), torch.float32).plan(backend)

    monkeypatch.setattr(module, "LEAST_ROWS", 20)
    planned = plan((21, 21), (25, 25))
    assert isinstance(planned, WholePlan)
    assert isinstance(planned.paged, RectanglePlan)
    assert planned.start_B1.tolist() == [0, 21, 46]
    assert (planned.start_B1.dtype, planned.most_rows) == (torch.int32, 25)
    assert isinstance(plan((40, 40), (2, 2)), WholePlan)  # the mean row is in a long prompt
    for shapes in ([(19, 19)], [(10, 10)] * 4, [(30, 31)], [(30, 30), (30, 34)]):  # short, or with keys before
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
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert isinstance(Pass([(30, 30)], (2, 1, 8), torch.bfloat16).attend("library"), WholeAttend)
    assert isinstance(Pass([(30, 30)], (2, 1, 8), torch.bfloat16, sinks=True).attend("library"), PagedAttend)
    for dim, dtype, takes in ((64, torch.float16, True), (80, torch.bfloat16, True), (64, torch.float32, False),
                              (60, torch.bfloat16, False), (512, torch.bfloat16, False)):  # fmt: skip
        assert module.takes_whole(dim, dtype, CPU) == takes


@pytest.mark.parametrize("changes", [{}, {"parallel": False}, {"window": 5}, {"max_num_batched_tokens": 16}])
def test_turned_off_no_token_changes(changes: dict[str, Any], calls: list[int]):
    """Prompts in one chunk and in several, the second time with a prefix in the cache."""
    prompts, params = random_prompts(8, longest=40), SamplingParams(max_tokens=12, temperature=0.0)
    prompts[3:5] = [prompts[2] + [7] * 9, prompts[2] + [8] * 9]

    def answers(attention: str) -> list[list[int]]:
        llm = tiny_llm(3, attention=attention, **changes)
        return [o.token_ids for _ in range(2) for o in llm.generate(prompts, params)]

    with_library = answers("library")
    count = len(calls)
    assert count >= 5  # the target's four layers, and the first of the drafter's
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
    prompts, params = random_prompts(2, longest=7), SamplingParams(max_tokens=2, temperature=0.0)

    def answers(attention: str) -> list[list[int]]:
        llm = llm_of(True, attention=attention, max_num_batched_tokens=64)
        return [o.token_ids for o in llm.generate(prompts, params)]

    with_library, rows = answers("library"), sum(len(p) for p in prompts)
    assert calls == [rows, rows, rows + 2 * 2]  # two layers of the target; the drafter's first has mask rows as well
    assert answers("triton") == with_library
    assert len(calls) == 3


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("lengths", [(1025,), (1, 1333, 77, 700), (127, 129) * 8])
def test_on_gpu(
    where: str, heads: tuple[int, int, int], window: int | None, lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """bfloat16 rounds in a different order in either form: 1e-2, as for the tiles."""
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    one = Pass([(n, n) for n in lengths], heads, torch.bfloat16, where, window, kernels="triton")
    whole = one.attend("library")
    assert isinstance(whole, WholeAttend)
    out = whole(0, *one.qkv)
    assert out.is_contiguous()
    assert relative_error(out, one.attend("torch")(0, *one.qkv)) < 1e-2


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("changes", [{"dtype": torch.float32}, {"sinks": True}, {"shapes": [(900, 900), (200, 207)]}])
def test_on_gpu_what_it_does_not_take(where: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LEAST_ROWS", 1)
    settings = {"shapes": [(900, 900), (207, 207)], "dtype": torch.bfloat16, "heads": (9, 3, 64), **changes}
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
    lengths = (1025, 33, 700)
    one = Pass([(n, n) for n in lengths], heads, torch.bfloat16, where, kernels="triton")
    layer = Attention(0, 96, 96, *heads, head_norm_eps=1e-6).to(where, torch.bfloat16).eval().requires_grad_(False)
    layer.kernels = "triton"
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e4, head_dim=heads[2])).to(where)
    tables = rope_tables(one.limit, inv_freq, torch.bfloat16, backend="torch")
    x = torch.randn(sum(lengths), 96, device=where, dtype=torch.bfloat16)

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
