"""Triton form of the sampling filters: the least logit that each row keeps, found without a sort in two readings.

Top-k and top-p both ask for the largest value v such that the weights of all logits >= v add up to a goal: k times a
weight of one, or a share of the mass. The sum falls as v grows, so v is found by halving the range that it lies in. A
first reading finds the maxima of groups of logits. The r-th largest of them is a border that at least r logits reach,
and not many more. A second reading collects these, and the halving looks at them alone. Where they are not enough, or
too many to hold, it looks at all logits of the row, again and again: a flat row is slow, not wrong.

Division by the temperature keeps the order, so values are halved as they are stored, in few steps if they have 16 bits.
Sums are of integers (`peagle.sampling.MASS_UNIT`): neither the number of programs nor the batch changes them.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from peagle.sampling import MASS_UNIT, RowSampling

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read at import, as Triton itself does
_BLOCK = 1024  # columns per turn of the loop
_PROGRAMS = 2048  # sixteen for each multiprocessor of a large GPU
_MOST_PARTS = 64  # of a row
_GROUPS = 2048  # of a row's logits, a power of two; the border is the maximum that three quarters of them reach
_ROOM = 4096  # logits that can be collected of a row; about 1.4 a group reach the border
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of a float32 that these do not use
_RUN = tl.constexpr(64)  # neighbours that a part of a row has together, so that parts are as likely as each other
_STAGES = tl.constexpr(3)  # turns whose loads are on their way
_UNIT = tl.constexpr(MASS_UNIT)
_WEIGHTLESS = tl.constexpr(40.0)  # a token less likely by a factor of e to this has no mass: a first guess

if _INTERPRETED:

    @triton.jit
    def _exp(x: tl.tensor) -> tl.tensor:
        """The interpreter has no device library, whose exponential is torch's own on CUDA."""
        return tl.exp(x)

else:
    _exp = libdevice.exp


