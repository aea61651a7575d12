"""The loss of one pack: target features, one drafter forward over all rows, chunked cross-entropy on the live ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import TrainConfig
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.drafters.vocab import target_ids
from peagle.models.decoder import TargetModel
from peagle.models.layers import Attend
from peagle.training.attention import Backend, attend_rows
from peagle.training.batches import Batch
from peagle.training.features import FeatureSource
from peagle.training.loss import (
    DepthStatistics,
    Targets,
    cross_entropy,
    depth_statistics,
    hard_targets,
    row_weights,
    soft_targets,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one pack. `loss` is differentiable, the rest is not."""

    loss: Tensor  # scalar
    statistics: DepthStatistics
    correct_R: Tensor  # bool: draft argmax == target argmax; False on rows without supervision


def drafter_hidden(
    drafter: PEagleDrafter, input_ids_P: Tensor, taps_PC: Tensor, position_R: Tensor, attend: Attend
) -> Tensor:
    """Final-normed hidden states [R, H] of P depth-0 rows followed by R - P mask rows.

    fc runs on the depth-0 rows and once for all mask rows, which share one embedding and one feature.
    """
    features_PH = drafter.combine(taps_PC)
    mask_rows = len(position_R) - len(input_ids_P)
    mask_feature_H = drafter.mask_feature()
    embeds_PH = drafter.embed_tokens(input_ids_P).to(features_PH.dtype)
    mask_embed_H = drafter.mask_embedding.to(features_PH.dtype)
    embeds_RH = torch.cat((embeds_PH, mask_embed_H.expand(mask_rows, -1)))
    features_RH = torch.cat((features_PH, mask_feature_H.expand(mask_rows, -1)))
    hidden_RH: Tensor = drafter(embeds_RH, features_RH, position_R, attend)
    return hidden_RH


class Objective:
    """Computes the outcome of a pack. `dtype` is the compute precision: parameters in float32 are cast by autocast."""

    def __init__(
        self,
        drafter: PEagleDrafter,
        target: TargetModel,
        features: FeatureSource,
        config: TrainConfig,
        *,
        backend: Backend,
        dtype: torch.dtype,
    ) -> None:
        self.drafter, self.features, self.config = drafter, features, config
        self._backend, self._dtype = backend, dtype
        self._target_head_VH = target.lm_head.weight.detach()
        full = drafter.config.draft_vocab_size == drafter.config.vocab_size
        self._draft_ids_U = None if full else target_ids(drafter.d2t)
        self._hidden: Callable[..., Tensor] = drafter_hidden
        if config.compile:
            self._hidden = torch.compile(drafter_hidden, dynamic=False)

    def __call__(self, batch: Batch) -> Outcome:
        """Outcome of a batch on the training device."""
        rows, live_L = batch.rows, batch.rows.live_L
        taps_PC, target_hidden_PH = self.features.gather(batch.features)
        attend = attend_rows(rows, self._backend)
        device = batch.input_ids_P.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            hidden_RH = self._hidden(self.drafter, batch.input_ids_P, taps_PC, rows.position_R, attend)
        depth_L = rows.depth_R[live_L]
        weight_L = row_weights(depth_L, rows.supervised_R[live_L], self.config.depth_decay)
        result = cross_entropy(
            hidden_RH.index_select(0, live_L).to(self._dtype),
            self.drafter.lm_head.weight.to(self._dtype),
            self._targets(target_hidden_PH, batch.labels_P),
            rows.target_R[live_L],
            weight_L,
            weight_L.sum(),
            chunk=self.config.loss_chunk,
            compiled=self.config.compile,
        )
        correct_R = torch.zeros_like(rows.supervised_R)
        correct_R[live_L] = result.correct_R
        statistics = depth_statistics(rows.anchor_R, rows.depth_R, correct_R, rows.supervised_R, self.config.num_depths)
        return Outcome(result.loss, statistics, correct_R)

    def _targets(self, hidden_PH: Tensor, labels_P: Tensor) -> Targets:
        """What each packed position should predict."""
        if self.config.loss == "hard-ce":
            return hard_targets(
                hidden_PH, self._target_head_VH, self._draft_ids_U, labels_P, chunk=self.config.loss_chunk
            )
        return soft_targets(hidden_PH, self._target_head_VH, self._draft_ids_U, chunk=self.config.loss_chunk)
