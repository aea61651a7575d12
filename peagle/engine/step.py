"""The speculative step: verify 1+K rows in the target, accept, lay out the drafter's rows, draft K tokens in one pass.

One code path for prefill, plain decoding and speculation, on CPU and CUDA; everything between the host arrays that go
in and the one transfer that comes out runs on the device. Suffixes: B requests, T target rows, U logit rows, K drafts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.drafters.p_eagle import PEagleDrafter
from peagle.engine.kv_cache import PagedCache
from peagle.engine.scheduler import Scheduled
from peagle.kernels.accept import accept_ref
from peagle.kernels.draft_layout import DraftLayout, draft_layout_ref, kv_slots_ref
from peagle.kernels.paged_attention import plan_attention
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
    decode_B: np.ndarray  # bool
    ids_T: np.ndarray
    drafts_BK: np.ndarray  # -1 for prompts
    next_prompt_B: np.ndarray  # the prompt token after the chunk, -1 where the next token is sampled

    @property
    def start_B1(self) -> np.ndarray:
        """First row of each request, and the total."""
        return np.concatenate(([0], np.cumsum(self.rows_B)))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the target emits per request: the first `accepted + 1` of `tokens`; and the drafts to verify next."""

    tokens_BV: np.ndarray  # [B, K + 1]
    accepted_B: np.ndarray
    drafts_BK: np.ndarray


def build_batch(scheduled: list[Scheduled], slots: Slots, num_drafts: int) -> Batch:
    """Collect the rows of the scheduled requests; decodes come before prompts."""
    requests = [s.request for s in scheduled]
    slot_B = np.array([r.slot for r in requests], dtype=np.int64)
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
    drafts_BK = np.where(decode_B[:, None], slots.drafts[slot_B, :num_drafts], -1)
    return Batch(
        slot_B=slot_B,
        first_B=np.array([r.num_computed for r in requests], dtype=np.int64),
        rows_B=np.array([s.num_rows for s in scheduled], dtype=np.int64),
        decode_B=decode_B,
        ids_T=np.concatenate(ids),
        drafts_BK=drafts_BK,
        next_prompt_B=next_prompt_B,
    )


