"""Linear layers of a few rows with what stands before and after them in a decoder layer, as one launch each.

With few rows a layer's time is its weights' way through memory, and in small models not even that: each launch of a
captured graph costs about as much as its work. So the norm, the gate and the residual sum move into the matmuls.

A row comes out the same however many others share the call: the order of its sums depends on the layer's width alone.
"""

import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.rms_norm import rms_norm_ref
from peagle.kernels.swiglu import silu_mul_ref

_ONE_TILE = 16  # rows that tensor cores multiply as one
_MOST_ROWS = 64
_SMALL_WEIGHT = 1 << 22  # elements, of a layer bound by launches
_LARGE_WEIGHT = 1 << 24  # from here on memory is what counts: left to cuBLAS


def prefers_fused(rows: int, weight_OI: Tensor) -> bool:
    """Whether the fused forms are taken to be faster than cuBLAS with kernels around it, for `rows` and this weight."""
    most = _LARGE_WEIGHT if rows <= _ONE_TILE else _SMALL_WEIGHT if rows <= _MOST_ROWS else 0
    return weight_OI.numel() <= most


def norm_linear(
    x_RH: Tensor,
    norm_H: Tensor,
    eps: float,
    weight_OH: Tensor,
    bias_O: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """RMSNorm(x) W^T + b, [R, O].

    The Triton form rounds x times the norm's weight once, where torch rounds x / rms(x) and then that product; 1 / rms
    is applied to the sums, in float32. In float16, whose range x may leave before it is normed, it does as torch does.

    `backend` "auto" is Triton on CUDA where no gradient is recorded and `prefers_fused` says so; "triton" takes any
    number of rows.
    """
    if _use_triton(backend, x_RH, weight_OH):
        # Imported late: triton is not installed everywhere.
        from peagle.kernels.fused_linear_triton import norm_linear_triton

        return norm_linear_triton(x_RH, norm_H, eps, weight_OH, bias_O)
    return norm_linear_ref(x_RH, norm_H, eps, weight_OH, bias_O)


def gated_norm_linear(
    x_RH: Tensor,
    norm_H: Tensor,
    eps: float,
    weight_GH: Tensor,
    bias_G: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """silu(gate) * up, [R, F], of gate and up side by side in `norm_linear`'s output, G = 2 F. `backend` as there."""
    if _use_triton(backend, x_RH, weight_GH):
        from peagle.kernels.fused_linear_triton import gated_norm_linear_triton

        return gated_norm_linear_triton(x_RH, norm_H, eps, weight_GH, bias_G)
    return gated_norm_linear_ref(x_RH, norm_H, eps, weight_GH, bias_G)


def linear_add(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor, *, backend: str = "auto"
) -> Tensor:
    """residual + (x W^T + b), [R, O], a new tensor: the residual may be a tap. `backend` as in `norm_linear`."""
    if _use_triton(backend, x_RI, weight_OI):
        from peagle.kernels.fused_linear_triton import linear_add_triton

        return linear_add_triton(x_RI, weight_OI, bias_O, residual_RO)
    return linear_add_ref(x_RI, weight_OI, bias_O, residual_RO)


def norm_linear_ref(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_OH: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """The torch form of `norm_linear`."""
    return F.linear(rms_norm_ref(x_RH, norm_H, eps), weight_OH, bias_O)


def gated_norm_linear_ref(
    x_RH: Tensor, norm_H: Tensor, eps: float, weight_GH: Tensor, bias_G: Tensor | None = None
) -> Tensor:
    """The torch form of `gated_norm_linear`."""
    return silu_mul_ref(norm_linear_ref(x_RH, norm_H, eps, weight_GH, bias_G))


def linear_add_ref(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, residual_RO: Tensor) -> Tensor:
    """The torch form of `linear_add`."""
    return residual_RO + F.linear(x_RI, weight_OI, bias_O)


def _use_triton(backend: str, x_RI: Tensor, weight_OI: Tensor) -> bool:
    if not use_triton_for_inference(backend, x_RI.device):
        return False
    return backend == "triton" or prefers_fused(x_RI.shape[0], weight_OI)
