"""Triton form of the masks: a program takes a block of the vocabulary of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 2048


@triton.jit(do_not_specialize=["logits_stride"], do_not_specialize_on_alignment=["slot_B"])
def _apply_masks(
    out_UV: tl.tensor,
    logits_UV: tl.tensor,
    slot_B: tl.tensor,
    bits_SRW: tl.tensor,
    logits_stride: tl.int64,
    slot_words: tl.int64,
    row_words: tl.int32,
    vocab: tl.int32,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_B + row // ROWS).to(tl.int64)
    token_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_B = token_B < vocab
    logit_B = tl.load(logits_UV + row * logits_stride + token_B, mask=inside_B, other=0.0)
    word_B = bits_SRW + slot * slot_words + (row % ROWS) * row_words + token_B // 32
    bits_B = tl.load(word_B, mask=inside_B & (slot >= 0), other=-1)
    allowed_B = ((bits_B >> (token_B % 32)) & 1) != 0
    tl.store(out_UV + row * vocab + token_B, tl.where(allowed_B, logit_B, -float("inf")), mask=inside_B)


def apply_masks_triton(bits_SRW: Tensor, logits_UV: Tensor, slot_B: Tensor) -> Tensor:
    """The Triton form of `TokenMasks.apply`. Rows of logits are contiguous."""
    count, vocab = logits_UV.shape
    out_UV = torch.empty((count, vocab), dtype=logits_UV.dtype, device=logits_UV.device)
    if count == 0:
        return out_UV
    block = min(triton.next_power_of_2(vocab), _MAX_BLOCK)
    with torch.cuda.device_of(logits_UV):
        _apply_masks[(count, triton.cdiv(vocab, block))](
            out_UV, logits_UV, slot_B, bits_SRW,
            logits_UV.stride(0), bits_SRW.stride(0), bits_SRW.stride(1), vocab,
            ROWS=count // len(slot_B), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out_UV
