"""The last kernel of a step: move each slot past what its request emitted, and pack what the host reads."""

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.kernels.verify_rows import SlotRows


def commit(
    slots: SlotRows,
    slot_B: Tensor,
    first_B: Tensor,
    kept_B: Tensor,
    next_token_B: Tensor,
    emitted_BV: Tensor,
    count_B: Tensor,
    drafts_BK: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Write the state of slots in place, as `verify_rows` reads it; what the host reads, int64 [B, V + 1].

    Row `kept` of a request is its last real one, at position `first` + `kept`; the next token follows it and becomes
    the slot's last, not computed yet. `drafts` [B, K], of which there may be none, replace the slot's first K. The
    result is emitted tokens, -1 after them, then the count of accepted drafts. No slot is given twice but -1, padding,
    which leaves the padding row at zero. All int64. `backend` "auto" is Triton on CUDA.
    """
    form = commit_ref
    if use_triton(backend, slot_B.device):
        from peagle.kernels.commit_triton import commit_triton as form
    return form(slots, slot_B, first_B, kept_B, next_token_B, emitted_BV, count_B, drafts_BK)


def commit_ref(
    slots: SlotRows,
    slot_B: Tensor,
    first_B: Tensor,
    kept_B: Tensor,
    next_token_B: Tensor,
    emitted_BV: Tensor,
    count_B: Tensor,
    drafts_BK: Tensor,
) -> Tensor:
    """The torch form of `commit`. Padding writes zeros to the padding row, so no shape depends on what is padding."""
    is_padding_B = slot_B < 0
    row_B = slot_B.where(slot_B >= 0, slots.last_token_S.shape[0] - 1)
    slots.last_token_S.index_copy_(0, row_B, next_token_B.masked_fill(is_padding_B, 0))
    slots.num_computed_S.index_copy_(0, row_B, (first_B + kept_B + 1).masked_fill(is_padding_B, 0))
    slots.drafts_SK[:, : drafts_BK.shape[1]].index_copy_(0, row_B, drafts_BK.masked_fill(is_padding_B[:, None], 0))
    return torch.cat((emitted_BV, count_B[:, None]), dim=1)
