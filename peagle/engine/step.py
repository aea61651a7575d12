"""The speculative step: run rows through the target, accept, lay out the drafter's rows, draft K tokens.

A P-EAGLE head drafts them in one pass over mask rows, an EAGLE-3 head in K passes, each from the draft before.

Prompts and verification are the same function of `Rows`; everything in it happens on the device and waits for nothing,
so verification can be captured as one CUDA graph. Suffixes: B requests, T target rows, U logit rows, K drafts,
V = K + 1 verify rows, N blocks of a table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from peagle.drafters.draft_pass import DraftPass, DraftSavings
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.engine.batch import HostShape, Rows, TiledShape
from peagle.engine.kv_cache import PagedCache
from peagle.engine.outputs import StepOutput
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SamplingMode, SlotState
from peagle.errors import PeagleError
from peagle.kernels.accept import Accepted, accept
from peagle.kernels.backend import INVARIANT, LIBRARY
from peagle.kernels.commit import commit
from peagle.kernels.draft_layout import DraftLayout, LayoutSizes, draft_layout, kv_slots
from peagle.kernels.draft_rows import MaskRow
from peagle.kernels.logprobs import RowLogprobs, join, row_logprobs, rows_at_once
from peagle.kernels.paged_attention import AttentionPlan
from peagle.kernels.paged_decode import plan_decode
from peagle.kernels.sample import sample
from peagle.kernels.synthetic_acceptance import SyntheticLengths
from peagle.kernels.whole_attention import plan_lengths
from peagle.models.decoder import TargetModel
from peagle.models.int8 import Int8Linear
from peagle.models.layers import Attend
from peagle.models.spec import ModelSpec
from peagle.sampling import MAX_LOGPROBS, RowSampling


@dataclass(frozen=True, slots=True)
class DraftSide:
    """A drafter with its cache, and what is the same in all of its passes."""

    drafter: Eagle3Drafter
    cache: PagedCache
    first_pass: DraftPass
    draft_to_target_V: Tensor  # target id of each draft id
    int8_head: Int8Linear | None = None  # in place of the drafter's own output layer

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        drafter: Eagle3Drafter,
        cache: PagedCache,
        savings: DraftSavings | None = None,
        int8_head: Int8Linear | None = None,
    ) -> Self:
        """Join a drafter, already in its final form on its device, and a cache."""
        draft_ids = torch.arange(drafter.config.draft_vocab_size, device=drafter.d2t.device)
        first_pass = DraftPass.of(drafter, savings, cache.kernels)
        return cls(drafter, cache, first_pass, drafter.to_target_ids(draft_ids), int8_head)

    def logits(self, stream_UH: Tensor) -> Tensor:
        """Over the draft vocabulary, [U, draft_vocab_size], from the pre-norm stream."""
        normed_UH = self.drafter.norm(stream_UH)
        return self.drafter.logits(normed_UH) if self.int8_head is None else self.int8_head(normed_UH)

    @property
    def mask(self) -> MaskRow | None:
        """None: the head has no mask rows, its drafts come one pass each."""
        return self.first_pass.mask


class SpeculativeStep:
    """Target, drafter, their caches and the state of the slots. `draft_side` None decodes plainly.

    `kernels` is "torch" or "triton". With `synthetic`, SYNTHETIC acceptance: how many drafts are kept is drawn,
    whatever they are, to time a system without a trained head.
    """

    def __init__(
        self,
        target: TargetModel,
        target_cache: PagedCache,
        draft_side: DraftSide | None,
        state: SlotState,
        *,
        sizes: EngineSizes,
        attention: str = "auto",
        kernels: str = "torch",
        synthetic: SyntheticLengths | None = None,
    ) -> None:
        self._target, self._target_cache = target, target_cache
        self._draft_side, self.state = draft_side, state
        self._sizes, self._block_size, self._max_model_len = sizes, sizes.block_size, sizes.max_model_len
        self._attention = attention
        self._attends_whole = attention == LIBRARY  # to a long prompt, by a library's kernel
        self._draft_attention = "auto" if attention == INVARIANT else attention  # no bit of a draft reaches the output
        self._kernels = kernels
        self.synthetic = synthetic

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self._target.spec.vocab_size

    def plan_whole(self) -> Iterator[int]:
        """Have a library plan for long prompts, if it attends to them; yields each length before its turn."""
        both = [self._target_cache] + ([self._draft_side.cache] if self._draft_side else [])
        caches = [cache for cache in both if cache.takes_whole]
        # A drafter's mask rows come after those of the prompt.
        most = min(self._max_model_len, self._sizes.max_num_batched_tokens) + self.state.drafts.shape[1]
        for rows in plan_lengths(most) if self._attends_whole and caches else ():
            yield rows
            for cache in caches:
                cache.plan_whole(rows)

    def run(self, rows: Rows, num_drafts: int, mode: SamplingMode) -> StepOutput:
        """Accept, draft `num_drafts` tokens, move the slots on. A prompt's chunk emits its next token, V = 1, real
        where the chunk is its last."""
        side = self._draft_side if num_drafts > 0 else None
        hidden_TH, taps_TC = self._run_target(rows, side.drafter.config.tap_ids if side else ())
        tokens_BV, logprobs = self._target_tokens(rows, hidden_TH, mode)
        accepted = self._accept(rows, tokens_BV)
        says_B = rows.slot_B
        if rows.next_prompt_B is None:
            kept_B, next_B = accepted.count_B, accepted.next_token_B
        else:
            says_B = torch.where(rows.next_prompt_B >= 0, -1, says_B)
            kept_B = rows.start_B1.diff() - 1
            next_B = torch.where(rows.next_prompt_B >= 0, rows.next_prompt_B, accepted.next_token_B)
        if mode.penalised:
            self.state.needed_history.add(says_B, accepted.emitted_BV)
        if side is None or taps_TC is None:
            drafts_BK = rows.slot_B.new_empty((rows.batch, 0))
        else:
            drafts_BK = self._draft(side, rows, kept_B, next_B, taps_TC, num_drafts, mode)
        tokens_BW = commit(
            self.state.rows, rows.slot_B, rows.first_B, kept_B, next_B, accepted.emitted_BV, accepted.count_B,
            drafts_BK, backend=self._kernels,
        )  # fmt: skip
        shown_BK = self.state.drafts[rows.slot_B] if mode.shows_drafts else None
        return StepOutput(tokens_BW, shown_BK, logprobs, self._prompt_logprobs(rows, hidden_TH))

    def _run_target(self, rows: Rows, tap_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Final hidden states and taps of every row."""
        plan = self._plan(rows.tables_BN, rows.rows_per_request, rows.host, self._target.spec)
        attend = self._target_cache.attend(rows.kv_slots_T, rows.last_keys_T, plan)
        return self._target(rows.ids_T, rows.positions_T, attend, tap_ids)

    def _target_tokens(self, rows: Rows, hidden_TH: Tensor, mode: SamplingMode) -> tuple[Tensor, RowLogprobs | None]:
        """The target's own token after each verify row, [B, V]; after a chunk's last row, [B, 1]. Their
        log-probabilities are those of the target's logits before anything changes them."""
        last_B, count = rows.first_B, rows.drafts_BK.shape[1] + 1
        if rows.next_prompt_B is not None:
            hidden_TH, last_B = hidden_TH[rows.start_B1[1:] - 1], rows.positions_T[rows.start_B1[1:] - 1]
        logits_UV = raw_UV = self._target.logits(hidden_TH)
        if mode.penalised:
            history = self.state.needed_history
            logits_UV = history.apply(logits_UV, rows.slot_B, rows.drafts_BK, backend=self._kernels)
        if mode.masked:
            logits_UV = self.state.needed_masks.apply(logits_UV, rows.slot_B, backend=self._kernels)
        sampling = self.state.row_sampling(rows.slot_B, last_B + 1, count, mode)
        tokens_U = sample(logits_UV, sampling, backend=self._kernels)
        logprobs = row_logprobs(raw_UV, tokens_U, MAX_LOGPROBS) if mode.scores else None
        return tokens_U.view(rows.batch, -1), logprobs

    def _prompt_logprobs(self, rows: Rows, hidden_TH: Tensor) -> RowLogprobs | None:
        """Log-probabilities of the prompt tokens that are asked for, a few rows of logits at a time."""
        if rows.scored is None:
            return None
        count = rows_at_once(self._target.spec.vocab_size)
        pairs = zip(rows.scored.rows_S.split(count), rows.scored.tokens_S.split(count), strict=True)
        return join([row_logprobs(self._target.logits(hidden_TH[at]), ids, MAX_LOGPROBS) for at, ids in pairs])

    def _accept(self, rows: Rows, tokens_BV: Tensor) -> Accepted:
        drafts_BK = rows.drafts_BK
        if self.synthetic is not None and rows.next_prompt_B is None:  # drafts become what lets so many be kept
            count_B1 = self.synthetic.at(self.state.seeds(rows.slot_B) + rows.first_B)[:, None]
            column_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
            drafts_BK = tokens_BV[:, :-1].masked_fill(column_K >= count_B1, -1)
        return accept(tokens_BV, drafts_BK, rows.slot_B, backend=self._kernels)

    def _draft(
        self,
        side: DraftSide,
        rows: Rows,
        kept_B: Tensor,
        next_B: Tensor,
        taps_TC: Tensor,
        num_drafts: int,
        mode: SamplingMode,
    ) -> Tensor:
        """The next K drafts of every request as target ids, [B, K]; row `kept` of a request is its last real one."""
        mask_rows = num_drafts - 1 if side.mask else 0
        sizes = LayoutSizes(
            mask_token_id=side.mask.token_id if side.mask else 0,
            num_drafts=1 + mask_rows,
            num_rows=len(rows.ids_T) + rows.batch * mask_rows,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
        )
        layout = draft_layout(
            rows.ids_T, rows.positions_T, next_B, rows.start_B1, rows.start_B1[:-1] + kept_B, rows.tables_BN, sizes,
            rows.slot_B, backend=self._kernels,
        )  # fmt: skip
        stream_UH = self._first_pass(side, rows, layout, taps_TC, mask_rows)
        index_B = rows.first_B + kept_B + 2  # the first draft follows the token after the last kept one
        if side.mask is None:
            position_B = layout.positions[layout.sample_rows]
            return self._draft_in_turn(side, rows, position_B, stream_UH, index_B, num_drafts, mode)
        sampling = self.state.row_sampling(rows.slot_B, index_B, num_drafts, mode)
        return self._pick(side, stream_UH, sampling).view(-1, num_drafts)

    def _first_pass(self, side: DraftSide, rows: Rows, layout: DraftLayout, taps_TC: Tensor, mask_rows: int) -> Tensor:
        """The drafter over every row that has its token: pre-norm stream of each request's last row and its mask rows,
        [B, H] or [B K, H]."""

        def attend_for(sampled: bool) -> Attend:
            host = rows.host and rows.host.extended(mask_rows)
            count, keys_R = rows.rows_per_request and rows.rows_per_request + mask_rows, layout.last_keys
            if sampled:
                count, keys_R = 1 + mask_rows, keys_R[layout.sample_rows]
                host = host and host.sampled(1 + mask_rows)
            plan = self._plan(rows.tables_BN, count, host, side.drafter.config)
            return side.cache.attend(layout.slots, keys_R, plan)

        return side.first_pass(layout, side.first_pass.features(layout, taps_TC), attend_for)

    def _draft_in_turn(
        self,
        side: DraftSide,
        rows: Rows,
        position_B: Tensor,
        stream_BH: Tensor,
        index_B: Tensor,
        num_drafts: int,
        mode: SamplingMode,
    ) -> Tensor:
        """EAGLE-3's drafts, [B, K]: each but the first takes one more row per request, made of the draft before it and
        the stream of that draft's row, which stands in for taps nobody has yet.

        `position_B`, `stream_BH` and `index_B` belong to the first draft. The keys and values of these rows lie past
        those of all real ones and are overwritten by the next step.
        """
        drafter = side.drafter
        request_B = torch.arange(rows.batch, device=position_B.device)
        host = rows.host and rows.host.extended(num_drafts - 1).sampled(1)
        plan = self._plan(rows.tables_BN, 1, host, drafter.config)
        sampling = self.state.row_sampling(rows.slot_B, index_B, 1, mode)
        drafts = [self._pick(side, stream_BH, sampling)]
        for turn in range(1, num_drafts):
            at_B = position_B + turn
            slots_B = kv_slots(
                rows.tables_BN, request_B, at_B, self._block_size, self._max_model_len, backend=self._kernels
            )
            last_key_B = at_B.clamp(max=self._max_model_len - 1)  # past the limit a row has no key of its own
            attend = side.cache.attend(slots_B, last_key_B, plan)
            stream_BH = drafter.stream(drafter.embed_tokens(drafts[-1]), stream_BH, at_B, attend)
            drafts.append(self._pick(side, stream_BH, sampling and replace(sampling, indices=index_B + turn)))
        return torch.stack(drafts, dim=1)

    def _pick(self, side: DraftSide, stream_UH: Tensor, sampling: RowSampling | None) -> Tensor:
        """The drafts that rows with this pre-norm stream propose, as target ids [U]."""
        return sample(side.logits(stream_UH), sampling, side.draft_to_target_V, backend=self._kernels)

    def _plan(
        self, tables_BN: Tensor, rows: int | None, host: HostShape | TiledShape | None, sizes: ModelSpec | DrafterConfig
    ) -> AttentionPlan:
        """Plan a pass over requests of `rows` rows each, or, None, of as many as the host says."""
        heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        attention = self._attention if isinstance(sizes, ModelSpec) else self._draft_attention
        if rows is not None and self._kernels == "triton":
            return plan_decode(
                rows, tables_BN, self._block_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                backend=self._kernels if attention in ("auto", LIBRARY) else attention,
            )  # fmt: skip
        if host is None:
            raise PeagleError("a step that the host does not follow needs kernels 'triton'")
        return host.plan(sizes, self._sizes, tables_BN.device, attention)
