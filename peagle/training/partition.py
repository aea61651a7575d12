"""The ways to run one pack: forward and backward passes that leave the gradient of its summed loss in `.grad`.

`recompute_prefix` is the flat pass (one chunk) and the paper's Algorithm 1 (several): every chunk runs all positions up
to its end. `prefix_once` runs the positions a single time. Positions never see mask rows, so their keys and values can
be leaves for the mask rows' chunks; each chunk leaves gradients in parameters and in those leaves, and one backward
pass through the positions, seeded with their own loss and the leaves' gradients, completes them. Nothing is run twice
and only one chunk's activations exist beside those of the positions. `unrolled` trains the EAGLE-3 baseline.

Suffixes: P positions, C mask rows of a chunk, R = positions and mask rows of one pass, H hidden, L charged rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.models.layers import Attend
from peagle.training.attention import Backend, RowAttention, attend_all, attend_chunk, attend_positions
from peagle.training.batches import Batch
from peagle.training.head_loss import HeadLoss
from peagle.training.plan import Chunk
from peagle.training.ttt import ttt_hidden


@dataclass(slots=True)
class Charge:
    """The loss of a batch, chunk by chunk."""

    loss: HeadLoss
    batch: Batch
    target_hidden_PH: Tensor
    train: bool
    loss_sum: Tensor = field(init=False)
    _correct: Tensor = field(init=False)  # [R + 1]: the last place takes what filling rows say

    def __post_init__(self) -> None:
        supervised_R = self.batch.rows.supervised_R
        self._correct = supervised_R.new_zeros(len(supervised_R) + 1)
        wide = torch.promote_types(self.target_hidden_PH.dtype, torch.float32)
        self.loss_sum = torch.zeros((), dtype=wide, device=self.target_hidden_PH.device)

    @property
    def correct_R(self) -> Tensor:
        """Bool: the draft's argmax is the target's; False on rows that were not charged."""
        return self._correct[:-1]

    def __call__(self, hidden_XH: Tensor, chunk: Chunk) -> Tensor:
        """Charge a chunk's rows among `hidden_XH`; the gradient of the summed loss there (empty unless training)."""
        result = self.loss(
            hidden_XH.detach(), self.target_hidden_PH, self.batch.labels_P, chunk.loss_rows, want_grad=self.train
        )
        self.loss_sum += result.loss_sum
        self._correct[chunk.charged_L] = result.correct_L
        return hidden_XH.new_empty(0) if result.grad_XH is None else result.grad_XH


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes of a drafter in the precision and with the attention of the run."""

    drafter: Eagle3Drafter
    backend: Backend
    dtype: torch.dtype
    num_depths: int
    compile: bool = False

    def attention(self, batch: Batch, positions: int, part: slice, *, chains: bool) -> RowAttention:
        """Attention of some rows of a batch."""
        windows = self.drafter.config.windows
        return RowAttention(batch.rows, positions, part, chains=chains, windows=windows, backend=self.backend)

    def run(self, function: Callable[..., Tensor], *inputs: object) -> Tensor:
        """`function(drafter, *inputs)` under autocast, compiled if asked for."""
        function = _compiled(function) if self.compile else function
        device = self.drafter.fc.weight.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return function(self.drafter, *inputs)


def positions_hidden(
    drafter: Eagle3Drafter, input_ids_P: Tensor, taps_PC: Tensor, position_P: Tensor, attend: Attend
) -> Tensor:
    """Final-normed hidden states of depth-0 rows, [P, H]."""
    hidden_PH: Tensor = drafter(*_position_rows(drafter, input_ids_P, taps_PC), position_P, attend)
    return hidden_PH


def mask_rows_hidden(drafter: PEagleDrafter, position_C: Tensor, attend: Attend) -> Tensor:
    """Final-normed hidden states of mask rows, [C, H]."""
    hidden_CH: Tensor = drafter(*_mask_rows(drafter, len(position_C)), position_C, attend)
    return hidden_CH


def all_rows_hidden(
    drafter: PEagleDrafter, input_ids_P: Tensor, taps_PC: Tensor, position_R: Tensor, attend: Attend
) -> Tensor:
    """Final-normed hidden states of depth-0 rows followed by mask rows, [R, H]."""
    positions = _position_rows(drafter, input_ids_P, taps_PC)
    mask_rows = _mask_rows(drafter, len(position_R) - len(input_ids_P))
    both = (torch.cat(parts) for parts in zip(positions, mask_rows, strict=True))
    hidden_RH: Tensor = drafter(*both, position_R, attend)
    return hidden_RH


def _position_rows(drafter: Eagle3Drafter, input_ids_P: Tensor, taps_PC: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings and features of depth-0 rows, each [P, H]."""
    features_PH = drafter.combine(taps_PC)
    return drafter.embed_tokens(input_ids_P).to(features_PH.dtype), features_PH


