"""Triton form of the streaming linear layers: a program per tile of output columns and cut of the inputs.

The product is made as W x^T, so that tensor cores take the weights as they come from memory and the few rows are the
narrow side. Programs that share a multiprocessor keep it busy while others wait; where there are few, each has more
loads in flight. Large layers have a form of their own on Hopper, `stream_ring_triton`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, prefetch_rows, wait_for_previous
from peagle.kernels.stream_ring import prefers_ring
from peagle.kernels.swiglu_triton import silu_times

_COLUMNS = 64  # of a tile: as many as Hopper's tensor cores multiply at once
_PROGRAMS = 128  # at least, where the inputs can be cut: an H200 has 132 multiprocessors
_LEAST_INPUTS = 512  # of a cut
_MOST_CUTS = 8
_PREFETCHED = tl.constexpr(512)  # inputs of a program's first, while the kernel before runs


class _Tile(NamedTuple):
    rows: int
    columns: int
    step: int  # inputs of a turn
    cuts: int
    stages: int


@triton.jit(do_not_specialize=["rows"])
def _stream_tile(
    out: tl.tensor, x_RI: tl.tensor, weight_GI: tl.tensor, bias_G: tl.tensor, rows: tl.int32, x_row_stride: tl.int64,
    weight_row_stride: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS  # output columns of a program
    cut, row_R = tl.program_id(1), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < rows
    tile_G = tl.arange(0, COLUMNS)
    # Gate and up of a column are neighbours in the tile, so that both are one product.
    column_G = tl.program_id(0) * OWN + (tile_G // 2 if GATED else tile_G)
    # Columns past the end are read as the last one, which spares the loads of weights a mask.
    read_G = tl.minimum(column_G, OUT - 1)
    if GATED:
        read_G += (tile_G % 2) * OUT
    k_K = cut * CUT + tl.arange(0, STEP)
    weight = weight_GI + (read_G.to(tl.int64) * weight_row_stride)[:, None] + k_K[None]
    x = x_RI + (row_R.to(tl.int64) * x_row_stride)[:, None] + k_K[None]
    if EARLY:
        PREFETCHED: tl.constexpr = min(_PREFETCHED, CUT)
        first = tl.minimum(cut * CUT, IN - PREFETCHED)  # cuts are rounded up: the last may end past its row
        prefetch_rows(weight_GI + first + read_G.to(tl.int64) * weight_row_stride, PREFETCHED)
    wait_for_previous(EARLY)
    acc_GR = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, CUT, STEP, num_stages=STAGES):
        inside_K = (k_K + start < IN) & (start + tl.arange(0, STEP) < CUT) | WHOLE
        if WHOLE:  # nobody else reads these weights: they need not stay in a cache
            weight_GK = tl.load(weight + start, eviction_policy="evict_first")
        else:
            weight_GK = tl.load(weight + start, mask=inside_K[None], other=0.0, eviction_policy="evict_first")
        x_RK = tl.load(x + start, mask=live_R[:, None] & inside_K[None], other=0.0)
        acc_GR = tl.dot(weight_GK, tl.trans(x_RK), acc_GR, input_precision="ieee")
    if BIAS:
        acc_GR += tl.load(bias_G + read_G, mask=(read_G >= 0) & (cut == 0), other=0.0).to(tl.float32)[:, None]
    if GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        wide_GR = acc_GR.to(dtype).to(tl.float32)  # rounded as torch rounds the layer's output
        gate_OR, up_OR = tl.split(tl.permute(tl.reshape(wide_GR, [OWN, 2, ROWS]), (0, 2, 1)))
        total_OR = silu_times(gate_OR, up_OR, dtype)
    else:
        total_OR = acc_GR
    column_O = tl.program_id(0) * OWN + tl.arange(0, OWN)
    at_OR = row_R.to(tl.int64)[None] * OUT + column_O[:, None]
    if PARTS:
        at_OR += cut.to(tl.int64) * rows * OUT
    tl.store(out + at_OR, total_OR.to(out.dtype.element_ty), mask=live_R[None] & (column_O < OUT)[:, None])


def stream_linear_triton(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The Triton form of `stream_linear`. Rows of x and of the weight may be strided, their elements not."""
    return _launch(x_RI, weight_OI, bias_O)


def gated_stream_linear_triton(x_RI: Tensor, weight_GI: Tensor, bias_G: Tensor | None) -> Tensor:
    """The Triton form of `gated_stream_linear`."""
    return _launch(x_RI, weight_GI, bias_G, gated=True)


def linear_parts_triton(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The Triton form of `linear_parts`."""
    return _launch(x_RI, weight_OI, bias_O, parts=True)


def _launch(
    x_RI: Tensor, weight_GI: Tensor, bias_G: Tensor | None, *, gated: bool = False, parts: bool = False
) -> Tensor:
    if prefers_ring(x_RI, weight_GI, gated=gated, parts=parts):
        # Imported late: Gluon is not in every Triton.
        from peagle.kernels.stream_ring_triton import launch_ring

        return launch_ring(x_RI, weight_GI, bias_G, gated=gated, parts=parts)
    (rows, inputs), outputs = x_RI.shape, weight_GI.shape[0] // (2 if gated else 1)
    x_RI, weight_GI = (t if t.stride(1) == 1 else t.contiguous() for t in (x_RI, weight_GI))
    tile = _tile(rows, inputs, weight_GI.shape[0], parts)
    cut = triton.cdiv(triton.cdiv(inputs, tile.cuts), tile.step) * tile.step if tile.cuts > 1 else inputs
    if parts:
        out = torch.empty((tile.cuts, rows, outputs), dtype=torch.float32, device=x_RI.device)
    else:
        out = torch.empty((rows, outputs), dtype=x_RI.dtype, device=x_RI.device)
    if out.numel() == 0:
        return out
    early = launches_early(x_RI.device)
    with torch.cuda.device_of(x_RI):
        _stream_tile[(triton.cdiv(weight_GI.shape[0], tile.columns), tile.cuts, triton.cdiv(rows, tile.rows))](
            out, x_RI, weight_GI,
            x_RI if bias_G is None else bias_G,  # not read
            rows, x_RI.stride(0), weight_GI.stride(0), IN=inputs, OUT=outputs, CUT=cut, ROWS=tile.rows,
            COLUMNS=tile.columns, STEP=tile.step, STAGES=tile.stages, GATED=gated, BIAS=bias_G is not None, PARTS=parts,
            WHOLE=inputs % tile.step == 0 and cut * tile.cuts == inputs, EARLY=early, num_warps=4,
            **early_launch(early),
        )  # fmt: skip
    return out


def _tile(rows: int, inputs: int, weight_rows: int, parts: bool) -> _Tile:
    """`cuts` set the order of sums: they must not follow from `rows`."""
    tiles, cuts = triton.cdiv(weight_rows, _COLUMNS), 1
    while parts and cuts < _MOST_CUTS and tiles * cuts < _PROGRAMS and inputs >= 2 * cuts * _LEAST_INPUTS:
        cuts *= 2
    tile_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    if tiles * cuts <= 2 * _PROGRAMS:
        return _Tile(tile_rows, _COLUMNS, 128, cuts, stages=6)
    if tile_rows <= 32:
        return _Tile(tile_rows, _COLUMNS, 128, cuts, stages=3)
    return _Tile(tile_rows, 2 * _COLUMNS, 64, cuts, stages=4)  # more rows: their loads count, wider tiles share them
