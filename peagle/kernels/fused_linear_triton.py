"""Triton form of the fused linear layers: one kernel, a program per tile of rows and run of output columns.

Each warp of a program sums its own slices of the inputs (a batched product, one slice of a turn per warp), and the
warps' sums are added at the end, always in the same order. So a program may own as few as 8 columns, which spreads a
small layer over the GPU without programs that wait for each other; and since the slices follow from the number of
inputs alone, neither the tile's height nor its width changes a bit of the result.

Sums of squares for the norm are taken from the same inputs as they pass, as the diagonal of x x^T: tensor cores are
idle between loads, and threads that squared and summed would make the loop 1.3 times as long. Every program has them
for itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, prefetch_rows, wait_for_previous
from peagle.kernels.fused_linear import LEAST_COLUMNS
from peagle.kernels.swiglu_triton import silu_times

_PROGRAMS = 96  # at least, where columns allow: an H200 has 132 multiprocessors
_MOST_COLUMNS = 32  # of a program
TILE_ROWS = 16  # of a tile: as many as tensor cores multiply at once
_PREFETCHED = tl.constexpr(512)  # inputs, while the kernel before runs
_BYTES_IN_FLIGHT = 100 << 10  # shared memory for loads of one program: a multiprocessor has room for two


class Tile(NamedTuple):
    columns: int
    slices: int  # of one turn of the loop, and warps
    step: int  # inputs of a slice
    stages: int


@triton.jit
def start_early(weight_OI: tl.tensor, read_O: tl.tensor, weight_row_stride: tl.int64, IN: tl.constexpr,
                EARLY: tl.constexpr) -> None:  # fmt: skip
    """What a program does before it loads or stores: ask for the first weights of its columns, then wait."""
    if EARLY:
        prefetch_rows(weight_OI + read_O.to(tl.int64) * weight_row_stride, min(IN, _PREFETCHED))
    wait_for_previous(EARLY)


@triton.jit
def _add_products(acc_SRO: tl.tensor, x_SRK: tl.tensor, weight: tl.tensor, inside_SK: tl.tensor,
                  WHOLE: tl.constexpr) -> tl.tensor:  # fmt: skip
    """One turn of the loop; `weight` [S, O, K] are addresses."""
    weight_SOK = tl.load(weight) if WHOLE else tl.load(weight, mask=inside_SK[:, None, :], other=0.0)
    return tl.dot(x_SRK, tl.permute(weight_SOK, (0, 2, 1)), acc_SRO, input_precision="ieee")


@triton.jit
def _square_sums(x: tl.tensor, live_R: tl.tensor, sk_SK: tl.tensor, IN: tl.constexpr, TURN: tl.constexpr,
                 ROWS: tl.constexpr, SLICES: tl.constexpr) -> tl.tensor:  # fmt: skip
    square_SR = tl.zeros([SLICES, ROWS], tl.float32)
    for start in range(0, IN, TURN):
        mask = live_R[None, :, None] & (start + sk_SK < IN)[:, None, :]
        x_SRK = tl.load(x + start, mask=mask, other=0.0).to(tl.float32)
        square_SR += tl.sum(x_SRK * x_SRK, axis=2)
    return tl.sum(square_SR, axis=0)


@triton.jit
def _diagonal(square_SRR: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """That of the slices' sum: each row times itself."""
    row_R = tl.arange(0, ROWS)
    own_SRR = tl.where((row_R[:, None] == row_R[None])[None], square_SRR, 0.0)
    return tl.sum(tl.sum(own_SRR, axis=2), axis=0)


