"""Triton form of the sampling filters: the least logit that each row keeps, found without a sort.

Top-k and top-p both ask for the largest value v such that the weights of all logits >= v add up to a goal: k times a
weight of one, or a share of the mass. The sum falls as v grows, so v is found digit by digit, from the bits of the
float that matter most: a pass over the row sums the weights above each of 16 values of the next four bits. Programs
share a row, and a pass starts by reading what all programs of the one before found. The sums are of integers
(`peagle.sampling.MASS_UNIT`): neither the number of programs nor the rest of the batch changes them.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from peagle.sampling import MASS_UNIT, RowSampling, min_p_floor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read at import, as Triton itself does
_BLOCK = 512  # columns per turn of the loop
_PROGRAMS = 528  # four for each multiprocessor of a large GPU
_MOST_PARTS = 64  # of a row: each program reads the sums of all
_PASSES = 8
_DIGITS = tl.constexpr(16)
_BITS = tl.constexpr(4)
_UNIT = tl.constexpr(MASS_UNIT)

if _INTERPRETED:

    @triton.jit
    def _exp(x: tl.tensor) -> tl.tensor:
        """The interpreter has no device library, whose exponential is torch's own on CUDA."""
        return tl.exp(x)

else:
    _exp = libdevice.exp


@triton.jit
def _key(z: tl.tensor) -> tl.tensor:
    """An integer that orders as the floats do, uint32; both zeros have the same."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float with this key."""
    return tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _key_before(
    step: tl.int32,
    row: tl.tensor,
    rows: tl.int32,
    parts: tl.int32,
    sums_SRPD: tl.tensor,
    key_SR: tl.tensor,
    goal: tl.tensor,
    MASS: tl.constexpr,
    PARTS_P2: tl.constexpr,
) -> tl.tensor:
    """The bits that the passes before `step` found, and zeros below them."""
    key = tl.full([], 0, tl.uint32)
    if step > 0:
        part_P, digit_D = tl.arange(0, PARTS_P2), tl.arange(0, _DIGITS)
        if MASS:  # the goal is a share of all there is, which is what the first pass found above zero
            total_at = sums_SRPD + (row * parts + part_P) * _DIGITS
            goal *= tl.sum(tl.load(total_at, mask=part_P < parts, other=0), axis=0).to(tl.float64)
        at = (step - 1) * rows + row
        sums_PD = sums_SRPD + (at * parts + part_P[:, None]) * _DIGITS + digit_D[None]
        sum_D = tl.sum(tl.load(sums_PD, mask=(part_P < parts)[:, None], other=0), axis=0)
        reached = tl.sum((sum_D.to(tl.float64) >= goal).to(tl.int32), axis=0)
        digit = tl.maximum(reached - 1, 0)  # the sums fall, the first one reaches the goal; NaNs may break both
        key = tl.load(key_SR + at).to(tl.uint32) + (digit.to(tl.uint32) << (32 - step * _BITS).to(tl.uint32))
    return key


