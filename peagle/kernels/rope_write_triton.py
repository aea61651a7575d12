"""Triton form of the rotation that writes into the cache: a program per row and part of its heads.

The same arithmetic as `rope_qkv`, then each head goes where it belongs: queries back, keys and values to their slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, wait_for_previous
from peagle.kernels.rope import HeadNorms
from peagle.kernels.rope_triton import rotate

_HEADS = 4  # of one program
_MOST_EARLY = 1 << 17  # elements: more programs would crowd where the layer before leaves room


@triton.jit(do_not_specialize_on_alignment=["slots_R"])
def _rotate_and_write(
    qkv_RA: tl.tensor,
    cos_RD: tl.tensor,
    sin_RD: tl.tensor,
    q_norm_D: tl.tensor,
    k_norm_D: tl.tensor,
    key_cache_MSD: tl.tensor,
    value_cache_MSD: tl.tensor,
    slots_R: tl.tensor,
    row_stride: tl.int64,
    cache_head_stride: tl.int64,
    eps: tl.float32,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_R + row).to(tl.int64)
    inside_D = (d < HALF)[None]
    wait_for_previous(EARLY)
    first = qkv_RA + row * row_stride + head_N[:, None] * 2 * HALF + d[None]
    inside_ND = (head_N < QUERY_HEADS + 2 * KV_HEADS)[:, None] & inside_D
    low, high = (tl.load(first, mask=inside_ND, other=0.0), tl.load(first + HALF, mask=inside_ND, other=0.0))
    table = row * 2 * HALF
    new_low, new_high = rotate(
        low.to(tl.float32), high.to(tl.float32), head_N < QUERY_HEADS, cos_RD + table, sin_RD + table, q_norm_D,
        k_norm_D, eps, qkv_RA.dtype.element_ty, HALF, BLOCK, NORM,
    )  # fmt: skip
    is_query_ND = (head_N < QUERY_HEADS)[:, None] & inside_D
    tl.store(first, new_low, mask=is_query_ND)
    tl.store(first + HALF, new_high, mask=is_query_ND)
    key_N, value_N = head_N - QUERY_HEADS, head_N - QUERY_HEADS - KV_HEADS
    is_key_ND = ((key_N >= 0) & (key_N < KV_HEADS) & (slot >= 0))[:, None] & inside_D
    is_value_ND = ((value_N >= 0) & (value_N < KV_HEADS) & (slot >= 0))[:, None] & inside_D
    in_slot = slot * 2 * HALF + d[None]
    key = key_cache_MSD + key_N.to(tl.int64)[:, None] * cache_head_stride + in_slot
    value = value_cache_MSD + value_N.to(tl.int64)[:, None] * cache_head_stride + in_slot
    cache_dtype = key_cache_MSD.dtype.element_ty
    tl.store(key, new_low.to(cache_dtype), mask=is_key_ND)
    tl.store(key + HALF, new_high.to(cache_dtype), mask=is_key_ND)
    tl.store(value, low.to(cache_dtype), mask=is_value_ND)
    tl.store(value + HALF, high.to(cache_dtype), mask=is_value_ND)


def rope_write_triton(
    qkv_RA: Tensor,
    cos_R1D: Tensor,
    sin_R1D: Tensor,
    heads: int,
    key_cache_MSD: Tensor,
    value_cache_MSD: Tensor,
    slots_R: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The Triton form of `rope_write`. Tables are dense; rows may be strided, their elements not."""
    rows, head_dim, kv_heads = qkv_RA.shape[0], cos_R1D.shape[-1], key_cache_MSD.shape[0]
    weights = (cos_R1D, cos_R1D) if norms is None else (norms.q_D, norms.k_D)  # not read without norms
    early = launches_early(qkv_RA.device) and qkv_RA.numel() <= _MOST_EARLY
    if rows:
        with torch.cuda.device_of(qkv_RA):
            _rotate_and_write[(rows, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
                qkv_RA, cos_R1D, sin_R1D, *weights, key_cache_MSD, value_cache_MSD, slots_R, qkv_RA.stride(0),
                key_cache_MSD.stride(0), norms.eps if norms else 0.0,
                QUERY_HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, HEADS=_HEADS,
                BLOCK=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, EARLY=early, num_warps=2,
                **early_launch(early), enable_fp_fusion=False,  # torch rounds each product before the sum
            )  # fmt: skip
    return qkv_RA[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
