"""Triton form of the sampling rule: programs find the best column of parts of a row, a second launch that of the row.

The best column is an argmax, so the number of parts, chosen to fill the GPU, never changes the token. The noise is
`peagle.sampling.gumbel_noise`: its integers are the same bits; of its two logarithms the device library computes each
as torch does on CUDA.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from peagle.kernels.sample_filter_triton import filter_threshold_triton
from peagle.sampling import RowSampling

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read at import, as Triton itself does
_MAX_BLOCK = 2048  # columns per turn of the loop
_PROGRAMS = 528  # four for each multiprocessor of a large GPU
_NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def _mix32(x: tl.tensor) -> tl.tensor:
    """MurmurHash3's finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


if _INTERPRETED:

    @triton.jit
    def _log1p(x: tl.tensor) -> tl.tensor:
        """log(1 + x) for x in (-1, 0): the interpreter has no device library."""
        sum_ = 1.0 + x
        return tl.where(sum_ == 1.0, x, tl.log(sum_) * (x / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))

else:
    _log1p = libdevice.log1p


@triton.jit
def _noise_keys(seed: tl.tensor, index: tl.tensor) -> tuple:
    """The two 32-bit keys of a row's noise."""
    index_key = _mix32(index.to(tl.uint32) * 0x9E3779B1 + 0x7F4A7C15)
    first_key = _mix32(seed.to(tl.uint32) ^ index_key)
    return first_key, _mix32((seed >> 32).to(tl.uint32) ^ _mix32(index_key + 0x3C6EF372))


