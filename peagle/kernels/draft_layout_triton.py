"""Triton form of the draft layout: one program per request writes everything its rows need.

Inputs may be slices of one transfer, so nothing is compiled for their alignment, nor for numbers that change as
requests come and go.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draft_layout import DraftLayout, LayoutSizes

_FEW_ROWS, _MANY_ROWS = 32, 1024  # that a program handles at a time: two kernels, when verifying and for prompts


@triton.jit
def _slots(
    table: tl.tensor, positions_R: tl.tensor, live_R: tl.tensor, limit: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """KV slots (int64) of positions in block tables; -1 at or beyond `limit` and where not `live`."""
    stored_R = live_R & (positions_R < limit)
    block_R = tl.load(table + positions_R // BLOCK_SIZE, mask=stored_R, other=0).to(tl.int64)
    return tl.where(stored_R, block_R * BLOCK_SIZE + positions_R % BLOCK_SIZE, -1)


@triton.jit(
    do_not_specialize=["mask_token_id", "limit", "table_stride"],
    do_not_specialize_on_alignment=[
        "target_ids_T", "target_positions_T", "next_tokens_B", "start_B1", "end_B", "slot_B", "tables_BN",
    ],
)  # fmt: skip
def _lay_out_request(
    ids_R: tl.tensor,
    positions_R: tl.tensor,
    last_keys_R: tl.tensor,
    is_rejected_R: tl.tensor,
    is_masked_R: tl.tensor,
    sample_rows_U: tl.tensor,
    source_rows_R: tl.tensor,
    slots_R: tl.tensor,
    next_ids_T: tl.tensor,
    target_ids_T: tl.tensor,
    target_positions_T: tl.tensor,
    next_tokens_B: tl.tensor,
    start_B1: tl.tensor,
    end_B: tl.tensor,
    slot_B: tl.tensor,
    tables_BN: tl.tensor,
    table_stride: tl.int64,
    mask_token_id: tl.int64,
    limit: tl.int64,
    DRAFTS: tl.constexpr,
    DRAFTS_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(start_B1 + request).to(tl.int64)
    rows = tl.load(start_B1 + request + 1).to(tl.int64) - start + (DRAFTS - 1)
    copied = tl.load(end_B + request).to(tl.int64) - start  # rows before the bonus row
    first = tl.load(target_positions_T + start).to(tl.int64)
    next_token = tl.load(next_tokens_B + request).to(tl.int64)
    table = tables_BN + request * table_stride
    out = start + request * (DRAFTS - 1)

    draft_K = tl.arange(0, DRAFTS_P2)
    tl.store(sample_rows_U + request * DRAFTS + draft_K, out + copied + draft_K, mask=draft_K < DRAFTS)

    live = True
    if PADDED:
        live = tl.load(slot_B + request) >= 0
        copied = tl.where(live, copied, -DRAFTS)  # the whole request is dead rows
    for begin in range(0, rows, TILE):
        offset_R = begin + tl.arange(0, TILE).to(tl.int64)
        inside_R = offset_R < rows
        is_copied_R = offset_R < copied
        masked_R = (offset_R > copied) & (offset_R < copied + DRAFTS)
        rejected_R = offset_R >= copied + DRAFTS
        token_R = tl.load(target_ids_T + start + 1 + offset_R, mask=is_copied_R, other=0).to(tl.int64)
        token_R = tl.where(offset_R == copied, next_token, token_R)
        is_target_R = offset_R < rows - (DRAFTS - 1)
        tl.store(next_ids_T + start + offset_R, tl.where(offset_R <= copied, token_R, 0), mask=is_target_R)
        token_R = tl.where(masked_R, mask_token_id, token_R)
        position_R = tl.where(rejected_R, 0, first + offset_R)
        last_key_R = tl.minimum(first + tl.minimum(offset_R, copied + (DRAFTS - 1)), limit - 1)
        last_key_R = tl.where(live, last_key_R, -1)
        slot_R = _slots(table, position_R, inside_R & ~rejected_R, limit, BLOCK_SIZE)
        at_R = out + offset_R
        tl.store(ids_R + at_R, token_R, mask=inside_R)
        tl.store(positions_R + at_R, position_R, mask=inside_R)
        tl.store(last_keys_R + at_R, last_key_R, mask=inside_R)
        tl.store(is_rejected_R + at_R, rejected_R, mask=inside_R)
        tl.store(is_masked_R + at_R, masked_R, mask=inside_R)
        tl.store(source_rows_R + at_R, tl.where(offset_R <= copied, start + offset_R, -1), mask=inside_R)
        tl.store(slots_R + at_R, slot_R, mask=inside_R)


@triton.jit(
    do_not_specialize=["rows", "limit", "table_stride"],
    do_not_specialize_on_alignment=["request_R", "positions_R", "tables_BN"],
)
def _slots_of_rows(
    slots_R: tl.tensor,
    tables_BN: tl.tensor,
    request_R: tl.tensor,
    positions_R: tl.tensor,
    rows: tl.int64,
    table_stride: tl.int64,
    limit: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row_R = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside_R = row_R < rows
    table_R = tables_BN + tl.load(request_R + row_R, mask=inside_R, other=0).to(tl.int64) * table_stride
    position_R = tl.load(positions_R + row_R, mask=inside_R, other=0).to(tl.int64)
    tl.store(slots_R + row_R, _slots(table_R, position_R, inside_R, limit, BLOCK_SIZE), mask=inside_R)


def draft_layout_triton(
    target_ids_T: Tensor,
    target_positions_T: Tensor,
    next_tokens_B: Tensor,
    query_start_B1: Tensor,
    query_end_B: Tensor,
    block_tables_BN: Tensor,
    sizes: LayoutSizes,
    slot_B: Tensor | None = None,
) -> DraftLayout:
    """The Triton form of `draft_layout`. Every input but the block tables is contiguous, and so are their rows."""
    batch, rows, device = next_tokens_B.shape[0], sizes.num_rows, target_ids_T.device

    def empty(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    layout = DraftLayout(
        input_ids=empty(rows),
        positions=empty(rows),
        last_keys=empty(rows),
        is_rejected=empty(rows, torch.bool),
        is_masked=empty(rows, torch.bool),
        sample_rows=empty(batch * sizes.num_drafts),
        source_rows=empty(rows),
        slots=empty(rows),
        next_ids=empty(target_ids_T.shape[0]),
    )
    tile = _FEW_ROWS if rows <= _FEW_ROWS * batch else _MANY_ROWS
    with torch.cuda.device_of(target_ids_T):
        _lay_out_request[(batch,)](
            layout.input_ids, layout.positions, layout.last_keys, layout.is_rejected, layout.is_masked,
            layout.sample_rows, layout.source_rows, layout.slots, layout.next_ids, target_ids_T, target_positions_T,
            next_tokens_B, query_start_B1, query_end_B,
            query_start_B1 if slot_B is None else slot_B,  # not read without padding
            block_tables_BN, block_tables_BN.stride(0), sizes.mask_token_id, sizes.max_model_len,
            DRAFTS=sizes.num_drafts, DRAFTS_P2=triton.next_power_of_2(sizes.num_drafts), BLOCK_SIZE=sizes.block_size,
            PADDED=slot_B is not None, TILE=tile, num_warps=max(1, tile // 128),
        )  # fmt: skip
    return layout


def kv_slots_triton(
    block_tables_BN: Tensor, request_R: Tensor, positions_R: Tensor, block_size: int, limit: int
) -> Tensor:
    """The Triton form of `kv_slots`. Rows of the block tables and the other inputs are contiguous."""
    rows, tile = len(positions_R), 128
    slots_R = torch.empty(rows, dtype=torch.int64, device=positions_R.device)
    with torch.cuda.device_of(positions_R):
        _slots_of_rows[(triton.cdiv(rows, tile),)](
            slots_R, block_tables_BN, request_R, positions_R, rows, block_tables_BN.stride(0), limit,
            BLOCK_SIZE=block_size, TILE=tile, num_warps=1,
        )  # fmt: skip
    return slots_R
