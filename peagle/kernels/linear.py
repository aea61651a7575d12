"""Linear layers for inference on the CPU, over weights that oneDNN packed once.

Two reasons, both measured on a 2-core Xeon (576 -> 49,152, float32): eight rows cost 5.8 ms instead of 14.3 ms, about
what one row costs, so that verifying drafts is nearly free; and a row's result does not depend on how many rows share
the call (for two rows or more), so that speculation changes no bit of the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# MKL's matmuls get a multiple of so many rows, and sum up at most so many products where that number varies, as it does
# with the keys there are: then a row is rounded the same way whatever shares the call, and a request's output depends
# neither on its batch nor on its drafts. On AMD's processors the rows beyond a multiple of four are summed in another
# order, in some calls and with some numbers of threads, and more than 192 products in halves.
MATMUL_ROWS_CPU = 4
MATMUL_SUM_CPU = 128
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
