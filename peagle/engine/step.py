"""The speculative step: verify 1+K rows in the target, accept, lay out the drafter's rows, draft K tokens.

A P-EAGLE head drafts them in one pass over mask rows, an EAGLE-3 head in K passes, each from the draft before.

One code path for prefill, plain decoding and speculation, on CPU and CUDA; everything between the host arrays that go
in and the one transfer that comes out runs on the device. Suffixes: B requests, T target rows, U logit rows, K drafts,
V = K + 1 verify rows, N blocks of a table.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.engine.batch import Batch, Slots, StepTensors, to_device
from peagle.engine.kv_cache import PagedCache
from peagle.kernels.accept import Accepted, accept
from peagle.kernels.draft_layout import DraftLayout, draft_layout, kv_slots
from peagle.kernels.draft_rows import MaskRow, draft_rows
from peagle.kernels.paged_attention import AttentionPlan, plan_attention
from peagle.kernels.paged_decode import plan_decode
from peagle.kernels.sample import sample
from peagle.models.decoder import TargetModel
from peagle.models.spec import ModelSpec
from peagle.sampling import RowSampling

_MOST_DECODE_ROWS = 2 * MAX_SPECULATIVE_TOKENS  # of one request in a pass that only decodes: the drafter's


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the target emits per request: the first `accepted + 1` of `tokens`; and the drafts to verify next."""

    tokens_BV: np.ndarray  # [B, K + 1]
    accepted_B: np.ndarray
    drafts_BK: np.ndarray


