"""The rows of a step's two passes, on the device: prompt chunks, ragged, and verification, K + 1 rows a request.

Suffixes: B requests, T target rows, K drafts, N blocks of a table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from peagle.engine.scheduler import Chunk
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SlotState
from peagle.engine.transfer import to_device
from peagle.kernels.draft_layout import kv_slots
from peagle.kernels.paged_attention import AttentionPlan, TilePlan, most_tile, plan_attention
from peagle.kernels.verify_rows import verify_rows
from peagle.models.spec import LayerSizes


def heads_per_kv(heads: LayerSizes) -> int:
    """Query heads that share a key and value head."""
    return heads.num_heads // heads.num_kv_heads


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

    def plan(self, heads: LayerSizes, sizes: EngineSizes, device: torch.device, backend: str) -> AttentionPlan:
        """Plan a pass over these rows, which it carries to the device."""
        return plan_attention(
            self.rows_B, self.most_keys_B.clip(max=sizes.max_model_len), self.tables_BN, sizes.block_size,
            heads_per_kv=heads_per_kv(heads), head_dim=heads.head_dim, device=device, backend=backend,
        )  # fmt: skip


class PassTiles(NamedTuple):
    """A kind of pass over the rows of prompts: its attention is cut into tiles by how many query heads share a key,
    and `extra` rows of each request come after those of its prompt."""

    heads_per_kv: int
    extra: int

    @property
    def rows(self) -> int:
        """Of a tile."""
        return most_tile(self.heads_per_kv) // self.heads_per_kv


@dataclass(frozen=True, slots=True)
class TiledShape:
    """`HostShape` for rows whose plans are on the device already, where a CUDA graph reads them."""

    plans: Mapping[PassTiles, TilePlan]
    extra: int = 0

    def extended(self, rows: int) -> "TiledShape":
        """The same requests with `rows` more rows each."""
        return TiledShape(self.plans, self.extra + rows)

    def sampled(self, rows: int) -> "TiledShape":  # noqa: ARG002
        """Equal counts of rows need no plan of the host's where kernels are Triton's."""
        return self

    def plan(self, heads: LayerSizes, sizes: EngineSizes, device: torch.device, backend: str) -> AttentionPlan:  # noqa: ARG002
        """The plan of a pass over these rows."""
        return self.plans[PassTiles(heads_per_kv(heads), self.extra)]


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
    host: HostShape | TiledShape | None  # None: plans must do without, as in a CUDA graph
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
        """Chunks of prompts; what follows each chunk's last token is known unless the chunk is the last. One that was
        decoded comes alone."""
        arrays, device = PromptParts.of(chunks), state.tables.device
        rows_B = np.diff(arrays.start_B1)
        host = HostShape(rows_B, arrays.first_B + rows_B, state.host_tables[arrays.slot_B])
        scored = _scored(chunks, arrays.start_B1, device)
        rows = cls.of_parts(PromptParts(*to_device(arrays, device)), state, sizes, host, backend, scored)
        return replace(rows, rows_per_request=chunks[0].num_rows) if chunks[0].decoded else rows

    @classmethod
    def of_parts(
        cls,
        parts: "PromptParts[Tensor]",
        state: SlotState,
        sizes: EngineSizes,
        host: HostShape | TiledShape,
        backend: str,
        scored: Scored | None = None,
    ) -> Self:
        """Chunks of prompts from their parts on the device."""
        tables_BN, positions_T = state.tables[parts.slot_B], parts.positions_T
        slots_T = kv_slots(
            tables_BN, parts.request_T, positions_T, sizes.block_size, sizes.max_model_len, backend=backend
        )  # fmt: skip
        return cls(
            slot_B=parts.slot_B,
            ids_T=parts.ids_T,
            positions_T=positions_T,
            kv_slots_T=slots_T,
            last_keys_T=positions_T,
            start_B1=parts.start_B1,
            first_B=parts.first_B,
            tables_BN=tables_BN,
            drafts_BK=parts.slot_B.new_empty((len(parts.slot_B), 0)),
            next_prompt_B=parts.next_B,
            rows_per_request=None,
            host=host,
            scored=scored,
        )


T = TypeVar("T", np.ndarray, Tensor)


class PromptParts(NamedTuple, Generic[T]):
    """What says which rows a pass over prompts has, on the host or on the device."""

    slot_B: T
    ids_T: T
    request_T: T
    positions_T: T
    start_B1: T
    first_B: T
    next_B: T  # the prompt token after a chunk, -1 where it is sampled

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "PromptParts[np.ndarray]":
        """Those of some chunks, on the host."""
        slot_B = _integers(c.request.slot for c in chunks)
        first_B = _integers(c.first for c in chunks)
        rows_B = _integers(c.num_rows for c in chunks)
        start_B1 = np.concatenate(([0], np.cumsum(rows_B)))
        ids_T = _integers(i for c in chunks for i in c.request.token_ids[c.first : c.first + c.num_rows])
        next_B = _integers(-1 if c.is_last else c.request.token_ids[c.first + c.num_rows] for c in chunks)
        request_T = np.repeat(np.arange(len(chunks)), rows_B)
        positions_T = (first_B - start_B1[:-1])[request_T] + np.arange(len(request_T))
        return PromptParts(slot_B, ids_T, request_T, positions_T, start_B1, first_B, next_B)


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _scored(chunks: Sequence[Chunk], start_B1: np.ndarray, device: torch.device) -> Scored | None:
    counts = [c.request.num_scored(c.first, c.num_rows) for c in chunks]
    if not any(counts):
        return None
    rows = np.concatenate([start + np.arange(count) for start, count in zip(start_B1, counts, strict=False)])
    tokens = [i for c, count in zip(chunks, counts, strict=True) for i in c.request.prompt_ids[c.first + 1 :][:count]]
    return Scored(*to_device((rows, np.array(tokens)), device))
