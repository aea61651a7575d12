"""Triton form of a step's last kernel: one program per request."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.verify_rows import SlotRows


@triton.jit(
    do_not_specialize=["state_stride", "drafts_stride"],
    do_not_specialize_on_alignment=[
        "slot_B", "first_B", "kept_B", "next_token_B", "emitted_BV", "count_B", "drafts_BK",
    ],
)  # fmt: skip
def _commit_request(
    out_BW: tl.tensor,
    last_token_S: tl.tensor,
    num_computed_S: tl.tensor,
    drafts_SK: tl.tensor,
    slot_B: tl.tensor,
    first_B: tl.tensor,
    kept_B: tl.tensor,
    next_token_B: tl.tensor,
    emitted_BV: tl.tensor,
    count_B: tl.tensor,
    drafts_BK: tl.tensor,
    state_stride: tl.int64,
    drafts_stride: tl.int64,
    EMITTED: tl.constexpr,
    DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, no less than either
) -> None:
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    out = out_BW + request * (EMITTED + 1)
    token_V = tl.load(emitted_BV + request * EMITTED + column, mask=column < EMITTED, other=0)
    tl.store(out + column, token_V, mask=column < EMITTED)
    tl.store(out + EMITTED, tl.load(count_B + request))
    slot = tl.load(slot_B + request)
    if slot >= 0:
        tl.store(last_token_S + slot, tl.load(next_token_B + request))
        tl.store(num_computed_S + slot, tl.load(first_B + request) + tl.load(kept_B + request) + 1)
        draft_K = tl.load(drafts_BK + request * drafts_stride + column, mask=column < DRAFTS, other=0)
        tl.store(drafts_SK + slot * state_stride + column, draft_K, mask=column < DRAFTS)


def commit_triton(
    slots: SlotRows,
    slot_B: Tensor,
    first_B: Tensor,
    kept_B: Tensor,
    next_token_B: Tensor,
    emitted_BV: Tensor,
    count_B: Tensor,
    drafts_BK: Tensor,
) -> Tensor:
    """The Triton form of `commit`. Emitted tokens are contiguous; elements of a row of drafts are adjacent."""
    (batch, emitted), drafts = emitted_BV.shape, drafts_BK.shape[1]
    out_BW = torch.empty((batch, emitted + 1), dtype=torch.int64, device=slot_B.device)
    with torch.cuda.device_of(slot_B):
        _commit_request[(batch,)](
            out_BW, *slots[:3], slot_B, first_B, kept_B, next_token_B, emitted_BV, count_B, drafts_BK,
            slots.drafts_SK.stride(0), drafts_BK.stride(0),
            EMITTED=emitted, DRAFTS=drafts, COLUMNS=triton.next_power_of_2(max(emitted, drafts)), num_warps=1,
        )  # fmt: skip
    return out_BW
