"""Small linear layers of a few rows with what stands before and after them in a decoder layer, as one launch each.

In small models each launch of a captured graph costs about as much as its work. So the norm, the gate and the residual
sum move into the matmuls. Larger layers are for `stream_linear`.

A row comes out the same however many others share the call: the order of its sums depends on the layer's width alone.
"""

import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.rms_norm import rms_norm_ref
from peagle.kernels.swiglu import silu_mul_ref

LEAST_COLUMNS = 8  # of a program of the Triton forms; tensor cores multiply no fewer
# Where they are faster than cuBLAS on an H200, see docs/decisions.md.
_MOST_ROWS = 16  # that tensor cores multiply as one
_LARGEST_WEIGHT = 1 << 22  # elements


def prefers_fused(rows: int, weight_OI: Tensor) -> bool:
    """Whether the fused forms are taken to be faster than others with kernels around them."""
    return rows <= _MOST_ROWS and weight_OI.numel() <= _LARGEST_WEIGHT


def norm_linear(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """RMSNorm(x) W^T + b, [R, O].

    The Triton form rounds x times the norm's weight once, where torch rounds x / rms(x) and then that product; 1 / rms
    is applied to the sums, in float32. In float16, whose range x may leave before it is normed, it does as torch does.

    `backend` "auto" is Triton on CUDA where no gradient is recorded and `prefers_fused` says so; "triton" takes any
    number of rows.
    """
    form = norm_linear_ref
    if _use_triton(backend, x_RH, weight_OH):
        from peagle.kernels.fused_linear_triton import norm_linear_triton as form
    return form(x_RH, norm_H, eps, weight_OH, bias_O)


def norm_gated_linear(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_GH: Tensor, bias_G: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """silu(gate) * up, [R, F], of gate and up side by side in RMSNorm(x) W^T + b, G = 2 F. Rounding and `backend` as in
    `norm_linear`."""
    form = norm_gated_linear_ref
    if _use_triton(backend, x_RH, weight_GH):
        from peagle.kernels.fused_linear_triton import norm_gated_linear_triton as form
    return form(x_RH, norm_H, eps, weight_GH, bias_G)


def linear_add(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor, *, backend: str = "auto"
) -> Tensor:
    """residual + (x W^T + b), [R, O], a new tensor: the residual may be a tap. `backend` as in `norm_linear`."""
    form = linear_add_ref
    if _use_triton(backend, x_RI, weight_OI):
        from peagle.kernels.fused_linear_triton import linear_add_triton as form
    return form(x_RI, weight_OI, bias_O, residual_RO)


def norm_linear_ref(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """The torch form of `norm_linear`."""
    return F.linear(rms_norm_ref(x_RH, norm_H, eps), weight_OH, bias_O)


def norm_gated_linear_ref(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_GH: Tensor, bias_G: Tensor | None = None
) -> Tensor:
    """The torch form of `norm_gated_linear`."""
    return silu_mul_ref(norm_linear_ref(x_RH, norm_H, eps, weight_GH, bias_G))


def linear_add_ref(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor) -> Tensor:
    """The torch form of `linear_add`."""
    return residual_RO + F.linear(x_RI, weight_OI, bias_O)


def _use_triton(backend: str, x_RI: Tensor, weight_OI: Tensor) -> bool:
    if not use_triton_for_inference(backend, x_RI.device):
        return False
    return backend == "triton" or prefers_fused(x_RI.shape[0], weight_OI)
