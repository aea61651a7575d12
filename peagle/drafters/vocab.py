"""Draft vocabularies: the part of the target's vocabulary a head may propose, and the maps between the two.

`draft_ids` [Vd] are target ids in ascending order; `d2t` holds offsets (target id = i + d2t[i], vLLM's convention).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.errors import PeagleError


def select_draft_ids(counts_V: Tensor, size: int, special_ids: Sequence[int] = ()) -> Tensor:
    """The `size` target ids to keep: every special id, then the most frequent ones; ascending int64 [size].

    `counts_V` counts each id among the supervised tokens of the training set. Equal counts prefer the lower id.
    """
    vocab, specials = counts_V.numel(), sorted(set(special_ids))
    if not max(1, len(specials)) <= size <= vocab:
        raise PeagleError(
            f"draft vocabulary of {size}: expected {max(1, len(specials))} (the special tokens) to {vocab} "
            "(the target's vocabulary); choose a size in that range"
        )
    if specials and (specials[0] < 0 or specials[-1] >= vocab):
        raise PeagleError(f"special ids {specials[0]}..{specials[-1]}: expected 0..{vocab - 1}; check the tokenizer")
    rank_V = counts_V.to(torch.int64, copy=True)
    rank_V[specials] = torch.iinfo(torch.int64).max  # first in any order
    kept = torch.sort(rank_V, descending=True, stable=True).indices[:size]
    return kept.sort().values


def offsets(draft_ids: Tensor) -> Tensor:
    """d2t, int64 [Vd]: what to add to a draft id to get its target id."""
    return draft_ids.to(torch.int64) - torch.arange(draft_ids.numel(), device=draft_ids.device)


def target_ids(d2t: Tensor) -> Tensor:
    """The inverse of `offsets`: the target id of every draft id, int64 [Vd]."""
    return d2t.to(torch.int64) + torch.arange(d2t.numel(), device=d2t.device)


def membership(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """t2d, bool [V]: which target ids the draft vocabulary holds."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[draft_ids.cpu()] = True
    return t2d
