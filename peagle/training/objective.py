"""From a batch to gradients: target features, the drafter's passes as the partition orders them, the loss.

Every call adds the gradient of the SUM of weighted row losses to the parameters' `.grad`. Whoever takes the optimiser's
step divides once by the weight of everything that was summed, be it chunks, packs or ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from peagle.config import TrainConfig
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.vocab import target_ids
from peagle.models.decoder import TargetModel
from peagle.training.attention import Backend
from peagle.training.batches import Batch
from peagle.training.features import FeatureSource, OnlineFeatures
from peagle.training.head_loss import HeadLoss
from peagle.training.partition import Charge, Passes, prefix_once, recompute_prefix, unrolled
from peagle.training.plan import Partition
from peagle.training.statistics import DepthStatistics, depth_statistics

_STRATEGIES: Mapping[Partition, Callable[[Passes, Batch, Tensor, Charge], None]] = MappingProxyType(
    {
        "flat": recompute_prefix,
        "algorithm1": recompute_prefix,
        "prefix-once": prefix_once,
        "unrolled": unrolled,
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one pack, detached. The mean loss is `loss_sum` over the plan's weight."""

    loss_sum: Tensor  # scalar: sum of weight * loss over rows
    statistics: DepthStatistics
    correct_R: Tensor  # bool: draft argmax == target argmax; False on rows without loss


class Objective:
    """Computes outcomes and gradients. `dtype` is the compute precision: float32 parameters are cast by autocast."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: TargetModel,
        features: FeatureSource,
        config: TrainConfig,
        *,
        backend: Backend,
        dtype: torch.dtype,
    ) -> None:
        self.drafter, self.features, self.config = drafter, features, config
        self._passes = Passes(drafter, backend, dtype, config.num_depths, config.compile)
        # Eager: a second set of compiled graphs, without gradients, would cost more than the evaluations of a run.
        self._eager_passes = replace(self._passes, compile=False)
        self._target_head_VH = target.lm_head.weight.detach()
        full = drafter.config.draft_vocab_size == drafter.config.vocab_size
        self._draft_ids_U = None if full else target_ids(drafter.d2t)

    @property
    def capturable(self) -> bool:
        """Whether packs can be captured in a CUDA graph: a network of transformers waits for the device in its run."""
        return not isinstance(self.features, OnlineFeatures) or isinstance(self.features.model, TargetModel)

    def __call__(self, batch: Batch, *, train: bool = True) -> Outcome:
        """Outcome of a batch on the training device; adds its gradients if `train`."""
        rows = batch.rows
        with torch.set_grad_enabled(train):
            taps_PC, target_hidden_PH = self.features.gather(batch.features)
            charge = Charge(self._head_loss(train), batch, target_hidden_PH, train)
            _STRATEGIES[batch.partition](self._passes if train else self._eager_passes, batch, taps_PC, charge)
        statistics = depth_statistics(
            rows.anchor_R, rows.depth_R, charge.correct_R, rows.supervised_R, self.config.num_depths
        )
        return Outcome(charge.loss_sum, statistics, charge.correct_R)

    def _head_loss(self, train: bool) -> HeadLoss:
        """The loss with this step's values of the output rows, which collect their gradient where they are trained."""
        weight = self.drafter.lm_head.weight
        if train and weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return HeadLoss(
            weight.detach().to(self._passes.dtype),
            weight.grad if train and weight.requires_grad else None,
            self._target_head_VH,
            self._draft_ids_U,
            loss=self.config.loss,
            tv_weight=self.config.tv_weight,
        )
