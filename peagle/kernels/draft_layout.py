"""The drafter's batch, built from the target's batch: inference reference 4.4 and 4.6 as one function.

Per request the drafter sees [valid rows, tokens shifted by one | bonus row | K-1 mask rows | dead rows]. Dead rows come
last, so a row's index equals its position offset and plain causal attention is exact. Two forms: torch, and a Triton
kernel that makes everything in one launch (`draft_layout_triton.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton

PADDING_SLOT_ID = -1  # a row with this slot writes no KV


class LayoutSizes(NamedTuple):
    """What of a layout is known on the host. `num_rows` is T + B (K-1)."""

    mask_token_id: int
    num_drafts: int
    num_rows: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """T target rows become T' = T + B (K-1) drafter rows."""

    input_ids: Tensor  # [T'] token, mask id, or 0 on dead rows
    positions: Tensor  # [T'] RoPE position, 0 on dead rows
    # [T'] the last key a row sees: its own, or the last there can be; dead rows: the last mask row's, padding none: -1
    last_keys: Tensor
    is_rejected: Tensor  # [T'] dead rows
    is_masked: Tensor  # [T'] mask rows
    sample_rows: Tensor  # [B K] the bonus row and the mask rows of each request
    source_rows: Tensor  # [T'] the target row whose hidden state a row takes; -1 on mask and dead rows
    slots: Tensor  # [T'] KV slot, -1 on dead rows and beyond the length limit
    next_ids: Tensor  # [T] token of the drafter row that takes a target row's hidden state; 0 where none does


def kv_slots(
    block_tables_BN: Tensor,
    request_R: Tensor,
    positions_R: Tensor,
    block_size: int,
    limit: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """KV slot of each (request, position), int64 [R]; -1 at or beyond `limit` positions."""
    form = kv_slots_ref
    if use_triton(backend, positions_R.device):
        from peagle.kernels.draft_layout_triton import kv_slots_triton as form
    return form(block_tables_BN, request_R, positions_R, block_size, limit)


def draft_layout(
    target_ids_T: Tensor,
    target_positions_T: Tensor,
    next_tokens_B: Tensor,
    query_start_B1: Tensor,
    query_end_B: Tensor,
    block_tables_BN: Tensor,
    sizes: LayoutSizes,
    slot_B: Tensor | None = None,
    *,
    backend: str = "auto",
) -> DraftLayout:
    """Lay out one drafter pass of B requests, each of at least one row; integers of any width in, int64 out.

    `query_end` is the last target row whose token was kept, `next_tokens` the token that follows it (the bonus token,
    or the next prompt token when a prompt continues in a later chunk). Requests whose `slot` is -1 are
    padding: all of their rows are dead.
    """
    form = draft_layout_ref
    if use_triton(backend, target_ids_T.device):
        from peagle.kernels.draft_layout_triton import draft_layout_triton as form
    rows = (target_ids_T, target_positions_T, next_tokens_B, query_start_B1, query_end_B)
    return form(*rows, block_tables_BN, sizes, slot_B)


def kv_slots_ref(
    block_tables_BN: Tensor, request_R: Tensor, positions_R: Tensor, block_size: int, limit: int
) -> Tensor:
    """The torch form of `kv_slots`."""
    inside_R = positions_R.clamp(max=limit - 1)
    block_R = block_tables_BN[request_R, inside_R // block_size].to(torch.int64)
    slots_R = block_R * block_size + inside_R % block_size
    return torch.where(positions_R < limit, slots_R, PADDING_SLOT_ID)


def draft_layout_ref(
    target_ids_T: Tensor,
    target_positions_T: Tensor,
    next_tokens_B: Tensor,
    query_start_B1: Tensor,
    query_end_B: Tensor,
    block_tables_BN: Tensor,
    sizes: LayoutSizes,
    slot_B: Tensor | None = None,
) -> DraftLayout:
    """The torch form of `draft_layout`."""
    device, k = target_ids_T.device, sizes.num_drafts
    batch = next_tokens_B.shape[0]
    start_B1 = query_start_B1 + torch.arange(batch + 1, device=device) * (k - 1)
    rows_R = torch.arange(sizes.num_rows, device=device)
    request_R = torch.searchsorted(start_B1, rows_R, right=True) - 1
    offset_R = rows_R - start_B1[request_R]
    copied_B = query_end_B - query_start_B1[:-1]  # rows before the bonus row
    padding_B = torch.zeros_like(copied_B, dtype=torch.bool) if slot_B is None else slot_B < 0
    copied_R = torch.where(padding_B, -k, copied_B)[request_R]

    is_bonus_R = offset_R == copied_R
    is_masked_R = (offset_R > copied_R) & (offset_R < copied_R + k)
    is_rejected_R = offset_R >= copied_R + k
    source_R = query_start_B1[request_R] + offset_R
    shifted_R = (source_R + 1).clamp(max=target_ids_T.shape[0] - 1)
    ids_R = torch.where(is_bonus_R, next_tokens_B[request_R], target_ids_T[shifted_R])
    ids_R = torch.where(is_masked_R, sizes.mask_token_id, ids_R).masked_fill(is_rejected_R, 0)
    first_B = target_positions_T[query_start_B1[:-1]]
    positions_R = (first_B[request_R] + offset_R).masked_fill(is_rejected_R, 0)
    last_keys_R = first_B[request_R] + torch.minimum(offset_R, copied_R + k - 1)

    slots_R = kv_slots_ref(block_tables_BN, request_R, positions_R, sizes.block_size, sizes.max_model_len)
    row_T = torch.arange(target_ids_T.shape[0], device=device)
    row_T += (torch.searchsorted(query_start_B1.to(row_T.dtype), row_T, right=True) - 1) * (k - 1)
    return DraftLayout(
        input_ids=ids_R,
        positions=positions_R,
        last_keys=last_keys_R.clamp(max=sizes.max_model_len - 1).masked_fill(padding_B[request_R], -1),
        is_rejected=is_rejected_R,
        is_masked=is_masked_R,
        sample_rows=((start_B1[:-1] + copied_B)[:, None] + torch.arange(k, device=device)).flatten(),
        source_rows=source_R.masked_fill(is_masked_R | is_rejected_R, -1),
        slots=slots_R.masked_fill(is_rejected_R, PADDING_SLOT_ID),
        next_ids=ids_R[row_T].masked_fill((is_masked_R | is_rejected_R)[row_T], 0),
    )
