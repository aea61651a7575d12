"""From a layer's input to its queries and cached keys and values: norm, projections, rotation and write, one launch.

For the small models and few rows that `fused_linear` is for, where a launch costs about as much as its work.
"""

from typing import NamedTuple

from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.fused_linear import LEAST_COLUMNS, norm_linear, prefers_fused
from peagle.kernels.rope import HeadNorms
from peagle.kernels.rope_write import rope_write


class NormedLinear(NamedTuple):
    """A linear layer and the RMSNorm in front of it."""

    norm_H: Tensor
    eps: float
    weight_OH: Tensor
    bias_O: Tensor | None


def norm_qkv_rope(
    x_RH: Tensor,
    qkv: NormedLinear,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    heads: int,
    key_cache_MSD: Tensor,
    value_cache_MSD: Tensor,
    slots_R: Tensor,
    norms: HeadNorms | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """`norm_linear`, then `rope_write` of its output: the rotated queries [R, N, D], and new slots in the caches.

    `backend` "auto" is one Triton kernel on CUDA where no gradient is recorded and `prefers_fused` says so, "triton"
    takes any number of rows. Layers that norm their heads, and heads of a size that is no multiple of 8, get the two
    operations one after the other, as "torch" does.
    """
    heads_fit = norms is None and cos_R1D.shape[-1] % LEAST_COLUMNS == 0  # a program's columns are all of one head
    few = backend == "triton" or prefers_fused(x_RH.shape[0], qkv.weight_OH)
    if heads_fit and few and use_triton_for_inference(backend, x_RH.device):
        from peagle.kernels.norm_qkv_rope_triton import norm_qkv_rope_triton

        return norm_qkv_rope_triton(x_RH, qkv, cos_R1D, sin_R1D, heads, key_cache_MSD, value_cache_MSD, slots_R)
    qkv_RA = norm_linear(x_RH, *qkv, backend=backend)
    return rope_write(qkv_RA, cos_R1D, sin_R1D, heads, key_cache_MSD, value_cache_MSD, slots_R, norms, backend=backend)
