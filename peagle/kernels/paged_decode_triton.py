"""Triton form of paged decoding attention: one launch, whatever the number of programs that share a tile's keys.

A program per (tile of a request's pairs, kv head, split) takes every `SPLITS`-th chunk of keys. Alone, it folds them as
it goes; else all leave their chunks in memory, and the one that finishes last folds them. See `paged_decode.py` for why
both give the same bits, and for the two forms of a program: where W warps have their own keys, what is [S] or [S, D]
in the other form is [W, S] or [W, S, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, let_next_start, wait_for_previous
from peagle.kernels.fused_linear_triton import over_warps
from peagle.kernels.paged_decode import FINE_KEYS, MOST_EARLY, CacheView, DecodePlan

_FINE = tl.constexpr(FINE_KEYS)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)  # a running maximum that is finite, so that -inf - maximum is never NaN
_MOST_AT_ONCE = tl.constexpr(16384)  # elements of chunks that the last to arrive loads together: registers


@triton.jit
def _chunk_start(chunk: tl.tensor) -> tl.tensor:
    doublings = tl.maximum(chunk // 8 - 1, 0)
    return (chunk - 8 * doublings) * _FINE << doublings


@triton.jit
def _chunk_of(key: tl.tensor) -> tl.tensor:
    """The chunk that holds a key's position. `_chunk_start` from 8 on is floating point with three bits after the
    first, so the exponent of a float32 says which doubling it is."""
    fine = key // _FINE
    exponent = (fine.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    doublings = tl.maximum(exponent - 3, 0)
    return 8 * doublings + (fine >> doublings)


@triton.jit
def _fold(out_TD: tl.tensor, top_T: tl.tensor, total_T: tl.tensor, chunk_TD: tl.tensor, chunk_top_T: tl.tensor,
          chunk_total_T: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add a later chunk to what came before it. One of which a row saw nothing (top lowest, sums 0) changes nothing."""
    new_top_T = tl.maximum(top_T, chunk_top_T)
    old_T, new_T = tl.exp2(top_T - new_top_T), tl.exp2(chunk_top_T - new_top_T)
    return out_TD * old_T[:, None] + chunk_TD * new_T[:, None], new_top_T, total_T * old_T + chunk_total_T * new_T


