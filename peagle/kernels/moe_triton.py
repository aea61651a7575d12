"""Triton form of the mixture of experts. See `moe.py` for the steps.

A pair is a row and one of its experts, numbered row * TOP_K + place. The list of an expert has room for every row, so
that nothing needs to be known to lay the lists out; a program of the grouped matmul finds its expert and its tile of
the list from how long the lists are. There are as many programs as tiles there could be: those left over do nothing.

A program owns a run of columns and all of its inputs, so weights are read once for each tile: decode tiles are high
enough that an expert mostly has one, and tiles of the same expert run side by side and meet in the cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe import ExpertWeights
from peagle.kernels.packed_experts import GROUP, PackedMatrix

_PROGRAMS = 264  # that fill a GPU: two on each of an H200's 132 multiprocessors
_ROUTED = 4096  # logits of one turn of the router
_COMBINED = 1024  # columns of a program that adds up


class _Tile(NamedTuple):
    rows: int
    columns: int  # of weights
    step: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["rows"])
def _route(
    pairs_ER: tl.tensor,
    counts_E: tl.tensor,
    shares_P: tl.tensor,
    logits_RE: tl.tensor,
    rows: tl.int32,
    row_stride: tl.int64,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """List one expert's pairs in order of rows, and write its share of each. Every program ranks all rows for itself:
    that is less work than waiting for another launch."""
    expert, e = tl.program_id(0), tl.arange(0, WIDTH)
    own_1E = (e == expert)[None]
    count = 0
    for start in range(0, rows, ROWS):
        row_R = start + tl.arange(0, ROWS)
        inside_RE = (row_R < rows)[:, None] & (e < EXPERTS)[None]
        at_RE = row_R.to(tl.int64)[:, None] * row_stride + e[None]
        logits = tl.load(logits_RE + at_RE, mask=inside_RE, other=-float("inf")).to(tl.float32)
        left_RE, rank_RE = logits, tl.full([ROWS, WIDTH], TOP_K, tl.int32)
        for place in tl.static_range(TOP_K):
            best_RE = e[None] == tl.argmax(left_RE, axis=1)[:, None]
            rank_RE = tl.where(best_RE, place, rank_RE)
            left_RE = tl.where(best_RE, -float("inf"), left_RE)
        weights_RE = tl.where(rank_RE < TOP_K, tl.exp(logits - tl.max(logits, axis=1)[:, None]), 0.0)
        share_R = tl.sum(tl.where(own_1E, weights_RE, 0.0), axis=1) / tl.sum(weights_RE, axis=1)
        rank_R = tl.sum(tl.where(own_1E, rank_RE, 0), axis=1)
        chosen_R = (rank_R < TOP_K) & (row_R < rows)
        pair_R = row_R * TOP_K + rank_R
        place_R = count + tl.cumsum(chosen_R.to(tl.int32), axis=0) - 1
        tl.store(pairs_ER + expert.to(tl.int64) * rows + place_R, pair_R, mask=chosen_R)
        tl.store(shares_P + pair_R, share_R, mask=chosen_R)
        count += tl.sum(chosen_R.to(tl.int32), axis=0)
    tl.store(counts_E + expert, count)


@triton.jit
def _find_tile(counts_E: tl.tensor, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr) -> tl.tuple:
    """The expert of this program's tile, EXPERTS for a program too many, with its list's places and their number."""
    tile, e = tl.program_id(0), tl.arange(0, WIDTH)
    count_E = tl.load(counts_E + e, mask=e < EXPERTS, other=0)
    end_E = tl.cumsum((count_E + ROWS - 1) // ROWS, axis=0)
    expert = tl.sum((end_E <= tile).to(tl.int32), axis=0)
    before = tl.max(tl.where(e < expert, end_E, 0), axis=0)
    count = tl.sum(tl.where(e == expert, count_E, 0), axis=0)
    return expert, (tile - before) * ROWS + tl.arange(0, ROWS), count


@triton.jit
def _store_tile(
    out_PO: tl.tensor,
    acc_RO: tl.tensor,
    bias_O: tl.tensor,
    pair_R: tl.tensor,
    live_R: tl.tensor,
    alpha: tl.float32,
    limit: tl.float32,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """Add the bias, apply the gate if there is one, and write the rows of pairs."""
    column_O = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_O = (column_O < OUT) | (OUT % COLUMNS == 0)
    acc_RO += tl.load(bias_O + column_O, mask=inside_O, other=0.0).to(tl.float32)[None]
    wide_pair_R1 = pair_R.to(tl.int64)[:, None]
    if GATED:
        gate_RF, up_RF = tl.split(tl.reshape(acc_RO, (ROWS, COLUMNS // 2, 2)))
        gate_RF = tl.minimum(gate_RF, limit)
        up_RF = tl.minimum(tl.maximum(up_RF, -limit), limit)
        gated_RF = (up_RF + 1.0) * gate_RF / (1.0 + tl.exp(-alpha * gate_RF))
        f = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        at_RF = wide_pair_R1 * (OUT // 2) + f[None]
        tl.store(out_PO + at_RF, gated_RF.to(out_PO.dtype.element_ty), mask=live_R[:, None] & (f < OUT // 2)[None])
    else:
        at_RO = wide_pair_R1 * OUT + column_O[None]
        tl.store(out_PO + at_RO, acc_RO.to(out_PO.dtype.element_ty), mask=live_R[:, None] & inside_O[None])


@triton.jit(do_not_specialize=["rows"])
def _expert_tile(
    out_PO: tl.tensor,
    x_XI: tl.tensor,
    weight_EIO: tl.tensor,
    bias_EO: tl.tensor,
    pairs_ER: tl.tensor,
    counts_E: tl.tensor,
    rows: tl.int32,
    x_row_stride: tl.int64,
    alpha: tl.float32,
    limit: tl.float32,
    IN: tl.constexpr,
    OUT: tl.constexpr,  # columns of weights: gate and up, if GATED
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,  # of x
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    WHOLE: tl.constexpr = IN % STEP == 0
    expert, place_R, count = _find_tile(counts_E, EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    live_R = place_R < count
    wide_expert = expert.to(tl.int64)
    # Places past the list read pair 0, which spares the loads of x a mask.
    pair_R = tl.load(pairs_ER + wide_expert * rows + place_R, mask=live_R, other=0)
    column_O, k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    inside_O = (column_O < OUT) | (OUT % COLUMNS == 0)
    x = x_XI + (pair_R // PAIRS_A_ROW).to(tl.int64)[:, None] * x_row_stride + k[None]
    weight = weight_EIO + wide_expert * (IN * OUT) + k[:, None] * OUT + column_O[None]
    acc_RO = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, IN, STEP, num_stages=STAGES):
        inside_K = (start + k < IN) | WHOLE
        x_RK = tl.load(x + start) if WHOLE else tl.load(x + start, mask=inside_K[None], other=0.0)
        if WHOLE and OUT % COLUMNS == 0:
            weight_KO = tl.load(weight + start * OUT)
        else:
            weight_KO = tl.load(weight + start * OUT, mask=inside_K[:, None] & inside_O[None], other=0.0)
        acc_RO = tl.dot(x_RK, weight_KO, acc_RO, input_precision="ieee")
    bias_O = bias_EO + wide_expert * OUT
    _store_tile(out_PO, acc_RO, bias_O, pair_R, live_R, alpha, limit, OUT, ROWS, COLUMNS, GATED)


@triton.jit
def _halves(pair_OW: tl.tensor) -> tl.tensor:
    """The bfloat16 numbers in both halves of 32-bit words, in turn: [O, 2 W]. Costs nothing: a tensor core's operand
    has them in such pairs."""
    low_OW = (pair_OW & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high_OW = (pair_OW >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low_OW, high_OW), (pair_OW.shape[0], 2 * pair_OW.shape[1]))


@triton.jit
def _block(word_OW: tl.tensor, scale_O: tl.tensor, J: tl.constexpr) -> tl.tensor:
    """Block J of a packed group, [O, 32] in bfloat16; see `packed_experts.py`. SIGNS and MAGNITUDES are the bits where
    a word of two bfloat16 numbers has them."""
    SIGNS: tl.constexpr = -0x7FFF8000  # 0x80008000 in 32 bits
    MAGNITUDES: tl.constexpr = 0x01C001C0
    if J == 0:
        pair_OW = word_OW & (SIGNS | MAGNITUDES)
    elif J == 1:
        pair_OW = (word_OW << 3) & (SIGNS | MAGNITUDES)
    elif J == 2:
        pair_OW = ((word_OW << 2) & SIGNS) | ((word_OW << 6) & MAGNITUDES)
    else:
        pair_OW = ((word_OW << 1) & SIGNS) | ((word_OW >> 3) & MAGNITUDES)
    multiplier_O = ((scale_O >> (8 * J)) & 0xFF) * 0x00800080  # the exponent in both halves
    return _halves(pair_OW) * _halves(tl.broadcast_to(multiplier_O[:, None], pair_OW.shape))


@triton.jit(do_not_specialize=["rows"])
def _packed_tile(
    out_PO: tl.tensor,
    x_XI: tl.tensor,
    words_EGOW: tl.tensor,
    scales_EGO: tl.tensor,
    bias_EO: tl.tensor,
    pairs_ER: tl.tensor,
    counts_E: tl.tensor,
    rows: tl.int32,
    x_row_stride: tl.int64,
    alpha: tl.float32,
    limit: tl.float32,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """`_expert_tile` with packed weights, made as W x^T: weights go from where they are unpacked, registers, straight
    into the tensor cores, which take only their left operand from there."""
    BLOCK: tl.constexpr = 32
    WORDS: tl.constexpr = 16
    GROUPS: tl.constexpr = (IN + 4 * BLOCK - 1) // (4 * BLOCK)
    expert, place_R, count = _find_tile(counts_E, EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    live_R = place_R < count
    wide_expert = expert.to(tl.int64)
    pair_R = tl.load(pairs_ER + wide_expert * rows + place_R, mask=live_R, other=0)
    # Columns past the end are read as the last one, which spares the loads of weights a mask.
    column_O = tl.minimum(tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), OUT - 1)
    words = words_EGOW + wide_expert * (GROUPS * OUT * WORDS) + column_O[:, None] * WORDS + tl.arange(0, WORDS)[None]
    scales = scales_EGO + wide_expert * (GROUPS * OUT) + column_O
    x = x_XI + (pair_R // PAIRS_A_ROW).to(tl.int64)[:, None] * x_row_stride + tl.arange(0, BLOCK)[None]
    acc_OR = tl.zeros([COLUMNS, ROWS], tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        word_OW = tl.load(words + group * (OUT * WORDS))
        scale_O = tl.load(scales + group * OUT)
        for j in tl.static_range(4):
            start = (4 * group + j) * BLOCK
            # Few weights a row: rows that no one asked for would be as much to read.
            x_RK = tl.load(x + start, mask=live_R[:, None] & (start < IN), other=0.0)
            weight_OK = _block(word_OW, scale_O, j).to(x_RK.dtype)
            acc_OR = tl.dot(weight_OK, tl.trans(x_RK), acc_OR, input_precision="ieee")
    bias_O = bias_EO + wide_expert * OUT
    _store_tile(out_PO, tl.trans(acc_OR), bias_O, pair_R, live_R, alpha, limit, OUT, ROWS, COLUMNS, GATED)


@triton.jit
def _combine(out_RH: tl.tensor, said_PH: tl.tensor, shares_P: tl.tensor, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
             BLOCK: tl.constexpr) -> None:  # fmt: skip
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total_H = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        said_H = tl.load(said_PH + pair * HIDDEN + h, mask=h < HIDDEN, other=0.0).to(tl.float32)
        total_H += tl.load(shares_P + pair) * said_H
    tl.store(out_RH + row * HIDDEN + h, total_H.to(out_RH.dtype.element_ty), mask=h < HIDDEN)


def moe_triton(
    x_RH: Tensor, logits_RE: Tensor, experts: ExpertWeights, *, top_k: int, alpha: float, limit: float
) -> Tensor:
    """The Triton form of `moe`. Weights are contiguous; rows of x and of the logits may be strided."""
    (rows, hidden), num_experts = x_RH.shape, logits_RE.shape[1]
    out_RH = torch.empty((rows, hidden), dtype=x_RH.dtype, device=x_RH.device)
    if rows == 0:
        return out_RH
    x_RH, logits_RE = (t if t.stride(1) == 1 else t.contiguous() for t in (x_RH, logits_RE))
    width = triton.next_power_of_2(num_experts)
    pairs_ER = torch.empty((num_experts, rows), dtype=torch.int32, device=x_RH.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=x_RH.device)
    shares_P = torch.empty(rows * top_k, dtype=torch.float32, device=x_RH.device)
    with torch.cuda.device_of(x_RH):
        _route[(num_experts,)](
            pairs_ER, counts_E, shares_P, logits_RE, rows, logits_RE.stride(0), EXPERTS=num_experts, WIDTH=width,
            TOP_K=top_k, ROWS=max(min(triton.next_power_of_2(rows), _ROUTED // width), 16),
        )  # fmt: skip
        lists = (pairs_ER, counts_E)
        gated_PF = _grouped(x_RH, experts.gate_up_EHJ, experts.gate_up_bias_EJ, *lists, top_k, (alpha, limit))
        said_PH = _grouped(gated_PF, experts.down_EFH, experts.down_bias_EH, *lists, top_k, None)
        _combine[(rows, triton.cdiv(hidden, _COMBINED))](
            out_RH, said_PH, shares_P, HIDDEN=hidden, TOP_K=top_k, BLOCK=_COMBINED
        )
    return out_RH


def _grouped(
    x_XI: Tensor,
    weight_EIO: Tensor | PackedMatrix,
    bias_EO: Tensor,
    pairs_ER: Tensor,
    counts_E: Tensor,
    top_k: int,
    gate: tuple[float, float] | None,
) -> Tensor:
    """Each pair through its expert's layer, and through the gate if there is one; x has a row a token or a pair."""
    num_experts, inputs, outputs = weight_EIO.shape
    rows = pairs_ER.shape[1]
    pairs = rows * top_k
    packed = isinstance(weight_EIO, PackedMatrix)
    tile = (_packed_tile_size if packed else _tile)(pairs, num_experts, outputs, x_XI.dtype)
    out_PO = torch.empty((pairs, outputs // 2 if gate else outputs), dtype=x_XI.dtype, device=x_XI.device)
    most_tiles = min(pairs, pairs // tile.rows + min(pairs, num_experts))
    sizes: dict[str, int | bool] = {
        "IN": inputs, "OUT": outputs, "EXPERTS": num_experts, "WIDTH": triton.next_power_of_2(num_experts),
        "PAIRS_A_ROW": top_k if gate else 1, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages,
        "GATED": gate is not None, "num_warps": tile.warps,
    }  # fmt: skip
    grid = (most_tiles, triton.cdiv(outputs, tile.columns))
    rest = (bias_EO, pairs_ER, counts_E, rows, x_XI.stride(0), *(gate or (0.0, 0.0)))
    if isinstance(weight_EIO, PackedMatrix):
        _packed_tile[grid](out_PO, x_XI, weight_EIO.words_EGOW, weight_EIO.scales_EGO, *rest, **sizes)
    else:
        _expert_tile[grid](out_PO, x_XI, weight_EIO, *rest, STEP=tile.step, **sizes)
    return out_PO


def _tile(pairs: int, experts: int, columns: int, dtype: torch.dtype) -> _Tile:
    """By how many pairs an expert has on average. `step` sets the order of sums: it must not follow from that."""
    if dtype.itemsize == 4:  # no tensor cores: the operands of a product live in registers
        return _Tile(16, 32, 16, 4, 2)
    mean = pairs / experts
    if mean > 64:
        return _Tile(128, 128, 64, 8, 3)
    if mean > 24:
        return _Tile(64, 128, 64, 4, 4)
    height = 32 if mean > 8 else 16
    # Of the few experts that few rows touch, narrower runs of columns make enough programs to keep memory busy.
    touched = min(pairs, experts)
    return _Tile(height, 128, 64, 4, 5) if touched * columns >= 128 * _PROGRAMS else _Tile(height, 64, 64, 4, 6)


def _packed_tile_size(pairs: int, experts: int, columns: int, dtype: torch.dtype) -> _Tile:
    """`_tile` for packed weights. Unpacking fills the turn of a program: two of them fit on a multiprocessor at least,
    so that one multiplies while the other unpacks."""
    if dtype.itemsize == 4:
        return _Tile(16, 32, GROUP, 4, 2)
    rows, wide, _step, warps, _stages = _tile(pairs, experts, columns, dtype)
    return _Tile(rows, wide, GROUP, warps, 2 if rows == 128 else 3 if rows == 64 else 4 if wide == 128 else 5)
