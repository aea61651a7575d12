"""Attention of a whole prompt: its rows see nothing but each other, and their keys and values are in one piece.

There cuDNN's attention takes the place of tiles over the paged cache, through torch's own function. It makes a plan for
each number of rows, which takes it 40 to 70 ms, so rows are filled up to a multiple of `PLAN_ROWS`. Of several prompts
in one pass it would need a call for each, and FlashAttention over ragged rows is slower than the tiles
(benchmarks/prompt_attention.py).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from peagle.kernels.backend import cuda_generation

LEAST_ROWS = 2048  # fewer gain less than its launches cost the host, measured at Qwen3-8B's sizes
PLAN_ROWS = 256
_BEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def takes_whole(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN has attention for heads of this size, on a GPU where it is fast: Hopper or newer."""
    fits = head_dim % 8 == 0 and head_dim <= 128 and dtype in (torch.bfloat16, torch.float16)
    return fits and cuda_generation(device) >= 9 and torch.backends.cudnn.is_available()


def prefers_whole(query_lens: np.ndarray, key_lens: np.ndarray) -> bool:
    """Whether the rows are one request's, begin at position 0, and are enough."""
    return len(query_lens) == 1 and bool(key_lens[0] == query_lens[0] >= LEAST_ROWS)


def whole_attention(q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, [R, N, D], over a row's own key and those before it."""
    parts = (q_RND, k_RMD, v_RMD)
    rows, heads = len(q_RND), [part.shape[1] for part in parts]
    # No row sees the zeros behind them, but 0 times the NaN that may be there is NaN.
    filled = q_RND.new_empty(_planned(rows), sum(heads), q_RND.shape[2])
    torch.cat(parts, dim=1, out=filled[:rows])
    filled[rows:] = 0
    q, k, v = (part.transpose(0, 1)[None] for part in filled.split(heads, dim=1))
    with sdpa_kernel(_BEST_FIRST, set_priority=True):
        out_1NRD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out_1NRD[0].transpose(0, 1)[:rows]


def plan_lengths(most_rows: int) -> range:
    """The numbers of rows that have a plan of their own, for prompts of up to `most_rows`."""
    return range(LEAST_ROWS, _planned(most_rows) + 1, PLAN_ROWS)


def _planned(rows: int) -> int:
    return -(-rows // PLAN_ROWS) * PLAN_ROWS
