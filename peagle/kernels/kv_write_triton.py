"""Triton form of the KV write: a program per row and part of its heads, keys and values together."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_PART = 1024  # elements of a row's keys a program moves; as many of its values


@triton.jit(do_not_specialize_on_alignment=["slots_R"])
def _write_row(
    key_cache_MSD: tl.tensor,
    value_cache_MSD: tl.tensor,
    slots_R: tl.tensor,
    keys_RMD: tl.tensor,
    values_RMD: tl.tensor,
    cache_head_stride: tl.int64,
    key_row_stride: tl.int64,
    key_head_stride: tl.int64,
    value_row_stride: tl.int64,
    value_head_stride: tl.int64,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_R + row).to(tl.int64)
    if slot >= 0:
        element = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = element < KV_HEADS * HEAD_DIM
        head, d = (element // HEAD_DIM).to(tl.int64), element % HEAD_DIM
        keys = tl.load(keys_RMD + row * key_row_stride + head * key_head_stride + d, mask=inside)
        values = tl.load(values_RMD + row * value_row_stride + head * value_head_stride + d, mask=inside)
        to = head * cache_head_stride + slot * HEAD_DIM + d
        tl.store(key_cache_MSD + to, keys.to(key_cache_MSD.dtype.element_ty), mask=inside)
        tl.store(value_cache_MSD + to, values.to(value_cache_MSD.dtype.element_ty), mask=inside)


def kv_write_triton(
    key_cache_MSD: Tensor, value_cache_MSD: Tensor, slots_R: Tensor, keys_RMD: Tensor, values_RMD: Tensor
) -> None:
    """The Triton form of `kv_write`. Both caches have the same shape, each kv head of them contiguous."""
    rows, kv_heads, head_dim = keys_RMD.shape
    keys_RMD, values_RMD = (x if x.stride(2) == 1 else x.contiguous() for x in (keys_RMD, values_RMD))
    part = min(triton.next_power_of_2(kv_heads * head_dim), _MAX_PART)
    with torch.cuda.device_of(key_cache_MSD):
        _write_row[(rows, triton.cdiv(kv_heads * head_dim, part))](
            key_cache_MSD, value_cache_MSD, slots_R, keys_RMD, values_RMD, key_cache_MSD.stride(0), keys_RMD.stride(0),
            keys_RMD.stride(1), values_RMD.stride(0), values_RMD.stride(1),
            KV_HEADS=kv_heads, HEAD_DIM=head_dim, PART=part, num_warps=max(1, part // 256),
        )  # fmt: skip
