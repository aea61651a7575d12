"""RMSNorm, alone or of a residual stream that another part is added to first."""

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """w * x / rms(x) over the last dimension, [..., H]; the mean square in float32.

    `backend` "auto" is Triton on CUDA where no gradient is recorded: the Triton form has none.
    """
    form = rms_norm_ref
    if use_triton_for_inference(backend, x.device):
        from peagle.kernels.rms_norm_triton import rms_norm_triton as form
    return form(x, weight_H, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_H: Tensor, eps: float, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The new residual stream, residual + x, and its RMSNorm, both [..., H]. `backend` as in `rms_norm`.

    x may come as float32 parts [S, ..., H]: it is their sum, rounded to the residual's dtype.
    """
    form = add_rms_norm_ref
    if use_triton_for_inference(backend, x.device):
        from peagle.kernels.rms_norm_triton import add_rms_norm_triton as form
    return form(x, residual, weight_H, eps)


def rms_norm_ref(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The torch form of `rms_norm`."""
    xf = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return weight_H * normed.to(x.dtype)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The torch form of `add_rms_norm`."""
    if x.ndim > residual.ndim:
        x = x.sum(dim=0).to(residual.dtype)
    total = residual + x
    return total, rms_norm_ref(total, weight_H, eps)
