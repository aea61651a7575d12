"""MXFP4, the format in which gpt-oss keeps its experts: blocks of 32 four-bit numbers that share a power of two.

A number is a sign, two bits of exponent and one of mantissa (E2M1); two lie in a byte, the earlier one in its low half.
A block's byte of scale is an exponent with a bias of 127. Every product is exact in bfloat16.
"""

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
BLOCKS, SCALES = "_blocks", "_scales"  # what is appended to a tensor's name for its two parts
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def dequantize(blocks_OGB: Tensor, scales_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [O, 32 G] of blocks uint8 [O, G, 16] and scales uint8 [O, G], in `dtype`."""
    values = torch.tensor((*_MAGNITUDES, *(-m for m in _MAGNITUDES)), device=blocks_OGB.device)
    nibbles_OGI = torch.stack((blocks_OGB & 0x0F, blocks_OGB >> 4), dim=-1).flatten(-2)
    exponents_OG1 = scales_OG[..., None].to(torch.int32) - _SCALE_BIAS
    return torch.ldexp(values[nibbles_OGI.int()], exponents_OG1).flatten(-2).to(dtype)
