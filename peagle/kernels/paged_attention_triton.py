"""Triton form of paged attention: one program per tile of a request's rows and kv head, online softmax over its keys.

The query heads that share a kv head are rows of the same tile, so each key and value is read once for all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.paged_attention import TilePlan
from peagle.kernels.paged_decode import CacheView

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_width"])  # it grows while requests run, which must not compile anew
def _attend_tile(
    out_RND: tl.tensor, q_RND: tl.tensor, keys_MSD: tl.tensor, values_MSD: tl.tensor, limit_R: tl.tensor,
    sinks_N: tl.tensor, tiles_W3: tl.tensor, tables_BN: tl.tensor, table_width: tl.int32, q_row_stride: tl.int64,
    q_head_stride: tl.int64, cache_head_stride: tl.int64, scale_log2: float, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles_W3 + tile * 3)
    num_rows = tl.load(tiles_W3 + tile * 3 + 1)
    table = tables_BN + tl.load(tiles_W3 + tile * 3 + 2).to(tl.int64) * table_width
    t, d, s = tl.arange(0, TILE), tl.arange(0, HEAD_DIM), tl.arange(0, KEYS)
    inside_T1 = (t < num_rows * GROUP)[:, None]
    row_T, head_T = (first_row + t // GROUP).to(tl.int64), kv_head * GROUP + t % GROUP
    # Rows of padding, the tile's own and those of requests that only pad, see nothing.
    limit_T = tl.load(limit_R + row_T, mask=t < num_rows * GROUP, other=-1).to(tl.int32)
    last_key = tl.max(limit_T, axis=0)
    first_key = 0
    if WINDOW > 0:
        limit_T = tl.where(t < num_rows * GROUP, limit_T, last_key)  # no padding row keeps the window from moving on
        first_key = tl.maximum(tl.min(limit_T, axis=0) - (WINDOW - 1), 0) // BLOCK_SIZE * BLOCK_SIZE
    q = tl.load(q_RND + (row_T * q_row_stride + head_T * q_head_stride)[:, None] + d[None], mask=inside_T1, other=0.0)
    head_offset = kv_head.to(tl.int64) * cache_head_stride

    top_T = tl.full([TILE], -float("inf"), tl.float32)
    total_T = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for start in range(first_key, last_key + 1, KEYS):
        position_S = start + s
        # Slots past the last visible key may hold NaN, which a zero weight would not remove: they are not read.
        written_S = position_S <= last_key
        block_S = tl.load(table + position_S // BLOCK_SIZE, mask=written_S, other=0).to(tl.int64)
        at_SD = head_offset + (block_S * BLOCK_SIZE + position_S % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None]
        k = tl.load(keys_MSD + at_SD, mask=written_S[:, None], other=0.0)
        v = tl.load(values_MSD + at_SD, mask=written_S[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(position_S[None] <= limit_T[:, None], scores, -float("inf"))
        if WINDOW > 0:
            scores = tl.where(position_S[None] > limit_T[:, None] - WINDOW, scores, -float("inf"))
        new_top_T = tl.maximum(top_T, tl.max(scores, axis=1))
        # Rows may see none of these keys: the windows of later ones may begin after them.
        base_T = tl.where(new_top_T == -float("inf"), 0.0, new_top_T)
        weights = tl.exp2(scores - base_T[:, None])
        shrink_T = tl.exp2(top_T - base_T)
        total_T = total_T * shrink_T + tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink_T[:, None], input_precision="ieee")
        top_T = new_top_T

    if SINKS:
        sink_T = tl.load(sinks_N + head_T).to(tl.float32) * LOG2_E
        new_top_T = tl.maximum(top_T, sink_T)
        total_T = total_T * tl.exp2(top_T - new_top_T) + tl.exp2(sink_T - new_top_T)
        out = out * tl.exp2(top_T - new_top_T)[:, None]
    total_T = tl.where(total_T > 0, total_T, 1.0)  # rows that see nothing are zero
    heads = tl.num_programs(1) * GROUP
    at_TD = ((row_T * heads + head_T) * HEAD_DIM)[:, None] + d[None]
    tl.store(out_RND + at_TD, (out / total_T[:, None]).to(out_RND.dtype.element_ty), mask=inside_T1)


def paged_attention_triton(q_RND: Tensor, cache: CacheView, plan: TilePlan) -> Tensor:
    """The Triton form of `paged_attention`. Each kv head of the caches is contiguous; softmax in float32.

    Blocks that lie before the windows of all rows of a tile are not read.
    float32 inputs are multiplied in float32, never in TF32.
    """
    (rows, heads, head_dim), kv_heads = q_RND.shape, cache.keys_MSD.shape[0]
    q_RND = q_RND if q_RND.stride(2) == 1 else q_RND.contiguous()
    out_RND = torch.empty((rows, heads, head_dim), dtype=q_RND.dtype, device=q_RND.device)
    keys, warps, stages = _launch_sizes(plan.tile_size, head_dim, q_RND.dtype)
    sinks_N = cache.limit_R if cache.sinks_N is None else cache.sinks_N  # not read without sinks
    with torch.cuda.device_of(q_RND):
        _attend_tile[(plan.tiles_W3.shape[0], kv_heads)](
            out_RND, q_RND, cache.keys_MSD, cache.values_MSD, cache.limit_R, sinks_N, plan.tiles_W3, plan.tables_BN,
            plan.tables_BN.shape[1], q_RND.stride(0), q_RND.stride(1), cache.keys_MSD.stride(0),
            head_dim**-0.5 * LOG2_E.value, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=plan.block_size,
            TILE=plan.tile_size, KEYS=keys, WINDOW=cache.window or 0, SINKS=cache.sinks_N is not None, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return out_RND


def _launch_sizes(tile_size: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys per turn of the loop, warps, pipeline stages."""
    if dtype == torch.float32:  # no tensor cores: the operands of a product live in registers
        return (32 if head_dim <= 64 else 16), (4 if tile_size <= 16 else 8), 2
    # A warp per 16 rows keeps softmax sums inside one warp.
    return (64 if head_dim <= 64 else 32), max(1, tile_size // 16), 3
