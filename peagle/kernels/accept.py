"""Count the drafts that equal the target's own tokens."""

import torch
from torch import Tensor


def accept_ref(target_tokens_BV: Tensor, drafts_BK: Tensor) -> Tensor:
    """Length of the longest prefix of `drafts` [B, K] equal to the target's tokens [B, K+1]; int64 [B] in 0..K.

    Row j of the target is what it emits after draft j; a padding draft of -1 never matches.
    """
    matches_BK = target_tokens_BV[:, :-1] == drafts_BK
    return matches_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)