@triton.jit(
    do_not_specialize=["part_blocks", "step"],
    do_not_specialize_on_alignment=["temperature_R", "goal_R", "highest_R", "floor_R"],
)
def _narrow(
    sums_SRPD: tl.tensor,
    key_SR: tl.tensor,
    logits_RV: tl.tensor,
    logits_stride: tl.int64,
    temperature_R: tl.tensor,
    goal_R: tl.tensor,
    highest_R: tl.tensor,
    floor_R: tl.tensor,
    vocab: tl.int32,
    part_blocks: tl.int32,
    step: tl.int32,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_P2: tl.constexpr,
) -> None:
    """One pass: sums of the weights above each value of the next digit, over a part of the row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, parts = tl.num_programs(0), tl.num_programs(1)
    goal = tl.load(goal_R + row)
    if goal == 0.0:
        return
    key = _key_before(step, row, rows, parts, sums_SRPD, key_SR, goal, MASS, PARTS_P2)
    if part == 0:
        tl.store(key_SR + step * rows + row, key.to(tl.int64))
    lane_B, digit_D = tl.arange(0, BLOCK), tl.arange(0, _DIGITS)
    shift = (32 - (step + 1) * _BITS).to(tl.uint32)
    low_D = key + (digit_D.to(tl.uint32) << shift)
    temperature = tl.load(temperature_R + row)
    begin = part * part_blocks * BLOCK
    end = tl.minimum(begin + part_blocks * BLOCK, vocab)
    sums_BD = tl.zeros([BLOCK, _DIGITS], tl.int64 if MASS else tl.int32)
    for start in range(begin, end, BLOCK):
        column_B = start + lane_B
        inside_B = column_B < end
        z_B = tl.load(logits_RV + row * logits_stride + column_B, mask=inside_B, other=-float("inf")).to(tl.float32)
        z_B = tl.div_rn(z_B, temperature)
        if MASS:
            weight_B = (_exp(z_B - tl.load(highest_R + row)) * _UNIT).to(tl.int64)
            weight_B = tl.where(inside_B & ~(z_B < tl.load(floor_R + row)), weight_B, 0)
        else:
            weight_B = inside_B.to(tl.int32)
        sums_BD += tl.where(_key(z_B)[:, None] >= low_D[None], weight_B[:, None], 0)
    sums_at = sums_SRPD + ((step * rows + row) * parts + part) * _DIGITS
    tl.store(sums_at + digit_D, tl.sum(sums_BD, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["parts", "step"], do_not_specialize_on_alignment=["goal_R"])
def _settle(
    value_R: tl.tensor,
    sums_SRPD: tl.tensor,
    key_SR: tl.tensor,
    goal_R: tl.tensor,
    parts: tl.int32,
    step: tl.int32,
    MASS: tl.constexpr,
    PARTS_P2: tl.constexpr,
) -> None:
    """The value that all passes together found, -inf in rows without a goal."""
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(goal_R + row)
    value = -float("inf")
    if goal != 0.0:
        value = _value(_key_before(step, row, tl.num_programs(0), parts, sums_SRPD, key_SR, goal, MASS, PARTS_P2))
    tl.store(value_R + row, value)


def filter_threshold_triton(logits_RV: Tensor, rows: RowSampling) -> Tensor:
    """`peagle.sampling.filter_threshold` of logits before the temperature; greedy rows get -inf or any other value.

    Rows of logits are contiguous.
    """
    drawn_R, vocab = rows.temperature > 0, logits_RV.shape[1]
    temperature_R = torch.where(drawn_R, rows.temperature, 1.0)
    highest_R = logits_RV.amax(dim=1).float() / temperature_R
    by_count_R = drawn_R & (rows.top_k > 0) & (rows.top_k < vocab)
    kth_R = _largest_reaching(torch.where(by_count_R, rows.top_k, 0).double(), logits_RV, temperature_R)
    floor_R = torch.maximum(kth_R, min_p_floor(highest_R, rows.min_p))
    share_R = torch.where(drawn_R & (rows.top_p < 1.0), rows.top_p, 0.0).double()
    crossing_R = _largest_reaching(share_R, logits_RV, temperature_R, (highest_R, floor_R))
    return torch.maximum(floor_R, crossing_R)


def _largest_reaching(
    goal_R: Tensor, logits_RV: Tensor, temperature_R: Tensor, mass: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The largest value of each row such that as many logits as the goal says reach it; -inf where the goal is 0.

    With `mass`, the highest logit of each row and the least that counts, the goal is a share of the mass instead.
    """
    (count, vocab), device = logits_RV.shape, logits_RV.device
    blocks = triton.cdiv(vocab, _BLOCK)
    part_blocks = triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, count), _MOST_PARTS))
    parts = triton.cdiv(blocks, part_blocks)
    value_R = torch.empty(count, dtype=torch.float32, device=device)
    key_SR = torch.empty((_PASSES, count), dtype=torch.int64, device=device)
    sums_SRPD = torch.empty((_PASSES, count, parts, _DIGITS.value), dtype=torch.int64, device=device)
    highest_R, floor_R = (value_R, value_R) if mass is None else mass  # not read without
    shared = {"MASS": mass is not None, "PARTS_P2": triton.next_power_of_2(parts)}
    with torch.cuda.device_of(logits_RV):
        for step in range(_PASSES):
            _narrow[(count, parts)](
                sums_SRPD, key_SR, logits_RV, logits_RV.stride(0), temperature_R, goal_R, highest_R, floor_R,
                vocab, part_blocks, step, BLOCK=_BLOCK, num_warps=8, **shared,
            )  # fmt: skip
        _settle[(count,)](value_R, sums_SRPD, key_SR, goal_R, parts, _PASSES, num_warps=4, **shared)
    return value_R
