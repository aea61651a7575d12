"""Attention of a few new rows per request over a paged KV cache, for a step that a CUDA graph replays.

The plan is made once for B requests of R rows each. Block tables and limits are read from device tensors, so one
captured launch serves every step while they change; nothing about it depends on how long the requests are.

Few requests do not fill a GPU, so their keys are split over programs (flash-decoding). For a result that depends on
nothing but the row itself, the split has no say in the arithmetic:

* Keys are cut into chunks at fixed positions: of 128 keys up to position 2048, then eight to each doubling.
* A chunk is attended to from a fresh start, whoever does it, and chunks are folded together in order of position.
* A chunk of which a row sees nothing changes no bit of that row.

So how many programs share the chunks may follow from the batch and the table's width alone.

A tile is (row, query head) pairs of one request and kv head. Of few requests each warp has its own of a turn's
`FINE_KEYS` keys, and waits for no other; tiles are small, so with many pairs keys would be read too often. Those are
streamed: the warps share fewer keys a turn, and the next turns are on their way meanwhile. Which it is, a tile's
height and the keys of a turn may change a row's last bits. For `INVARIANT` all follow from the model alone, and a row
comes out the same whatever its neighbours, in its own request or others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import INVARIANT, use_triton

# Of the first chunks. Fewer make one short request faster, as more programs share it; many requests slower, as a chunk
# starts afresh.
FINE_KEYS = 128
_DOUBLING_CHUNKS = 8
_MULTIPROCESSORS = 132  # an H200's
_MOST_RESIDENT = 4  # programs of one of them
_MOST_SHARING = 3  # of those: tiles which just fill the GPU are not split, for that costs more than it shares
_TILE_NUMBERS = 8192  # of the tiles that a multiprocessor holds at once
_MAX_TILE = 64
_FEW_TILES = 64  # of 16 pairs: with more, to read keys several times costs more than to wait
MOST_EARLY = 16  # programs of own keys that share a tile: as many as fine chunks; idle ones cost time


class CacheView(NamedTuple):
    """One layer of the cache, and what each row sees of it: keys 0 .. limit[r], or the last `window` of them.

    `sinks_N` adds a learned logit per query head to the softmax's denominator: attention may go nowhere (gpt-oss).
    """

    keys_MSD: Tensor
    values_MSD: Tensor
    limit_R: Tensor
    window: int | None = None
    sinks_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Where programs that share a tile leave their chunks. `arrivals` counts those done; zero between launches."""

    out_WMCTD: Tensor  # float32
    stats_WMC2T: Tensor  # float32: maximum and sum of each row's weights
    arrivals_WM: Tensor  # int32


class TileForm(NamedTuple):
    """How a tile is attended to. The first, second and last may change a row's last bits; splits may not."""

    size: int  # pairs, a power of two
    own_keys: bool  # of each warp
    resident: int  # programs that a multiprocessor is to hold
    few: bool  # tiles: programs are to share them, so that each has a chunk or two


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """B requests of `rows` rows each, flat in request order; shared by all layers.

    `tables_BN` holds block ids, any integer type, and is read when the kernel runs. All its entries are ids of blocks
    that the cache has: keys may be loaded before it is known that nobody sees them. A row whose limit is -1 sees
    nothing and gets zeros: so do rows and requests that only pad the batch.
    """

    rows: int
    tables_BN: Tensor
    block_size: int
    triton: bool
    tile: TileForm
    chunks: int  # that a table's width holds
    splits: int  # programs that share a tile's chunks
    scratch: SplitScratch | None  # None where nothing is shared


