"""The two inputs of the drafter's rows: the embedding of each row's token and the feature of the state it follows."""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.kernels.draft_layout import DraftLayout


class MaskRow(NamedTuple):
    """What every mask row of a P-EAGLE head consists of."""

    token_id: int
    embed_H: Tensor
    feature_H: Tensor


def draft_rows(
    layout: DraftLayout, features_TH: Tensor, table_VH: Tensor, mask: MaskRow | None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Embeddings and features, each [T', H], of the rows of a layout.

    A row takes its token's row of the embedding table and the target row of `features` that the layout names; mask
    rows take those of `mask`; dead rows are zero. All of one dtype. `mask` None: no row is masked. `backend` "auto" is
    Triton on CUDA.
    """
    form = draft_rows_ref
    if use_triton(backend, features_TH.device):
        from peagle.kernels.draft_rows_triton import draft_rows_triton as form
    return form(layout, features_TH, table_VH, mask)


def draft_rows_ref(
    layout: DraftLayout, features_TH: Tensor, table_VH: Tensor, mask: MaskRow | None
) -> tuple[Tensor, Tensor]:
    """The torch form of `draft_rows`."""
    dead_R1, masked_R1 = layout.is_rejected[:, None], layout.is_masked[:, None]
    if mask is None:
        embeds_RH, features_RH = table_VH[layout.input_ids], features_TH[layout.source_rows.clamp(min=0)]
    else:
        # The id of the mask token need not be one of the table's.
        embeds_RH = torch.where(masked_R1, mask.embed_H, table_VH[layout.input_ids.masked_fill(layout.is_masked, 0)])
        features_RH = torch.where(masked_R1, mask.feature_H, features_TH[layout.source_rows.clamp(min=0)])
    return embeds_RH.masked_fill(dead_R1, 0), features_RH.masked_fill(dead_R1, 0)
