"""Rotary embedding: its tables, and the rotation of the query and key heads of merged projections.

Targets that norm each query and key head (Qwen3) do so in the same pass, before the rotation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.rms_norm import rms_norm_ref


class HeadNorms(NamedTuple):
    """RMSNorm of each query and each key head: weights [D]."""

    q_D: Tensor
    k_D: Tensor
    eps: float


def rope_tables(
    positions_R: Tensor, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """cos and sin times `scale`, each [R, 1, D] in `dtype`, computed in float32; the first half of sin is negated for
    `apply_rope`.

    `inv_freq` [D/2] is float32. `backend` "auto" is Triton on CUDA where no gradient is recorded.
    """
    form = rope_tables_ref
    if use_triton_for_inference(backend, positions_R.device):
        from peagle.kernels.rope_triton import rope_tables_triton as form
    return form(positions_R, inv_freq, dtype, scale)


def rope_qkv(
    qkv_RA: Tensor,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut rows [q heads | k heads | v heads] into q [R, N, D], k and v [R, M, D]; norm and rotate q and k.

    The Triton form works in place: it changes `qkv_RA`, and its outputs are views of it. `backend` as in `rope_tables`.
    """
    form = rope_qkv_ref
    if use_triton_for_inference(backend, qkv_RA.device):
        from peagle.kernels.rope_triton import rope_qkv_triton as form
    return form(qkv_RA, cos_R1D, sin_R1D, heads, kv_heads, norms)


def apply_rope(x_RND: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2), the Hugging Face layout."""
    return x_RND * cos_R1D + x_RND.roll(x_RND.shape[-1] // 2, dims=-1) * sin_R1D


def rope_tables_ref(
    positions_R: Tensor, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The torch form of `rope_tables`."""
    angles = torch.outer(positions_R.float(), inv_freq)
    cos_RD, sin_RD = scale * angles.cos().repeat(1, 2), scale * angles.sin()
    return cos_RD[:, None].to(dtype), torch.cat((-sin_RD, sin_RD), dim=-1)[:, None].to(dtype)


def rope_qkv_ref(
    qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, heads: int, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The torch form of `rope_qkv`; differentiable, and not in place."""
    qkv = qkv_RA.unflatten(-1, (heads + 2 * kv_heads, -1))
    rotated, v = qkv.split((heads + kv_heads, kv_heads), dim=-2)
    if norms is not None:
        q, k = rotated.split((heads, kv_heads), dim=-2)
        rotated = torch.cat((rms_norm_ref(q, norms.q_D, norms.eps), rms_norm_ref(k, norms.k_D, norms.eps)), dim=-2)
    q, k = apply_rope(rotated, cos_R1D, sin_R1D).split((heads, kv_heads), dim=-2)
    return q, k, v
