"""Which streaming linear layers take Hopper's form (`stream_ring_triton`), and how their work is divided.

All of it follows from the layer's sizes, so that a row comes out the same however many share the call.
"""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import cuda_generation, is_on

SLAB = 64  # rows of weights that Hopper's tensor cores multiply at once
STEP = 128  # inputs of a turn
MOST_ROWS = 64
_PROGRAMS = 132  # at most, the multiprocessors of an H100 or H200: each holds one
_RING_SLABS = 12  # of 16 KB: as many as leave a multiprocessor room for the output's way to its layout

# What was measured, see docs/decisions.md: smaller layers, and those of fewer programs, keep the other form.
_LEAST_INPUTS, _LEAST_WEIGHTS, _LEAST_PROGRAMS = 2048, 1 << 24, 96


class Ring(NamedTuple):
    """A tile is `slabs` of weights and all inputs. A program makes whole tiles, or one cut of one."""

    slabs: int
    stages: int  # turns of a program that are on their way from memory, or there
    cuts: int  # of a tile's inputs
    turns: int  # of a tile
    own_turns: int  # of a program
    all_turns: int

    @property
    def programs(self) -> int:
        return -(-self.all_turns // self.own_turns)


def ring_of(weight_rows: int, inputs: int, *, parts: bool) -> Ring:
    """How a layer is divided; `parts`: its sums may come in parts."""
    all_slabs = -(-weight_rows // SLAB)
    cuts = 2 if parts and 2 * all_slabs <= _PROGRAMS else 1  # four give the norm that adds them more to read
    # By slabs of a tile: four were slower. Its rows count as half a slab: they come from the L2 cache.
    tiles_of_program = {slabs: -(-all_slabs // (slabs * _PROGRAMS)) for slabs in (1, 2, 3)}
    slabs, tiles = min(tiles_of_program.items(), key=lambda item: item[1] * (item[0] + 0.5))
    turns = -(-inputs // (STEP * cuts)) * cuts
    own_turns = turns // cuts if cuts > 1 else tiles * turns
    return Ring(slabs, _RING_SLABS // (slabs + 1), cuts, turns, own_turns, -(-all_slabs // slabs) * turns)


@cache
def has_ring(device: torch.device) -> bool:
    """Whether it is a whole Hopper GPU, and Triton has Gluon. `PEAGLE_WEIGHT_RING=0` turns the ring off."""
    if not is_on("PEAGLE_WEIGHT_RING") or cuda_generation(device) != 9 or not find_spec("triton.experimental.gluon"):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= _PROGRAMS


def is_read_by_tma(matrix: Tensor) -> bool:
    """As it lies, without a copy."""
    (_, columns), (row_stride, stride) = matrix.shape, matrix.stride()
    aligned = columns % 8 == 0 and row_stride % 8 == 0 and matrix.data_ptr() % 16 == 0
    return aligned and stride == 1 and row_stride >= columns and matrix.dtype in (torch.bfloat16, torch.float16)


def suits_ring(weight_GI: Tensor, *, gated: bool) -> bool:
    """Whether the ring can make the layer of at most 64 rows."""
    whole = not gated or (weight_GI.shape[0] % 16 == 0 and weight_GI.is_contiguous())
    return whole and is_read_by_tma(weight_GI)


def prefers_ring(x_RI: Tensor, weight_GI: Tensor, *, gated: bool, parts: bool) -> bool:
    """Whether the ring is taken to be faster than the other kernel of `stream_linear_triton`."""
    if not has_ring(x_RI.device) or not 0 < x_RI.shape[0] <= MOST_ROWS:
        return False
    is_large = weight_GI.shape[1] >= _LEAST_INPUTS and weight_GI.numel() >= _LEAST_WEIGHTS
    is_wide = ring_of(*weight_GI.shape, parts=parts).programs >= _LEAST_PROGRAMS
    return is_large and is_wide and suits_ring(weight_GI, gated=gated)
