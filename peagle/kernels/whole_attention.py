"""Attention of whole prompts: rows see nothing but each other, and their keys and values are at hand, in one piece.

There torch's FlashAttention over ragged rows takes the place of tiles over the paged cache. It is called below
`torch.nn.attention.varlen`, whose arguments differ from torch 2.10 to 2.11 to 2.13; those of the operator are the same
since 2.9, and it takes fewer key heads than query heads. Nothing is compiled for a new length.
"""

import numpy as np
import torch
from torch import Tensor

from peagle.kernels.backend import cuda_generation

# Of the prompt that the mean row belongs to. Below, what the library gains is less than the launch it costs: keys are
# rotated in place and then written to the cache, not in one go. To be measured: benchmarks/prompt_attention.py.
LEAST_ROWS = 1024


def takes_whole(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has FlashAttention for heads of this size: it needs an Ampere GPU, or newer."""
    fits = head_dim % 8 == 0 and head_dim <= 256 and dtype in (torch.bfloat16, torch.float16)
    return fits and cuda_generation(device) >= 8 and torch.backends.cuda.is_flash_attention_available()


def prefers_whole(query_lens: np.ndarray, key_lens: np.ndarray) -> bool:
    """Whether the rows begin at position 0 in each request, and are enough."""
    return bool((query_lens == key_lens).all() and query_lens @ query_lens >= LEAST_ROWS * query_lens.sum())


def whole_attention(
    q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor, start_B1: Tensor, most_rows: int, window: int | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [R, N, D], over a row's own key and those before it in its request, or the last
    `window` of these. `start` int32 is each request's first row, and the total; none has more than `most_rows`."""
    return torch.ops.aten._flash_attention_forward(
        q_RND, k_RMD, v_RMD, start_B1, start_B1, most_rows, most_rows, 0.0, True, False, scale=q_RND.shape[2] ** -0.5,
        window_size_left=None if window is None else window - 1,
    )[0]  # fmt: skip