@triton.jit
def over_warps(acc_SRO: tl.tensor, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The warps' sums added up, by threads that hold those of all four: `tl.sum` brings them there one at a time."""
    low_RO, high_RO = tl.split(tl.permute(tl.reshape(acc_SRO, [2, SLICES // 2, ROWS, COLUMNS]), (1, 2, 3, 0)))
    low_RO, high_RO = tl.split(tl.permute(low_RO + high_RO, (1, 2, 0)))
    return low_RO + high_RO


@triton.jit
def linear_tile(x_RI: tl.tensor, norm_I: tl.tensor, weight_OI: tl.tensor, bias_O: tl.tensor, row_R: tl.tensor,
                live_R: tl.tensor, column_O: tl.tensor, x_row_stride: tl.int64, weight_row_stride: tl.int64,
                eps: tl.float32, dtype: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
                NORM_FIRST: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """A linear layer's outputs at these rows and columns, [ROWS, COLUMNS], as torch would round them."""
    TURN: tl.constexpr = SLICES * STEP
    WHOLE: tl.constexpr = IN % TURN == 0
    sk_SK = tl.arange(0, SLICES)[:, None] * STEP + tl.arange(0, STEP)[None]
    x = x_RI + (row_R.to(tl.int64) * x_row_stride)[None, :, None] + sk_SK[:, None, :]
    weight = weight_OI + (column_O.to(tl.int64) * weight_row_stride)[None, :, None] + sk_SK[:, None, :]
    acc_SRO = tl.zeros([SLICES, ROWS, COLUMNS], tl.float32)
    square_SRR = tl.zeros([SLICES, ROWS, ROWS], tl.float32)
    scale_R = tl.full([ROWS], 1.0, tl.float32)
    if BIAS:
        own_O = tl.load(bias_O + column_O).to(tl.float32)
    if NORM_FIRST:
        scale_R = tl.rsqrt(_square_sums(x, live_R, sk_SK, IN, TURN, ROWS, SLICES) / IN + eps)
    for start in tl.range(0, IN, TURN, num_stages=STAGES):
        inside_SK = (start + sk_SK < IN) | WHOLE
        x_SRK = tl.load(x + start, mask=live_R[None, :, None] & inside_SK[:, None, :], other=0.0)
        if NORM:
            norm_SK = tl.load(norm_I + start + sk_SK, mask=inside_SK, other=0.0).to(tl.float32)
            wide_SRK = x_SRK.to(tl.float32)
            if NORM_FIRST:
                wide_SRK = (wide_SRK * scale_R[None, :, None]).to(dtype).to(tl.float32)
            else:
                square_SRR = tl.dot(x_SRK, tl.permute(x_SRK, (0, 2, 1)), square_SRR, input_precision="ieee")
            x_SRK = (wide_SRK * norm_SK[:, None, :]).to(dtype)
        acc_SRO = _add_products(acc_SRO, x_SRK, weight + start, inside_SK, WHOLE)
    if NORM_FIRST:
        scale_R = scale_R * 0.0 + 1.0  # it is in the inputs
    elif NORM:
        scale_R = tl.rsqrt(_diagonal(square_SRR, ROWS) / IN + eps)
    total_RO = over_warps(acc_SRO, SLICES, ROWS, COLUMNS) * scale_R[:, None]
    if BIAS:
        total_RO += own_O[None]
    return total_RO.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _linear_tile(
    out_RO: tl.tensor,
    x_RI: tl.tensor,
    norm_I: tl.tensor,
    weight_OI: tl.tensor,
    bias_O: tl.tensor,
    residual_RO: tl.tensor,
    rows: tl.int32,
    x_row_stride: tl.int64,
    weight_row_stride: tl.int64,
    residual_row_stride: tl.int64,
    eps: tl.float32,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_RO.dtype.element_ty
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column_O = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the end are read as the last one, which spares the loads of weights a mask.
    read_O = tl.minimum(column_O, OUT - 1)
    start_early(weight_OI, read_O, weight_row_stride, IN, EARLY)
    live_R, live_O = row_R < rows, column_O < OUT
    live_RO = live_R[:, None] & live_O[None]
    if ADD:  # asked for now, to be there when the sums are
        at_RO = (row_R.to(tl.int64) * residual_row_stride)[:, None] + column_O[None]
        own_RO = tl.load(residual_RO + at_RO, mask=live_RO, other=0.0).to(tl.float32)
    total_RO = linear_tile(
        x_RI, norm_I, weight_OI, bias_O, row_R, live_R, read_O, x_row_stride, weight_row_stride, eps, dtype, IN, ROWS,
        COLUMNS, SLICES, STEP, STAGES, NORM, NORM_FIRST, BIAS,
    ).to(tl.float32)  # fmt: skip
    if ADD:
        total_RO += own_RO
    tl.store(out_RO + row_R.to(tl.int64)[:, None] * OUT + column_O[None], total_RO.to(dtype), mask=live_RO)


@triton.jit(do_not_specialize=["rows"])
def _gated_linear_tile(out_RF: tl.tensor, x_RH: tl.tensor, norm_H: tl.tensor, weight_GH: tl.tensor, bias_G: tl.tensor,
                       rows: tl.int32, x_row_stride: tl.int64, weight_row_stride: tl.int64, eps: tl.float32,
                       IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       SLICES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, NORM_FIRST: tl.constexpr,
                       BIAS: tl.constexpr, EARLY: tl.constexpr) -> None:  # fmt: skip
    OWN: tl.constexpr = COLUMNS // 2  # output columns: gate and up of each are neighbours in the tile
    dtype: tl.constexpr = out_RF.dtype.element_ty
    row_R, tile_G = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    live_R = row_R < rows
    read_G = tl.minimum(tl.program_id(0) * OWN + tile_G // 2, OUT - 1) + tile_G % 2 * OUT
    start_early(weight_GH, read_G, weight_row_stride, IN, EARLY)
    total_RG = linear_tile(
        x_RH, norm_H, weight_GH, bias_G, row_R, live_R, read_G, x_row_stride, weight_row_stride, eps, dtype, IN, ROWS,
        COLUMNS, SLICES, STEP, STAGES, True, NORM_FIRST, BIAS,
    ).to(tl.float32)  # fmt: skip
    gate_RO, up_RO = tl.split(tl.reshape(total_RG, [ROWS, OWN, 2]))
    out_RO = silu_times(gate_RO, up_RO, dtype)
    column_O = tl.program_id(0) * OWN + tl.arange(0, OWN)
    at_RO = row_R.to(tl.int64)[:, None] * OUT + column_O[None]
    tl.store(out_RF + at_RO, out_RO.to(dtype), mask=live_R[:, None] & (column_O < OUT)[None])


def norm_gated_linear_triton(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_GH: Tensor, bias_G: Tensor | None = None
) -> Tensor:
    """The Triton form of `norm_gated_linear`. Rows of x and of the weight may be strided, their elements not."""
    (rows, inputs), outputs = x_RH.shape, weight_GH.shape[0] // 2
    x_RH, weight_GH = (t if t.stride(1) == 1 else t.contiguous() for t in (x_RH, weight_GH))
    out_RF = torch.empty((rows, outputs), dtype=x_RH.dtype, device=x_RH.device)
    if out_RF.numel() == 0:
        return out_RF
    tile, early = tile_of(rows, inputs, 2 * outputs, x_RH.dtype), launches_early(x_RH.device)
    with torch.cuda.device_of(x_RH):
        _gated_linear_tile[(triton.cdiv(2 * outputs, tile.columns), triton.cdiv(rows, TILE_ROWS))](
            out_RF, x_RH, norm_H, weight_GH, x_RH if bias_G is None else bias_G, rows, x_RH.stride(0),
            weight_GH.stride(0), eps, IN=inputs, OUT=outputs, ROWS=TILE_ROWS, COLUMNS=tile.columns, SLICES=tile.slices,
            STEP=tile.step, STAGES=tile.stages, NORM_FIRST=x_RH.dtype == torch.float16, BIAS=bias_G is not None,
            EARLY=early, num_warps=tile.slices, **early_launch(early),
            enable_fp_fusion=False,  # torch rounds each product before the sum
        )  # fmt: skip
    return out_RF


def norm_linear_triton(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """The Triton form of `norm_linear`. Rows of x and of the weight may be strided, their elements not."""
    return _launch(x_RH, weight_OH, bias_O, norm_H=norm_H, eps=eps)


def linear_add_triton(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor) -> Tensor:
    """The Triton form of `linear_add`."""
    return _launch(x_RI, weight_OI, bias_O, residual_RO=residual_RO)


def _launch(
    x_RI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    *,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    residual_RO: Tensor | None = None,
) -> Tensor:
    (rows, inputs), outputs = x_RI.shape, weight_OI.shape[0]
    x_RI, weight_OI = (t if t.stride(1) == 1 else t.contiguous() for t in (x_RI, weight_OI))
    out_RO = torch.empty((rows, outputs), dtype=x_RI.dtype, device=x_RI.device)
    if out_RO.numel() == 0:
        return out_RO
    residual = out_RO if residual_RO is None else residual_RO  # not read, like the next two, where there is none
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    tile, early = tile_of(rows, inputs, outputs, x_RI.dtype), launches_early(x_RI.device)
    with torch.cuda.device_of(x_RI):
        _linear_tile[(triton.cdiv(outputs, tile.columns), triton.cdiv(rows, TILE_ROWS))](
            out_RO, x_RI, x_RI if norm_H is None else norm_H, weight_OI, x_RI if bias_O is None else bias_O, residual,
            rows, x_RI.stride(0), weight_OI.stride(0), residual.stride(0), eps,
            IN=inputs, OUT=outputs, ROWS=TILE_ROWS, COLUMNS=tile.columns, SLICES=tile.slices, STEP=tile.step,
            STAGES=tile.stages, NORM=norm_H is not None, NORM_FIRST=norm_H is not None and x_RI.dtype == torch.float16,
            BIAS=bias_O is not None, ADD=residual_RO is not None, EARLY=early, num_warps=tile.slices,
            **early_launch(early), enable_fp_fusion=False,  # torch rounds each product before the sum
        )  # fmt: skip
    return out_RO


def tile_of(rows: int, inputs: int, outputs: int, dtype: torch.dtype, within: int = 0) -> Tile:
    """`slices` and `step` set the order of sums: they must not follow from `rows`.

    `within` is a multiple of `LEAST_COLUMNS` that the tile's columns are to divide.
    """

    def too_wide(columns: int) -> bool:
        return within % columns > 0 or triton.cdiv(outputs, columns) * triton.cdiv(rows, TILE_ROWS) < _PROGRAMS

    columns = _MOST_COLUMNS
    while columns > LEAST_COLUMNS and too_wide(columns):
        columns //= 2
    if dtype == torch.float32:  # no tensor cores: the operands of a product live in registers
        return Tile(min(columns, 16), 4, 16, 2)
    slices, step = 4, 64
    turn_bytes = slices * step * dtype.itemsize * (TILE_ROWS + columns)
    in_flight = min(triton.cdiv(inputs, slices * step), _BYTES_IN_FLIGHT // turn_bytes, 5)
    return Tile(columns, slices, step, 1 + in_flight)
