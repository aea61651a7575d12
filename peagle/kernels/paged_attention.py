"""Attention of new rows over a paged KV cache: causal by position, grouped-query, ragged over requests.

The torch form gathers each request's keys into a rectangle. Requests of similar size share one rectangle, so a step is
a few batched matmuls a layer whatever the mix of prefill and decode. A request's row r sees keys 0 .. limit[r].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Fewest query rows of one matmul on the CPU: from 3 on, MKL rounds a row the same way however many rows share the
# call, which keeps a request's output independent of its batch and of its drafts.
_MIN_MATMUL_ROWS_CPU = 3


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """b requests padded to Q query rows and S keys."""

    rows_bQ: Tensor  # flat row of each query; padding repeats the request's first row
    slots_bS: Tensor  # cache slot of each key position
    positions_S: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows and slots belong together in one forward pass; shared by all layers."""

    rectangles: tuple[_Rectangle, ...]
    order_R: Tensor  # where row r ends up in the concatenated rectangles


def plan_attention(
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    *,
    heads_per_kv: int,
    device: torch.device,
    max_scores: int = 1 << 26,
) -> AttentionPlan:
    """Group B requests of `query_lens` new rows and at most `key_lens` visible keys into rectangles.

    `block_tables` [B, blocks] holds block ids; rows are flat, in request order. `max_scores` bounds b*Q*S of one
    rectangle, which with the head count bounds memory.
    """
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    least_rows = -(-_MIN_MATMUL_ROWS_CPU // heads_per_kv) if device.type == "cpu" else 1
    order = np.zeros(starts[-1], dtype=np.int64)
    rectangles, filled = [], 0
    for members in _groups(query_lens, key_lens, max_scores):
        q_lens = query_lens[members]
        width = max(int(q_lens.max()), least_rows)
        offsets = np.arange(width)
        inside = offsets[None] < q_lens[:, None]
        rows = starts[members][:, None] + np.where(inside, offsets[None], 0)
        order[rows[inside]] = filled + np.flatnonzero(inside.ravel())
        filled += rows.size
        blocks = -(-int(key_lens[members].max()) // block_size)
        tables = torch.from_numpy(block_tables[members, :blocks]).to(device)
        slots = tables[:, :, None] * block_size + torch.arange(block_size, device=device)
        positions = torch.arange(blocks * block_size, device=device)
        rectangles.append(_Rectangle(torch.from_numpy(rows).to(device), slots.flatten(1), positions))
    return AttentionPlan(tuple(rectangles), torch.from_numpy(order).to(device))


def _groups(query_lens: np.ndarray, key_lens: np.ndarray, max_scores: int) -> Sequence[np.ndarray]:
    """Split requests into runs of similar shape: padding costs at most about half again, scores stay bounded."""
    order = np.lexsort((key_lens, query_lens))
    q_sorted, s_sorted = query_lens[order].tolist(), key_lens[order].tolist()
    groups: list[np.ndarray] = []
    first, widest = 0, 0
    for i, (q, s) in enumerate(zip(q_sorted, s_sorted, strict=True)):
        widest = max(widest, s)
        fits = q <= 1.5 * q_sorted[first] and widest <= 1.5 * s_sorted[first] + 256
        if not (fits and (i + 1 - first) * q * widest <= max_scores) and i > first:
            groups.append(order[first:i])
            first, widest = i, s
    groups.append(order[first:])
    return groups


def paged_attention_ref(
    q_RND: Tensor, key_cache_MSD: Tensor, value_cache_MSD: Tensor, limit_R: Tensor, plan: AttentionPlan
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over each row's visible keys, [R, N, D]; softmax in float32 or wider."""
    parts = [
        _rectangle_attention(q_RND, key_cache_MSD, value_cache_MSD, limit_R, rectangle)
        for rectangle in plan.rectangles
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[plan.order_R]


def _rectangle_attention(
    q_RND: Tensor, key_cache_MSD: Tensor, value_cache_MSD: Tensor, limit_R: Tensor, rectangle: _Rectangle
) -> Tensor:
    (b, width), keys = rectangle.rows_bQ.shape, rectangle.slots_bS.shape[1]
    kv_heads, head_dim = key_cache_MSD.shape[0], key_cache_MSD.shape[2]
    limit_bQ = limit_R[rectangle.rows_bQ]
    # Slots past a request's last visible key may hold anything, NaN included: read its first key in their place.
    written_bS = rectangle.positions_S[None] <= limit_bQ.amax(dim=1, keepdim=True)
    slots = rectangle.slots_bS.where(written_bS, rectangle.slots_bS[:, :1]).flatten()
    k_MbSD = key_cache_MSD.index_select(1, slots).view(kv_heads, b, keys, head_dim)
    v_MbSD = value_cache_MSD.index_select(1, slots).view(kv_heads, b, keys, head_dim)
    # Query heads of one kv head become rows of the same matmul: [M, b, Q G, D].
    q = q_RND[rectangle.rows_bQ].unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)
    groups = q.shape[3]
    scores = q.reshape(kv_heads, b, width * groups, head_dim) @ k_MbSD.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * head_dim**-0.5
    visible_bQS = rectangle.positions_S[None, None] <= limit_bQ[:, :, None]
    scores = scores.view(kv_heads, b, width, groups, keys).masked_fill(~visible_bQS[None, :, :, None], -torch.inf)
    probs = scores.softmax(dim=-1).to(v_MbSD.dtype).view(kv_heads, b, width * groups, keys)
    out = (probs @ v_MbSD).view(kv_heads, b, width, groups, head_dim)
    return out.permute(1, 2, 0, 3, 4).reshape(b * width, kv_heads * groups, head_dim)
