"""Count the drafts that equal the target's own tokens, and say what each request emits."""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton


class Accepted(NamedTuple):
    """What verification decides, int64."""

    count_B: Tensor  # drafts kept, 0..K
    emitted_BV: Tensor  # the first count + 1 tokens of the target; -1 after them
    next_token_B: Tensor  # the last token emitted


def accept(
    target_tokens_BV: Tensor, drafts_BK: Tensor, slot_B: Tensor | None = None, *, backend: str = "auto"
) -> Accepted:
    """Keep the longest prefix of `drafts` [B, K] that equals the target's tokens [B, K+1]; K may be 0.

    Row j of the target is what it emits after draft j; a padding draft of -1 never matches. Requests whose `slot` is
    -1 are padding: they keep and emit nothing, and their next token is 0. `backend` "auto" is Triton on CUDA.
    """
    if not use_triton(backend, drafts_BK.device):
        return emit_ref(target_tokens_BV, accept_ref(target_tokens_BV, drafts_BK), slot_B)
    from peagle.kernels.accept_triton import accept_triton

    return accept_triton(target_tokens_BV, drafts_BK, slot_B)


def accept_ref(target_tokens_BV: Tensor, drafts_BK: Tensor) -> Tensor:
    """How many drafts `accept` keeps of each request, padding aside; int64 [B]."""
    matches_BK = target_tokens_BV[:, :-1] == drafts_BK
    return matches_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)


def emit_ref(target_tokens_BV: Tensor, count_B: Tensor, slot_B: Tensor | None = None) -> Accepted:
    """What requests emit that keep `count` drafts. The torch form of `accept` after counting."""
    last_B = count_B if slot_B is None else torch.where(slot_B >= 0, count_B, -1)
    column_V = torch.arange(target_tokens_BV.shape[1], device=count_B.device)
    emitted_BV = target_tokens_BV.masked_fill(column_V > last_B[:, None], -1)
    next_token_B = target_tokens_BV.gather(1, last_B.clamp(min=0)[:, None])[:, 0].masked_fill(last_B < 0, 0)
    return Accepted(last_B.clamp(min=0), emitted_BV, next_token_B)
