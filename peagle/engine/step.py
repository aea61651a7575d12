"""The speculative step: verify 1+K rows in the target, accept, lay out the drafter's rows, draft K tokens in one pass.

One code path for prefill, plain decoding and speculation, on CPU and CUDA; everything between the host arrays that go
in and the one transfer that comes out runs on the device. Suffixes: B requests, T target rows, U logit rows, K drafts,
V = K + 1 verify rows, N blocks of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from peagle.drafters.p_eagle import PEagleDrafter
from peagle.engine.kv_cache import PagedCache
from peagle.engine.scheduler import Scheduled
from peagle.kernels.accept import accept_ref
from peagle.kernels.draft_layout import DraftLayout, draft_layout_ref, kv_slots_ref
from peagle.kernels.paged_attention import AttentionPlan, plan_attention
from peagle.models.decoder import TargetModel
from peagle.sampling import RowSampling, sample_tokens


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
        ids, request, positions, start, first, decode, *others = _to_device((*rows, *requests), device)
        return cls(ids, request, positions, start, first, decode.bool(), *others)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the target emits per request: the first `accepted + 1` of `tokens`; and the drafts to verify next."""

    tokens_BV: np.ndarray  # [B, K + 1]
    accepted_B: np.ndarray
    drafts_BK: np.ndarray


@dataclass(frozen=True, slots=True)
class DraftSide:
    """A drafter with its cache, and what is the same in all of its passes."""

    drafter: PEagleDrafter
    cache: PagedCache
    mask_feature_H: Tensor
    draft_to_target_V: Tensor  # target id of each draft id
    heads_per_kv: int

    @classmethod
    @torch.inference_mode()
    def of(cls, drafter: PEagleDrafter, cache: PagedCache) -> Self:
        """Join a drafter, already in its final form on its device, and a cache."""
        config = drafter.config
        draft_ids = torch.arange(config.draft_vocab_size, device=drafter.d2t.device)
        return cls(
            drafter,
            cache,
            drafter.mask_feature(),
            drafter.to_target_ids(draft_ids),
            config.num_heads // config.num_kv_heads,
        )


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


