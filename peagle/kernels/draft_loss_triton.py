"""Triton form of the draft loss: one program per row, which walks the vocabulary in blocks.

Each pass over the row is one loop. The first finds log-sum-exp, argmax and sum p z; with total variation a second one
finds its two sums; the last writes the gradient over the logits. Maxima and sums of the first pass are kept per lane
and combined once at its end, so that no block waits for a reduction across the program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draft_loss import HardLabels, Labels, LossMix, RowResult, RowSummary

_MAX_BLOCK = 4096
_FLOOR = tl.constexpr(-1e30)  # below any logit, yet finite: a difference to it is never NaN


@triton.jit
def _read(row: tl.tensor, at_B: tl.tensor, VOCAB: tl.constexpr, outside: tl.constexpr) -> tl.tensor:
    """A block of a row of logits in float32, `outside` past its end. A NaN stays a NaN."""
    inside_B = at_B < VOCAB
    return tl.where(inside_B, tl.load(row + at_B, mask=inside_B, other=0.0).to(tl.float32), outside)


@triton.jit
def _probability(
    label_row: tl.tensor,
    label_lse: tl.tensor,
    token: tl.tensor,
    at_B: tl.tensor,
    VOCAB: tl.constexpr,
    SOFT: tl.constexpr,
) -> tl.tensor:
    """p at the columns `at_B`; 0 outside of the vocabulary."""
    p_B = tl.exp(_read(label_row, at_B, VOCAB, -float("inf")) - label_lse) if SOFT else (at_B == token).to(tl.float32)
    return p_B


@triton.jit
def _advance(
    z_B: tl.tensor,
    at_B: tl.tensor,
    highest_B: tl.tensor,
    total_B: tl.tensor,
    column_B: tl.tensor,
    VOCAB: tl.constexpr,
) -> tuple:
    """Take a block into each lane's maximum, sum relative to it, and column of it."""
    # One of exp(old - new) and exp(z - new) is 1: a single exponential serves both cases.
    step_B = tl.exp(-tl.abs(z_B - highest_B))
    higher_B = z_B > highest_B
    total_B = tl.where(higher_B, total_B * step_B + 1.0, total_B + tl.where(at_B < VOCAB, step_B, 0.0))
    return tl.where(higher_B, z_B, highest_B), total_B, tl.where(higher_B, at_B, column_B)


@triton.jit
def _combine(highest_B: tl.tensor, total_B: tl.tensor, column_B: tl.tensor) -> tuple:
    """Log-sum-exp of the row and the lowest column of its maximum (int64), from the lanes of `_advance`."""
    highest = tl.max(highest_B, axis=0)
    lse = highest + tl.log(tl.sum(total_B * tl.exp(highest_B - highest), axis=0))
    return lse, tl.min(tl.where(highest_B == highest, column_B, 2147483647), axis=0).to(tl.int64)


@triton.jit
def _scan(
    z_row: tl.tensor,
    label_row: tl.tensor,
    label_lse: tl.tensor,
    token: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
) -> tuple:
    """Log-sum-exp and argmax of the row, and sum p z."""
    lane_B = tl.arange(0, BLOCK)
    highest_B, total_B, column_B = tl.full([BLOCK], _FLOOR, tl.float32), tl.zeros([BLOCK], tl.float32), lane_B
    product_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at_B = start + lane_B
        z_B = _read(z_row, at_B, VOCAB, _FLOOR)
        product_B += _probability(label_row, label_lse, token, at_B, VOCAB, SOFT) * z_B
        highest_B, total_B, column_B = _advance(z_B, at_B, highest_B, total_B, column_B, VOCAB)
    lse, top = _combine(highest_B, total_B, column_B)
    return lse, top, tl.sum(product_B, axis=0)


@triton.jit
def _variation(
    z_row: tl.tensor,
    lse: tl.tensor,
    label_row: tl.tensor,
    label_lse: tl.tensor,
    token: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
) -> tuple:
    """sum |p - q| and sum h q."""
    distance_B, below_B = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        q_B = tl.exp(_read(z_row, at_B, VOCAB, -float("inf")) - lse)
        gap_B = q_B - _probability(label_row, label_lse, token, at_B, VOCAB, SOFT)
        distance_B += tl.abs(gap_B)
        below_B += _below(gap_B) * q_B
    return tl.sum(distance_B, axis=0), tl.sum(below_B, axis=0)


@triton.jit
def _below(gap_B: tl.tensor) -> tl.tensor:
    """h, from q - p."""
    return tl.where(gap_B < 0.0, 1.0, tl.where(gap_B > 0.0, 0.0, 0.5))


