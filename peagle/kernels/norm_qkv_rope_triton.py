"""Triton form of norm, projections, rotation and write: the fused linear layer, whose programs know where a head goes.

A rotation needs both halves of a head. So the columns of a program are no run: both elements of a pair (d, d + D/2)
stand side by side, and a program's pairs are of one head, whose fate is then one branch for all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early
from peagle.kernels.fused_linear_triton import TILE_ROWS, linear_tile, start_early, tile_of
from peagle.kernels.norm_qkv_rope import NormedLinear
from peagle.kernels.rope_triton import turn


@triton.jit
def _store_pairs(to_RP: tl.tensor, low_RP: tl.tensor, high_RP: tl.tensor, live_R: tl.tensor,
                 HALF: tl.constexpr) -> None:  # fmt: skip
    dtype: tl.constexpr = to_RP.dtype.element_ty
    tl.store(to_RP, low_RP.to(dtype), mask=live_R[:, None])
    tl.store(to_RP + HALF, high_RP.to(dtype), mask=live_R[:, None])


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_R"])
def _qkv_linear_tile(
    q_RND: tl.tensor,
    x_RI: tl.tensor,
    norm_I: tl.tensor,
    weight_AI: tl.tensor,
    bias_A: tl.tensor,
    cos_RD: tl.tensor,
    sin_RD: tl.tensor,
    key_cache_MSD: tl.tensor,
    value_cache_MSD: tl.tensor,
    slots_R: tl.tensor,
    rows: tl.int32,
    x_row_stride: tl.int64,
    weight_row_stride: tl.int64,
    cache_head_stride: tl.int64,
    eps: tl.float32,
    IN: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    PAIRS: tl.constexpr = COLUMNS // 2
    dtype: tl.constexpr = q_RND.dtype.element_ty
    head, first = tl.program_id(0) * PAIRS // HALF, tl.program_id(0) * PAIRS % HALF
    row_R, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    live_R, wide_R1 = row_R < rows, row_R.to(tl.int64)[:, None]
    d_1P = (first + tl.arange(0, PAIRS))[None]
    column_O = head * 2 * HALF + first + column // 2 + column % 2 * HALF
    start_early(weight_AI, column_O, weight_row_stride, IN, EARLY)
    # Asked for now, to be there when the sums are.
    at_RP = wide_R1 * 2 * HALF + d_1P
    cos_RP = tl.load(cos_RD + at_RP, mask=live_R[:, None], other=0.0)
    sin_RP = tl.load(sin_RD + at_RP + HALF, mask=live_R[:, None], other=0.0)
    slot_R = tl.load(slots_R + row_R, mask=live_R, other=-1).to(tl.int64)
    total_RO = linear_tile(
        x_RI, norm_I, weight_AI, bias_A, row_R, live_R, column_O, x_row_stride, weight_row_stride, eps, dtype, IN,
        ROWS, COLUMNS, SLICES, STEP, STAGES, True, NORM_FIRST, BIAS,
    )  # fmt: skip
    low_RP, high_RP = tl.split(tl.reshape(total_RO, [ROWS, PAIRS, 2]))
    if head < QUERY_HEADS + KV_HEADS:
        low_RP, high_RP = turn(
            low_RP.to(tl.float32), high_RP.to(tl.float32), cos_RP.to(tl.float32), sin_RP.to(tl.float32), dtype
        )
    in_slot_RP = slot_R[:, None] * 2 * HALF + d_1P
    if head < QUERY_HEADS:
        _store_pairs(q_RND + (wide_R1 * QUERY_HEADS + head) * 2 * HALF + d_1P, low_RP, high_RP, live_R, HALF)
    elif head < QUERY_HEADS + KV_HEADS:
        key = key_cache_MSD + (head - QUERY_HEADS).to(tl.int64) * cache_head_stride
        _store_pairs(key + in_slot_RP, low_RP, high_RP, slot_R >= 0, HALF)
    else:
        value = value_cache_MSD + (head - QUERY_HEADS - KV_HEADS).to(tl.int64) * cache_head_stride
        _store_pairs(value + in_slot_RP, low_RP, high_RP, slot_R >= 0, HALF)


def norm_qkv_rope_triton(
    x_RH: Tensor,
    qkv: NormedLinear,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    heads: int,
    key_cache_MSD: Tensor,
    value_cache_MSD: Tensor,
    slots_R: Tensor,
) -> Tensor:
    """The Triton form of `norm_qkv_rope`. Tables are dense; rows of x and of the weight may be strided."""
    (rows, inputs), outputs, head_dim = x_RH.shape, qkv.weight_OH.shape[0], cos_R1D.shape[-1]
    x_RH, weight_OH = (t if t.stride(1) == 1 else t.contiguous() for t in (x_RH, qkv.weight_OH))
    q_RND = torch.empty((rows, heads, head_dim), dtype=x_RH.dtype, device=x_RH.device)
    if rows == 0:
        return q_RND
    tile, early = tile_of(rows, inputs, outputs, x_RH.dtype, within=head_dim), launches_early(x_RH.device)
    with torch.cuda.device_of(x_RH):
        _qkv_linear_tile[(outputs // tile.columns, triton.cdiv(rows, TILE_ROWS))](
            q_RND, x_RH, qkv.norm_H, weight_OH,
            x_RH if qkv.bias_O is None else qkv.bias_O,  # not read where there is none
            cos_R1D, sin_R1D, key_cache_MSD, value_cache_MSD, slots_R, rows, x_RH.stride(0), weight_OH.stride(0),
            key_cache_MSD.stride(0), qkv.eps,
            IN=inputs, QUERY_HEADS=heads, KV_HEADS=key_cache_MSD.shape[0], HALF=head_dim // 2, ROWS=TILE_ROWS,
            COLUMNS=tile.columns, SLICES=tile.slices, STEP=tile.step, STAGES=tile.stages,
            NORM_FIRST=x_RH.dtype == torch.float16, BIAS=qkv.bias_O is not None, EARLY=early, num_warps=tile.slices,
            **early_launch(early), enable_fp_fusion=False,  # torch rounds each product before the sum
        )  # fmt: skip
    return q_RND
