"""Triton forms of the rotary embedding: tables in one launch, and norm and rotation of all heads in one launch.

They round where the torch forms round: each product of the rotation before the sum, the normed head before its weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.rope import HeadNorms

_HEADS = 8  # of one program


@triton.jit
def _fill_tables(cos_RD: tl.tensor, sin_RD: tl.tensor, positions_R: tl.tensor, inv_freq: tl.tensor,
                 scale: tl.float32, HALF: tl.constexpr, BLOCK: tl.constexpr) -> None:  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = d < HALF
    dtype = cos_RD.dtype.element_ty
    angle = tl.load(positions_R + row).to(tl.float32) * tl.load(inv_freq + d, mask=inside, other=0.0)
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    at = row * 2 * HALF + d
    tl.store(cos_RD + at, cos.to(dtype), mask=inside)
    tl.store(cos_RD + at + HALF, cos.to(dtype), mask=inside)
    tl.store(sin_RD + at, (-sin).to(dtype), mask=inside)
    tl.store(sin_RD + at + HALF, sin.to(dtype), mask=inside)


@triton.jit
def turn(low: tl.tensor, high: tl.tensor, cos: tl.tensor, sin: tl.tensor, dtype: tl.constexpr
         ) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Pairs rotated, all in float32; each product is rounded before the sum."""
    new_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    new_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return new_low.to(dtype), new_high.to(dtype)


@triton.jit
def rotate(low: tl.tensor, high: tl.tensor, is_query_N: tl.tensor, cos_D: tl.tensor, sin_D: tl.tensor,
           q_norm_D: tl.tensor, k_norm_D: tl.tensor, eps: tl.float32, dtype: tl.constexpr, HALF: tl.constexpr,
           BLOCK: tl.constexpr, NORM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Heads' halves [N, D/2] in float32, normed and rotated; `cos_D` and `sin_D` are one row's tables."""
    d = tl.arange(0, BLOCK)
    inside_D = d < HALF
    if NORM:
        is_query_N1 = is_query_N[:, None]
        scale_N1 = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)[:, None]
        q_low = tl.load(q_norm_D + d, mask=inside_D, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_D + d, mask=inside_D, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_D + HALF + d, mask=inside_D, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_D + HALF + d, mask=inside_D, other=0.0).to(tl.float32)
        low_weight = tl.where(is_query_N1, q_low[None], k_low[None])
        high_weight = tl.where(is_query_N1, q_high[None], k_high[None])
        low = (low_weight * (low * scale_N1).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        high = (high_weight * (high * scale_N1).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cos = tl.load(cos_D + d, mask=inside_D, other=0.0).to(tl.float32)[None]
    sin = tl.load(sin_D + HALF + d, mask=inside_D, other=0.0).to(tl.float32)[None]
    return turn(low, high, cos, sin, dtype)


@triton.jit
def _rotate_heads(
    qkv_RA: tl.tensor,
    cos_RD: tl.tensor,
    sin_RD: tl.tensor,
    q_norm_D: tl.tensor,
    k_norm_D: tl.tensor,
    row_stride: tl.int64,
    eps: tl.float32,
    QUERY_HEADS: tl.constexpr,
    ROTATED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head_N = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside_ND = (head_N < ROTATED_HEADS)[:, None] & (d < HALF)[None]
    first = qkv_RA + row * row_stride + head_N[:, None] * 2 * HALF + d[None]
    low = tl.load(first, mask=inside_ND, other=0.0).to(tl.float32)
    high = tl.load(first + HALF, mask=inside_ND, other=0.0).to(tl.float32)
    table = row * 2 * HALF
    low, high = rotate(low, high, head_N < QUERY_HEADS, cos_RD + table, sin_RD + table, q_norm_D, k_norm_D, eps,
                       qkv_RA.dtype.element_ty, HALF, BLOCK, NORM)  # fmt: skip
    tl.store(first, low, mask=inside_ND)
    tl.store(first + HALF, high, mask=inside_ND)


def rope_tables_triton(
    positions_R: Tensor, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The Triton form of `rope_tables`."""
    rows, half, device = positions_R.shape[0], inv_freq.shape[0], positions_R.device
    cos_R1D, sin_R1D = (torch.empty((rows, 1, 2 * half), dtype=dtype, device=device) for _ in range(2))
    if rows:
        with torch.cuda.device_of(positions_R):
            _fill_tables[(rows,)](
                cos_R1D, sin_R1D, positions_R.contiguous(), inv_freq, scale, HALF=half,
                BLOCK=triton.next_power_of_2(half), num_warps=1,
            )  # fmt: skip
    return cos_R1D, sin_R1D


def rope_qkv_triton(
    qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, heads: int, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton form of `rope_qkv`, in place. Tables are dense; rows may be strided, their elements not."""
    rows, head_dim = qkv_RA.shape[0], cos_R1D.shape[-1]
    rotated = heads + kv_heads
    if rows:
        block_heads = min(triton.next_power_of_2(rotated), _HEADS)
        weights = (cos_R1D, cos_R1D) if norms is None else (norms.q_D, norms.k_D)  # not read without norms
        with torch.cuda.device_of(qkv_RA):
            _rotate_heads[(rows, triton.cdiv(rotated, block_heads))](
                qkv_RA, cos_R1D, sin_R1D, *weights, qkv_RA.stride(0), norms.eps if norms else 0.0,
                QUERY_HEADS=heads, ROTATED_HEADS=rotated, HALF=head_dim // 2, HEADS=block_heads,
                BLOCK=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, num_warps=2,
                enable_fp_fusion=False,  # torch rounds each product before the sum
            )  # fmt: skip
    q, k, v = qkv_RA.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=-2)
    return q, k, v
