"""From what was computed once per target row to the rows of a drafter layout, whose mask rows all share one value."""

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.kernels.draft_layout import DraftLayout


def expand_rows(
    layout: DraftLayout, x_TX: Tensor, mask_X: Tensor, rows_U: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """The layout's rows, all [T', X] or those that `rows_U` names [U, X].

    A row takes the row of `x` of its target row, a mask row takes `mask`, a dead row is zero. `backend` "auto" is
    Triton on CUDA.
    """
    form = expand_rows_ref
    if use_triton(backend, x_TX.device):
        from peagle.kernels.expand_rows_triton import expand_rows_triton as form
    return form(layout, x_TX, mask_X, rows_U)


def expand_rows_ref(layout: DraftLayout, x_TX: Tensor, mask_X: Tensor, rows_U: Tensor | None = None) -> Tensor:
    """The torch form of `expand_rows`."""
    source_R, is_masked_R = layout.source_rows, layout.is_masked
    if rows_U is not None:
        source_R, is_masked_R = source_R[rows_U], is_masked_R[rows_U]
    is_dead_R = (source_R < 0) & ~is_masked_R
    rows_RX = torch.where(is_masked_R[:, None], mask_X, x_TX[source_R.clamp(min=0)])
    return rows_RX.masked_fill(is_dead_R[:, None], 0)
