"""One pass of a drafter over the rows of a layout, without the work whose result nobody reads or somebody has.

fc runs over target rows, never over mask rows, whose input is always the same. What the fusion layer makes of a mask
row before RoPE is the same for all of them too: it is computed once, at load. And in the last layer only sampled rows
go through queries, attention and feed-forward part: of the others nothing is needed but keys and values. All of it is
exact up to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from peagle.drafters.eagle3 import Eagle3Drafter, SampledRows
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.kernels.draft_layout import DraftLayout
from peagle.kernels.draft_rows import MaskRow, draft_rows
from peagle.kernels.expand_rows import expand_rows
from peagle.models.layers import Attend

# Attention of a pass: with True, of the last layer, which is asked for `layout.sample_rows` only.
AttendFor = Callable[[bool], Attend]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSavings:
    """Which work a pass leaves out."""

    last_layer_sampled: bool = True
    constant_mask_qkv: bool = True
    fc_target_rows: bool = True


class ProjectedMask(NamedTuple):
    """What the fusion layer makes of a mask row before RoPE."""

    residual_H: Tensor
    qkv_A: Tensor


@dataclass(frozen=True, slots=True)
class DraftPass:
    """A drafter, in its final form on its device, and what is the same in all of its passes."""

    drafter: Eagle3Drafter
    mask: MaskRow | None  # None: an EAGLE-3 head, which has no mask rows
    projected_mask: ProjectedMask | None  # None: mask rows are computed like others
    savings: DraftSavings
    kernels: str

    @classmethod
    @torch.inference_mode()
    def of(cls, drafter: Eagle3Drafter, savings: DraftSavings | None = None, kernels: str = "auto") -> Self:
        """Compute the constants of a drafter, which hold until its weights change.

        `kernels` "auto" is Triton on CUDA; `savings` None is all of them.
        """
        savings, mask, projected = savings or DraftSavings(), None, None
        if isinstance(drafter, PEagleDrafter):
            mask = MaskRow(drafter.mask_token_id, drafter.mask_embedding, drafter.mask_feature())
            if savings.constant_mask_qkv:
                residual_1H, qkv_1A = drafter.fusion.project(mask.embed_H[None], mask.feature_H[None])
                projected = ProjectedMask(residual_1H[0], qkv_1A[0])
        return cls(drafter, mask, projected, savings, kernels)

    def features(self, layout: DraftLayout, taps_TC: Tensor) -> Tensor:
        """fc's output for each target row, [T, H]."""
        if self.savings.fc_target_rows or not isinstance(self.drafter, PEagleDrafter):
            return self.drafter.combine(taps_TC)
        # As a drafter that knows no constants: mask rows carry their hidden state through fc as others carry taps.
        source_R, last = layout.source_rows, len(taps_TC)
        taps_RC = torch.where(layout.is_masked[:, None], self.drafter.mask_hidden, taps_TC[source_R.clamp(min=0)])
        features_RH = self.drafter.combine(taps_RC)
        wide_TH = features_RH.new_zeros((last + 1, features_RH.shape[1]))
        return wide_TH.index_copy_(0, torch.where(source_R < 0, last, source_R), features_RH)[:last]

    def __call__(self, layout: DraftLayout, features_TH: Tensor, attend_for: AttendFor) -> Tensor:
        """The pre-norm stream of the layout's sampled rows, [U, H]; `features` are fc's, one of each target row.

        `attend_for` makes a pass's attention when it is needed: each kind at most once.
        """
        drafter, sampled = self.drafter, None
        if self.savings.last_layer_sampled:
            sampled = SampledRows(layout.sample_rows, attend_for(True))
        # A head of one layer has but the last.
        attend = attend_for(False) if sampled is None or drafter.config.num_layers > 1 else sampled.attend
        if self.projected_mask is not None and self._saves_rows(layout, features_TH):
            stream_RH = self._from_target_rows(self.projected_mask, layout, features_TH, attend, sampled)
        else:
            embeds_RH, features_RH = draft_rows(
                layout, features_TH, drafter.embed_tokens.weight, self.mask, backend=self.kernels
            )
            stream_RH = drafter.stream(embeds_RH, features_RH, layout.positions, attend, sampled)
        return stream_RH if sampled is not None else stream_RH[layout.sample_rows]

    def _from_target_rows(
        self, mask: ProjectedMask, layout: DraftLayout, features_TH: Tensor, attend: Attend, sampled: SampledRows | None
    ) -> Tensor:
        """The stream with the fusion layer's projections of target rows only."""
        drafter = self.drafter
        residual_TH, qkv_TA = drafter.fusion.project(drafter.embed_tokens(layout.next_ids), features_TH)
        qkv_RA = expand_rows(layout, qkv_TA, mask.qkv_A, backend=self.kernels)
        wanted_U = sampled.rows_U if sampled is not None and drafter.config.num_layers == 1 else None
        residual_RH = expand_rows(layout, residual_TH, mask.residual_H, wanted_U, backend=self.kernels)
        return drafter.stream_of_projected(residual_RH, qkv_RA, layout.positions, attend, sampled)

    @staticmethod
    def _saves_rows(layout: DraftLayout, features_TH: Tensor) -> bool:
        """Whether enough rows are not target rows, as when verifying with K > 1: a prompt's would only be copied."""
        rows = layout.input_ids.shape[0]
        return 4 * (rows - features_TH.shape[0]) >= rows
