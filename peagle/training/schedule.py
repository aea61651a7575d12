"""How long a run is, and the learning rate on the way."""

import math

from peagle.config import TrainConfig
from peagle.training.batches import epoch_packs
from peagle.training.corpus import Corpus
from peagle.training.distributed import Ranks
from peagle.training.optim import learning_rate_factor
from peagle.training.rows import RowLayout


def planned_steps(corpus: Corpus, layout: RowLayout, config: TrainConfig, ranks: Ranks) -> int:
    """Optimiser steps of the whole run."""
    if config.max_steps is not None:
        return config.max_steps
    packs = sum(1 for _ in epoch_packs(corpus.train, layout, config.seed, 0))
    return max(1, round(config.epochs * packs / (config.accumulate * ranks.world)))


def schedule_factor(step: int, planned: int, seconds: float, config: TrainConfig) -> float:
    """Share of the peak learning rates for 0-based `step` after `seconds` of training."""
    factor = learning_rate_factor(step, planned, config.warmup_steps)
    if config.max_seconds is None or step < config.warmup_steps:
        return factor
    return min(factor, 0.5 * (1.0 + math.cos(math.pi * min(1.0, seconds / config.max_seconds))))
