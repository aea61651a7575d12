"""Chunks of prompts in one of a few shapes, so that their pass can be a CUDA graph.

What is missing to a shape is padding: requests in slot -1, of one row each but the last one, which has all that are
left. They see a key of the null block, write nothing, and change no slot.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from peagle.engine.batch import PassTiles, PromptParts, Rows, TiledShape
from peagle.engine.scheduler import Chunk
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SlotState
from peagle.engine.transfer import pack, unpack
from peagle.kernels.draft_layout import PADDING_SLOT_ID
from peagle.kernels.paged_attention import TilePlan, cut_tiles, most_tile

# Few shapes are soon captured. From 129 rows on a pass computes at most half again as many as it has to. Not measured:
# that fewer cost a GPU next to nothing, and that more than the most keep it busy longer than launches do the host.
_ROWS, _REQUESTS = (64, 128, 192, 256, 384, 512, 768, 1024), (2, 8)


class PromptShape(NamedTuple):
    """Rows and requests of a pass, padding included."""

    rows: int
    requests: int


def prompt_shapes(most_rows: int) -> list[PromptShape]:
    """The shapes of passes over at most so many rows."""
    return [PromptShape(rows, requests) for rows in _ROWS if rows <= most_rows for requests in _REQUESTS]


def shape_of(chunks: Sequence[Chunk], shapes: Sequence[PromptShape]) -> PromptShape | None:
    """The smallest shape that holds these chunks and a request of padding; None where there is none."""
    total, count = sum(c.num_rows for c in chunks), len(chunks)
    fit = [s for s in shapes if s.requests > count and s.rows >= total + s.requests - count]
    return min(fit, default=None)


class PaddedPrompts:
    """What a pass of one shape reads, in one tensor of the device whose address stays."""

    def __init__(self, shape: PromptShape, passes: Collection[PassTiles], device: torch.device) -> None:
        self.shape, self._passes, self._device = shape, passes, device
        arrays = self._arrays(())
        self._packed = pack(arrays, device).to(device)
        self._views = unpack(self._packed, [array.shape for array in arrays])

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Have the next pass be over these chunks, which `shape_of` says fit; without any, over padding alone."""
        self._packed.copy_(pack(self._arrays(chunks), self._device), non_blocking=True)

    def rows(self, state: SlotState, sizes: EngineSizes, backend: str) -> Rows:
        """The rows of the pass, made of what is on the device alone."""
        count = len(PromptParts._fields)
        parts: PromptParts[Tensor] = PromptParts(*self._views[:count])
        tables_BN = state.tables[parts.slot_B]
        plans = {
            kind: TilePlan(tiles_W3, tables_BN, sizes.block_size, most_tile(kind.heads_per_kv))
            for kind, tiles_W3 in zip(self._passes, self._views[count:], strict=True)
        }
        rows = Rows.of_parts(parts, state, sizes, TiledShape(plans), backend)
        is_padding_T = (parts.slot_B < 0)[parts.request_T]
        return replace(rows, kv_slots_T=rows.kv_slots_T.masked_fill(is_padding_T, PADDING_SLOT_ID))

    def _arrays(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """The parts of the rows and each kind's tiles, of the same sizes whatever the chunks."""
        spare, total = self.shape.requests - len(chunks), sum(c.num_rows for c in chunks)
        rows_B = np.array([*(c.num_rows for c in chunks), *[1] * (spare - 1), self.shape.rows - total - (spare - 1)])
        none, padding_T = np.full(spare, -1), np.zeros(self.shape.rows - total, dtype=np.int64)
        real = PromptParts.of(chunks)
        parts = PromptParts(
            slot_B=np.concatenate((real.slot_B, none)),
            ids_T=np.concatenate((real.ids_T, padding_T)),
            request_T=np.repeat(np.arange(len(rows_B)), rows_B),
            positions_T=np.concatenate((real.positions_T, padding_T)),
            start_B1=np.concatenate(([0], np.cumsum(rows_B))),
            first_B=np.concatenate((real.first_B, np.zeros(spare, dtype=np.int64))),
            next_B=np.concatenate((real.next_B, none)),
        )
        return [*parts, *(self._tiles(rows_B, kind) for kind in self._passes)]

    def _tiles(self, rows_B: np.ndarray, kind: PassTiles) -> np.ndarray:
        """The tiles of a pass, then empty ones, as many as the shape can need in all."""
        tiles_W3, shape = cut_tiles(rows_B + kind.extra, kind.rows), self.shape
        most = (shape.rows + shape.requests * kind.extra) // kind.rows + shape.requests
        return np.concatenate((tiles_W3, np.zeros((most - len(tiles_W3), 3), dtype=np.int64)))
