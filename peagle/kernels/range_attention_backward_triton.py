"""Backward pass of range attention in Triton: dQ a block of rows at a time, dK and dV a block of keys at a time.

dQ: a program per (block of rows, query head) walks the keys as the forward pass does. dK/dV of one source: a program
per (block of keys, kv head) walks the rows that see any of them, for every query head of the group; a small kernel
finds those rows first, so that nothing waits for the host. No sum is shared between programs: results are reproducible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.range_attention_triton import (
    LOG2_E,
    NEVER,
    RANGES,
    LaunchSizes,
    SourceTensors,
    dense,
    edges,
    key_tiles,
    launch_sizes,
    load_ranges,
    load_tile,
    pack_source,
    score_tile,
    store_tile,
    tile_counts,
)

_SCANNED_ROWS = 4096


def backward(
    dout_RND: Tensor, out_RND: Tensor, lse_NR: Tensor, q_RND: Tensor, context: SourceTensors, chain: SourceTensors
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, context keys and values, chain keys and values, all dense."""
    dq_RND, stats_NR2 = backward_q(dout_RND, out_RND, lse_NR, q_RND, context, chain)
    dk_PMD, dv_PMD = backward_kv(dout_RND, stats_NR2, q_RND, context)
    dk_CMD, dv_CMD = backward_kv(dout_RND, stats_NR2, q_RND, chain)
    return dq_RND, dk_PMD, dv_PMD, dk_CMD, dv_CMD


