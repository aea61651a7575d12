"""The gate of a SwiGLU feed-forward layer, on the merged projection's output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference


def silu_mul(gate_up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up, [..., F], of gate and up side by side in [..., 2 F].

    `backend` "auto" is Triton on CUDA where no gradient is recorded: the Triton form has none.
    """
    form = silu_mul_ref
    if use_triton_for_inference(backend, gate_up.device):
        from peagle.kernels.swiglu_triton import silu_mul_triton as form
    return form(gate_up)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """The torch form of `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type == "cpu" and gate.dtype == torch.float32 and not gate.requires_grad:
        # silu has an exp of its own for what is left over of each thread's part, of which many rows have more than few.
        return gate / (-gate).exp_().add_(1) * up
    return F.silu(gate) * up