@triton.jit
def _key(z: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """An integer that orders as the floats do, int32; both zeros have the same."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _value(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The float with this key."""
    bits = key << SHIFT
    return tl.where(bits < 0, bits ^ ((0x7FFFFFFF >> SHIFT) << SHIFT), bits).to(tl.float32, bitcast=True)


@triton.jit
def _mass(scaled: tl.tensor, highest: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Integer masses of logits over the temperature, of those that reach `floor`."""
    return tl.where(scaled >= floor, (_exp(scaled - highest) * _UNIT).to(tl.int64), 0)


@triton.jit
def _columns_of(part: tl.tensor, parts: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A part's columns among the first parts * BLOCK of a row."""
    lane_B = tl.arange(0, BLOCK)
    return (lane_B // _RUN * parts + part) * _RUN + lane_B % _RUN


@triton.jit
def _filters_of(row: tl.tensor, filters: tl.tuple, vocab: tl.int32, MIN_P: tl.constexpr) -> tuple:
    """A row's temperature, k (0 is off), p (1 is off), logarithm of min-p (-inf is off), and whether any is on."""
    temperature_R, top_k_R, top_p_R, log_min_p_R = filters
    temperature, k, p = tl.load(temperature_R + row), tl.load(top_k_R + row), tl.load(top_p_R + row)
    k = tl.where((temperature > 0.0) & (k > 0) & (k < vocab), k, 0).to(tl.int32)
    p = tl.where(temperature > 0.0, p, 1.0)
    log_min_p = tl.full([], -float("inf"), tl.float32)
    if MIN_P:
        log_min_p = tl.where(temperature > 0.0, tl.load(log_min_p_R + row), log_min_p)
    return temperature, k, p, log_min_p, (k > 0) | (p < 1.0) | (log_min_p > -float("inf"))


@triton.jit
def _least_of(
    z_N: tl.tensor, weight_N: tl.tensor, goal: tl.tensor, low: tl.tensor, high: tl.tensor, SHIFT: tl.constexpr
) -> tl.tensor:
    """The largest key in [low, high] whose value logits of as much weight as the goal reach, `low` where none."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # half of the sum, rounded up; the sum itself may not fit
        enough = tl.sum(tl.where(z_N >= _value(middle, SHIFT), weight_N, 0), axis=0) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _weigh(row: tl.tuple, floor: tl.tensor, least: tl.tensor, MASS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Number of the row's logits that are at least `least`, or their mass."""
    z_V, vocab, temperature, highest = row
    sum_B = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=_STAGES):
        column_B = start + tl.arange(0, BLOCK)
        z_B = tl.load(z_V + column_B, mask=column_B < vocab, other=float("nan")).to(tl.float32)
        if MASS:
            sum_B += tl.where(z_B >= least, _mass(tl.div_rn(z_B, temperature), highest, floor), 0)
        else:
            sum_B += (z_B >= least).to(tl.int32)
    return tl.sum(sum_B, axis=0)


@triton.jit
def _least_of_row(
    row: tl.tuple, floor: tl.tensor, goal: tl.tensor, low: tl.tensor, high: tl.tensor, guess: tl.tensor,
    MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`_least_of` all logits of a row, a reading of it for each step; the first step looks at the key `guess`."""
    middle = tl.minimum(tl.maximum(guess, low + 1), high)
    while low < high:
        enough = _weigh(row, floor, _value(middle, SHIFT), MASS, BLOCK) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
    return low


@triton.jit(do_not_specialize_on_alignment=["temperature_R", "top_k_R", "top_p_R", "log_min_p_R"])
def _maxima_of_groups(
    maxima_RG: tl.tensor, count_R: tl.tensor, mass_R: tl.tensor, logits_RV: tl.tensor, logits_stride: tl.int64,
    temperature_R: tl.tensor, top_k_R: tl.tensor, top_p_R: tl.tensor, log_min_p_R: tl.tensor, vocab: tl.int32,
    MIN_P: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The first reading. A group is spread over the row: tokens of near ids tend to be likely together."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        tl.store(count_R + row, 0)
        tl.store(mass_R + row, 0)
    _temperature, _k, _p, _log_min_p, on = _filters_of(
        row, (temperature_R, top_k_R, top_p_R, log_min_p_R), vocab, MIN_P
    )
    if on == 0:
        return
    highest_B = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in tl.range(0, vocab, PARTS * BLOCK, num_stages=_STAGES):
        column_B = start + _columns_of(part, PARTS, BLOCK)
        z_B = tl.load(logits_RV + row * logits_stride + column_B, mask=column_B < vocab, other=-float("inf"))
        z_B = z_B.to(tl.float32)
        highest_B = tl.where(z_B > highest_B, z_B, highest_B)  # a NaN is no maximum
    OWN: tl.constexpr = GROUPS // PARTS
    highest_G = tl.max(tl.reshape(highest_B, [BLOCK // OWN, OWN]), axis=0)
    tl.store(maxima_RG + row * GROUPS + part * OWN + tl.arange(0, OWN), highest_G)


@triton.jit(do_not_specialize_on_alignment=["temperature_R", "top_k_R", "top_p_R", "log_min_p_R"])
def _collect(
    collected_RC: tl.tensor, count_R: tl.tensor, mass_R: tl.tensor, bounds_R2: tl.tensor, maxima_RG: tl.tensor,
    logits_RV: tl.tensor, logits_stride: tl.int64, temperature_R: tl.tensor, top_k_R: tl.tensor, top_p_R: tl.tensor,
    log_min_p_R: tl.tensor, vocab: tl.int32, MIN_P: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The second reading: the logits that reach the border, in any order, and without top-k the mass of a part."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, k, p, log_min_p, on = _filters_of(row, (temperature_R, top_k_R, top_p_R, log_min_p_R), vocab, MIN_P)
    if on == 0:
        return
    z_G = tl.load(maxima_RG + row * GROUPS + tl.arange(0, GROUPS))
    highest = tl.max(z_G, axis=0)
    rank = tl.where((k > 0) & (k < RANK), k, RANK)
    low, high = _key(tl.min(z_G, axis=0), SHIFT), _key(highest, SHIFT)
    border = _value(_least_of(z_G, tl.full([GROUPS], 1, tl.int32), rank, low, high, SHIFT), SHIFT)
    if part == 0:
        tl.store(bounds_R2 + row * 2, border)
        tl.store(bounds_R2 + row * 2 + 1, highest)
    if (k == 0) & (p >= 1.0):
        return
    highest = tl.div_rn(highest, temperature)
    mass_B = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, vocab, parts * BLOCK, num_stages=_STAGES):
        column_B = start + _columns_of(part, parts, BLOCK)
        z_B = tl.load(logits_RV + row * logits_stride + column_B, mask=column_B < vocab, other=-float("inf"))
        z_B = z_B.to(tl.float32)
        reaches_B = ((z_B >= border) & (z_B > -float("inf"))).to(tl.int32)
        reaching = tl.sum(reaches_B, axis=0)
        if reaching > 0:  # atomic, in any order: what follows are sums of integers
            place_B = tl.atomic_add(count_R + row, reaching, sem="relaxed") + tl.cumsum(reaches_B, axis=0) - reaches_B
            tl.store(collected_RC + row * ROOM + place_B, z_B, mask=(reaches_B > 0) & (place_B < ROOM))
        if k == 0:
            mass_B += _mass(tl.div_rn(z_B, temperature), highest, highest + log_min_p)
    if k == 0:
        tl.atomic_add(mass_R + row, tl.sum(mass_B, axis=0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["temperature_R", "top_k_R", "top_p_R", "log_min_p_R"])
def _narrow(
    threshold_R: tl.tensor, collected_RC: tl.tensor, count_R: tl.tensor, mass_R: tl.tensor, bounds_R2: tl.tensor,
    logits_RV: tl.tensor, logits_stride: tl.int64, temperature_R: tl.tensor, top_k_R: tl.tensor, top_p_R: tl.tensor,
    log_min_p_R: tl.tensor, vocab: tl.int32, MIN_P: tl.constexpr, ROOM: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The threshold of a row, from what was collected if that is enough to be sure, else from all of the row."""
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, log_min_p, on = _filters_of(row, (temperature_R, top_k_R, top_p_R, log_min_p_R), vocab, MIN_P)
    threshold = tl.full([], -float("inf"), tl.float32)
    if on:
        border, highest = tl.load(bounds_R2 + row * 2), tl.load(bounds_R2 + row * 2 + 1)
        least, low, high = _key(threshold, SHIFT), _key(border, SHIFT), _key(highest, SHIFT)
        guess = _key(highest - _WEIGHTLESS * temperature, SHIFT)
        highest = tl.div_rn(highest, temperature)
        whole = (logits_RV + row * logits_stride, vocab, temperature, highest)
        floor, count = highest + log_min_p, tl.load(count_R + row)
        held, all_there = count <= ROOM, border == -float("inf")
        place_C = tl.arange(0, ROOM)
        is_there_C = place_C < tl.where(held, count, 0)
        z_C = tl.load(collected_RC + row * ROOM + place_C, mask=is_there_C, other=-float("inf"))
        kth_is_there = held & ((count >= k) | all_there)
        if k > 0:
            if kth_is_there:
                key = _least_of(z_C, is_there_C.to(tl.int32), k, low, high, SHIFT)
                key = tl.where(count >= k, key, least)
            else:
                begin, end = tl.where(count >= k, low, least), tl.where(count >= k, high, low)
                key = _least_of_row(whole, floor, k, begin, end, 0, False, SHIFT, BLOCK)
            floor = tl.maximum(floor, tl.div_rn(_value(key, SHIFT), temperature))
        threshold = floor
        if p < 1.0:
            mass_C = tl.where(is_there_C, _mass(tl.div_rn(z_C, temperature), highest, floor), 0)
            mass = tl.sum(mass_C, axis=0)
            if k == 0:
                total = tl.load(mass_R + row)
            elif kth_is_there:
                total = mass
            else:
                total = _weigh(whole, floor, -float("inf"), True, BLOCK)
            goal = p.to(tl.float64) * total.to(tl.float64)
            if held & (mass.to(tl.float64) >= goal):
                key = _least_of(z_C, mass_C, goal, low, high, SHIFT)
            else:
                key = _least_of_row(whole, floor, goal, least, tl.where(held, low, high), guess, True, SHIFT, BLOCK)
            threshold = tl.maximum(floor, tl.div_rn(_value(key, SHIFT), temperature))
    tl.store(threshold_R + row, threshold)


def filter_threshold_triton(logits_RV: Tensor, rows: RowSampling) -> Tensor:
    """`peagle.sampling.filter_threshold` of contiguous rows before the temperature; -inf for greedy rows."""
    (count, vocab), device = logits_RV.shape, logits_RV.device
    most = min(_MOST_PARTS, _GROUPS, triton.cdiv(_PROGRAMS, count), triton.cdiv(vocab, _BLOCK))
    parts = 1 << (most.bit_length() - 1)
    groups = min(_GROUPS, parts * _BLOCK)
    threshold_R, bounds_R2, collected_RC, maxima_RG = (
        torch.empty(size, dtype=torch.float32, device=device)
        for size in ((count,), (count, 2), (count, _ROOM), (count, groups))
    )
    count_R, mass_R = (torch.empty(count, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    log_min_p_R = rows.temperature if rows.min_p is None else rows.min_p.log()  # not read without
    filters = rows.temperature, rows.top_k, rows.top_p, log_min_p_R
    asked = logits_RV, logits_RV.stride(0), *filters, vocab, rows.min_p is not None
    sizes = {"ROOM": _ROOM, "SHIFT": _KEY_SHIFTS[logits_RV.dtype], "BLOCK": _BLOCK}
    with torch.cuda.device_of(logits_RV):
        _maxima_of_groups[(count, parts)](
            maxima_RG, count_R, mass_R, *asked, GROUPS=groups, PARTS=parts, BLOCK=_BLOCK, num_warps=4
        )
        _collect[(count, parts)](
            collected_RC, count_R, mass_R, bounds_R2, maxima_RG, *asked, GROUPS=groups, RANK=groups * 3 // 4,
            **sizes, num_warps=4,
        )  # fmt: skip
        _narrow[(count,)](threshold_R, collected_RC, count_R, mass_R, bounds_R2, *asked, **sizes, num_warps=8)
    return threshold_R
