"""Triton form of the drafter's inputs: a program per row and part of it copies an embedding and a feature."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draft_layout import DraftLayout
from peagle.kernels.draft_rows import MaskRow

_MAX_PART = 2048  # elements


@triton.jit
def _copy_row(
    embeds_RH: tl.tensor,
    features_RH: tl.tensor,
    ids_R: tl.tensor,
    source_rows_R: tl.tensor,
    is_masked_R: tl.tensor,
    features_TH: tl.tensor,
    table_VH: tl.tensor,
    mask_embed_H: tl.tensor,
    mask_feature_H: tl.tensor,
    HIDDEN: tl.constexpr,
    MASKED: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = h < HIDDEN
    source = tl.load(source_rows_R + row).to(tl.int64)
    token = tl.load(ids_R + row).to(tl.int64)
    # A dead row has no source: nothing is loaded, which leaves zeros.
    embed_from, feature_from, live = table_VH + token * HIDDEN, features_TH + source * HIDDEN, source >= 0
    if MASKED:
        masked = tl.load(is_masked_R + row)
        embed_from = tl.where(masked, mask_embed_H, embed_from)
        feature_from = tl.where(masked, mask_feature_H, feature_from)
        live = live | masked
    embed = tl.load(embed_from + h, mask=inside & live, other=0.0)
    feature = tl.load(feature_from + h, mask=inside & live, other=0.0)
    tl.store(embeds_RH + row * HIDDEN + h, embed, mask=inside)
    tl.store(features_RH + row * HIDDEN + h, feature, mask=inside)


def draft_rows_triton(
    layout: DraftLayout, features_TH: Tensor, table_VH: Tensor, mask: MaskRow | None
) -> tuple[Tensor, Tensor]:
    """The Triton form of `draft_rows`. All inputs are contiguous."""
    rows, hidden = len(layout.input_ids), table_VH.shape[1]
    embeds_RH, features_RH = (
        torch.empty((rows, hidden), dtype=table_VH.dtype, device=table_VH.device) for _ in range(2)
    )
    part = min(triton.next_power_of_2(hidden), _MAX_PART)
    with torch.cuda.device_of(table_VH):
        _copy_row[(rows, triton.cdiv(hidden, part))](
            embeds_RH, features_RH, layout.input_ids, layout.source_rows, layout.is_masked, features_TH, table_VH,
            table_VH if mask is None else mask.embed_H,  # not read without mask rows
            table_VH if mask is None else mask.feature_H,
            HIDDEN=hidden, MASKED=mask is not None, PART=part, num_warps=max(1, min(part // 256, 8)),
        )  # fmt: skip
    return embeds_RH, features_RH