@triton.jit
def _write_gradient(
    z_row: tl.tensor,
    lse: tl.tensor,
    below: tl.tensor,
    scale: tl.tensor,
    tv_weight: tl.tensor,
    label_row: tl.tensor,
    label_lse: tl.tensor,
    token: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
    TV: tl.constexpr,
) -> None:
    for start in range(0, VOCAB, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        q_B = tl.exp(_read(z_row, at_B, VOCAB, -float("inf")) - lse)
        grad_B = q_B - _probability(label_row, label_lse, token, at_B, VOCAB, SOFT)
        if TV:
            grad_B = (1.0 - tv_weight) * grad_B + tv_weight * q_B * (below - _below(grad_B))
        grad_B = tl.where(token >= 0, grad_B * scale, 0.0)
        tl.store(z_row + at_B, grad_B.to(z_row.dtype.element_ty), mask=at_B < VOCAB)


@triton.jit
def _clear(z_row: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> None:
    for start in range(0, VOCAB, BLOCK):
        at_B = start + tl.arange(0, BLOCK)
        tl.store(z_row + at_B, tl.zeros([BLOCK], z_row.dtype.element_ty), mask=at_B < VOCAB)


@triton.jit
def _draft_loss_row(
    loss_C: tl.tensor,
    top_C: tl.tensor,
    logits_CU: tl.tensor,
    scale_C: tl.tensor,
    token_C: tl.tensor,  # of hard labels the token, of soft ones the row of label_TU
    label_TU: tl.tensor,
    label_lse_T: tl.tensor,
    logits_stride: tl.int64,
    label_stride: tl.int64,
    tv_weight: tl.float32,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT: tl.constexpr,
    TV: tl.constexpr,
    GRAD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    z_row = logits_CU + row * logits_stride
    scale = tl.load(scale_C + row).to(tl.float32)
    if scale == 0.0:
        tl.store(loss_C + row, 0.0)
        tl.store(top_C + row, tl.full([], -1, tl.int64))
        if GRAD:
            _clear(z_row, VOCAB, BLOCK)
    else:
        token = tl.load(token_C + row)
        label_row, label_lse = label_TU, 0.0
        if SOFT:
            label_row = label_TU + token * label_stride
            label_lse = tl.load(label_lse_T + token)
        lse, top, product = _scan(z_row, label_row, label_lse, token, VOCAB, BLOCK, SOFT)
        loss, below = lse - product, 0.0
        if TV:
            distance, below = _variation(z_row, lse, label_row, label_lse, token, VOCAB, BLOCK, SOFT)
            loss = (1.0 - tv_weight) * loss + tv_weight * 0.5 * distance
        tl.store(loss_C + row, tl.where(token >= 0, loss, 0.0))
        tl.store(top_C + row, top)
        if GRAD:
            _write_gradient(z_row, lse, below, scale, tv_weight, label_row, label_lse, token, VOCAB, BLOCK, SOFT, TV)


@triton.jit
def _summarise_row(
    lse_T: tl.tensor,
    top_T: tl.tensor,
    entropy_T: tl.tensor,
    logits_TU: tl.tensor,
    logits_stride: tl.int64,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    z_row = logits_TU + row * logits_stride
    lane_B = tl.arange(0, BLOCK)
    highest_B, total_B, column_B = tl.full([BLOCK], _FLOOR, tl.float32), tl.zeros([BLOCK], tl.float32), lane_B
    moment_B = tl.zeros([BLOCK], tl.float32)  # sum of (z - highest) exp(z - highest)
    for start in range(0, VOCAB, BLOCK):
        at_B = start + lane_B
        z_B = _read(z_row, at_B, VOCAB, _FLOOR)
        gap_B = z_B - highest_B
        step_B = tl.exp(-tl.abs(gap_B))
        moment_B = tl.where(gap_B > 0.0, (moment_B - gap_B * total_B) * step_B, moment_B + gap_B * step_B)
        highest_B, total_B, column_B = _advance(z_B, at_B, highest_B, total_B, column_B, VOCAB)
    lse, top = _combine(highest_B, total_B, column_B)
    # Sums relative to each lane's maximum become sum p (z - lse), minus the entropy. A lane without a value adds 0.
    mean_B = tl.exp(highest_B - lse) * (moment_B + (highest_B - lse) * total_B)
    tl.store(lse_T + row, lse)
    tl.store(top_T + row, top)
    tl.store(entropy_T + row, -tl.sum(mean_B, axis=0))


def draft_loss_triton(
    logits_CU: Tensor, scale_C: Tensor, labels: Labels, mix: LossMix, *, want_grad: bool = True
) -> RowResult:
    """The Triton form of `draft_loss`; arithmetic in float32. Rows of both kinds of logits are contiguous."""
    (rows, vocab), device = logits_CU.shape, logits_CU.device
    result = RowResult(
        torch.empty(rows, dtype=torch.float32, device=device), torch.empty(rows, dtype=torch.int64, device=device)
    )
    if isinstance(labels, HardLabels):
        token_C, label_TU, label_lse_T = labels.token_C, logits_CU, scale_C  # the last two are not read
    else:
        token_C, label_TU, label_lse_T = labels.index_C, labels.logits_TU, labels.lse_T
    if rows == 0:
        return result
    block, warps = _launch_sizes(vocab)
    with torch.cuda.device_of(logits_CU):
        _draft_loss_row[(rows,)](
            result.loss_C, result.top_C, logits_CU, scale_C, token_C, label_TU, label_lse_T, logits_CU.stride(0),
            label_TU.stride(0), mix.tv_weight,
            VOCAB=vocab, BLOCK=block, SOFT=not isinstance(labels, HardLabels), TV=mix.tv_weight != 0, GRAD=want_grad,
            num_warps=warps,
        )  # fmt: skip
    return result


def row_summary_triton(logits_TU: Tensor) -> RowSummary:
    """The Triton form of `row_summary`."""
    (rows, vocab), device = logits_TU.shape, logits_TU.device
    lse_T, entropy_T = torch.empty(2, rows, dtype=torch.float32, device=device)
    top_T = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return RowSummary(lse_T, top_T, entropy_T)
    block, warps = _launch_sizes(vocab)
    with torch.cuda.device_of(logits_TU):
        _summarise_row[(rows,)](
            lse_T, top_T, entropy_T, logits_TU, logits_TU.stride(0), VOCAB=vocab, BLOCK=block, num_warps=warps
        )
    return RowSummary(lse_T, top_T, entropy_T)


def _launch_sizes(vocab: int) -> tuple[int, int]:
    """Columns per turn of a loop, and warps."""
    block = max(128, min(triton.next_power_of_2(vocab), _MAX_BLOCK))
    return block, max(1, min(block // 256, 16))