def _mask_rows(drafter: PEagleDrafter, rows: int) -> tuple[Tensor, Tensor]:
    """Embeddings and features of mask rows, each [rows, H]: all of them share one of either."""
    feature_H = drafter.mask_feature()
    return drafter.mask_embedding.to(feature_H.dtype).expand(rows, -1), feature_H.expand(rows, -1)


def recompute_prefix(passes: Passes, batch: Batch, taps_PC: Tensor, charge: Charge) -> None:
    """One forward and backward pass per chunk over the chunk's mask rows and every position up to its end."""
    rows, positions = batch.rows, len(batch.input_ids_P)
    for chunk in batch.plan.chunks:
        part = slice(positions + chunk.start, positions + chunk.stop)
        prefix = slice(0, chunk.last)
        among_positions = passes.attention(batch, chunk.last, prefix, chains=False)
        of_mask_rows = passes.attention(batch, chunk.last, part, chains=True) if chunk.stop > chunk.start else None
        hidden_RH = passes.run(
            all_rows_hidden,
            batch.input_ids_P[prefix],
            taps_PC[prefix],
            torch.cat((rows.position_R[prefix], rows.position_R[part])),
            attend_all(chunk.last, among_positions, of_mask_rows),
        )
        gradient_RH = charge(hidden_RH, chunk)
        if charge.train:
            hidden_RH.backward(gradient_RH)


def prefix_once(passes: Passes, batch: Batch, taps_PC: Tensor, charge: Charge) -> None:
    """Positions once, mask rows chunk by chunk, then one backward pass through the positions."""
    prefix = _Prefix(passes, batch, taps_PC)
    for chunk in batch.plan.chunks:
        span = slice(chunk.first, chunk.last)
        own_XH = prefix.hidden_PH.detach()[span]
        mask_CH = prefix.mask_rows(chunk)
        gradient = charge(torch.cat((own_XH, mask_CH.detach())), chunk)
        if charge.train:
            prefix.gradient_PH[span] = gradient[: len(own_XH)]
            if len(mask_CH) > 0:
                mask_CH.backward(gradient[len(own_XH) :])
    if charge.train:
        prefix.backward()


class _Prefix:
    """The pass over the positions. Its keys and values are leaves for the mask rows, which leave gradients there."""

    def __init__(self, passes: Passes, batch: Batch, taps_PC: Tensor) -> None:
        self._passes, self._batch = passes, batch
        every = slice(0, len(batch.input_ids_P))
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        attend = attend_positions(passes.attention(batch, every.stop, every, chains=False), kept)
        position_P = batch.rows.position_R[every]
        self.hidden_PH = passes.run(positions_hidden, batch.input_ids_P, taps_PC, position_P, attend)
        self.gradient_PH = torch.zeros_like(self.hidden_PH)  # of the positions' own loss
        self._kept = [kept[layer] for layer in sorted(kept)]
        self._leaves = [(_leaf(keys), _leaf(values)) for keys, values in self._kept]

    def mask_rows(self, chunk: Chunk) -> Tensor:
        """Hidden states of a chunk's mask rows, [C, H]; C may be 0."""
        batch, positions = self._batch, len(self._batch.input_ids_P)
        part = slice(positions + chunk.start, positions + chunk.stop)
        if chunk.start == chunk.stop:
            return self.hidden_PH.new_empty(0, self.hidden_PH.shape[1])
        attend = attend_chunk(self._passes.attention(batch, positions, part, chains=True), self._leaves)
        return self._passes.run(mask_rows_hidden, batch.rows.position_R[part], attend)

    def backward(self) -> None:
        """Go back through the positions, from their own loss and from what the mask rows left."""
        roots, seeds = [self.hidden_PH], [self.gradient_PH]
        for pair, leaves in zip(self._kept, self._leaves, strict=True):
            for tensor, leaf in zip(pair, leaves, strict=True):
                if leaf.grad is not None:
                    roots.append(tensor)
                    seeds.append(leaf.grad.to(tensor.dtype))
        torch.autograd.backward(roots, seeds)


def unrolled(passes: Passes, batch: Batch, taps_PC: Tensor, charge: Charge) -> None:
    """EAGLE-3's training-time test: K passes over the positions, each fed by the one before; one backward pass."""
    (chunk,) = batch.plan.chunks
    hidden_XH = passes.run(ttt_hidden, batch.input_ids_P, taps_PC, batch.rows, passes.num_depths, passes.backend)
    gradient_XH = charge(hidden_XH, chunk)
    if charge.train:
        hidden_XH.backward(gradient_XH)


def _leaf(tensor: Tensor) -> Tensor:
    """A leaf that collects the gradients of all chunks, in float32 or wider: a sum over many chunks needs the bits."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).requires_grad_()


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)
