"""Matmul FLOPs of training, counted from sizes and real rows, and the model FLOP utilisation (MFU) they amount to.

A matmul of [m, k] by [k, n] is 2 m k n. Counted is what the result needs, once, whatever the partition: padding, a
prefix run again, recomputation under checkpointing and the optimiser are not work in this sense. Per pack:

    fc            2 C H per position, and once for all mask rows; C is the width of the taps side by side
    layer         2 I (N + 2 M) D + 2 N D H + 6 H F per row; I is 2 H in the fusion layer, H in the others
    attention     4 N D per layer and pair of a row and a key it sees: scores and weighted sum
    backward      twice these forward figures: one matmul for the input's gradient, one for the weight's. fc needs the
                  first only if a norm is trained before it
    head          2 H U per charged row for the logits, as much for the gradient in the row, and again for that in the
                  head where it is trained
    target head   2 H V per distinct position that is predicted
    target        where it runs online: its layers on every token of the stream, forward only, as a dense decoder

A row (a, d) sees the positions of its document up to a and the d rows of its own chain up to itself: as many keys as
its RoPE position plus one, at most the window of a sliding layer.

Letters: N query heads, M key/value heads, D head size, H hidden size, F feed-forward size, U draft and V target
vocabulary, R real rows, positions first.
"""

import re

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.drafters.eagle3 import DrafterConfig
from peagle.models.spec import LayerSizes, ModelSpec
from peagle.training.batches import Batch

# Dense bfloat16 matmul peaks of the vendor's data sheets, FLOP/s. PCIe and NVL cards are clocked lower: not listed.
_PEAKS = ((r"\bG?H[12]00\b(?!.*(PCIe|NVL))", 989e12), (r"\bA100\b", 312e12))


class PackCost:
    """FLOPs of training on packs, forward and backward."""

    def __init__(self, config: DrafterConfig, spec: ModelSpec, *, trains_head: bool, runs_target: bool) -> None:
        """`trains_head`: the output rows are trained; `runs_target`: features are made online."""
        self._config, self._spec = config, spec
        self._head_matmuls = 3 if trains_head else 2
        self._runs_target = runs_target

    def of(self, batch: Batch) -> int:
        """FLOPs of a batch; reads nothing from the device."""
        plan = batch.plan
        return self(batch.seen_R, positions=batch.positions, charged=plan.charged_rows, targets=plan.targets)

    def __call__(self, seen_R: NDArray[np.int64], *, positions: int, charged: int, targets: int) -> int:
        """`seen_R` are the keys each real row would see without a window, positions first; `charged` rows have loss and
        predict `targets` distinct positions."""
        config, spec = self._config, self._spec
        fc = 2 * config.feature_size * config.hidden_size * (positions + 1)
        rows = _layer(config, 2 * config.hidden_size) + (config.num_layers - 1) * _layer(config, config.hidden_size)
        forward = rows * len(seen_R) + self._attention(seen_R)
        trunk = (3 if config.norm_before_fc else 2) * fc + 3 * forward
        head = 2 * config.hidden_size * config.draft_vocab_size * self._head_matmuls * charged
        target_head = 2 * spec.hidden_size * spec.vocab_size * targets
        return trunk + head + target_head + (self._target(seen_R[:positions]) if self._runs_target else 0)

    def _attention(self, seen_R: NDArray[np.int64]) -> int:
        windows = self._config.windows
        pairs = {window: int(_within(seen_R, window).sum()) for window in set(windows)}
        return 4 * self._config.num_heads * self._config.head_dim * sum(pairs[window] for window in windows)

    def _target(self, seen_P: NDArray[np.int64]) -> int:
        """The target's layers over the pack's stream, which has one token more than positions for every document."""
        spec = self._spec
        tokens = len(seen_P) + int(np.count_nonzero(seen_P == 1))
        pairs = int(seen_P.sum()) + tokens  # every token but the first of a document sees one more than its position
        attention = 4 * spec.num_heads * spec.head_dim * pairs
        return spec.num_layers * (_layer(spec, spec.hidden_size) * tokens + attention)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device at dense bfloat16 matmuls; None for another precision and for one not listed here."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return named_peak(torch.cuda.get_device_name(device))


def named_peak(name: str) -> float | None:
    """`peak_flops` of a GPU by the name its driver gives it."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, name)), None)


def _layer(sizes: LayerSizes, input_size: int) -> int:
    """Forward FLOPs of one layer for one row, attention itself aside; the projections read `input_size`."""
    width = sizes.num_heads * sizes.head_dim
    projected = width + 2 * sizes.num_kv_heads * sizes.head_dim
    hidden = sizes.hidden_size
    return 2 * input_size * projected + 2 * width * hidden + 6 * hidden * sizes.intermediate_size


def _within(seen_R: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    return seen_R if window is None else np.minimum(seen_R, window)