@triton.jit
def _nothing(TILE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What rows have before they attend to anything: sum, maximum and total of weights."""
    return tl.zeros([TILE, HEAD_DIM], tl.float32), tl.full([TILE], _LOWEST, tl.float32), tl.zeros([TILE], tl.float32)


@triton.jit
def _keep(kept_TD: tl.tensor, kept_T: tl.tensor, place: tl.tensor, chunk_TD: tl.tensor, chunk_top_T: tl.tensor,
          chunk_total_T: tl.tensor, TILE: tl.constexpr, HEAD_DIM: tl.constexpr) -> None:  # fmt: skip
    """Leave a chunk in memory for the program that folds them all."""
    tl.store(kept_TD + place * TILE * HEAD_DIM, chunk_TD)
    tl.store(kept_T + place * 2 * TILE, chunk_top_T)
    tl.store(kept_T + place * 2 * TILE + TILE, chunk_total_T)


@triton.jit
def _fold_kept(kept_TD: tl.tensor, kept_T: tl.tensor, place: tl.tensor, first: tl.tensor, end: tl.tensor,
               TILE: tl.constexpr,
               HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Fold the chunks first .. end - 1 that programs left."""
    out_TD, top_T, total_T = _nothing(TILE, HEAD_DIM)
    AT_ONCE: tl.constexpr = min(8 if TILE * HEAD_DIM <= 1024 else 4, _MOST_AT_ONCE // (TILE * HEAD_DIM))
    for from_chunk in range(first, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            kept, there = place + from_chunk + i, from_chunk + i < end
            chunk_TD = tl.load(kept_TD + kept * TILE * HEAD_DIM, mask=there, other=0.0)
            chunk_top_T = tl.load(kept_T + kept * 2 * TILE, mask=there, other=_LOWEST)
            chunk_total_T = tl.load(kept_T + kept * 2 * TILE + TILE, mask=there, other=0.0)
            out_TD, top_T, total_T = _fold(out_TD, top_T, total_T, chunk_TD, chunk_top_T, chunk_total_T)
    return out_TD, top_T, total_T


@triton.jit
def _fold_if_last(arrival: tl.tensor, sharing: tl.tensor, kept_TD: tl.tensor, kept_T: tl.tensor, place: tl.tensor,
                  first: tl.tensor, end: tl.tensor, live_T: tl.tensor, out_TD: tl.tensor, top_T: tl.tensor,
                  total_T: tl.tensor, TILE: tl.constexpr, HEAD_DIM: tl.constexpr
                  ) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The rows that this program writes and what all chunks say of them, once it is the last of those that share a tile
    to arrive; no rows for the others."""
    tl.debug_barrier()  # what all threads stored is released by the one that counts
    if tl.atomic_add(arrival, 1, sem="acq_rel") < sharing - 1:
        live_T = tl.arange(0, TILE) < 0
    else:
        tl.store(arrival, 0)
        out_TD, top_T, total_T = _fold_kept(kept_TD, kept_T, place, first, end, TILE, HEAD_DIM)
    return live_T, out_TD, top_T, total_T


@triton.jit
def _chunks_seen(limit_T: tl.tensor, last_key: tl.tensor,
                 WINDOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The first key that any row of a tile sees, its chunk, and the chunk past `last_key`'s."""
    lowest_key = last_key * 0
    if WINDOW > 0:
        lowest_key = tl.maximum(tl.min(tl.where(limit_T >= 0, limit_T, last_key), axis=0) - (WINDOW - 1), 0)
    return lowest_key, _chunk_of(lowest_key), tl.where(last_key >= 0, _chunk_of(last_key) + 1, 0)


@triton.jit
def _run_of(chunk: tl.tensor, lowest_key: tl.tensor, last_key: tl.tensor, KEYS: tl.constexpr,
            WINDOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where the keys of a chunk that a tile sees start, and where they stop."""
    start = _chunk_start(chunk)
    if WINDOW > 0:  # whole turns of the loop before the window are left out
        start += tl.maximum(lowest_key - start, 0) // KEYS * KEYS
    return start, tl.minimum(_chunk_start(chunk + 1), last_key + 1)


@triton.jit
def _places(block_S: tl.tensor, position_S: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Offsets of keys, and values, from the first of their head, [S, D]; [W, S, D] of [W, S]."""
    slot_S = block_S.to(tl.int64) * BLOCK_SIZE + position_S % BLOCK_SIZE
    return tl.expand_dims(slot_S, -1) * HEAD_DIM + tl.arange(0, HEAD_DIM)


@triton.jit
def _attend_own(q: tl.tensor, k_WSD: tl.tensor, v_WSD: tl.tensor, position_WS: tl.tensor, limit_T: tl.tensor,
                scale_log2: tl.tensor, WINDOW: tl.constexpr
                ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """What pairs make of keys that each of four warps has its own of; q is [W, T, D]. In tiles of 8 keys are the rows
    of products, which have no fewer than 16, and q is [W, D, T]."""
    FLIP: tl.constexpr = limit_T.shape[0] == 8
    if FLIP:
        scores_WTS = tl.permute(tl.dot(k_WSD, q, input_precision="ieee"), (0, 2, 1))
    else:
        scores_WTS = tl.dot(q, tl.permute(k_WSD, (0, 2, 1)), input_precision="ieee")
    visible_WTS = position_WS[:, None] <= limit_T[None, :, None]
    if WINDOW > 0:
        visible_WTS = visible_WTS & (position_WS[:, None] > limit_T[None, :, None] - WINDOW)
    scores_WTS = tl.where(visible_WTS, scores_WTS * scale_log2, -float("inf"))
    top_WT = tl.maximum(tl.max(scores_WTS, axis=2), _LOWEST)
    weights_WTS = tl.exp2(scores_WTS - top_WT[:, :, None])
    total_WT = tl.sum(weights_WTS, axis=2)
    weights_WTS = weights_WTS.to(v_WSD.dtype)
    if FLIP:
        v_WDS, weights_WST = tl.permute(v_WSD, (0, 2, 1)), tl.permute(weights_WTS, (0, 2, 1))
        out_WTD = tl.permute(tl.dot(v_WDS, weights_WST, input_precision="ieee"), (0, 2, 1))
    else:
        out_WTD = tl.dot(weights_WTS, v_WSD, input_precision="ieee")
    top_T = tl.max(top_WT, axis=0)
    share_WT = tl.exp2(top_WT - top_T[None])
    out_TD = over_warps(out_WTD * share_WT[:, :, None], 4, out_WTD.shape[1], out_WTD.shape[2])
    return out_TD, top_T, tl.sum(total_WT * share_WT, axis=0)


@triton.jit
def _is_read(position_S: tl.tensor, stop: tl.tensor, lowest_key: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Slots that nobody sees may hold NaN, which a zero weight would not remove: they are not read."""
    read_S = position_S < stop
    if WINDOW > 0:
        read_S = read_S & (position_S >= lowest_key)
    return read_S


@triton.jit
def _load_turn(keys_SD: tl.tensor, values_SD: tl.tensor, block_S: tl.tensor, position_S: tl.tensor, read_S: tl.tensor,
               BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Keys and values of a turn of the loop."""
    at_SD, read_S1 = _places(block_S, position_S, BLOCK_SIZE, HEAD_DIM), tl.expand_dims(read_S, -1)
    return tl.load(keys_SD + at_SD, mask=read_S1, other=0.0), tl.load(values_SD + at_SD, mask=read_S1, other=0.0)


@triton.jit
def _attend_own_chunk(q: tl.tensor, keys_SD: tl.tensor, values_SD: tl.tensor, table: tl.tensor, start: tl.tensor,
                      stop: tl.tensor, lowest_key: tl.tensor, limit_T: tl.tensor, key_WS: tl.tensor,
                      early: tl.tensor, early_block_WS: tl.tensor, scale_log2: tl.tensor, BLOCK_SIZE: tl.constexpr,
                      HEAD_DIM: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
                      KEYS_FIRST: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """What pairs make of keys start .. stop - 1 of one request; none before `lowest_key` is read.

    Blocks of the KEYS keys from `early` on are known, unless KEYS_FIRST: these were attended to.
    """
    out_TD, top_T, total_T = _nothing(TILE, HEAD_DIM)
    for turn in range(start, stop, KEYS):
        position_WS = turn + key_WS
        read_WS = _is_read(position_WS, stop, lowest_key, WINDOW)
        if KEYS_FIRST:
            block_WS = tl.load(table + position_WS // BLOCK_SIZE, mask=read_WS, other=0)
        else:
            block_WS = tl.load(table + position_WS // BLOCK_SIZE, mask=read_WS & (turn != early), other=0)
            block_WS = tl.where(turn == early, early_block_WS, block_WS)
        k_WSD, v_WSD = _load_turn(keys_SD, values_SD, block_WS, position_WS, read_WS, BLOCK_SIZE, HEAD_DIM)
        turn_TD, turn_top_T, turn_total_T = _attend_own(q, k_WSD, v_WSD, position_WS, limit_T, scale_log2, WINDOW)
        out_TD, top_T, total_T = _fold(out_TD, top_T, total_T, turn_TD, turn_top_T, turn_total_T)
    return out_TD, top_T, total_T


@triton.jit
def _attend_own_chunks(out_TD: tl.tensor, top_T: tl.tensor, total_T: tl.tensor, q: tl.tensor, keys_SD: tl.tensor,
                       values_SD: tl.tensor, table: tl.tensor, chunk: tl.tensor, end: tl.tensor, lowest_key: tl.tensor,
                       last_key: tl.tensor, limit_T: tl.tensor, key_WS: tl.tensor, early: tl.tensor,
                       early_block_WS: tl.tensor, kept_TD: tl.tensor, kept_T: tl.tensor, place: tl.tensor,
                       is_shared: tl.tensor, scale_log2: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
                       TILE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
                       KEYS_FIRST: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """`_stream` for warps with their own keys, after `out_TD`, `top_T` and `total_T` of a chunk before."""
    for at in range(chunk, end, SPLITS):
        start, stop = _run_of(at, lowest_key, last_key, KEYS, WINDOW)
        chunk_TD, chunk_top_T, chunk_total_T = _attend_own_chunk(
            q, keys_SD, values_SD, table, start, stop, lowest_key, limit_T, key_WS, early, early_block_WS,
            scale_log2, BLOCK_SIZE, HEAD_DIM, TILE, KEYS, WINDOW, KEYS_FIRST,
        )  # fmt: skip
        if SPLITS == 1:
            out_TD, top_T, total_T = _fold(out_TD, top_T, total_T, chunk_TD, chunk_top_T, chunk_total_T)
        else:
            if is_shared:
                _keep(kept_TD, kept_T, place + at, chunk_TD, chunk_top_T, chunk_total_T, TILE, HEAD_DIM)
            out_TD, top_T, total_T = chunk_TD, chunk_top_T, chunk_total_T  # the result where there is only one
    return out_TD, top_T, total_T


@triton.jit
def _attend_turn(q: tl.tensor, k_SD: tl.tensor, v_SD: tl.tensor, position_S: tl.tensor, limit_T: tl.tensor,
                 out_TD: tl.tensor, top_T: tl.tensor, total_T: tl.tensor, scale_log2: tl.tensor, WINDOW: tl.constexpr
                 ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Online softmax: a chunk's sums with the keys of one more turn."""
    scores_TS = tl.dot(q, tl.trans(k_SD), input_precision="ieee") * scale_log2
    visible_TS = position_S[None] <= limit_T[:, None]
    if WINDOW > 0:
        visible_TS = visible_TS & (position_S[None] > limit_T[:, None] - WINDOW)
    scores_TS = tl.where(visible_TS, scores_TS, -float("inf"))
    new_top_T = tl.maximum(top_T, tl.max(scores_TS, axis=1))
    weights_TS = tl.exp2(scores_TS - new_top_T[:, None])
    shrink_T = tl.exp2(top_T - new_top_T)
    total_T = total_T * shrink_T + tl.sum(weights_TS, axis=1)
    out_TD = tl.dot(weights_TS.to(v_SD.dtype), v_SD, out_TD * shrink_T[:, None], input_precision="ieee")
    return out_TD, new_top_T, total_T


@triton.jit
def _stream(q: tl.tensor, keys_SD: tl.tensor, values_SD: tl.tensor, table: tl.tensor, chunk: tl.tensor, end: tl.tensor,
            lowest_key: tl.tensor, last_key: tl.tensor, limit_T: tl.tensor, key_S: tl.tensor, early: tl.tensor,
            early_block_S: tl.tensor, kept_TD: tl.tensor, kept_T: tl.tensor, place: tl.tensor, is_shared: tl.tensor,
            scale_log2: tl.tensor, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
            KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr
            ) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """What pairs make of chunks chunk, chunk + SPLITS, .. before `end`: all of them folded if nobody shares the tile,
    else the last, and each of them kept if the tile `is_shared`.

    One loop over the turns of all chunks, for its loads run ahead: a loop for each chunk would begin by waiting.
    """
    turns = end * 0
    for c in range(chunk, end, SPLITS):
        start, stop = _run_of(c, lowest_key, last_key, KEYS, WINDOW)
        turns += (stop - start + KEYS - 1) // KEYS
    start, stop = _run_of(chunk, lowest_key, last_key, KEYS, WINDOW)
    out_TD, top_T, total_T = _nothing(TILE, HEAD_DIM)
    chunk_TD, chunk_top_T, chunk_total_T = _nothing(TILE, HEAD_DIM)
    for _ in range(turns):
        position_S = start + key_S
        read_S = _is_read(position_S, stop, lowest_key, WINDOW)
        block_S = tl.load(table + position_S // BLOCK_SIZE, mask=read_S & (start != early), other=0)
        block_S = tl.where(start == early, early_block_S, block_S)
        k_SD, v_SD = _load_turn(keys_SD, values_SD, block_S, position_S, read_S, BLOCK_SIZE, HEAD_DIM)
        chunk_TD, chunk_top_T, chunk_total_T = _attend_turn(
            q, k_SD, v_SD, position_S, limit_T, chunk_TD, chunk_top_T, chunk_total_T, scale_log2, WINDOW
        )  # fmt: skip
        is_last, start = start + KEYS >= stop, start + KEYS
        if is_last:
            if SPLITS == 1:
                out_TD, top_T, total_T = _fold(out_TD, top_T, total_T, chunk_TD, chunk_top_T, chunk_total_T)
            else:
                if is_shared:
                    _keep(kept_TD, kept_T, place + chunk, chunk_TD, chunk_top_T, chunk_total_T, TILE, HEAD_DIM)
                out_TD, top_T, total_T = chunk_TD, chunk_top_T, chunk_total_T
        # Not in the branch: Triton 3.6 does not wait for Hopper's products before a branch, the only one to use them.
        chunk_TD, chunk_top_T = tl.where(is_last, 0.0, chunk_TD), tl.where(is_last, _LOWEST, chunk_top_T)
        chunk_total_T = tl.where(is_last, 0.0, chunk_total_T)
        # Nor this, or the next turn's loads would have to wait for it.
        chunk = tl.where(is_last, chunk + SPLITS, chunk)
        next_start, next_stop = _run_of(chunk, lowest_key, last_key, KEYS, WINDOW)
        start, stop = tl.where(is_last, next_start, start), tl.where(is_last, next_stop, stop)
    return out_TD, top_T, total_T


@triton.jit
def _write(to_TD: tl.tensor, sink_T: tl.tensor, live_T: tl.tensor, out_TD: tl.tensor, top_T: tl.tensor,
           total_T: tl.tensor, SINKS: tl.constexpr) -> None:  # fmt: skip
    """The mean of values by their weights, and by those of sinks at `sink_T`, to where the tile's pairs belong."""
    if SINKS:
        sink_T = tl.load(sink_T).to(tl.float32) * _LOG2_E
        out_TD, top_T, total_T = _fold(out_TD, top_T, total_T, out_TD * 0.0, sink_T, total_T * 0.0 + 1.0)
    total_T = tl.where(total_T > 0.0, total_T, 1.0)  # rows that see nothing
    tl.store(to_TD, (out_TD / total_T[:, None]).to(to_TD.dtype.element_ty), mask=live_T[:, None])


@triton.jit
def _first_blocks(table: tl.tensor, table_width: tl.tensor, at_S: tl.tensor, ALL_READ: tl.constexpr) -> tl.tensor:
    """Ids of the blocks at these places of a table. Where keys in ALL_READ of them will be, past its end the last."""
    if ALL_READ:
        return tl.load(table + tl.minimum(at_S, table_width - 1))
    return tl.load(table + at_S, mask=at_S < table_width, other=0)


@triton.jit(do_not_specialize=["table_width"])
def _decode_tile(out_RND: tl.tensor, q_RND: tl.tensor, keys_MSD: tl.tensor, values_MSD: tl.tensor, limit_R: tl.tensor,
                 sinks_N: tl.tensor, tables_BN: tl.tensor, scratch_out: tl.tensor, scratch_stats: tl.tensor,
                 arrivals: tl.tensor, table_width: tl.int32, q_row_stride: tl.int64, q_head_stride: tl.int64,
                 cache_head_stride: tl.int64, scale_log2: tl.float32, ROWS: tl.constexpr, GROUP: tl.constexpr,
                 HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
                 CHUNKS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
                 OWN: tl.constexpr, KEYS_FIRST: tl.constexpr, EARLY: tl.constexpr) -> None:  # fmt: skip
    """CHUNKS: as many as a table's width holds. OWN: warps have their own keys. KEYS_FIRST: those of the first chunk,
    chunk `split` then, are asked for before the limits are known. See the head of this file."""
    let_next_start(EARLY and not OWN)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles_of_request: tl.constexpr = (ROWS * GROUP + TILE - 1) // TILE
    request, t, d = tile // tiles_of_request, tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
    pair_T = tile % tiles_of_request * TILE + t
    live_T = pair_T < ROWS * GROUP
    row_T, head_T = (request * ROWS + pair_T // GROUP).to(tl.int64), kv_head * GROUP + pair_T % GROUP
    table = tables_BN + request.to(tl.int64) * table_width
    head_offset = kv_head.to(tl.int64) * cache_head_stride
    keys_SD, values_SD = keys_MSD + head_offset, values_MSD + head_offset
    early = _chunk_start(split)  # where this program starts if there is no window
    q_at = tl.where(live_T, row_T * q_row_stride + head_T * q_head_stride, 0)[:, None] + d[None]
    key_S = tl.arange(0, KEYS)
    if OWN:
        q_at = tl.zeros([4, 1, 1], tl.int64) + (tl.trans(q_at) if TILE == 8 else q_at)[None]
        key_S = tl.arange(0, 4)[:, None] * (KEYS // 4) + tl.arange(0, KEYS // 4)[None]
    early_S = early + key_S
    # All that does not follow from the limits is loaded along with them: the wait for memory is most of a short pass.
    # Limits and tables are there before the projections are; queries, and keys and values of the rows, after them.
    limit_T = tl.load(limit_R + row_T, mask=live_T, other=-1).to(tl.int32)
    early_block_S = _first_blocks(table, table_width, early_S // BLOCK_SIZE, KEYS_FIRST)
    wait_for_previous(EARLY and OWN)
    if KEYS_FIRST:
        early_at_SD = _places(early_block_S, early_S, BLOCK_SIZE, HEAD_DIM)
        # Volatile, or the assembler moves them behind the branch on the limits.
        k_SD, v_SD = tl.load(keys_SD + early_at_SD, volatile=True), tl.load(values_SD + early_at_SD, volatile=True)
        q = tl.load(q_RND + q_at)  # after the keys: right behind it come a move to shared memory and the wait for it
    else:
        q = tl.load(q_RND + q_at)

    last_key = tl.max(limit_T, axis=0)
    lowest_key, first, end = _chunks_seen(limit_T, last_key, WINDOW)
    count, sharing = end - first, tl.minimum(end - first, SPLITS)
    if split >= tl.maximum(sharing, 1):
        return

    place = (tile.to(tl.int64) * tl.num_programs(1) + kv_head) * CHUNKS
    kept_TD, kept_T = scratch_out + t[:, None] * HEAD_DIM + d[None], scratch_stats + t
    if OWN:
        if KEYS_FIRST:
            read_SD = tl.expand_dims(early_S <= last_key, -1)
            k_SD, v_SD = tl.where(read_SD, k_SD, 0.0), tl.where(read_SD, v_SD, 0.0)
            out_TD, top_T, total_T = _attend_own(q, k_SD, v_SD, early_S, limit_T, scale_log2, WINDOW)
            if SPLITS > 1:  # noqa: SIM102  # known when compiled, unlike the next
                if count > 1:
                    _keep(kept_TD, kept_T, place + split, out_TD, top_T, total_T, TILE, HEAD_DIM)
        else:
            out_TD, top_T, total_T = _nothing(TILE, HEAD_DIM)
        if not KEYS_FIRST or SPLITS < CHUNKS:  # else nobody has a second chunk
            next_chunk = first + split + (SPLITS if KEYS_FIRST else 0)
            out_TD, top_T, total_T = _attend_own_chunks(
                out_TD, top_T, total_T, q, keys_SD, values_SD, table, next_chunk, end, lowest_key, last_key, limit_T,
                key_S, early, early_block_S, kept_TD, kept_T, place, count > 1, scale_log2, BLOCK_SIZE, HEAD_DIM,
                TILE, KEYS, SPLITS, WINDOW, KEYS_FIRST,
            )  # fmt: skip
    else:
        out_TD, top_T, total_T = _stream(
            q, keys_SD, values_SD, table, first + split, end, lowest_key, last_key, limit_T, key_S, early,
            early_block_S, kept_TD, kept_T, place, count > 1, scale_log2, BLOCK_SIZE, HEAD_DIM, TILE, KEYS, SPLITS,
            WINDOW,
        )  # fmt: skip

    if SPLITS > 1:  # noqa: SIM102  # known when compiled, unlike the next
        if count > 1:
            live_T, out_TD, top_T, total_T = _fold_if_last(
                arrivals + tile * tl.num_programs(1) + kv_head, sharing, kept_TD, kept_T, place, first, end, live_T,
                out_TD, top_T, total_T, TILE, HEAD_DIM,
            )  # fmt: skip

    to_TD = out_RND + ((row_T * (tl.num_programs(1) * GROUP) + head_T) * HEAD_DIM)[:, None] + d[None]
    _write(to_TD, sinks_N + head_T, live_T, out_TD, top_T, total_T, SINKS)


def paged_decode_triton(q_RND: Tensor, cache: CacheView, plan: DecodePlan) -> Tensor:
    """The Triton form of `paged_decode`. Each kv head of the caches is contiguous; softmax in float32.

    Keys that lie before the windows of all rows of a tile are not read. float32 inputs are multiplied in float32.
    """
    (rows, heads, head_dim), kv_heads = q_RND.shape, cache.keys_MSD.shape[0]
    q_RND = q_RND if q_RND.stride(2) == 1 else q_RND.contiguous()
    out_RND = torch.empty((rows, heads, head_dim), dtype=q_RND.dtype, device=q_RND.device)
    scratch = plan.scratch
    group = heads // kv_heads
    tiles = plan.tables_BN.shape[0] * -(-plan.rows * group // plan.tile.size)
    keys, warps, stages, registers = _launch_sizes(plan, head_dim, q_RND.dtype)
    sinks_N = cache.limit_R if cache.sinks_N is None else cache.sinks_N  # not read without sinks
    kept = (scratch.out_WMCTD, scratch.stats_WMC2T, scratch.arrivals_WM) if scratch else (out_RND,) * 3
    early = launches_early(q_RND.device)
    # Of more dims they would take too many registers; splits past the fine chunks begin with several turns.
    keys_first = plan.tile.own_keys and not cache.window and head_dim <= 64 and plan.splits <= MOST_EARLY
    with torch.cuda.device_of(q_RND):  # no fusion: folding in registers and folding from memory must round alike
        _decode_tile[(tiles, kv_heads, plan.splits)](
            out_RND, q_RND, cache.keys_MSD, cache.values_MSD, cache.limit_R, sinks_N, plan.tables_BN, *kept,
            plan.tables_BN.shape[1], q_RND.stride(0), q_RND.stride(1), cache.keys_MSD.stride(0),
            head_dim**-0.5 * _LOG2_E.value, ROWS=plan.rows, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=plan.block_size,
            TILE=plan.tile.size, KEYS=keys, CHUNKS=plan.chunks, SPLITS=plan.splits, WINDOW=cache.window or 0,
            SINKS=cache.sinks_N is not None, OWN=plan.tile.own_keys, KEYS_FIRST=keys_first,
            EARLY=early, num_warps=warps, num_stages=stages, maxnreg=registers,
            **early_launch(early and plan.tile.own_keys), enable_fp_fusion=False,
        )  # fmt: skip
    return out_RND


def _launch_sizes(plan: DecodePlan, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int | None]:
    """Keys per turn of the loop, which divide a chunk; warps; pipeline stages; the most registers of a thread."""
    if plan.tile.own_keys:
        return FINE_KEYS, 4, 1, None
    if dtype == torch.float32:  # no tensor cores: the operands of a product live in registers
        return (32 if head_dim <= 64 else 16), (4 if plan.tile.size <= 16 else 8), 2, None
    # Fewer than the compiler would take, where so many programs are to be resident.
    registers = min(65536 // (128 * plan.tile.resident) // 8 * 8, 255)
    # Loads of keys wait for those of block ids: seven stages are three turns in flight, five two, three one. Measured:
    # benchmarks/results/decode-attention-loop-h200.json, and -sizes- for 128 dims; not for 256.
    if head_dim == 256:
        return 16, 4, 7, registers
    if head_dim == 128 and plan.tile.size <= 16:
        return 32, 4, 5, registers
    if head_dim == 128 and plan.tile.size == 32 and plan.tile.few:
        return 128, 4, 3, registers  # a program has a chunk or two
    return 64, 4, (3 if plan.tile.size <= 32 else 5), registers
