"""Triton form of the penalties: a program takes a block of the vocabulary of one row and keeps its counts in registers.

Rows whose request has neither penalties nor bias are copied without a look at the tables.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from peagle.kernels.penalties import TokenHistory

_MAX_BLOCK = 2048


@triton.jit(
    do_not_specialize=["logits_stride", "drafts_stride"],
    do_not_specialize_on_alignment=["slot_B", "drafts_BK"],
)
def _penalise(
    out_UV: tl.tensor,
    logits_UV: tl.tensor,
    slot_B: tl.tensor,
    drafts_BK: tl.tensor,
    factors_S4: tl.tensor,
    prompt_SV: tl.tensor,
    counts_SV: tl.tensor,
    bias_SV: tl.tensor,
    logits_stride: tl.int64,
    drafts_stride: tl.int64,
    vocab: tl.int32,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    request, place = row // (DRAFTS + 1), row % (DRAFTS + 1)
    token_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = token_B < vocab
    logit_B = tl.load(logits_UV + row * logits_stride + token_B, mask=inside_B, other=0.0).to(tl.float32)
    slot = tl.load(slot_B + request).to(tl.int64)
    factors_4, own = factors_S4 + slot * 4, slot >= 0
    repetition = tl.load(factors_4, mask=own, other=1.0)
    frequency = tl.load(factors_4 + 1, mask=own, other=0.0)
    presence = tl.load(factors_4 + 2, mask=own, other=0.0)
    if tl.load(factors_4 + 3, mask=own, other=0.0) != 0.0:
        bias_B = tl.load(bias_SV + slot * vocab + token_B, mask=inside_B, other=0.0)
        logit_B = tl.where(bias_B != 0.0, logit_B + bias_B, logit_B)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        count_B = tl.load(counts_SV + slot * vocab + token_B, mask=inside_B, other=0)
        for i in tl.static_range(DRAFTS):
            draft = tl.load(drafts_BK + request * drafts_stride + i)
            count_B += ((token_B == draft) & (i < place)).to(tl.int32)
        in_prompt_B = tl.load(prompt_SV + slot * vocab + token_B, mask=inside_B, other=0) != 0
        repeated_B = tl.where(logit_B > 0.0, tl.div_rn(logit_B, repetition), logit_B * repetition)
        logit_B = tl.where(in_prompt_B | (count_B > 0), repeated_B, logit_B)
        logit_B = logit_B - frequency * count_B.to(tl.float32) - presence * (count_B > 0).to(tl.float32)
    tl.store(out_UV + row * vocab + token_B, logit_B, mask=inside_B)


def penalise_triton(history: "TokenHistory", logits_UV: Tensor, slot_B: Tensor, drafts_BK: Tensor) -> Tensor:
    """The Triton form of `TokenHistory.apply`. Rows of logits and of drafts are contiguous."""
    count, vocab = logits_UV.shape
    out_UV = torch.empty((count, vocab), dtype=torch.float32, device=logits_UV.device)
    if count == 0:
        return out_UV
    block = min(triton.next_power_of_2(vocab), _MAX_BLOCK)
    with torch.cuda.device_of(logits_UV):
        _penalise[(count, triton.cdiv(vocab, block))](
            out_UV, logits_UV, slot_B, drafts_BK,
            history.factors_S4, history.prompt_SV.view(torch.uint8), history.counts_SV, history.bias_SV,
            logits_UV.stride(0), drafts_BK.stride(0), vocab,
            DRAFTS=drafts_BK.shape[1], BLOCK=block, num_warps=4,
            enable_fp_fusion=False,  # the product is rounded before it is subtracted, as in torch
        )  # fmt: skip
    return out_UV
