"""A mixture of experts: each row goes through the few experts with the highest router logits (gpt-oss).

With few rows a pass takes as long as reading the experts that any of them chose; with thousands it is as many matmuls
as there are experts. The Triton form is the same five steps for both and asks the host for nothing, so that a CUDA
graph can replay it: rows are listed by expert, a launch each for gate and up and for down goes over tiles of these
lists, and what a row's experts said is added up in the order of their logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.linear import MATMUL_ROWS_CPU
from peagle.kernels.packed_experts import PackedMatrix, unpack


class ExpertWeights(NamedTuple):
    """Of E experts with F features; J = 2 F, columns of gate and up in turn. Matrices may be packed to four bits."""

    gate_up_EHJ: Tensor | PackedMatrix
    gate_up_bias_EJ: Tensor
    down_EFH: Tensor | PackedMatrix
    down_bias_EH: Tensor


def moe(
    x_RH: Tensor,
    logits_RE: Tensor,
    experts: ExpertWeights,
    *,
    top_k: int,
    alpha: float,
    limit: float,
    backend: str = "auto",
) -> Tensor:
    """sum_e p_e down_e((up + 1) * gate * sigmoid(alpha * gate)), [R, H], over the `top_k` highest logits of each row.

    p is the softmax over these, gate is cut off above `limit` and up beyond it on both sides. Of equal logits the
    expert with the lower number is preferred. `backend` "auto" is Triton on CUDA where no gradient is recorded: the
    Triton form has none. A row comes out the same whoever shares the call on the CPU; on a GPU as long as the mean
    expert has as many rows that tiles are equally high, else up to the rounding of the sums. Packed matrices give the
    products of unpacked ones; on a GPU they are added up in another order.
    """
    form = moe_ref
    if use_triton_for_inference(backend, x_RH.device):
        from peagle.kernels.moe_triton import moe_triton as form
    return form(x_RH, logits_RE, experts, top_k=top_k, alpha=alpha, limit=limit)


def moe_ref(
    x_RH: Tensor, logits_RE: Tensor, experts: ExpertWeights, *, top_k: int, alpha: float, limit: float
) -> Tensor:
    """The torch form of `moe`, one expert after another; waits for the device. Softmax, gate and sum in float32 or
    wider."""
    wide = torch.promote_types(x_RH.dtype, torch.float32)
    top_RE, order_RE = logits_RE.sort(dim=-1, descending=True, stable=True)
    chosen_RK, share_RK = order_RE[:, :top_k], top_RE[:, :top_k].to(wide).softmax(dim=-1)
    out_RH = torch.zeros_like(x_RH, dtype=wide)
    for expert in range(logits_RE.shape[1]):
        row_X, place_X = (chosen_RK == expert).nonzero(as_tuple=True)
        if not len(row_X):
            continue
        padding = -len(row_X) % MATMUL_ROWS_CPU if x_RH.device.type == "cpu" else 0
        x_XH = F.pad(x_RH[row_X], (0, 0, 0, padding))
        gate_up_XJ = x_XH @ _matrix(experts.gate_up_EHJ, expert, x_RH.dtype) + experts.gate_up_bias_EJ[expert]
        gate_XF, up_XF = gate_up_XJ.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        gate_XF, up_XF = gate_XF.clamp(max=limit), up_XF.clamp(-limit, limit)
        # Not by sigmoid: on a CPU its bits depend on how many rows there are, as in `silu_mul_ref`.
        gated_XF = ((up_XF + 1) * gate_XF / (-alpha * gate_XF).exp_().add_(1)).to(x_RH.dtype)
        said_XH = gated_XF @ _matrix(experts.down_EFH, expert, x_RH.dtype) + experts.down_bias_EH[expert]
        out_RH.index_add_(0, row_X, share_RK[row_X, place_X, None] * said_XH[: len(row_X)].to(wide))
    return out_RH.to(x_RH.dtype)


def _matrix(matrices_EIO: Tensor | PackedMatrix, expert: int, dtype: torch.dtype) -> Tensor:
    return unpack(matrices_EIO, expert, dtype) if isinstance(matrices_EIO, PackedMatrix) else matrices_EIO[expert]
