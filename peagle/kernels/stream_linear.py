"""Linear layers of a few rows, made to read their weights as fast as memory gives them.

With few rows a layer's time is its weights' way through memory, so all that counts is how many bytes are on their
way at any moment. A narrow layer has too few tiles for that; it is cut along its inputs as well, and the sums of the
cuts (`linear_parts`) are added by whoever reads them next, which is a norm that reads and adds anyway.

A row comes out the same however many others share the call: the order of its sums depends on the layer's sizes alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.swiglu import silu_mul_ref

# Where they are faster than cuBLAS on an H200, see docs/decisions.md.
_MOST_ROWS = 64
_LONG, _WIDE = 2048, 6144  # inputs of a layer that should be cut, outputs of one that need not be


def prefers_stream(x_RI: Tensor, weight_OI: Tensor, *, cut: bool) -> bool:
    """Whether these forms are taken to be faster than cuBLAS; `cut`: where the inputs may be cut."""
    outputs, inputs = weight_OI.shape
    suits = cut or inputs <= _LONG or outputs >= _WIDE
    return suits and x_RI.shape[0] <= _MOST_ROWS and x_RI.dtype != torch.float32


def stream_linear(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """x W^T + b, [R, O].

    `backend` "auto" is Triton on CUDA where no gradient is recorded and `prefers_stream` says so; "triton" and
    `INVARIANT` take any number of rows.
    """
    if _use_triton(backend, x_RI, weight_OI, cut=False):
        from peagle.kernels.stream_linear_triton import stream_linear_triton

        return stream_linear_triton(x_RI, weight_OI, bias_O)
    return F.linear(x_RI, weight_OI, bias_O)


def gated_stream_linear(
    x_RI: Tensor, weight_GI: Tensor, bias_G: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """silu(gate) * up, [R, F], of gate and up side by side in x W^T + b, G = 2 F. `backend` as in `stream_linear`."""
    if _use_triton(backend, x_RI, weight_GI, cut=False):
        from peagle.kernels.stream_linear_triton import gated_stream_linear_triton

        return gated_stream_linear_triton(x_RI, weight_GI, bias_G)
    return silu_mul_ref(F.linear(x_RI, weight_GI, bias_G))


def linear_parts(x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """S float32 parts whose sum, rounded to x's dtype, is x W^T + b: [S, R, O]. `backend` as in `stream_linear`."""
    if _use_triton(backend, x_RI, weight_OI, cut=True):
        from peagle.kernels.stream_linear_triton import linear_parts_triton

        return linear_parts_triton(x_RI, weight_OI, bias_O)
    return F.linear(x_RI, weight_OI, bias_O)[None].float()


def _use_triton(backend: str, x_RI: Tensor, weight_OI: Tensor, *, cut: bool) -> bool:
    if not use_triton_for_inference(backend, x_RI.device):
        return False
    return backend != "auto" or prefers_stream(x_RI, weight_OI, cut=cut)
