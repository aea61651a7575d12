"""Attention of new rows over a paged KV cache: causal by position, grouped-query, ragged over requests.

A request's row r sees keys 0 .. limit[r], or the last `window` of them. Two forms of the same thing, chosen when the
step's plan is made: a Triton kernel over tiles of rows (`paged_attention_triton.py`), and torch, its twin, which
gathers each request's keys into a rectangle. Requests of similar size share one rectangle, so a step is a few batched
matmuls a layer whatever the mix of prefill and decode.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.backend import INVARIANT, LIBRARY, use_triton
from peagle.kernels.linear import MATMUL_ROWS_CPU, MATMUL_SUM_CPU
from peagle.kernels.paged_decode import CacheView, DecodePlan, paged_decode, power_of_two
from peagle.kernels.whole_attention import prefers_whole

_MAX_RECTANGLE_ROWS = 256  # of one request: bounds the scores of a long prompt
_KEYS = 16  # a rectangle has a multiple: torch's softmax on a CPU adds up other numbers of weights in other orders
# Rows times query heads of one kv head in a Triton tile: tl.dot takes no fewer than the first; past the second a
# tile only costs registers.
_MIN_TILE, _MAX_TILE = 16, 64


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """b requests padded to Q query rows and S keys."""

    rows_bQ: Tensor  # flat row of each query; padding repeats the request's first row
    slots_bS: Tensor  # cache slot of each key position
    positions_S: Tensor


@dataclass(frozen=True, slots=True)
class RectanglePlan:
    """Which rows and slots belong together in one forward pass of the torch form; shared by all layers."""

    rectangles: tuple[_Rectangle, ...]
    order_R: Tensor  # where row r ends up in the concatenated rectangles


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The Triton form's work list, one program per tile and kv head; shared by all layers."""

    tiles_W3: Tensor  # integers: first flat row, number of rows, request
    tables_BN: Tensor  # integers: block ids
    block_size: int
    tile_size: int  # rows times query heads of one kv head, a power of two


@dataclass(frozen=True, slots=True)
class WholePlan:
    """A whole prompt, for `whole_attention`. `paged`: the same over the cache, for layers which that does not take."""

    paged: RectanglePlan | TilePlan


AttentionPlan = RectanglePlan | TilePlan | DecodePlan | WholePlan


