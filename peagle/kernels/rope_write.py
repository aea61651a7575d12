"""Rotation of merged projections whose keys and values go straight into the paged cache."""

from torch import Tensor

from peagle.kernels.backend import use_triton_for_inference
from peagle.kernels.kv_write import kv_write_ref
from peagle.kernels.rope import HeadNorms, rope_qkv_ref


def rope_write(
    qkv_RA: Tensor,
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
    """`rope_qkv`, then `kv_write` of its keys and values: the rotated queries [R, N, D], and new slots in the caches.

    The Triton form works in place: the queries are a view of `qkv_RA`, the keys in there stay as they were.
    `backend` "auto" is Triton on CUDA where no gradient is recorded.
    """
    form = rope_write_ref
    if use_triton_for_inference(backend, qkv_RA.device):
        from peagle.kernels.rope_write_triton import rope_write_triton as form
    return form(qkv_RA, cos_R1D, sin_R1D, heads, key_cache_MSD, value_cache_MSD, slots_R, norms)


def rope_write_ref(
    qkv_RA: Tensor,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    heads: int,
    key_cache_MSD: Tensor,
    value_cache_MSD: Tensor,
    slots_R: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The torch form of `rope_write`; rows with slot -1 land in the caches' spare last slot."""
    q, k, v = rope_qkv_ref(qkv_RA, cos_R1D, sin_R1D, heads, key_cache_MSD.shape[0], norms)
    kv_write_ref(key_cache_MSD, slots_R, k)
    kv_write_ref(value_cache_MSD, slots_R, v)
    return q
