"""Triton form of the expansion to drafter rows: a program per row and part of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draft_layout import DraftLayout

_MAX_PART = 2048  # elements


@triton.jit(do_not_specialize_on_alignment=["rows_U"])
def _expand_row(
    out_UX: tl.tensor,
    x_TX: tl.tensor,
    mask_X: tl.tensor,
    source_rows_R: tl.tensor,
    is_masked_R: tl.tensor,
    rows_U: tl.tensor,
    x_stride: tl.int64,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    to = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = x < SIZE
    row = to
    if CHOSEN:
        row = tl.load(rows_U + to).to(tl.int64)
    source, masked = tl.load(source_rows_R + row).to(tl.int64), tl.load(is_masked_R + row)
    # A dead row has no source: nothing is loaded, which leaves zeros.
    value = tl.load(
        tl.where(masked, mask_X, x_TX + source * x_stride) + x, mask=inside & (masked | (source >= 0)), other=0.0
    )
    tl.store(out_UX + to * SIZE + x, value, mask=inside)


def expand_rows_triton(layout: DraftLayout, x_TX: Tensor, mask_X: Tensor, rows_U: Tensor | None = None) -> Tensor:
    """The Triton form of `expand_rows`. Rows of `x` may be strided, nothing else."""
    rows, size = len(layout.source_rows if rows_U is None else rows_U), x_TX.shape[1]
    out_UX = torch.empty((rows, size), dtype=x_TX.dtype, device=x_TX.device)
    part = min(triton.next_power_of_2(size), _MAX_PART)
    with torch.cuda.device_of(x_TX):
        _expand_row[(rows, triton.cdiv(size, part))](
            out_UX, x_TX, mask_X, layout.source_rows, layout.is_masked,
            layout.source_rows if rows_U is None else rows_U,  # not read without a choice
            x_TX.stride(0),
            SIZE=size, CHOSEN=rows_U is not None, PART=part, num_warps=max(1, min(part // 256, 8)),
        )  # fmt: skip
    return out_UX