@dataclass(frozen=True, slots=True)
class DraftSide:
    """A drafter with its cache, and what is the same in all of its passes."""

    drafter: Eagle3Drafter
    cache: PagedCache
    mask: MaskRow | None  # None: no mask rows, drafts come one pass each
    draft_to_target_V: Tensor  # target id of each draft id

    @classmethod
    @torch.inference_mode()
    def of(cls, drafter: Eagle3Drafter, cache: PagedCache) -> Self:
        """Join a drafter, already in its final form on its device, and a cache."""
        config, mask = drafter.config, None
        if isinstance(drafter, PEagleDrafter):
            mask = MaskRow(drafter.mask_token_id, drafter.mask_embedding, drafter.mask_feature())
        draft_ids = torch.arange(config.draft_vocab_size, device=drafter.d2t.device)
        return cls(drafter, cache, mask, drafter.to_target_ids(draft_ids))


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
        kernels: str = "torch",
    ) -> None:
        self._target, self._target_cache = target, target_cache
        self._draft_side = draft_side
        self._slots = slots
        self._block_size, self._max_model_len = block_size, max_model_len
        self._device, self._attention, self._kernels = device, attention, kernels

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Verify, accept and draft for one batch. A batch without drafts leaves the drafter out."""
        side = self._draft_side if batch.num_drafts > 0 else None
        tensors = StepTensors.of(batch, self._device)
        hidden_TH, taps_TC = self._run_target(batch, tensors, side.drafter.config.tap_ids if side else ())
        tokens_BV = self._target_tokens(batch, hidden_TH)
        accepted = accept(tokens_BV, tensors.drafts_BK, backend=self._kernels)
        if side is None or taps_TC is None:
            drafts_BK = tokens_BV[:, :0]
        else:
            drafts_BK = self._draft(side, batch, tensors, accepted, taps_TC)
        out = torch.cat((tokens_BV, accepted.count_B[:, None], drafts_BK), dim=1).cpu().numpy()
        width = batch.num_drafts + 1
        return StepResult(out[:, :width], out[:, width], out[:, width + 1 :])

    def _run_target(self, batch: Batch, tensors: StepTensors, tap_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Final hidden states and taps of every row."""
        spec, positions_T = self._target.spec, tensors.positions_T
        slots_T = self._kv_slots(tensors, tensors.request_T, positions_T)
        keys_B = batch.first_B + batch.rows_B
        plan = self._plan(batch, tensors.tables_BN, batch.rows_B, keys_B, spec)
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
        rows, indices, lines = to_device((row_U, index_U, line_BV), self._device)
        logits_UV = self._target.logits(hidden_TH[rows])
        row_sampling = self._row_sampling(batch.slot_B[request_U], indices)
        return sample(logits_UV, row_sampling, backend=self._kernels)[lines]

    def _draft(
        self,
        side: DraftSide,
        batch: Batch,
        tensors: StepTensors,
        accepted: Accepted,
        taps_TC: Tensor,
    ) -> Tensor:
        """The next K drafts of every request as target ids, [B, K]."""
        kept_B = torch.where(tensors.decode_B, accepted.count_B, tensors.start_B1.diff() - 1)
        mask_rows = batch.num_drafts - 1 if side.mask else 0
        layout = draft_layout(
            tensors.ids_T,
            tensors.positions_T,
            torch.where(tensors.next_prompt_B >= 0, tensors.next_prompt_B, accepted.next_token_B),
            tensors.start_B1,
            tensors.start_B1[:-1] + kept_B,
            mask_token_id=side.mask.token_id if side.mask else 0,
            num_drafts=1 + mask_rows,
            num_rows=len(batch.ids_T) + len(batch.rows_B) * mask_rows,
            block_tables_BN=tensors.tables_BN,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            backend=self._kernels,
        )
        stream_UH = self._first_pass(side, batch, tensors, layout, taps_TC)
        index_B = tensors.first_B + kept_B + 2  # the first draft follows the token after the last kept one
        if side.mask is None:
            return self._draft_in_turn(side, batch, tensors, layout.positions[layout.sample_rows], stream_UH, index_B)
        index_U = (index_B[:, None] + torch.arange(batch.num_drafts, device=self._device)).flatten()
        rows = self._row_sampling(np.repeat(batch.slot_B, batch.num_drafts), index_U)
        return self._pick(side, stream_UH, rows).view(-1, batch.num_drafts)

    def _first_pass(
        self, side: DraftSide, batch: Batch, tensors: StepTensors, layout: DraftLayout, taps_TC: Tensor
    ) -> Tensor:
        """The drafter over every row that has its token: pre-norm stream of each request's last row and its mask rows,
        [B, H] or [B K, H]."""
        drafter = side.drafter
        embeds_RH, features_RH = draft_rows(
            layout, drafter.combine(taps_TC), drafter.embed_tokens.weight, side.mask, backend=self._kernels
        )
        rows_B = batch.rows_B + (batch.num_drafts - 1 if side.mask else 0)
        plan = self._plan(batch, tensors.tables_BN, rows_B, batch.first_B + rows_B, drafter.config)
        attend = side.cache.attend(layout.slots, self._visible(layout.last_keys), plan)
        return drafter.stream(embeds_RH, features_RH, layout.positions, attend)[layout.sample_rows]

    def _draft_in_turn(
        self,
        side: DraftSide,
        batch: Batch,
        tensors: StepTensors,
        position_B: Tensor,
        stream_BH: Tensor,
        index_B: Tensor,
    ) -> Tensor:
        """EAGLE-3's drafts, [B, K]: each but the first takes one more row per request, made of the draft before it and
        the stream of that draft's row, which stands in for taps nobody has yet.

        `position_B`, `stream_BH` and `index_B` belong to the first draft. The keys and values of these rows lie past
        those of all real ones and are overwritten by the next step.
        """
        drafter, num_drafts = side.drafter, batch.num_drafts
        request_B = torch.arange(len(position_B), device=self._device)
        one_B = np.ones_like(batch.rows_B)
        most_keys_B = batch.first_B + batch.rows_B + num_drafts - 1  # how many there are depends on what was accepted
        plan = self._plan(batch, tensors.tables_BN, one_B, most_keys_B, drafter.config)
        rows = self._row_sampling(batch.slot_B, index_B)
        drafts = [self._pick(side, stream_BH, rows)]
        for turn in range(1, num_drafts):
            at_B = position_B + turn
            slots_B = self._kv_slots(tensors, request_B, at_B)
            attend = side.cache.attend(slots_B, self._visible(at_B), plan)
            stream_BH = drafter.stream(drafter.embed_tokens(drafts[-1]), stream_BH, at_B, attend)
            drafts.append(self._pick(side, stream_BH, rows and replace(rows, indices=index_B + turn)))
        return torch.stack(drafts, dim=1)

    def _pick(self, side: DraftSide, stream_UH: Tensor, rows: RowSampling | None) -> Tensor:
        """The drafts that rows with this pre-norm stream propose, as target ids [U]."""
        logits_UV = side.drafter.logits(side.drafter.norm(stream_UH))
        return sample(logits_UV, rows, side.draft_to_target_V, backend=self._kernels)

    def _kv_slots(self, tensors: StepTensors, request_R: Tensor, positions_R: Tensor) -> Tensor:
        return kv_slots(
            tensors.tables_BN, request_R, positions_R, self._block_size, self._max_model_len, backend=self._kernels
        )

    def _plan(
        self,
        batch: Batch,
        tables_BN: Tensor,
        rows_B: np.ndarray,
        keys_B: np.ndarray,
        sizes: ModelSpec | DrafterConfig,
    ) -> AttentionPlan:
        """Plan a pass with `rows_B` rows of each request over at most `keys_B` keys."""
        heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        rows = int(rows_B.max())
        if self._kernels == "triton" and rows <= _MOST_DECODE_ROWS and (rows_B == rows).all():
            return plan_decode(
                rows, tables_BN, self._block_size,
                heads=heads, kv_heads=kv_heads, head_dim=head_dim, backend=self._kernels,
            )  # fmt: skip
        return plan_attention(
            rows_B,
            np.minimum(keys_B, self._max_model_len),
            batch.tables_BN,
            self._block_size,
            heads_per_kv=heads // kv_heads,
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
