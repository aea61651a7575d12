"""Matrices of four-bit numbers (MXFP4) in the order in which the experts' kernel takes them apart cheapest.

A number is a sign, two bits of exponent and one of mantissa (E2M1): its three low bits, shifted to where bfloat16 has
the end of its exponent and the start of its mantissa, are bfloat16's of the number times 2^-126. Multiplying by a power
of two sets that right and applies the scale of the block at once, exactly. Expanding four-bit numbers is what a GPU has
little time for (41 a clock and multiprocessor at an H200's bandwidth), so they are stored the other way round: what two
neighbours need comes out of a word with two shifts and two masks at most, and a scale is the multiplier's exponent.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # inputs that share a scale
GROUP = 4 * BLOCK  # inputs whose scales are one word
WORDS = GROUP // 8  # of a group of one output
MOST_SCALE = 128  # as stored in a checkpoint: 2^1. A larger multiplier has no place in bfloat16
PACKED_BYTES = 0.5 + 1 / BLOCK  # of a number, its share of the scale included
_EXPONENT = 126  # of the multiplier above the scale's

# Of each block of a group: where its magnitudes and signs begin, in either half of a word.
_PLACES = ((6, 15), (3, 12), (0, 13), (9, 14))


class PackedMatrix(NamedTuple):
    """[E, inputs, O] of E experts. Groups of inputs are filled up with zeros.

    Word i of a group holds numbers 2 i (low half) and 2 i + 1 (high half) of each of its four blocks; the four bytes of
    its scale are bfloat16 exponents.
    """

    words_EGOW: Tensor  # int32
    scales_EGO: Tensor  # int32
    inputs: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the matrix: experts, inputs, outputs."""
        experts, _groups, outputs = self.scales_EGO.shape
        return experts, self.inputs, outputs


def num_groups(inputs: int) -> int:
    """Of a matrix with so many inputs."""
    return -(-inputs // GROUP)


def pack(blocks_OBI: Tensor, scales_OB: Tensor) -> tuple[Tensor, Tensor]:
    """One expert's words [G, O, 16] and scales [G, O] from a checkpoint's blocks uint8 [O, B, 16], the earlier of two
    numbers in a byte's low half, and scales uint8 [O, B] up to MOST_SCALE."""
    missing = num_groups(BLOCK * scales_OB.shape[1]) * 4 - scales_OB.shape[1]
    bytes_OGJI = F.pad(blocks_OBI, (0, 0, 0, missing)).unflatten(1, (-1, 4)).int()
    code = torch.arange(256, dtype=torch.int32, device=blocks_OBI.device)
    words_OGI = torch.zeros_like(bytes_OGJI[:, :, 0])
    for j, (magnitude, sign) in enumerate(_PLACES):
        low, high = (((c & 7) << magnitude) | (((c >> 3) & 1) << sign) for c in (code, code >> 4))
        words_OGI |= (low | high << 16)[bytes_OGJI[:, :, j]]
    exponents_OB = F.pad(scales_OB + _EXPONENT, (0, missing))
    return words_OGI.transpose(0, 1).contiguous(), exponents_OB.view(torch.int32).T.contiguous()


def unpack(matrix: PackedMatrix, expert: int, dtype: torch.dtype) -> Tensor:
    """The matrix [inputs, O] of one expert, in `dtype`."""
    words_GOW, scales_GO = matrix.words_EGOW[expert], matrix.scales_EGO[expert]
    parts = []
    for j, (magnitude, sign) in enumerate(_PLACES):
        halves_GOWH = torch.stack((words_GOW & 0xFFFF, words_GOW >> 16 & 0xFFFF), dim=-1)
        bits = (halves_GOWH >> magnitude & 7) << 6 | (halves_GOWH >> sign & 1) << 15
        multiplier_GO = ((scales_GO >> 8 * j & 0xFF) << 7).to(torch.int16).view(torch.bfloat16)
        values_GOK = bits.to(torch.int16).view(torch.bfloat16).flatten(-2) * multiplier_GO[..., None]
        parts.append(values_GOK.to(dtype))
    return torch.stack(parts, dim=1).permute(0, 1, 3, 2).flatten(0, 2)[: matrix.inputs].contiguous()


@torch.no_grad()
def draw(words_EGOW: Tensor, scales_EGO: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with random numbers: all 16 equally often, and of each block one of two neighbouring scales, so often that
    the standard deviation is `std`."""
    squares = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).square().mean()
    ratio = torch.log2(std / squares.sqrt()).item()
    lower = int(ratio // 1)
    share = (4 ** (ratio - lower) - 1) / 3  # of blocks with the higher scale
    words_EGOW.random_(-(2**31), 2**31, generator=generator)
    for scales_GO in scales_EGO:  # one expert after another spares memory
        bytes_N = scales_GO.view(torch.uint8)
        chance_N = torch.rand(bytes_N.shape, device=bytes_N.device, generator=generator)
        bytes_N.copy_((chance_N < share).to(torch.uint8) + (127 + lower + _EXPONENT))
