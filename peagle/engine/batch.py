"""The rows of a step's two passes, on the device: prompt chunks, ragged, and verification, K + 1 rows a request.

Suffixes: B requests, T target rows, K drafts, N blocks of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from peagle.engine.scheduler import Chunk
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SlotState
from peagle.engine.transfer import to_device
from peagle.kernels.draft_layout import kv_slots
from peagle.kernels.verify_rows import verify_rows


@dataclass(frozen=True, slots=True)
class HostShape:
    """What plans of attention need from the host: rows of each request, and the most keys any of them can see."""

    rows_B: np.ndarray
    most_keys_B: np.ndarray
    tables_BN: np.ndarray

    def extended(self, rows: int) -> "HostShape":
        """The same requests with `rows` more rows each."""
        return HostShape(self.rows_B + rows, self.most_keys_B + rows, self.tables_BN)

    def sampled(self, rows: int) -> "HostShape":
        """`rows` rows of each request, over the same keys."""
        return HostShape(np.full_like(self.rows_B, rows), self.most_keys_B, self.tables_BN)


class Scored(NamedTuple):
    """Rows of prompts after which the next prompt token's log-probability is asked for, and these tokens."""

    rows_S: Tensor
    tokens_S: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Target rows of B requests, flat in request order."""

    slot_B: Tensor
    ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor  # -1: nothing is written
    last_keys_T: Tensor  # the last key a row sees: its own, or the last there is
    start_B1: Tensor  # first row of each request, and the total
    first_B: Tensor  # position of each request's first row
    tables_BN: Tensor
    drafts_BK: Tensor  # what the rows after the first verify; K is 0 for prompts
    next_prompt_B: Tensor | None  # the prompt token after a chunk, -1 where it is sampled; None when verifying
    rows_per_request: int | None  # None: ragged
    host: HostShape | None  # None: plans must do without, as in a CUDA graph
    scored: Scored | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.slot_B.shape[0]

    @classmethod
    def to_verify(
        cls,
        state: SlotState,
        slot_B: Tensor,
        num_drafts: int,
        sizes: EngineSizes,
        host: HostShape | None,
        backend: str,
    ) -> Self:
        """Last token and drafts of each slot, at the positions where the device stands; slot -1 is padding."""
        r = verify_rows(state.rows, slot_B, num_drafts, sizes.block_size, sizes.max_model_len, backend=backend)
        width = num_drafts + 1
        start_B1 = torch.arange(0, (len(slot_B) + 1) * width, width, device=slot_B.device)
        return cls(
            slot_B=slot_B,
            ids_T=r.ids_T,
            positions_T=r.positions_T,
            kv_slots_T=r.slots_T,
            last_keys_T=r.last_keys_T,
            start_B1=start_B1,
            first_B=r.first_B,
            tables_BN=r.tables_BN,
            drafts_BK=r.drafts_BK,
            next_prompt_B=None,
            rows_per_request=width,
            host=host,
        )

    @classmethod
    def of_prompts(cls, chunks: Sequence[Chunk], state: SlotState, sizes: EngineSizes, backend: str) -> Self:
        """Chunks of prompts; what follows each chunk's last token is known unless the chunk is the last."""
        slot_B = np.array([c.request.slot for c in chunks])
        first_B = np.array([c.first for c in chunks])
        rows_B = np.array([c.num_rows for c in chunks])
        start_B1 = np.concatenate(([0], np.cumsum(rows_B)))
        ids = [np.array(c.request.token_ids[c.first : c.first + c.num_rows]) for c in chunks]
        next_B = np.array([-1 if c.is_last else c.request.token_ids[c.first + c.num_rows] for c in chunks])
        request_T = np.repeat(np.arange(len(chunks)), rows_B)
        positions_T = (first_B - start_B1[:-1])[request_T] + np.arange(len(request_T))
        arrays = (slot_B, np.concatenate(ids), request_T, positions_T, start_B1, first_B, next_B)
        slot, ids_T, request, positions, start, first, next_prompt = to_device(arrays, state.tables.device)
        tables_BN = state.tables[slot]
        slots_T = kv_slots(tables_BN, request, positions, sizes.block_size, sizes.max_model_len, backend=backend)
        return cls(
            slot_B=slot,
            ids_T=ids_T,
            positions_T=positions,
            kv_slots_T=slots_T,
            last_keys_T=positions,
            start_B1=start,
            first_B=first,
            tables_BN=tables_BN,
            drafts_BK=slot.new_empty((len(chunks), 0)),
            next_prompt_B=next_prompt,
            rows_per_request=None,
            host=HostShape(rows_B, first_B + rows_B, state.host_tables[slot_B]),
            scored=_scored(chunks, start_B1, state.tables.device),
        )


def _scored(chunks: Sequence[Chunk], start_B1: np.ndarray, device: torch.device) -> Scored | None:
    counts = [c.request.num_scored(c.first, c.num_rows) for c in chunks]
    if not any(counts):
        return None
    rows = np.concatenate([start + np.arange(count) for start, count in zip(start_B1, counts, strict=False)])
    tokens = [i for c, count in zip(chunks, counts, strict=True) for i in c.request.prompt_ids[c.first + 1 :][:count]]
    return Scored(*to_device((rows, np.array(tokens)), device))
