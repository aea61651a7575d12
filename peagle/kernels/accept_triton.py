"""Triton form of acceptance: one program per request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.accept import Accepted


@triton.jit(
    do_not_specialize=["tokens_stride", "drafts_stride"],
    do_not_specialize_on_alignment=["tokens_BV", "drafts_BK", "slot_B"],
)
def _accept_request(
    count_B: tl.tensor,
    emitted_BV: tl.tensor,
    next_token_B: tl.tensor,
    tokens_BV: tl.tensor,
    drafts_BK: tl.tensor,
    slot_B: tl.tensor,
    tokens_stride: tl.int64,
    drafts_stride: tl.int64,
    DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two above DRAFTS
    PADDED: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    column_V = tl.arange(0, COLUMNS)
    is_draft_V = column_V < DRAFTS
    token_V = tl.load(tokens_BV + request * tokens_stride + column_V, mask=column_V <= DRAFTS, other=0).to(tl.int64)
    draft_V = tl.load(drafts_BK + request * drafts_stride + column_V, mask=is_draft_V, other=-1).to(tl.int64)
    # The first column that does not match; column K has no draft and ends every run.
    last = tl.min(tl.where(is_draft_V & (token_V == draft_V), COLUMNS, column_V), axis=0)
    if PADDED:
        last = tl.where(tl.load(slot_B + request) >= 0, last, -1)
    emitted_at = emitted_BV + request * (DRAFTS + 1) + column_V
    tl.store(count_B + request, tl.maximum(last, 0).to(tl.int64))
    tl.store(emitted_at, tl.where(column_V <= last, token_V, -1), mask=column_V <= DRAFTS)
    tl.store(next_token_B + request, tl.sum(tl.where(column_V == last, token_V, 0), axis=0))


def accept_triton(target_tokens_BV: Tensor, drafts_BK: Tensor, slot_B: Tensor | None = None) -> Accepted:
    """The Triton form of `accept`. Rows of tokens and of drafts are contiguous."""
    (batch, width), device = target_tokens_BV.shape, target_tokens_BV.device
    count_B, next_token_B = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    emitted_BV = torch.empty((batch, width), dtype=torch.int64, device=device)
    with torch.cuda.device_of(target_tokens_BV):
        _accept_request[(batch,)](
            count_B, emitted_BV, next_token_B, target_tokens_BV, drafts_BK,
            target_tokens_BV if slot_B is None else slot_B,  # not read without padding
            target_tokens_BV.stride(0), drafts_BK.stride(0),
            DRAFTS=width - 1, COLUMNS=triton.next_power_of_2(width), PADDED=slot_B is not None, num_warps=1,
        )  # fmt: skip
    return Accepted(count_B, emitted_BV, next_token_B)