@triton.jit
def _gumbel(token_id_B: tl.tensor, first_key: tl.tensor, second_key: tl.tensor) -> tl.tensor:
    """`gumbel_noise` of token ids (uint32)."""
    bits_B = _mix32(_mix32(token_id_B * 0x9E3779B1 + first_key) ^ second_key) & 0x7FFFFFFF
    uniform_B = tl.minimum((bits_B.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)  # 2^-31, 1 - 2^-24
    return -tl.log(-_log1p(-uniform_B))


@triton.jit
def _take(z_B: tl.tensor, column_B: tl.tensor, highest_B: tl.tensor, best_B: tl.tensor) -> tuple:
    """Keep each lane's maximum and its first column. A NaN is higher than all, a later one no higher than it."""
    higher_B = (highest_B == highest_B) & ~(z_B <= highest_B)
    return tl.where(higher_B, z_B, highest_B), tl.where(higher_B, column_B, best_B)


@triton.jit
def _combine(highest_B: tl.tensor, best_B: tl.tensor) -> tuple:
    """The maximum over lanes, and the lowest column that holds it; NaN as in `_take`."""
    is_nan_B = highest_B != highest_B
    any_nan = tl.max(is_nan_B.to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(is_nan_B, -float("inf"), highest_B), axis=0)
    candidate_B = tl.where(any_nan, is_nan_B, highest_B == highest)
    best = tl.min(tl.where(candidate_B, best_B, _NO_COLUMN), axis=0)
    return tl.where(any_nan, float("nan"), highest), best


@triton.jit
def _best_of_part(
    z_row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    temperature: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    token_ids_V: tl.tensor,
    threshold: tl.tensor,
    IN_DRAFT_VOCAB: tl.constexpr,
    DRAWN: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple:
    """Maximum over columns [begin, end) and its column; if DRAWN with noise, if FILTERED not below `threshold`."""
    lane_B = tl.arange(0, BLOCK)
    highest_B, best_B = tl.full([BLOCK], -float("inf"), tl.float32), begin + lane_B
    for start in range(begin, end, BLOCK):
        column_B = start + lane_B
        inside_B = column_B < end
        z_B = tl.load(z_row + column_B, mask=inside_B, other=-float("inf")).to(tl.float32)
        if DRAWN:
            id_B = column_B
            if IN_DRAFT_VOCAB:
                id_B = tl.load(token_ids_V + column_B, mask=inside_B, other=0)
            z_B = tl.div_rn(z_B, temperature)
            if FILTERED:
                z_B = tl.where(z_B < threshold, -float("inf"), z_B)
            z_B += _gumbel(id_B.to(tl.uint32), first_key, second_key)
        highest_B, best_B = _take(z_B, column_B, highest_B, best_B)
    return _combine(highest_B, best_B)


@triton.jit(
    do_not_specialize=["part_blocks"],
    do_not_specialize_on_alignment=["temperature_R", "seed_R", "index_R", "threshold_R"],
)
def _scan_part(
    highest_RP: tl.tensor,
    best_RP: tl.tensor,
    logits_RV: tl.tensor,
    logits_stride: tl.int64,
    temperature_R: tl.tensor,
    seed_R: tl.tensor,
    index_R: tl.tensor,
    token_ids_V: tl.tensor,
    threshold_R: tl.tensor,
    vocab: tl.int32,
    part_blocks: tl.int32,
    IN_DRAFT_VOCAB: tl.constexpr,
    DRAWN: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    z_row = logits_RV + row * logits_stride
    begin = part * part_blocks * BLOCK
    end = tl.minimum(begin + part_blocks * BLOCK, vocab)
    temperature = 0.0
    if DRAWN:
        temperature = tl.load(temperature_R + row)
    if temperature == 0.0:
        highest, best = _best_of_part(
            z_row, begin, end, 1.0, 0, 0, token_ids_V, 0.0, IN_DRAFT_VOCAB, False, False, BLOCK
        )
    else:
        first_key, second_key = _noise_keys(tl.load(seed_R + row), tl.load(index_R + row))
        threshold = 0.0
        if FILTERED:
            threshold = tl.load(threshold_R + row)
        highest, best = _best_of_part(
            z_row, begin, end, temperature, first_key, second_key, token_ids_V, threshold,
            IN_DRAFT_VOCAB, True, FILTERED, BLOCK,
        )  # fmt: skip
    at = row * tl.num_programs(1) + part
    tl.store(highest_RP + at, highest)
    tl.store(best_RP + at, best)


@triton.jit(do_not_specialize=["parts"])
def _best_of_row(
    token_R: tl.tensor,
    highest_RP: tl.tensor,
    best_RP: tl.tensor,
    token_ids_V: tl.tensor,
    parts: tl.int32,
    IN_DRAFT_VOCAB: tl.constexpr,
    PARTS_P2: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_P2)
    highest_P = tl.load(highest_RP + row * parts + part, mask=part < parts, other=-float("inf"))
    best_P = tl.load(best_RP + row * parts + part, mask=part < parts, other=_NO_COLUMN)
    _highest, best = _combine(highest_P, best_P)
    if IN_DRAFT_VOCAB:
        tl.store(token_R + row, tl.load(token_ids_V + best).to(tl.int64))
    else:
        tl.store(token_R + row, best.to(tl.int64))


def sample_triton(logits_RV: Tensor, rows: RowSampling | None, token_ids_V: Tensor | None = None) -> Tensor:
    """The Triton form of `sample`; arithmetic in float32."""
    (count, vocab), device = logits_RV.shape, logits_RV.device
    token_R = torch.empty(count, dtype=torch.int64, device=device)
    if count == 0:
        return token_R
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    block, part_blocks = _part_sizes(count, vocab)
    parts = triton.cdiv(vocab, part_blocks * block)
    highest_RP = torch.empty((count, parts), dtype=torch.float32, device=device)
    best_RP = torch.empty((count, parts), dtype=torch.int32, device=device)
    unread = token_R
    threshold_R = filter_threshold_triton(logits_RV, rows) if rows is not None and rows.filtered else None
    with torch.cuda.device_of(logits_RV):
        _scan_part[(count, parts)](
            highest_RP, best_RP, logits_RV, logits_RV.stride(0), unread if rows is None else rows.temperature,
            unread if rows is None else rows.seed, unread if rows is None else rows.indices,
            unread if token_ids_V is None else token_ids_V, unread if threshold_R is None else threshold_R, vocab,
            part_blocks, IN_DRAFT_VOCAB=token_ids_V is not None, DRAWN=rows is not None,
            FILTERED=threshold_R is not None, BLOCK=block, num_warps=max(1, block // 512),
        )  # fmt: skip
        _best_of_row[(count,)](
            token_R, highest_RP, best_RP, unread if token_ids_V is None else token_ids_V, parts,
            IN_DRAFT_VOCAB=token_ids_V is not None, PARTS_P2=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip
    return token_R


def _part_sizes(rows: int, vocab: int) -> tuple[int, int]:
    """Columns per turn of the loop, and turns per program: few enough for programs to fill the GPU."""
    block = max(128, min(triton.next_power_of_2(vocab), _MAX_BLOCK))
    blocks = triton.cdiv(vocab, block)
    return block, triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, rows)))