class SpeculativeStep:
    """Target, drafter and their caches; `run` is one step. `draft_side` None decodes plainly."""

    def __init__(
        self,
        target: TargetModel,
        target_cache: PagedCache,
        draft_side: DraftSide | None,
        *,
        slots: Slots,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        attention: str = "auto",
    ) -> None:
        self._target, self._target_cache = target, target_cache
        self._draft_side = draft_side
        self._slots = slots
        self._block_size, self._max_model_len = block_size, max_model_len
        self._device, self._attention = device, attention

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Verify, accept and draft for one batch. A batch without drafts leaves the drafter out."""
        side = self._draft_side if batch.num_drafts > 0 else None
        tensors = StepTensors.of(batch, self._device)
        hidden_TH, taps_TC = self._run_target(batch, tensors, side.drafter.config.tap_ids if side else ())
        tokens_BV = self._target_tokens(batch, hidden_TH)
        accepted_B = accept_ref(tokens_BV, tensors.drafts_BK)
        if side is None or taps_TC is None:
            drafts_BK = tokens_BV[:, :0]
        else:
            drafts_BK = self._draft(side, batch, tensors, tokens_BV, accepted_B, taps_TC)
        out = torch.cat((tokens_BV, accepted_B[:, None], drafts_BK), dim=1).cpu().numpy()
        width = batch.num_drafts + 1
        return StepResult(out[:, :width], out[:, width], out[:, width + 1 :])

    def _run_target(self, batch: Batch, tensors: StepTensors, tap_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Final hidden states and taps of every row."""
        spec, positions_T = self._target.spec, tensors.positions_T
        slots_T = kv_slots_ref(tensors.tables_BN, tensors.request_T, positions_T, self._block_size, self._max_model_len)
        plan = self._plan(batch, batch.rows_B, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        attend = self._target_cache.attend(slots_T, self._visible(positions_T), plan)
        return self._target(tensors.ids_T, positions_T, attend, tap_ids)

    def _target_tokens(self, batch: Batch, hidden_TH: Tensor) -> Tensor:
        """The target's own token after each verify row, [B, K+1]; a prompt's last row fills its whole line."""
        count_B = np.where(batch.decode_B, batch.num_drafts + 1, 1)
        request_U = np.repeat(np.arange(len(count_B)), count_B)
        base_B1 = np.concatenate(([0], np.cumsum(count_B)))
        row_U = (batch.start_B1[1:] - base_B1[1:])[request_U] + np.arange(base_B1[-1])
        index_U = (batch.first_B - batch.start_B1[:-1] + 1)[request_U] + row_U
        line_BV = base_B1[:-1, None] + np.minimum(np.arange(batch.num_drafts + 1)[None], count_B[:, None] - 1)
        rows, indices, lines = _to_device((row_U, index_U, line_BV), self._device)
        logits_UV = self._target.logits(hidden_TH[rows])
        return sample_tokens(logits_UV, self._row_sampling(batch.slot_B[request_U], indices))[lines]

    def _draft(
        self,
        side: DraftSide,
        batch: Batch,
        tensors: StepTensors,
        tokens_BV: Tensor,
        accepted_B: Tensor,
        taps_TC: Tensor,
    ) -> Tensor:
        """One drafter pass over every request's 2K (or prompt + K-1) rows; the drafts as target ids, [B, K]."""
        sampled_B = tokens_BV.gather(1, accepted_B[:, None])[:, 0]
        kept_B = torch.where(tensors.decode_B, accepted_B, tensors.start_B1.diff() - 1)
        layout = draft_layout_ref(
            tensors.ids_T,
            tensors.positions_T,
            torch.where(tensors.next_prompt_B >= 0, tensors.next_prompt_B, sampled_B),
            tensors.start_B1,
            tensors.start_B1[:-1] + kept_B,
            mask_token_id=side.drafter.config.mask_token_id,
            num_drafts=batch.num_drafts,
            num_rows=len(batch.ids_T) + len(batch.rows_B) * (batch.num_drafts - 1),
            block_tables_BN=tensors.tables_BN,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
        )
        hidden_UH = self._run_drafter(side, batch, layout, taps_TC)
        index_B = tensors.first_B + kept_B + 2  # the first draft follows the token after the last kept one
        index_U = (index_B[:, None] + torch.arange(batch.num_drafts, device=self._device)).flatten()
        rows = self._row_sampling(np.repeat(batch.slot_B, batch.num_drafts), index_U)
        picked_U = sample_tokens(side.drafter.logits(hidden_UH), rows, side.draft_to_target_V)
        return side.draft_to_target_V[picked_U].view(-1, batch.num_drafts)

    def _run_drafter(self, side: DraftSide, batch: Batch, layout: DraftLayout, taps_TC: Tensor) -> Tensor:
        """Final hidden states of the sampled rows, [B K, H]."""
        drafter, masked_R1 = side.drafter, layout.is_masked[:, None]
        embeds_RH = torch.where(masked_R1, drafter.mask_embedding, drafter.embed_tokens(layout.input_ids))
        features_RH = torch.zeros_like(embeds_RH)
        features_RH[layout.hidden_map] = drafter.combine(taps_TC)
        features_RH = torch.where(masked_R1, side.mask_feature_H, features_RH)
        plan = self._plan(batch, batch.rows_B + batch.num_drafts - 1, side.heads_per_kv, drafter.config.head_dim)
        attend = side.cache.attend(layout.slots, self._visible(layout.positions), plan)
        return drafter(embeds_RH, features_RH, layout.positions, attend)[layout.sample_rows]

    def _plan(self, batch: Batch, rows_B: np.ndarray, heads_per_kv: int, head_dim: int) -> AttentionPlan:
        """Plan a pass in which each request has `rows_B` rows from its first position on."""
        return plan_attention(
            rows_B,
            np.minimum(batch.first_B + rows_B, self._max_model_len),
            batch.tables_BN,
            self._block_size,
            heads_per_kv=heads_per_kv,
            head_dim=head_dim,
            device=self._device,
            backend=self._attention,
        )

    def _visible(self, positions_R: Tensor) -> Tensor:
        """The last key position each row sees: its own; rows past the length limit have no key of their own."""
        return positions_R.clamp(max=self._max_model_len - 1)

    def _row_sampling(self, slot_U: np.ndarray, indices_U: Tensor) -> RowSampling | None:
        """Sampling parameters of rows that belong to `slot_U`; None when all of them are greedy."""
        s, device = self._slots, self._device
        if not s.temperature[slot_U].any():
            return None
        return RowSampling(
            temperature=torch.from_numpy(s.temperature[slot_U]).to(device),
            top_k=torch.from_numpy(s.top_k[slot_U]).to(device),
            top_p=torch.from_numpy(s.top_p[slot_U]).to(device),
            seed=torch.from_numpy(s.seed[slot_U]).to(device),
            indices=indices_U,
            filtered=bool((s.top_k[slot_U] > 0).any() or (s.top_p[slot_U] < 1.0).any()),
        )


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors of the same shapes, in one transfer."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64)).to(device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