class SpeculativeStep:
    """Target, drafter and their caches; `run` is one step. `drafter` None decodes plainly."""

    def __init__(
        self,
        target: TargetModel,
        target_cache: PagedCache,
        drafter: PEagleDrafter | None,
        drafter_cache: PagedCache | None,
        *,
        slots: Slots,
        block_size: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._target, self._target_cache = target, target_cache
        self._drafter, self._drafter_cache = drafter, drafter_cache
        self._slots = slots
        self._block_size, self._max_model_len = block_size, max_model_len
        self._device = device
        spec = target.spec
        self._target_group = spec.num_heads // spec.num_kv_heads
        if drafter is not None:
            self._drafter_group = drafter.config.num_heads // drafter.config.num_kv_heads
            self._mask_feature_H = drafter.mask_feature()  # the same for every mask row of every step
            draft_ids = torch.arange(drafter.config.draft_vocab_size, device=device)
            self._draft_to_target_V = drafter.to_target_ids(draft_ids)

    @torch.inference_mode()
    def run(self, batch: Batch, num_drafts: int) -> StepResult:
        """Verify, accept and draft for one batch. `num_drafts` 0 leaves the drafter out."""
        start_B1 = batch.start_B1
        hidden_TH, taps_TC = self._run_target(batch, start_B1, tapped=num_drafts > 0)
        tokens_BV = self._target_tokens(batch, start_B1, hidden_TH, num_drafts)
        accepted_B = accept_ref(tokens_BV, self._to_device(batch.drafts_BK))
        if num_drafts == 0 or taps_TC is None:
            drafts_BK = tokens_BV[:, :0]
        else:
            drafts_BK = self._draft(batch, start_B1, tokens_BV, accepted_B, taps_TC, num_drafts)
        out = torch.cat((tokens_BV, accepted_B[:, None], drafts_BK), dim=1).cpu().numpy()
        width = num_drafts + 1
        return StepResult(out[:, :width], out[:, width], out[:, width + 1 :])

    def _run_target(self, batch: Batch, start_B1: np.ndarray, *, tapped: bool) -> tuple[Tensor, Tensor | None]:
        request_T = np.repeat(np.arange(len(batch.rows_B)), batch.rows_B)
        positions_T = batch.first_B[request_T] + np.arange(start_B1[-1]) - start_B1[request_T]
        positions = self._to_device(positions_T)
        tables_BN = self._slots.block_tables[batch.slot_B]
        slots = kv_slots_ref(
            self._to_device(tables_BN), self._to_device(request_T), positions, self._block_size, self._max_model_len
        )
        plan = plan_attention(
            batch.rows_B,
            np.minimum(batch.first_B + batch.rows_B, self._max_model_len),
            tables_BN,
            self._block_size,
            heads_per_kv=self._target_group,
            device=self._device,
        )
        limit = positions.clamp(max=self._max_model_len - 1)
        tap_ids = self._drafter.config.tap_ids if tapped and self._drafter is not None else ()
        attend = self._target_cache.attend(slots, limit, plan)
        return self._target(self._to_device(batch.ids_T), positions, attend, tap_ids)

    def _target_tokens(self, batch: Batch, start_B1: np.ndarray, hidden_TH: Tensor, num_drafts: int) -> Tensor:
        """The target's own token after each verify row, [B, K+1]; a prompt's last row fills its whole line."""
        count_B = np.where(batch.decode_B, num_drafts + 1, 1)
        request_U = np.repeat(np.arange(len(count_B)), count_B)
        base_B = np.concatenate(([0], np.cumsum(count_B)))
        row_U = start_B1[1:][request_U] - count_B[request_U] + np.arange(base_B[-1]) - base_B[:-1][request_U]
        index_U = batch.first_B[request_U] + row_U - start_B1[request_U] + 1
        logits_UV = self._target.logits(hidden_TH[self._to_device(row_U)])
        tokens_U = sample_tokens(logits_UV, self._row_sampling(batch.slot_B[request_U], index_U))
        line_BV = base_B[:-1, None] + np.minimum(np.arange(num_drafts + 1)[None], count_B[:, None] - 1)
        return tokens_U[self._to_device(line_BV)]

    def _draft(
        self,
        batch: Batch,
        start_B1: np.ndarray,
        tokens_BV: Tensor,
        accepted_B: Tensor,
        taps_TC: Tensor,
        num_drafts: int,
    ) -> Tensor:
        """One drafter pass over every request's 2K (or prompt + K-1) rows; the drafts as target ids, [B, K]."""
        drafter, first_B = self._require_drafter(), self._to_device(batch.first_B)
        start = self._to_device(start_B1)
        next_prompt_B = self._to_device(batch.next_prompt_B)
        sampled_B = tokens_BV.gather(1, accepted_B[:, None])[:, 0]
        kept_B = torch.where(self._to_device(batch.decode_B), accepted_B, start.diff() - 1)
        layout = draft_layout_ref(
            self._to_device(batch.ids_T),
            self._positions(first_B, start),
            torch.where(next_prompt_B >= 0, next_prompt_B, sampled_B),
            start,
            start[:-1] + kept_B,
            mask_token_id=drafter.config.mask_token_id,
            num_drafts=num_drafts,
            num_rows=int(start_B1[-1]) + len(first_B) * (num_drafts - 1),
            block_tables_BN=self._to_device(self._slots.block_tables[batch.slot_B]),
            block_size=self._block_size,
            max_model_len=self._max_model_len,
        )
        hidden_KH = self._run_drafter(batch, layout, taps_TC, num_drafts)
        index_B = first_B + kept_B + 2  # the first draft follows the token after the last kept one
        index_R = (index_B[:, None] + torch.arange(num_drafts, device=self._device)).flatten()
        rows = self._row_sampling(np.repeat(batch.slot_B, num_drafts), index_R)
        picked = sample_tokens(drafter.logits(hidden_KH), rows, self._draft_to_target_V)
        return self._draft_to_target_V[picked].view(-1, num_drafts)

    def _run_drafter(self, batch: Batch, layout: DraftLayout, taps_TC: Tensor, num_drafts: int) -> Tensor:
        """Final hidden states of the sampled rows, [B K, H]."""
        drafter = self._require_drafter()
        assert self._drafter_cache is not None
        masked_R1 = layout.is_masked[:, None]
        embeds_RH = torch.where(masked_R1, drafter.mask_embedding, drafter.embed_tokens(layout.input_ids))
        features_RH = torch.zeros_like(embeds_RH)
        features_RH[layout.hidden_map] = drafter.combine(taps_TC)
        features_RH = torch.where(masked_R1, self._mask_feature_H, features_RH)
        rows_B = batch.rows_B + num_drafts - 1
        plan = plan_attention(
            rows_B,
            np.minimum(batch.first_B + rows_B, self._max_model_len),
            self._slots.block_tables[batch.slot_B],
            self._block_size,
            heads_per_kv=self._drafter_group,
            device=self._device,
        )
        limit_R = layout.positions.clamp(max=self._max_model_len - 1)
        attend = self._drafter_cache.attend(layout.slots, limit_R, plan)
        return drafter(embeds_RH, features_RH, layout.positions, attend)[layout.sample_rows]

    def _positions(self, first_B: Tensor, start_B1: Tensor) -> Tensor:
        rows_T = torch.arange(int(start_B1[-1]), device=self._device)
        request_T = torch.searchsorted(start_B1, rows_T, right=True) - 1
        return first_B[request_T] + rows_T - start_B1[request_T]

    def _row_sampling(self, slot_U: np.ndarray, index_U: np.ndarray | Tensor) -> RowSampling | None:
        """Sampling parameters of rows that belong to `slot_U`; None when all of them are greedy."""
        s = self._slots
        if not s.temperature[slot_U].any():
            return None
        return RowSampling(
            temperature=self._to_device(s.temperature[slot_U]),
            top_k=self._to_device(s.top_k[slot_U]),
            top_p=self._to_device(s.top_p[slot_U]),
            seed=self._to_device(s.seed[slot_U]),
            indices=self._to_device(index_U),
            filtered=bool((s.top_k[slot_U] > 0).any() or (s.top_p[slot_U] < 1.0).any()),
        )

    def _require_drafter(self) -> PEagleDrafter:
        if self._drafter is None:
            raise RuntimeError("drafting was asked of an engine without a drafter")
        return self._drafter

    def _to_device(self, array: np.ndarray | Tensor) -> Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(array).to(self._device)