def backward_q(
    dout_RND: Tensor,
    out_RND: Tensor,
    lse_NR: Tensor,
    q_RND: Tensor,
    context: SourceTensors,
    chain: SourceTensors,
    sizes: LaunchSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of q [R, N, D], and per row [N, R, 2] what dK/dV needs: its log2-sum-exp and out . dout."""
    rows, heads, head_dim = q_RND.shape
    sizes = sizes or launch_sizes("backward_q", head_dim, q_RND.dtype)
    q_RND, dout_RND = dense(q_RND), dense(dout_RND)
    dq_RND = torch.empty((rows, heads, head_dim), dtype=q_RND.dtype, device=q_RND.device)
    stats_NR2 = torch.empty((heads, rows, 2), dtype=torch.float32, device=q_RND.device)
    with torch.cuda.device_of(q_RND):
        _backward_q_kernel[(heads, triton.cdiv(rows, sizes.rows))](
            dq_RND, stats_NR2, dout_RND, out_RND.contiguous(), lse_NR, q_RND, pack_source(context), *context[2:],
            pack_source(chain), *chain[2:], rows, q_RND.stride(0), q_RND.stride(1), dout_RND.stride(0),
            dout_RND.stride(1), head_dim**-0.5, head_dim**-0.5 * LOG2_E,
            HAS_CHAIN=chain[0].shape[0] > 0, GROUP=heads // context[0].shape[1], HEAD_DIM=head_dim, ROWS=sizes.rows,
            KEYS=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return dq_RND, stats_NR2


def backward_kv(
    dout_RND: Tensor,
    stats_NR2: Tensor,
    q_RND: Tensor,
    source: SourceTensors,
    sizes: LaunchSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of one source's keys and values [S, M, D]."""
    (rows, heads, head_dim), (num_keys, kv_heads, _) = q_RND.shape, source[0].shape
    sizes = sizes or launch_sizes("backward_kv", head_dim, q_RND.dtype)
    q_RND, dout_RND = dense(q_RND), dense(dout_RND)
    dk_SMD, dv_SMD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in source[:2])
    blocks = triton.cdiv(num_keys, sizes.keys)
    spans_B4 = torch.empty((blocks, 4), dtype=torch.int32, device=q_RND.device)
    with torch.cuda.device_of(q_RND):
        _row_spans_kernel[(blocks,)](
            spans_B4, source[2], source[3], rows, num_keys,
            ROWS=sizes.rows, KEYS=sizes.keys, SCANNED=_SCANNED_ROWS, num_warps=8,
        )  # fmt: skip
        _backward_kv_kernel[(kv_heads, blocks)](
            dk_SMD, dv_SMD, dout_RND, stats_NR2, q_RND, pack_source(source), *source[2:], spans_B4, rows, num_keys,
            q_RND.stride(0), q_RND.stride(1), dout_RND.stride(0), dout_RND.stride(1), head_dim**-0.5,
            head_dim**-0.5 * LOG2_E, GROUP=heads // kv_heads, HEAD_DIM=head_dim, ROWS=sizes.rows, KEYS=sizes.keys,
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return dk_SMD, dv_SMD


@triton.jit
def _dq_tile(dq_RD: tl.tensor, q_RD: tl.tensor, dout_RD: tl.tensor, lse_R: tl.tensor, delta_R: tl.tensor,
             source: tl.tuple, kv_head: tl.tensor, start: tl.tensor, lo_R: tl.tensor, hi_R: tl.tensor,
             scale_log2: tl.tensor, last: tl.tensor, MASKED: tl.constexpr, KEYS: tl.constexpr,
             HEAD_DIM: tl.constexpr) -> tl.tensor:  # fmt: skip
    scores_RS, k_SD, v_SD = score_tile(q_RD, source, kv_head, start, lo_R, hi_R, last, MASKED, KEYS, HEAD_DIM)
    probs_RS = tl.exp2(scores_RS * scale_log2 - lse_R[:, None])
    dprobs_RS = tl.dot(dout_RD, tl.trans(v_SD), input_precision="ieee")
    dscores_RS = probs_RS * (dprobs_RS - delta_R[:, None])
    return tl.dot(dscores_RS.to(k_SD.dtype), k_SD, dq_RD, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=RANGES)
def _backward_q_kernel(
    dq_RND: tl.tensor,
    stats_NR2: tl.tensor,
    dout_RND: tl.tensor,
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
    dout_row: tl.tensor,
    dout_head: tl.tensor,
    scale: float,
    scale_log2: float,
    HAS_CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    kv_head = head // GROUP
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row_R = first_row + tl.arange(0, ROWS)
    lo_R, hi_R = load_ranges(context_lo, context_hi, row_R, num_rows)
    active_R = lo_R < hi_R
    if HAS_CHAIN:
        chain_lo_R, chain_hi_R = load_ranges(chain_lo, chain_hi, row_R, num_rows)
        active_R = active_R | (chain_lo_R < chain_hi_R)
    q_RD = load_tile(q_RND + head * q_head, first_row, q_row, active_R, True, ROWS, HEAD_DIM)
    dout_RD = load_tile(dout_RND + head * dout_head, first_row, dout_row, active_R, True, ROWS, HEAD_DIM)
    out_RD = load_tile(out_RND + head * HEAD_DIM, first_row, heads * HEAD_DIM, active_R, True, ROWS, HEAD_DIM)
    delta_R = tl.sum(out_RD.to(tl.float32) * dout_RD.to(tl.float32), axis=1)
    at_R = head * num_rows + row_R
    lse_R = tl.load(lse_NR + at_R, mask=row_R < num_rows, other=float("inf"))
    tl.store(stats_NR2 + at_R * 2, lse_R, mask=row_R < num_rows)
    tl.store(stats_NR2 + at_R * 2 + 1, delta_R, mask=row_R < num_rows)

    dq_RD = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    first, last, before, full, after = key_tiles(lo_R, hi_R, active_R, KEYS)
    for i in tl.range(before + after, num_stages=1):
        start = first + (i + tl.where(i < before, 0, full)) * KEYS
        dq_RD = _dq_tile(
            dq_RD, q_RD, dout_RD, lse_R, delta_R, context, kv_head, start, lo_R, hi_R, scale_log2,
            last, True, KEYS, HEAD_DIM,
        )  # fmt: skip
    for i in range(full):
        start = first + (before + i) * KEYS
        dq_RD = _dq_tile(
            dq_RD, q_RD, dout_RD, lse_R, delta_R, context, kv_head, start, lo_R, hi_R, scale_log2,
            last, False, KEYS, HEAD_DIM,
        )  # fmt: skip
    if HAS_CHAIN:
        first, last = edges(chain_lo_R, chain_hi_R)
        for i in tl.range(tl.cdiv(tl.maximum(last - first, 0), KEYS), num_stages=1):
            start = first + i * KEYS
            dq_RD = _dq_tile(
                dq_RD, q_RD, dout_RD, lse_R, delta_R, chain, kv_head, start, chain_lo_R, chain_hi_R, scale_log2,
                last, True, KEYS, HEAD_DIM,
            )  # fmt: skip
    store_tile(dq_RND, first_row, head, heads, dq_RD * scale, row_R < num_rows, ROWS, HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_keys"], do_not_specialize_on_alignment=RANGES)
def _row_spans_kernel(
    spans_B4: tl.tensor,
    source_lo: tl.tensor,
    source_hi: tl.tensor,
    num_rows: tl.int32,
    num_keys: tl.int32,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SCANNED: tl.constexpr,
) -> None:
    """Per block of keys: the first row that sees any of it, and its tiles of rows as in `tile_counts`.

    Full tiles lie between the first row that sees the whole block and the next one that does not.
    """
    block = tl.program_id(0)
    key, key_end = block * KEYS, tl.minimum((block + 1) * KEYS, num_keys)
    r = tl.arange(0, SCANNED)
    first_R, whole_R, broken_R = r * 0 + NEVER, r * 0 + NEVER, r * 0 + NEVER
    last_R = r * 0
    for start in range(0, num_rows, SCANNED):
        row_R = start + r
        lo_R, hi_R = load_ranges(source_lo, source_hi, row_R, num_rows)
        sees = tl.maximum(lo_R, key) < tl.minimum(hi_R, key_end)
        first_R = tl.minimum(first_R, tl.where(sees, row_R, NEVER))
        last_R = tl.maximum(last_R, tl.where(sees, row_R + 1, 0))
        whole_R = tl.minimum(whole_R, tl.where((lo_R <= key) & (key_end <= hi_R), row_R, NEVER))
    first, last, whole = tl.min(first_R, axis=0), tl.max(last_R, axis=0), tl.min(whole_R, axis=0)
    for start in range(whole, last, SCANNED):
        row_R = start + r
        lo_R, hi_R = load_ranges(source_lo, source_hi, row_R, num_rows)
        broken_R = tl.minimum(broken_R, tl.where((lo_R <= key) & (key_end <= hi_R), NEVER, row_R))
    broken = tl.minimum(tl.min(broken_R, axis=0), last)
    before, full, after = tile_counts(first, last, whole, broken, ROWS)
    spans = spans_B4 + block * 4
    tl.store(spans, first)
    tl.store(spans + 1, before)
    tl.store(spans + 2, full)
    tl.store(spans + 3, after)


@triton.jit
def _dkv_tile(dk_SD: tl.tensor, dv_SD: tl.tensor, k_SD: tl.tensor, v_SD: tl.tensor, q: tl.tensor, q_row: tl.tensor,
              dout: tl.tensor, dout_row: tl.tensor, stats_R2: tl.tensor, lo: tl.tensor, hi: tl.tensor, key: tl.tensor,
              start: tl.tensor, num_rows: tl.tensor, scale_log2: tl.tensor, MASKED: tl.constexpr,
              ROWS: tl.constexpr, KEYS: tl.constexpr,
              HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add one tile of rows of one query head. Everything is transposed, [keys, rows]."""
    row_R = start + tl.arange(0, ROWS)
    sees_R = row_R
    if MASKED:
        lo_R, hi_R = load_ranges(lo, hi, row_R, num_rows)
        key_S = key + tl.arange(0, KEYS)
        visible_SR = (lo_R[None] <= key_S[:, None]) & (key_S[:, None] < hi_R[None])
        sees_R = tl.maximum(lo_R, key) < tl.minimum(hi_R, key + KEYS)
    lse_R, delta_R = tl.split(load_tile(stats_R2, start, 2, sees_R, MASKED, ROWS, 2))
    q_RD = load_tile(q, start, q_row, sees_R, MASKED, ROWS, HEAD_DIM)
    dout_RD = load_tile(dout, start, dout_row, sees_R, MASKED, ROWS, HEAD_DIM)
    scores_SR = tl.dot(k_SD, tl.trans(q_RD), input_precision="ieee")
    probs_SR = tl.exp2(scores_SR * scale_log2 - lse_R[None])
    if MASKED:
        probs_SR = tl.where(visible_SR, probs_SR, 0.0)
    dv_SD = tl.dot(probs_SR.to(dout_RD.dtype), dout_RD, dv_SD, input_precision="ieee")
    dprobs_SR = tl.dot(v_SD, tl.trans(dout_RD), input_precision="ieee")
    dscores_SR = probs_SR * (dprobs_SR - delta_R[None])
    if MASKED:  # an unseen value may be NaN, which a zero weight does not remove
        dscores_SR = tl.where(visible_SR, dscores_SR, 0.0)
    dk_SD = tl.dot(dscores_SR.to(q_RD.dtype), q_RD, dk_SD, input_precision="ieee")
    return dk_SD, dv_SD


@triton.jit(do_not_specialize=["num_rows", "num_keys"], do_not_specialize_on_alignment=RANGES)
def _backward_kv_kernel(
    dk_SMD: tl.tensor,
    dv_SMD: tl.tensor,
    dout_RND: tl.tensor,
    stats_NR2: tl.tensor,
    q_RND: tl.tensor,
    source: tl.tuple,
    source_lo: tl.tensor,
    source_hi: tl.tensor,
    spans_B4: tl.tensor,
    num_rows: tl.int32,
    num_keys: tl.int32,
    q_row: tl.tensor,
    q_head: tl.tensor,
    dout_row: tl.tensor,
    dout_head: tl.tensor,
    scale: float,
    scale_log2: float,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    kv_head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = block * KEYS
    inside_S = key + tl.arange(0, KEYS) < num_keys
    k_SD = load_tile(source.k + kv_head * source.k_head, key, source.k_row, inside_S, True, KEYS, HEAD_DIM)
    v_SD = load_tile(source.v + kv_head * source.v_head, key, source.v_row, inside_S, True, KEYS, HEAD_DIM)
    first = tl.load(spans_B4 + block * 4)
    before = tl.load(spans_B4 + block * 4 + 1)
    full = tl.load(spans_B4 + block * 4 + 2)
    after = tl.load(spans_B4 + block * 4 + 3)

    dk_SD = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    dv_SD = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q, dout = q_RND + head * q_head, dout_RND + head * dout_head
        stats_R2 = stats_NR2 + head * num_rows * 2
        for i in tl.range(before + after, num_stages=1):
            start = first + (i + tl.where(i < before, 0, full)) * ROWS
            dk_SD, dv_SD = _dkv_tile(
                dk_SD, dv_SD, k_SD, v_SD, q, q_row, dout, dout_row, stats_R2, source_lo, source_hi,
                key, start, num_rows, scale_log2, True, ROWS, KEYS, HEAD_DIM,
            )  # fmt: skip
        for i in range(full):
            start = first + (before + i) * ROWS
            dk_SD, dv_SD = _dkv_tile(
                dk_SD, dv_SD, k_SD, v_SD, q, q_row, dout, dout_row, stats_R2, source_lo, source_hi,
                key, start, num_rows, scale_log2, False, ROWS, KEYS, HEAD_DIM,
            )  # fmt: skip
    store_tile(dk_SMD, key, kv_head, tl.num_programs(0), dk_SD * scale, inside_S, KEYS, HEAD_DIM)
    store_tile(dv_SMD, key, kv_head, tl.num_programs(0), dv_SD, inside_S, KEYS, HEAD_DIM)