def plan_decode(
    rows: int,
    tables_BN: Tensor,
    block_size: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    backend: str = "auto",
    splits: int | None = None,
) -> DecodePlan:
    """Plan passes of `rows` rows for each of the B requests whose block tables are, and stay, in `tables_BN`.

    `backend` "auto" is Triton on CUDA; a head dim that does not tile (other than 16 to 256, powers of two) goes to
    torch. `splits` None chooses by batch and table width. For `INVARIANT` tiles are as for one row of one request.
    """
    device, batch, group = tables_BN.device, tables_BN.shape[0], heads // kv_heads
    pairs, chunks = rows * group, num_chunks(tables_BN.shape[1] * block_size)
    triton = use_triton(backend, device) and head_dim in (16, 32, 64, 128, 256)
    judged = (group, kv_heads) if backend == INVARIANT else (pairs, batch * kv_heads)
    tile = tile_form(head_dim, *judged)
    tiles = batch * -(-pairs // tile.size)
    if splits is None:  # all programs run at once: a second wave costs more than it shares
        splits = min(max(1, _programs(tile.resident) // (tiles * kv_heads)), MOST_EARLY if tile.own_keys else chunks)
    splits = min(splits, chunks)
    scratch = None
    if triton and splits > 1:
        shape = (tiles, kv_heads, chunks, tile.size, head_dim)
        scratch = SplitScratch(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty((*shape[:3], 2, tile.size), dtype=torch.float32, device=device),
            torch.zeros(shape[:2], dtype=torch.int32, device=device),
        )
    return DecodePlan(rows, tables_BN, block_size, triton, tile, chunks, splits, scratch)


def tile_form(head_dim: int, pairs: int, kv_heads: int) -> TileForm:
    """Of `kv_heads`, those of all requests, with so many pairs each."""
    if head_dim <= 128 and pairs <= _MAX_TILE and kv_heads * -(-pairs // 16) <= _FEW_TILES:
        return TileForm(8, True, 3, True) if head_dim <= 64 and pairs <= 24 else TileForm(16, True, 2, True)
    most = _MAX_TILE if head_dim <= 128 else _MAX_TILE // 2  # registers hold no more
    size = max(16, min(power_of_two(pairs), most))
    if size == _MAX_TILE and head_dim > 64 and 2 * kv_heads * -(-pairs // size) <= _MULTIPROCESSORS:
        size //= 2  # twice the programs, each with registers for turns of more keys
    resident = max(1, min(_TILE_NUMBERS // (head_dim * size), _MOST_RESIDENT))
    return TileForm(size, False, resident, few=2 * kv_heads * -(-pairs // size) <= _programs(resident))


def _programs(resident: int) -> int:
    """As many as are to share the tiles of a launch."""
    return min(resident, _MOST_SHARING) * _MULTIPROCESSORS


def most_scratch_bytes(keys: int, head_dim: int) -> int:
    """No plan for tables of so many keys takes more scratch: tiles that are shared leave room for as many programs."""
    return _MULTIPROCESSORS * _TILE_NUMBERS // (2 * head_dim) * num_chunks(keys) * (head_dim + 2) * 4


def power_of_two(least: int) -> int:
    """The smallest one that is no less."""
    return 1 << (least - 1).bit_length()


def chunk_start(chunk: int) -> int:
    """The first key position of a chunk."""
    doublings = max(chunk // _DOUBLING_CHUNKS - 1, 0)
    return (chunk - _DOUBLING_CHUNKS * doublings) * FINE_KEYS << doublings


def num_chunks(keys: int) -> int:
    """Chunks that hold positions 0 .. keys - 1."""
    chunk = 1
    while chunk_start(chunk) < keys:
        chunk += 1
    return chunk


def paged_decode(q_RND: Tensor, cache: CacheView, plan: DecodePlan) -> Tensor:
    """`paged_attention` for a `DecodePlan`, [R, N, D]."""
    form = paged_decode_ref
    if plan.triton:
        from peagle.kernels.paged_decode_triton import paged_decode_triton as form
    return form(q_RND, cache, plan)


def paged_decode_ref(q_RND: Tensor, cache: CacheView, plan: DecodePlan) -> Tensor:
    """The torch form of `paged_decode`, over the whole width of the tables; softmax in float32 or wider."""
    (_, heads, head_dim), kv_heads = q_RND.shape, cache.keys_MSD.shape[0]
    slots_BS = plan.tables_BN[:, :, None] * plan.block_size + torch.arange(plan.block_size, device=q_RND.device)
    slots_BS = slots_BS.flatten(1)
    batch, keys = slots_BS.shape
    limit_BR1, position_S = cache.limit_R.view(batch, plan.rows, 1), torch.arange(keys, device=q_RND.device)
    visible_BRS = position_S <= limit_BR1
    if cache.window is not None:
        visible_BRS &= position_S > limit_BR1 - cache.window
    # Slots that nobody sees may hold anything, NaN included.
    unseen_BS1 = ~visible_BRS.any(dim=1)[:, :, None]
    k_MBSD = cache.keys_MSD[:, slots_BS].masked_fill(unseen_BS1, 0.0)
    v_MBSD = cache.values_MSD[:, slots_BS].masked_fill(unseen_BS1, 0.0)
    q_MBGRD = q_RND.view(batch, plan.rows, kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4)
    scores = q_MBGRD @ k_MBSD[:, :, None].transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * head_dim**-0.5
    scores = scores.masked_fill(~visible_BRS[:, None], -torch.inf)
    if cache.sinks_N is not None:
        sinks = cache.sinks_N.to(scores.dtype).view(kv_heads, 1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probs = scores.softmax(dim=-1)[..., :keys].masked_fill((limit_BR1 < 0)[:, None], 0.0)
    out_MBGRD = probs.to(v_MBSD.dtype) @ v_MBSD[:, :, None]
    return out_MBGRD.permute(1, 3, 0, 2, 4).reshape(batch * plan.rows, heads, head_dim)
