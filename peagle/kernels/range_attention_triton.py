"""Triton form of range attention: forward pass, and what the backward pass shares with it.

A program per (block of rows, query head) walks the keys between the first and the last that its rows see, with an
online softmax; nothing of size rows x keys is ever stored. Tiles that all rows see whole skip the mask. A row that sees
nothing has the log-sum-exp +inf, so that each of its weights in the backward pass is exp2(score - inf) = 0.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
NEVER = tl.constexpr(1 << 30)  # beyond every row and key
_LOWEST = tl.constexpr(-1e30)  # a running maximum that is finite, so that -inf - maximum is never NaN

# Ranges of a chunk of rows start anywhere: no kernel is compiled anew for how they are aligned.
RANGES = ("context_lo", "context_hi", "chain_lo", "chain_hi", "source_lo", "source_hi")

SourceTensors = tuple[Tensor, Tensor, Tensor, Tensor]  # keys [S, M, D], values [S, M, D], lo [R], hi [R]
Kernel = Literal["forward", "backward_q", "backward_kv"]


class LaunchSizes(NamedTuple):
    """Tile of a kernel: query rows, keys, warps, software pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


class Source(NamedTuple):
    """Keys and values of one source as the kernels take them; strides in elements."""

    k: Tensor
    v: Tensor
    k_row: int
    k_head: int
    v_row: int
    v_head: int


def launch_sizes(kernel: Kernel, head_dim: int, dtype: torch.dtype) -> LaunchSizes:
    """Tiles for Hopper: in bfloat16 up to head dim 128, as large as registers hold without spilling."""
    if dtype == torch.float32:  # no tensor cores: the operands of a product live in registers
        return LaunchSizes(32, 32, 8, 1) if head_dim <= 64 else LaunchSizes(16, 16, 4, 1)
    if head_dim <= 64:
        return LaunchSizes(64, 64, 4, 3)  # the best of 16 for each kernel, measured at D = 64 on an H200
    return {
        ("forward", 128): LaunchSizes(128, 64, 8, 2),
        ("forward", 256): LaunchSizes(64, 32, 8, 2),
        ("backward_q", 128): LaunchSizes(128, 64, 8, 2),
        ("backward_q", 256): LaunchSizes(64, 16, 8, 2),
        ("backward_kv", 128): LaunchSizes(32, 128, 8, 2),
        ("backward_kv", 256): LaunchSizes(16, 64, 8, 2),
    }[kernel, head_dim]


