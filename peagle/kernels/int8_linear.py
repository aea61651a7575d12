"""A linear layer of a few rows with a byte for each weight, for drafts: its time is its weights' way through memory.

Two weights share a word, for words of 16 bits go into tensor cores as they lie. Of each 128 inputs word j has input j
in its low byte and input j + 64 in its high one, both plus 128. Inputs are filled up to a multiple of 128 with zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference

MOST_ROWS = 64  # more are bound by their products
WORDS = 64  # of a block


def pack_bytes(numbers_OI: Tensor) -> Tensor:
    """int8 numbers as words [O, W]."""
    padded = F.pad(numbers_OI.to(torch.int16) + 128, (0, -numbers_OI.shape[1] % (2 * WORDS)), value=128)
    low_OBW, high_OBW = padded.unflatten(1, (-1, 2, WORDS)).unbind(2)
    return (low_OBW | high_OBW << 8).flatten(1)


def unpack_bytes(words_OW: Tensor, inputs: int) -> Tensor:
    """The int8 numbers [O, inputs] of `pack_bytes`."""
    words_OBW = words_OW.unflatten(1, (-1, WORDS))
    both = torch.stack((words_OBW & 255, words_OBW >> 8 & 255), dim=2)
    return (both.flatten(1)[:, :inputs] - 128).to(torch.int8)


def int8_linear(x_RI: Tensor, words_OW: Tensor, scale_O: Tensor, *, backend: str = "auto") -> Tensor:
    """x (s w)^T, [R, O], of weights w in words and a float32 scale s of each of their rows, for up to `MOST_ROWS` rows.

    `backend` "auto" is Triton on CUDA where no gradient is recorded; that rounds inputs to float16.
    """
    if use_triton_for_inference(backend, x_RI.device):
        from peagle.kernels.int8_linear_triton import int8_linear_triton

        return int8_linear_triton(x_RI, words_OW, scale_O)
    wide = torch.promote_types(x_RI.dtype, torch.float32)
    return ((x_RI.to(wide) @ unpack_bytes(words_OW, x_RI.shape[1]).to(wide).T) * scale_O).to(x_RI.dtype)