def plan_attention(
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    *,
    heads_per_kv: int,
    head_dim: int,
    device: torch.device,
    backend: str = "auto",
) -> AttentionPlan:
    """Plan one forward pass of B requests with `query_lens` new rows and at most `key_lens` visible keys.

    `block_tables` [B, blocks] holds block ids; rows are flat, in request order. `backend` "auto" is Triton on CUDA;
    `LIBRARY` is as "auto" but for a long prompt without keys before it. A head dim the kernel cannot tile (it takes
    powers of two from 16 to 256) goes to torch whatever the backend. Tiles are as high as the mean request, for
    `INVARIANT` as can be.
    """
    plan: RectanglePlan | TilePlan
    if use_triton(backend, device) and can_tile(head_dim):
        tile_size = most_tile(heads_per_kv)
        if backend != INVARIANT:
            mean_height = -(-int(query_lens.sum()) * heads_per_kv // len(query_lens))
            tile_size = min(max(_least_tile(heads_per_kv), power_of_two(mean_height)), tile_size)
        plan = _plan_tiles(query_lens, key_lens, block_tables, block_size, tile_size, heads_per_kv, device)
    else:
        lens = query_lens, key_lens
        plan = plan_rectangles(*lens, block_tables, block_size, heads_per_kv=heads_per_kv, device=device)
    return WholePlan(plan) if backend == LIBRARY and prefers_whole(query_lens, key_lens) else plan


def paged_attention(q_RND: Tensor, cache: CacheView, plan: AttentionPlan) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over each row's visible keys, [R, N, D], in the form that `plan` was made for."""
    if isinstance(plan, DecodePlan):
        return paged_decode(q_RND, cache, plan)
    if isinstance(plan, WholePlan):
        plan = plan.paged
    if isinstance(plan, RectanglePlan):
        return paged_attention_ref(q_RND, cache, plan)
    # Imported late: triton is not installed everywhere.
    from peagle.kernels.paged_attention_triton import paged_attention_triton

    return paged_attention_triton(q_RND, cache, plan)


def _plan_tiles(
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    tile_size: int,
    heads_per_kv: int,
    device: torch.device,
) -> TilePlan:
    """Table and tiles travel in one transfer."""
    tiles_W3 = cut_tiles(query_lens, tile_size // heads_per_kv)
    tables_BN = block_tables[:, : -(-int(key_lens.max()) // block_size)]
    # The table begins at a multiple of 16 bytes, or the kernel would be compiled anew for every other number of tiles.
    parts = (tiles_W3.ravel(), np.zeros(-tiles_W3.size % 4), tables_BN.ravel())
    packed = _to_device(np.concatenate(parts, dtype=np.int32, casting="unsafe"), device)
    tiles, _, tables = packed.split([part.size for part in parts])
    return TilePlan(tiles.view(-1, 3), tables.view(tables_BN.shape), block_size, tile_size)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """From pinned memory on CUDA: the copy waits in the stream, and the host does not."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def can_tile(head_dim: int) -> bool:
    """Whether the Triton kernel takes heads of this size."""
    return head_dim in (16, 32, 64, 128, 256)


def most_tile(heads_per_kv: int) -> int:
    """Rows times query heads of one kv head in the highest tile."""
    return max(_least_tile(heads_per_kv), _MAX_TILE)


def cut_tiles(query_lens: np.ndarray, most_rows: int) -> np.ndarray:
    """Tiles of at most `most_rows` rows that cover requests of so many rows, as `TilePlan` lists them."""
    request_W, offset_W, count_W = _cut(query_lens, most_rows)
    first_W = (np.cumsum(query_lens) - query_lens)[request_W] + offset_W
    # Programs start in this order: prompts come last in a batch and the end of a prompt sees most keys, so backwards
    # starts the longest work first.
    return np.stack((first_W, count_W, request_W), axis=1)[::-1]


def _least_tile(heads_per_kv: int) -> int:
    return max(_MIN_TILE, power_of_two(heads_per_kv))


def _cut(query_lens: np.ndarray, most_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut each request's rows into runs of at most `most_rows`: request, offset within it and rows of each run."""
    runs_B = -(-query_lens // most_rows)
    request_W = np.repeat(np.arange(len(query_lens)), runs_B)
    offset_W = (np.arange(len(request_W)) - (np.cumsum(runs_B) - runs_B)[request_W]) * most_rows
    return request_W, offset_W, np.minimum(query_lens[request_W] - offset_W, most_rows)


def plan_rectangles(
    query_lens: np.ndarray,
    key_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    *,
    heads_per_kv: int,
    device: torch.device,
    max_scores: int = 1 << 22,
) -> RectanglePlan:
    """Group requests into rectangles, arguments as in `plan_attention`.

    Long prompts are cut into runs of rows first. `max_scores` bounds b*Q*S of a rectangle with more than one member,
    which with the head count bounds memory.
    """
    request_W, offset_W, rows_W = _cut(query_lens, _MAX_RECTANGLE_ROWS)
    keys_W = key_lens[request_W]
    starts_W = (np.cumsum(query_lens) - query_lens)[request_W] + offset_W
    multiple = MATMUL_ROWS_CPU // math.gcd(MATMUL_ROWS_CPU, heads_per_kv) if device.type == "cpu" else 1
    order = np.zeros(query_lens.sum(), dtype=np.int64)
    rectangles, filled = [], 0
    for members in _groups(rows_W, keys_W, max_scores):
        offsets = np.arange(-(-int(rows_W[members].max()) // multiple) * multiple)
        inside = offsets[None] < rows_W[members][:, None]
        rows = starts_W[members][:, None] + np.where(inside, offsets[None], 0)
        order[rows[inside]] = filled + np.flatnonzero(inside.ravel())
        filled += rows.size
        blocks = -(-int(keys_W[members].max()) // block_size)
        tables = torch.from_numpy(block_tables[request_W[members], :blocks]).to(device)
        slots = (tables[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
        slots = F.pad(slots, (0, -slots.shape[1] % _KEYS))
        positions = torch.arange(slots.shape[1], device=device)
        rectangles.append(_Rectangle(torch.from_numpy(rows).to(device), slots, positions))
    return RectanglePlan(tuple(rectangles), torch.from_numpy(order).to(device))


def _groups(query_lens: np.ndarray, key_lens: np.ndarray, max_scores: int) -> list[np.ndarray]:
    """Split requests into runs of similar shape: padding costs at most about half again, scores stay bounded."""
    order = np.lexsort((key_lens, query_lens))
    q_sorted, s_sorted = query_lens[order], key_lens[order]
    groups: list[np.ndarray] = []
    first = 0
    while first < len(order):
        end = np.searchsorted(q_sorted, 1.5 * q_sorted[first], side="right")
        q, widest = q_sorted[first:end], np.maximum.accumulate(s_sorted[first:end])
        # Each bound, once broken, stays broken further on, so counting finds where the run ends.
        fits = (widest <= 1.5 * s_sorted[first] + 256) & (np.arange(1, len(q) + 1) * q * widest <= max_scores)
        count = max(int(fits.sum()), 1)
        groups.append(order[first : first + count])
        first += count
    return groups


def paged_attention_ref(q_RND: Tensor, cache: CacheView, plan: RectanglePlan) -> Tensor:
    """The torch form of `paged_attention`; softmax in float32 or wider."""
    parts = [_rectangle_attention(q_RND, cache, rectangle) for rectangle in plan.rectangles]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[plan.order_R]


def _rectangle_attention(q_RND: Tensor, cache: CacheView, rectangle: _Rectangle) -> Tensor:
    (b, width), keys = rectangle.rows_bQ.shape, rectangle.slots_bS.shape[1]
    kv_heads, head_dim = cache.keys_MSD.shape[0], cache.keys_MSD.shape[2]
    limit_bQ = cache.limit_R[rectangle.rows_bQ]
    # Slots past a request's last visible key may hold anything, NaN included: read its first key in their place.
    written_bS = rectangle.positions_S[None] <= limit_bQ.amax(dim=1, keepdim=True)
    slots = rectangle.slots_bS.where(written_bS, rectangle.slots_bS[:, :1]).flatten()
    k_MbSD = cache.keys_MSD.index_select(1, slots).view(kv_heads, b, keys, head_dim)
    v_MbSD = cache.values_MSD.index_select(1, slots).view(kv_heads, b, keys, head_dim)
    # Query heads of one kv head become rows of the same matmul: [M, b, Q G, D].
    q = q_RND[rectangle.rows_bQ].unflatten(2, (kv_heads, -1)).permute(2, 0, 1, 3, 4)
    groups = q.shape[3]
    scores = q.reshape(kv_heads, b, width * groups, head_dim) @ k_MbSD.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * head_dim**-0.5
    visible_bQS = rectangle.positions_S[None, None] <= limit_bQ[:, :, None]
    if cache.window is not None:
        visible_bQS &= rectangle.positions_S[None, None] > limit_bQ[:, :, None] - cache.window
    scores = scores.view(kv_heads, b, width, groups, keys).masked_fill(~visible_bQS[None, :, :, None], -torch.inf)
    if cache.sinks_N is not None:
        sinks = cache.sinks_N.to(scores.dtype).view(kv_heads, 1, 1, groups, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probs = scores.softmax(dim=-1)[..., :keys].to(v_MbSD.dtype).reshape(kv_heads, b, width * groups, keys)
    at_once = MATMUL_SUM_CPU if probs.device.type == "cpu" else keys
    parts = [p @ v for p, v in zip(probs.split(at_once, dim=3), v_MbSD.split(at_once, dim=2), strict=True)]
    out = functools.reduce(Tensor.add_, parts).view(kv_heads, b, width, groups, head_dim)
    return out.permute(1, 2, 0, 3, 4).reshape(b * width, kv_heads * groups, head_dim)
