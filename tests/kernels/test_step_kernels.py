"""The small kernels of a step, acceptance, the KV write and the drafter's rows, against their torch twins: exactly.

Buffers that a kernel must not write to hold values it could not have made.
"""

import itertools
from dataclasses import astuple, is_dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from benchmarks.step_kernels import SHAPES, Step
from peagle.kernels.accept import accept
from peagle.kernels.draft_layout import DraftLayout, LayoutSizes, draft_layout
from peagle.kernels.draft_rows import MaskRow, draft_rows
from peagle.kernels.expand_rows import expand_rows
from peagle.kernels.kv_write import kv_write
from tests.kernels.interpreter import INTERPRETED, run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


def test_accept():
    """Two of three drafts kept, all kept, none, a prompt's row without drafts, padding."""
    tokens = torch.tensor([[5, 6, 7, 8]] * 5)
    drafts = torch.tensor([[5, 6, 0], [5, 6, 7], [0, 6, 7], [-1, -1, -1], [5, 6, 7]])
    result = accept(tokens, drafts, torch.tensor([3, 0, 1, 2, -1]))
    assert result.count_B.tolist() == [2, 3, 0, 0, 0]
    assert result.emitted_BV.tolist() == [[5, 6, 7, -1], [5, 6, 7, 8], [5, -1, -1, -1], [5, -1, -1, -1], [-1] * 4]
    assert result.next_token_B.tolist() == [7, 8, 5, 5, 0]


def compare_accept(k: int, device: str) -> None:
    """Every pattern of right and wrong drafts, with and without padding; inputs are slices of wider rows."""
    right = torch.tensor(list(itertools.product((True, False), repeat=k)), device=device).bool().view(2**k, k)
    wide = torch.randint(0, 2**40, (len(right), k + 3), device=device)
    tokens = wide[:, 1 : k + 2]
    drafts = torch.where(right, tokens[:, :-1], tokens[:, :-1] + 1)
    drafts[::5] = -1
    drafts = torch.cat((drafts, drafts), dim=1)[:, :k]
    slots = torch.arange(len(right), device=device)
    slots[1::3] = -1
    for padding in (None, slots):
        expected, got = (accept(tokens, drafts, padding, backend=backend) for backend in ("torch", "triton"))
        assert all(torch.equal(want, have) and want.dtype == have.dtype for want, have in zip(expected, got))


def compare_kv_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Live slots hold the new keys and values, all others what they held; -1 writes nothing at all."""
    rows, slots_total = 37, 101
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=device).to(dtype)
    _q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    slots = torch.randperm(slots_total - 1, device=device)[:rows]
    slots[::4] = -1
    live = slots >= 0
    canary = torch.randn(2, kv_heads, slots_total, dim, device=device).to(dtype)
    written = canary.clone()
    kv_write(written[0], written[1], slots, k, v, backend="triton")
    expected = canary.clone()
    expected[0][:, slots[live]] = k[live].transpose(0, 1)
    expected[1][:, slots[live]] = v[live].transpose(0, 1)
    assert torch.equal(written, expected)
    twin = canary.clone()
    kv_write(twin[0], twin[1], slots, k, v, backend="torch")
    assert torch.equal(twin[:, :, :-1], expected[:, :, :-1])


def layout_of(k: int, masked: bool, device: str) -> DraftLayout:
    """Decodes of every acceptance, a prompt's chunk and a padding request."""
    kept = [*range(8), 20, 3]
    start = torch.tensor([0, *itertools.accumulate([8] * 8 + [21, 8])], device=device)
    total, batch = int(start[-1]), len(kept)
    drafts = k if masked else 1
    return draft_layout(
        torch.arange(total, device=device) % 50, torch.arange(total, device=device),
        torch.arange(batch, device=device), start, start[:-1] + torch.tensor(kept, device=device),
        torch.zeros(batch, 30, dtype=torch.int64, device=device),
        LayoutSizes(10**6, drafts, total + batch * (drafts - 1), 16, 480),
        torch.tensor([0] * 9 + [-1], device=device), backend="torch",
    )  # fmt: skip


