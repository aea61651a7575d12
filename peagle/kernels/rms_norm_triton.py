"""Triton form of RMSNorm: one program per row, which is read once.

It rounds where the torch form rounds: the sum of a residual before its norm, the normed row before the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, let_next_start, wait_for_previous
from peagle.kernels.stream_ring import MOST_ROWS


@triton.jit
def _norm_row(
    out_RH: tl.tensor,
    sum_RH: tl.tensor,
    x_RH: tl.tensor,
    residual_RH: tl.tensor,
    weight_H: tl.tensor,
    x_row_stride: tl.int64,
    residual_row_stride: tl.int64,
    part_stride: tl.int64,
    eps: tl.float32,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    let_next_start(EARLY)
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = out_RH.dtype.element_ty
    weight = tl.load(weight_H + h, mask=h < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    x = tl.load(x_RH + row * x_row_stride + h, mask=h < SIZE, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_RH + part * part_stride + row * x_row_stride + h, mask=h < SIZE, other=0.0)
    x = x.to(dtype).to(tl.float32)
    if ADD:
        residual = tl.load(residual_RH + row * residual_row_stride + h, mask=h < SIZE, other=0.0).to(tl.float32)
        total = (residual + x).to(dtype)
        tl.store(sum_RH + row * SIZE + h, total, mask=h < SIZE)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_RH + row * SIZE + h, (weight * normed.to(dtype).to(tl.float32)).to(dtype), mask=h < SIZE)


def rms_norm_triton(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The Triton form of `rms_norm`. Rows may be strided; the output is dense."""
    rows_RH, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, out, rows_RH[None], rows_RH, weight_H, eps, add=False)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The Triton form of `add_rms_norm`; both outputs are dense."""
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    parts_SRH = x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > residual.ndim else _rows(x)[None]
    _launch(out, total, parts_SRH, _rows(residual), weight_H, eps, add=True)
    return total, out


def _rows(x: Tensor) -> Tensor:
    rows_RH = x.reshape(-1, x.shape[-1])
    return rows_RH if rows_RH.stride(1) == 1 else rows_RH.contiguous()


def _launch(
    out: Tensor, total: Tensor, x_SRH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float, *, add: bool
) -> None:
    parts, rows, size = x_SRH.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    early = rows <= MOST_ROWS and launches_early(x_SRH.device)  # of more, it gains nothing
    with torch.cuda.device_of(x_SRH):
        _norm_row[(rows,)](
            out, total, x_SRH, residual_RH, weight_H, x_SRH.stride(1), residual_RH.stride(0), x_SRH.stride(0), eps,
            SIZE=size, BLOCK=block, ADD=add, PARTS=parts, EARLY=early, **early_launch(early),
            num_warps=16 if block >= 4096 else max(block // 512, 1),
            enable_fp_fusion=False,  # torch rounds each product before the sum
        )  # fmt: skip