def forward(
    q_RND: Tensor, context: SourceTensors, chain: SourceTensors, sizes: LaunchSizes | None = None
) -> tuple[Tensor, Tensor]:
    """Output [R, N, D] and the log2-sum-exp of each row [N, R] in float32."""
    rows, heads, head_dim = q_RND.shape
    sizes = sizes or launch_sizes("forward", head_dim, q_RND.dtype)
    q_RND = dense(q_RND)
    out_RND = torch.empty((rows, heads, head_dim), dtype=q_RND.dtype, device=q_RND.device)
    lse_NR = torch.empty((heads, rows), dtype=torch.float32, device=q_RND.device)
    with torch.cuda.device_of(q_RND):
        _forward_kernel[(heads, triton.cdiv(rows, sizes.rows))](
            out_RND, lse_NR, q_RND, pack_source(context), *context[2:], pack_source(chain), *chain[2:], rows,
            q_RND.stride(0), q_RND.stride(1), head_dim**-0.5 * LOG2_E,
            HAS_CHAIN=chain[0].shape[0] > 0, GROUP=heads // context[0].shape[1], HEAD_DIM=head_dim, ROWS=sizes.rows,
            KEYS=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return out_RND, lse_NR


def dense(x: Tensor) -> Tensor:
    """`x`, copied only if its last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pack_source(tensors: SourceTensors) -> Source:
    k, v = dense(tensors[0]), dense(tensors[1])
    return Source(k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1))


@triton.jit
def load_tile(base: tl.tensor, start: tl.tensor, stride: tl.tensor, inside_S: tl.tensor, MASKED: tl.constexpr,
              SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Rows start .. start + SIZE - 1 of one head, [SIZE, D]; with MASKED, 0 outside `inside`. Offsets may pass 2^31."""
    s, d = tl.arange(0, SIZE), tl.arange(0, HEAD_DIM)
    at_SD = base + start.to(tl.int64) * stride + (s[:, None] * stride + d[None])
    return tl.load(at_SD, mask=inside_S[:, None], other=0.0) if MASKED else tl.load(at_SD)


@triton.jit
def load_ranges(lo: tl.tensor, hi: tl.tensor, row_R: tl.tensor, num_rows: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Ranges of rows; a row past the last sees nothing."""
    lo_R = tl.load(lo + row_R, mask=row_R < num_rows, other=0)
    return lo_R, tl.load(hi + row_R, mask=row_R < num_rows, other=0)


@triton.jit
def edges(lo_R: tl.tensor, hi_R: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The union of ranges lies within first .. last - 1; NEVER and 0 when all are empty."""
    first = tl.min(tl.where(lo_R < hi_R, lo_R, NEVER), axis=0)
    return first, tl.max(tl.where(lo_R < hi_R, hi_R, 0), axis=0)


@triton.jit
def tile_counts(first: tl.tensor, last: tl.tensor, inner_first: tl.tensor, inner_last: tl.tensor,
                SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Cut first .. last - 1 into tiles: masked ones, full ones within inner_first .. inner_last - 1, masked ones."""
    total = tl.cdiv(tl.maximum(last - first, 0), SIZE)
    head = tl.cdiv(tl.maximum(inner_first - first, 0), SIZE)
    full = tl.maximum(inner_last - first, 0) // SIZE - head
    has_full = (inner_first < inner_last) & (full > 0)
    head, full = tl.where(has_full, head, total), tl.where(has_full, full, 0)
    return head, full, total - head - full


@triton.jit
def key_tiles(lo_R: tl.tensor, hi_R: tl.tensor, active_R: tl.tensor,
              SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Keys first .. last - 1 of a block of rows, and its tiles as in `tile_counts`.

    A row that is not active may sit in a full tile: its weights are dropped at the end.
    """
    first, last = edges(lo_R, hi_R)
    sees_R = lo_R < hi_R
    inner_first = tl.max(tl.where(active_R, tl.where(sees_R, lo_R, NEVER), 0), axis=0)
    inner_last = tl.minimum(tl.min(tl.where(sees_R, hi_R, NEVER), axis=0), last)
    head, full, tail = tile_counts(first, last, inner_first, inner_last, SIZE)
    return first, last, head, full, tail


@triton.jit
def score_tile(q_RD: tl.tensor, source: tl.tuple, kv_head: tl.tensor, start: tl.tensor, lo_R: tl.tensor,
               hi_R: tl.tensor, last: tl.tensor, MASKED: tl.constexpr, KEYS: tl.constexpr,
               HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """q k^T of one tile, -inf where a row does not see a key, and the tile's keys and values, 0 from `last` on."""
    key_S = start + tl.arange(0, KEYS)
    inside_S = key_S < last
    k_SD = load_tile(source.k + kv_head * source.k_head, start, source.k_row, inside_S, MASKED, KEYS, HEAD_DIM)
    v_SD = load_tile(source.v + kv_head * source.v_head, start, source.v_row, inside_S, MASKED, KEYS, HEAD_DIM)
    scores_RS = tl.dot(q_RD, tl.trans(k_SD), input_precision="ieee")
    if MASKED:
        visible_RS = (lo_R[:, None] <= key_S[None]) & (key_S[None] < hi_R[:, None])
        scores_RS = tl.where(visible_RS, scores_RS, -float("inf"))
    return scores_RS, k_SD, v_SD


@triton.jit
def _attend_tile(out_RD: tl.tensor, top_R: tl.tensor, total_R: tl.tensor, q_RD: tl.tensor, source: tl.tuple,
                 kv_head: tl.tensor, start: tl.tensor, lo_R: tl.tensor, hi_R: tl.tensor, scale_log2: tl.tensor,
                 last: tl.tensor, MASKED: tl.constexpr, KEYS: tl.constexpr,
                 HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One turn of the online softmax."""
    scores_RS, _k_SD, v_SD = score_tile(q_RD, source, kv_head, start, lo_R, hi_R, last, MASKED, KEYS, HEAD_DIM)
    new_top_R = tl.maximum(top_R, tl.max(scores_RS, axis=1) * scale_log2)
    weights_RS = tl.exp2(scores_RS * scale_log2 - new_top_R[:, None])
    shrink_R = tl.exp2(top_R - new_top_R)
    out_RD = tl.dot(weights_RS.to(v_SD.dtype), v_SD, out_RD * shrink_R[:, None], input_precision="ieee")
    return out_RD, new_top_R, total_R * shrink_R + tl.sum(weights_RS, axis=1)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=RANGES)
def _forward_kernel(
    out_RND: tl.tensor,
    lse_NR: tl.tensor,
    q_RND: tl.tensor,
    context: tl.tuple,
    context_lo: tl.tensor,
    context_hi: tl.tensor,
    chain: tl.tuple,
    chain_lo: tl.tensor,
    chain_hi: tl.tensor,
    num_rows: tl.int32,
    q_row: tl.tensor,
    q_head: tl.tensor,
    scale_log2: float,
    HAS_CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    kv_head = head // GROUP
    # Programs start in order: backwards, as late rows see most keys.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row_R = first_row + tl.arange(0, ROWS)
    lo_R, hi_R = load_ranges(context_lo, context_hi, row_R, num_rows)
    active_R = lo_R < hi_R
    if HAS_CHAIN:
        chain_lo_R, chain_hi_R = load_ranges(chain_lo, chain_hi, row_R, num_rows)
        active_R = active_R | (chain_lo_R < chain_hi_R)
    q_RD = load_tile(q_RND + head * q_head, first_row, q_row, active_R, True, ROWS, HEAD_DIM)

    out_RD = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    top_R = tl.full([ROWS], _LOWEST, tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    first, last, before, full, after = key_tiles(lo_R, hi_R, active_R, KEYS)
    for i in tl.range(before + after, num_stages=1):
        start = first + (i + tl.where(i < before, 0, full)) * KEYS
        out_RD, top_R, total_R = _attend_tile(
            out_RD, top_R, total_R, q_RD, context, kv_head, start, lo_R, hi_R, scale_log2, last, True, KEYS, HEAD_DIM
        )
    for i in range(full):
        start = first + (before + i) * KEYS
        out_RD, top_R, total_R = _attend_tile(
            out_RD, top_R, total_R, q_RD, context, kv_head, start, lo_R, hi_R, scale_log2, last, False, KEYS, HEAD_DIM
        )
    if HAS_CHAIN:
        first, last = edges(chain_lo_R, chain_hi_R)
        for i in tl.range(tl.cdiv(tl.maximum(last - first, 0), KEYS), num_stages=1):
            start = first + i * KEYS
            out_RD, top_R, total_R = _attend_tile(
                out_RD, top_R, total_R, q_RD, chain, kv_head, start, chain_lo_R, chain_hi_R, scale_log2,
                last, True, KEYS, HEAD_DIM,
            )  # fmt: skip

    total_R = tl.where(active_R, total_R, 1.0)
    out_RD = tl.where(active_R[:, None], out_RD / total_R[:, None], 0.0)
    lse_R = tl.where(active_R, top_R + tl.log2(total_R), float("inf"))
    tl.store(lse_NR + head * num_rows + row_R, lse_R, mask=row_R < num_rows)
    store_tile(out_RND, first_row, head, tl.num_programs(0), out_RD, row_R < num_rows, ROWS, HEAD_DIM)


@triton.jit
def store_tile(base: tl.tensor, start: tl.tensor, head: tl.tensor, heads: tl.tensor, tile_SD: tl.tensor,
               inside_S: tl.tensor, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> None:  # fmt: skip
    """Store rows start .. start + SIZE - 1 of one head of a dense tensor [., heads, D]."""
    s, d = tl.arange(0, SIZE), tl.arange(0, HEAD_DIM)
    at_SD = base + (start.to(tl.int64) * heads + head) * HEAD_DIM + (s[:, None] * heads * HEAD_DIM + d[None])
    tl.store(at_SD, tile_SD.to(base.dtype.element_ty), mask=inside_S[:, None])
