"""Triton form of a decode step's first kernel: a program per request and part of its block table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.verify_rows import SlotRows, VerifyRows

_MAX_PART = 1024  # blocks of a table a program copies


@triton.jit(
    do_not_specialize=["padding_row", "limit", "width", "table_stride", "drafts_stride"],
    do_not_specialize_on_alignment=["slot_B", "tables_SN"],
)
def _collect_request(
    ids_T: tl.tensor,
    positions_T: tl.tensor,
    slots_T: tl.tensor,
    last_keys_T: tl.tensor,
    first_B: tl.tensor,
    drafts_BK: tl.tensor,
    tables_BN: tl.tensor,
    slot_B: tl.tensor,
    last_token_S: tl.tensor,
    num_computed_S: tl.tensor,
    drafts_SK: tl.tensor,
    tables_SN: tl.tensor,
    padding_row: tl.int64,
    limit: tl.int64,
    width: tl.int64,
    table_stride: tl.int64,
    drafts_stride: tl.int64,
    DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two above DRAFTS
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_B + request).to(tl.int64)
    live = slot >= 0
    row = tl.where(live, slot, padding_row)
    table = tables_SN + row * table_stride
    block_N = tl.program_id(1) * PART + tl.arange(0, PART)
    inside_N = block_N < width
    tl.store(tables_BN + request * width + block_N, tl.load(table + block_N, mask=inside_N, other=0), mask=inside_N)
    if tl.program_id(1) == 0:
        offset_V = tl.arange(0, ROWS)
        inside_V, is_draft_V = offset_V <= DRAFTS, (offset_V > 0) & (offset_V <= DRAFTS)
        first = tl.load(num_computed_S + row)
        draft_V = tl.load(drafts_SK + row * drafts_stride + offset_V - 1, mask=is_draft_V, other=0)
        position_V = first + offset_V
        stored_V = inside_V & live & (position_V < limit)
        block_V = tl.load(table + position_V // BLOCK_SIZE, mask=stored_V, other=0).to(tl.int64)
        kv_slot_V = tl.where(stored_V, block_V * BLOCK_SIZE + position_V % BLOCK_SIZE, -1)
        at_V = request * (DRAFTS + 1) + offset_V
        tl.store(ids_T + at_V, tl.where(is_draft_V, draft_V, tl.load(last_token_S + row)), mask=inside_V)
        tl.store(positions_T + at_V, position_V, mask=inside_V)
        tl.store(slots_T + at_V, kv_slot_V, mask=inside_V)
        tl.store(last_keys_T + at_V, tl.where(live, tl.minimum(position_V, limit - 1), -1), mask=inside_V)
        tl.store(first_B + request, first)
        tl.store(drafts_BK + request * DRAFTS + offset_V - 1, tl.where(live, draft_V, -1), mask=is_draft_V)


def verify_rows_triton(
    slots: SlotRows, slot_B: Tensor, num_drafts: int, block_size: int, max_model_len: int
) -> VerifyRows:
    """The Triton form of `verify_rows`. Elements of a row of drafts or of a table are adjacent."""
    (batch,), width, device = slot_B.shape, slots.tables_SN.shape[1], slot_B.device

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    rows = batch * (num_drafts + 1)
    result = VerifyRows(
        ids_T=empty(rows),
        positions_T=empty(rows),
        slots_T=empty(rows),
        last_keys_T=empty(rows),
        first_B=empty(batch),
        drafts_BK=empty(batch, num_drafts),
        tables_BN=torch.empty((batch, width), dtype=slots.tables_SN.dtype, device=device),
    )
    part = min(triton.next_power_of_2(width), _MAX_PART)
    with torch.cuda.device_of(slot_B):
        _collect_request[(batch, triton.cdiv(width, part))](
            *result, slot_B, *slots, slots.last_token_S.shape[0] - 1, max_model_len, width, slots.tables_SN.stride(0),
            slots.drafts_SK.stride(0),
            DRAFTS=num_drafts, ROWS=triton.next_power_of_2(num_drafts + 1), BLOCK_SIZE=block_size, PART=part,
            num_warps=max(1, part // 256),
        )  # fmt: skip
    return result
