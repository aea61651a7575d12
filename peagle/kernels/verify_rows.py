"""The first kernel of a decode step: the rows to verify, collected from what the device knows of each slot.

State of S slots is held in S + 1 rows. The last row belongs to requests that only pad the batch; it stays zero, so that
padding computes something harmless. Suffixes: S slots and the padding row, B requests, K drafts, V = K + 1 verify rows
of a request, T = B V rows, N blocks of a table.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.kernels.draft_layout import PADDING_SLOT_ID, kv_slots_ref


class SlotRows(NamedTuple):
    """What the device knows of every slot. Tables hold int32 block ids, all else is int64; drafts and tables may be
    slices of wider rows."""

    last_token_S: Tensor  # emitted and not computed yet
    num_computed_S: Tensor  # the last token's position
    drafts_SK: Tensor
    tables_SN: Tensor


class VerifyRows(NamedTuple):
    """V rows of each request, its last token and its K drafts; int64 but for the tables."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # KV slot; -1 at or beyond the length limit and for padding
    last_keys_T: Tensor  # the last key a row sees: its own, or the last there can be; -1 for padding, which sees none
    first_B: Tensor  # position of the first row
    drafts_BK: Tensor  # -1 for padding
    tables_BN: Tensor  # int32


def verify_rows(
    slots: SlotRows, slot_B: Tensor, num_drafts: int, block_size: int, max_model_len: int, *, backend: str = "auto"
) -> VerifyRows:
    """Collect the rows of the requests in `slot` (-1 is padding) with their first `num_drafts` drafts, of which there
    may be none. `backend` "auto" is Triton on CUDA."""
    form = verify_rows_ref
    if use_triton(backend, slot_B.device):
        from peagle.kernels.verify_rows_triton import verify_rows_triton as form
    return form(slots, slot_B, num_drafts, block_size, max_model_len)


def verify_rows_ref(
    slots: SlotRows, slot_B: Tensor, num_drafts: int, block_size: int, max_model_len: int
) -> VerifyRows:
    """The torch form of `verify_rows`."""
    (batch,), width, device = slot_B.shape, num_drafts + 1, slot_B.device
    padding_B1 = (slot_B < 0)[:, None]
    row_B = slot_B.where(slot_B >= 0, slots.last_token_S.shape[0] - 1)
    last_token_B, first_B, all_drafts_BK, tables_BN = (part[row_B] for part in slots)
    drafts_BK = all_drafts_BK[:, :num_drafts]
    positions_BV = first_B[:, None] + torch.arange(width, device=device)
    request_T = torch.arange(batch * width, device=device) // width
    slots_T = kv_slots_ref(tables_BN, request_T, positions_BV.flatten(), block_size, max_model_len)
    return VerifyRows(
        ids_T=torch.cat((last_token_B[:, None], drafts_BK), dim=1).flatten(),
        positions_T=positions_BV.flatten(),
        slots_T=slots_T.view(batch, width).masked_fill(padding_B1, PADDING_SLOT_ID).flatten(),
        last_keys_T=positions_BV.clamp(max=max_model_len - 1).masked_fill(padding_B1, -1).flatten(),
        first_B=first_B,
        drafts_BK=drafts_BK.masked_fill(padding_B1, -1),
        tables_BN=tables_BN,
    )
