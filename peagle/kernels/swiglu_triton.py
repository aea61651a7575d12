"""Triton form of the SwiGLU gate; silu is rounded before the product, as in the torch form."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up in float32, silu rounded to `dtype`."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32) * up


@triton.jit
def _silu_mul(out_RF: tl.tensor, gate_up_RF: tl.tensor, row_stride: tl.int64, SIZE: tl.constexpr,
              BLOCK: tl.constexpr) -> None:  # fmt: skip
    row, f = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = f < SIZE
    dtype: tl.constexpr = out_RF.dtype.element_ty
    gate = tl.load(gate_up_RF + row * row_stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_RF + row * row_stride + SIZE + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_RF + row * SIZE + f, silu_times(gate, up, dtype).to(dtype), mask=inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """The Triton form of `silu_mul`; the output is dense."""
    rows_RF, size = gate_up.reshape(-1, gate_up.shape[-1]), gate_up.shape[-1] // 2
    rows_RF = rows_RF if rows_RF.stride(1) == 1 else rows_RF.contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(size), _BLOCK)
    with torch.cuda.device_of(gate_up):
        _silu_mul[(triton.cdiv(size, block), rows_RF.shape[0])](
            out, rows_RF, rows_RF.stride(0), SIZE=size, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out
