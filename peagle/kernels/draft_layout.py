"""The drafter's batch, built from the target's batch: inference reference 4.4 and 4.6 as one function.

Per request the drafter sees [valid rows, tokens shifted by one | bonus row | K-1 mask rows | dead rows]. Dead rows come
last, so a row's index equals its position offset and plain causal attention is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_SLOT_ID = -1  # a row with this slot writes no KV


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """T target rows become T' = T + B (K-1) drafter rows."""

    input_ids: Tensor  # [T'] token, mask id, or 0 on dead rows
    positions: Tensor  # [T'] RoPE position, 0 on dead rows
    last_keys: Tensor  # [T'] the last key a row sees: its own; dead rows see what the last mask row sees
    is_rejected: Tensor  # [T'] dead rows
    is_masked: Tensor  # [T'] mask rows
    sample_rows: Tensor  # [B K] the bonus row and the mask rows of each request
    hidden_map: Tensor  # [T] target row -> drafter row, rejected rows included
    slots: Tensor  # [T'] KV slot, -1 on dead rows and beyond the length limit
    seq_lens: Tensor  # [B] first position + rows, dead rows counted: bottom-right causal alignment
    query_start: Tensor  # [B + 1] first drafter row of each request


def kv_slots_ref(
    block_tables_BN: Tensor, request_R: Tensor, positions_R: Tensor, block_size: int, limit: int
) -> Tensor:
    """KV slot of each (request, position); -1 at or beyond `limit` positions."""
    inside_R = positions_R.clamp(max=limit - 1)
    slots_R = block_tables_BN[request_R, inside_R // block_size] * block_size + inside_R % block_size
    return torch.where(positions_R < limit, slots_R, PADDING_SLOT_ID)


def draft_layout_ref(
    target_ids_T: Tensor,
    target_positions_T: Tensor,
    next_tokens_B: Tensor,
    query_start_B1: Tensor,
    query_end_B: Tensor,
    *,
    mask_token_id: int,
    num_drafts: int,
    num_rows: int,
    block_tables_BN: Tensor,
    block_size: int,
    max_model_len: int,
) -> DraftLayout:
    """Lay out one drafter pass.

    `query_end` is the last target row whose token was kept, `next_tokens` the token that follows it (the bonus token,
    or the next prompt token when a prompt continues in a later chunk). `num_rows` is T + B (K-1), known on the host.
    """
    device, k = target_ids_T.device, num_drafts
    batch = next_tokens_B.shape[0]
    start_B1 = query_start_B1 + torch.arange(batch + 1, device=device) * (k - 1)
    rows_R = torch.arange(num_rows, device=device)
    request_R = torch.searchsorted(start_B1, rows_R, right=True) - 1
    offset_R = rows_R - start_B1[request_R]
    copied_R = (query_end_B - query_start_B1[:-1])[request_R]  # rows before the bonus row

    is_bonus_R = offset_R == copied_R
    is_masked_R = (offset_R > copied_R) & (offset_R < copied_R + k)
    is_rejected_R = offset_R >= copied_R + k
    shifted_R = (query_start_B1[request_R] + 1 + offset_R).clamp(max=target_ids_T.shape[0] - 1)
    ids_R = torch.where(is_bonus_R, next_tokens_B[request_R], target_ids_T[shifted_R])
    ids_R = torch.where(is_masked_R, mask_token_id, ids_R).masked_fill(is_rejected_R, 0)
    first_B = target_positions_T[query_start_B1[:-1]]
    positions_R = (first_B[request_R] + offset_R).masked_fill(is_rejected_R, 0)

    slots_R = kv_slots_ref(block_tables_BN, request_R, positions_R, block_size, max_model_len)
    bonus_B = start_B1[:-1] + query_end_B - query_start_B1[:-1]
    target_rows_T = torch.arange(target_ids_T.shape[0], device=device)
    request_T = torch.searchsorted(query_start_B1, target_rows_T, right=True) - 1
    return DraftLayout(
        input_ids=ids_R,
        positions=positions_R,
        last_keys=first_B[request_R] + torch.minimum(offset_R, copied_R + k - 1),
        is_rejected=is_rejected_R,
        is_masked=is_masked_R,
        sample_rows=(bonus_B[:, None] + torch.arange(k, device=device)).flatten(),
        hidden_map=target_rows_T + request_T * (k - 1),
        slots=slots_R.masked_fill(is_rejected_R, PADDING_SLOT_ID),
        seq_lens=first_B + start_B1.diff(),
        query_start=start_B1,
    )