def compare_draft_rows(hidden: int, dtype: torch.dtype, masked: bool, device: str) -> None:
    """Against the twin, and the twin against a loop over rows. Rejected target rows hold NaN: none may be read."""
    layout = layout_of(5, masked, device)
    table = torch.randn(50, hidden, device=device).to(dtype)
    features = torch.full((8 * 8 + 21 + 8, hidden), torch.nan, dtype=dtype, device=device)
    used = layout.source_rows[layout.source_rows >= 0]
    features[used] = torch.randn(len(used), hidden, device=device).to(dtype)
    mask = MaskRow(10**6, *torch.randn(2, hidden, device=device).to(dtype)) if masked else None
    expected, got = (draft_rows(layout, features, table, mask, backend=backend) for backend in ("torch", "triton"))
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])
    ids, sources, is_masked = (x.tolist() for x in (layout.input_ids, layout.source_rows, layout.is_masked))
    zero = torch.zeros(hidden, dtype=dtype, device=device)
    for row, (token, source, is_mask) in enumerate(zip(ids, sources, is_masked, strict=True)):
        want: tuple[Tensor, Tensor] = (zero, zero)
        if source >= 0:
            want = table[token], features[source]
        elif is_mask and mask is not None:
            want = mask.embed_H, mask.feature_H
        assert torch.equal(expected[0][row], want[0])
        assert torch.equal(expected[1][row], want[1])


def compare_expand_rows(size: int, dtype: torch.dtype, device: str) -> None:
    """All rows and chosen ones, from rows of a wider tensor; rejected target rows hold NaN: none may be read."""
    layout = layout_of(5, True, device)
    wide = torch.full((8 * 8 + 21 + 8, size + 3), torch.nan, dtype=dtype, device=device)
    used = layout.source_rows[layout.source_rows >= 0]
    wide[used] = torch.randn(len(used), size + 3, device=device).to(dtype)
    mask = torch.randn(size, device=device).to(dtype)
    every = torch.arange(len(layout.source_rows), device=device)
    for rows in (None, layout.sample_rows, every.flip(0)[::3].contiguous()):
        expected, got = (expand_rows(layout, wide[:, 1:-2], mask, rows, backend=b) for b in ("torch", "triton"))
        assert torch.equal(expected, got)
        for row, have in zip((every if rows is None else rows).tolist(), expected, strict=True):
            source = int(layout.source_rows[row])
            want = mask if layout.is_masked[row] else wide[source, 1:-2] if source >= 0 else torch.zeros_like(mask)
            assert torch.equal(have, want)


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.parametrize("k", range(8))
def test_interpreted_accept(k: int):
    compare_accept(k, "cpu")


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (4, 2, 8), (16, 8, 128), (8, 12, 128), (4, 1, 80)])
def test_interpreted_kv_write(heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    compare_kv_write(heads, kv_heads, dim, dtype, "cpu")


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 576, 2880])
@pytest.mark.parametrize("masked", [True, False])
def test_interpreted_draft_rows(hidden: int, dtype: torch.dtype, masked: bool):
    compare_draft_rows(hidden, dtype, masked, "cpu")


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 960, 2881])
def test_interpreted_expand_rows(size: int, dtype: torch.dtype):
    compare_expand_rows(size, dtype, "cpu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("k", range(9))
def test_accept_on_gpu(k: int):
    compare_accept(k, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (4, 2, 8), (32, 8, 128), (64, 8, 64), (4, 1, 80)])
def test_kv_write_on_gpu(heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    compare_kv_write(heads, kv_heads, dim, dtype, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 32, 576, 2880, 4096])
@pytest.mark.parametrize("masked", [True, False])
def test_draft_rows_on_gpu(hidden: int, dtype: torch.dtype, masked: bool):
    compare_draft_rows(hidden, dtype, masked, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 960, 2881, 6144])
def test_expand_rows_on_gpu(size: int, dtype: torch.dtype):
    compare_expand_rows(size, dtype, "cuda")


@gpu
@pytest.mark.gpu
def test_kv_slots_beyond_32_bits_on_gpu():
    """A cache whose last slot lies past 2^31 elements of one head."""
    slots = 2**31 // 128 + 3
    cache = torch.zeros(2, 2, slots, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, 2, 128, device="cuda").bfloat16()
    kv_write(cache[0], cache[1], torch.tensor([slots - 1], device="cuda"), k, v)
    assert torch.equal(cache[0][:, -1], k[0])
    assert torch.equal(cache[1][:, -1], v[0])
    assert not cache[:, :, :-1].any()


def tensors_of(result: object) -> list[Tensor]:
    parts = astuple(result) if is_dataclass(result) else result if isinstance(result, tuple) else (result,)
    return [part.clone() for part in parts if isinstance(part, Tensor)]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@torch.inference_mode()
def test_a_graph_of_each_on_gpu(backend: str):
    """No call waits for the device, and a replay does what the call did."""
    for kernel, _size, call in Step(SHAPES["smollm2"], 3, "cuda").calls():
        for _ in range(2):
            expected = tensors_of(call(backend))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(backend)
        graph.replay()
        for want, have in zip(expected, tensors_of(result), strict=True):
            assert torch.equal(want, have), kernel
