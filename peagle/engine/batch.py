"""The batch of a step: per-request state on the host, the rows collected from it, and their one way to the device.

Suffixes: B requests, T target rows, K drafts, N blocks of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from peagle.engine.scheduler import Scheduled


class Slots:
    """Per-request state that outlives a step, one row per slot, on the host."""

    def __init__(self, max_num_seqs: int, num_drafts: int, max_blocks: int) -> None:
        self.drafts = np.zeros((max_num_seqs, num_drafts), dtype=np.int64)
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Batch:
    """The host arrays of one step."""

    slot_B: np.ndarray
    first_B: np.ndarray  # position of each request's first row
    rows_B: np.ndarray  # rows per request
    start_B1: np.ndarray  # first row of each request, and the total
    decode_B: np.ndarray  # bool
    ids_T: np.ndarray
    drafts_BK: np.ndarray  # -1 for prompts
    next_prompt_B: np.ndarray  # the prompt token after the chunk, -1 where the next token is sampled
    tables_BN: np.ndarray  # block tables

    @property
    def num_drafts(self) -> int:
        """K; 0 where the step decodes plainly."""
        return self.drafts_BK.shape[1]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the parts of one step share on the device: a batch, and where each of its rows belongs."""

    ids_T: Tensor
    request_T: Tensor
    positions_T: Tensor
    start_B1: Tensor
    first_B: Tensor
    decode_B: Tensor  # bool
    next_prompt_B: Tensor
    drafts_BK: Tensor
    tables_BN: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        """Move a batch to the device, all of it in one transfer."""
        request_T = np.repeat(np.arange(len(batch.rows_B)), batch.rows_B)
        positions_T = (batch.first_B - batch.start_B1[:-1])[request_T] + np.arange(len(request_T))
        b = batch
        rows = (b.ids_T, request_T, positions_T)
        requests = (b.start_B1, b.first_B, b.decode_B, b.next_prompt_B, b.drafts_BK, b.tables_BN)
        ids, request, positions, start, first, decode, *others = to_device((*rows, *requests), device)
        return cls(ids, request, positions, start, first, decode.bool(), *others)


def build_batch(scheduled: list[Scheduled], slots: Slots, num_drafts: int) -> Batch:
    """Collect the rows of the scheduled requests; decodes come before prompts."""
    slot_B = np.array([s.request.slot for s in scheduled], dtype=np.int64)
    rows_B = np.array([s.num_rows for s in scheduled], dtype=np.int64)
    decode_B = np.array([s.is_decode for s in scheduled], dtype=bool)
    decode_slots = slot_B[decode_B]
    decode_ids = np.concatenate((slots.last_token[decode_slots, None], slots.drafts[decode_slots, :num_drafts]), axis=1)
    ids: list[np.ndarray] = [decode_ids.ravel()]
    next_prompt_B = np.full(len(scheduled), -1, dtype=np.int64)
    for i, s in enumerate(scheduled):
        if not s.is_decode:
            prompt, end = s.request.prompt_ids, s.request.num_computed + s.num_rows
            ids.append(np.array(prompt[s.request.num_computed : end], dtype=np.int64))
            if end < len(prompt):
                next_prompt_B[i] = prompt[end]
    return Batch(
        slot_B=slot_B,
        first_B=np.array([s.request.num_computed for s in scheduled], dtype=np.int64),
        rows_B=rows_B,
        start_B1=np.concatenate(([0], np.cumsum(rows_B))),
        decode_B=decode_B,
        ids_T=np.concatenate(ids),
        drafts_BK=np.where(decode_B[:, None], slots.drafts[slot_B, :num_drafts], -1),
        next_prompt_B=next_prompt_B,
        tables_BN=slots.block_tables[slot_B],
    )


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors of the same shapes, in one transfer."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64)).to(device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
