"""Linear layers for inference on the CPU, over weights that oneDNN packed once.

Two reasons, both measured on a 2-core Xeon (576 -> 49,152, float32): eight rows cost 5.8 ms instead of 14.3 ms, about
what one row costs, so that verifying drafts is nearly free; and a row's result does not depend on how many rows share
the call (for two rows or more), so that speculation changes no bit of the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Fewest rows of one of MKL's matmuls: with so many it rounds a row the same way however many share the call. On Intel's
# processors three would do, on AMD's four. It keeps a request's output independent of its batch and its drafts.
LEAST_MATMUL_ROWS_CPU = 4
_MIN_ROWS = 2  # oneDNN splits a single row's reduction between threads, which rounds differently


def can_pack(weight_OI: Tensor) -> bool:
    """Whether `pack_weight` is available for this weight on this machine."""
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_weight(weight_OI: Tensor) -> Tensor:
    """oneDNN's blocked layout of a weight [out, in]; only `packed_linear` can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI)


def packed_linear(x_RI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b for rows [R, in] and a packed weight, [R, out]."""
    rows = x_RI.shape[0]
    if rows < _MIN_ROWS:
        x_RI = F.pad(x_RI, (0, 0, 0, _MIN_ROWS - rows))
    return torch.ops.mkldnn._linear_pointwise(x_RI, packed_OI, bias_O, "none", [], "")[:rows]
