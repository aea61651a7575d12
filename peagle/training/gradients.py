"""The gradient of an optimiser step: one flat tensor, summed over packs, chunks and ranks, divided once at the end.

What is accumulated is the gradient of the SUM of weighted row losses. Dividing by the weight of all rows of the step,
wherever they were computed, makes the result independent of how the rows were dealt out (training reference 8.3).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peagle.training.distributed import SINGLE, Ranks

_ALIGNMENT = 64  # elements; keeps every gradient at an address that vector loads and NCCL like
_LOSS, _WEIGHT = 0, 1  # places in the tail; further counters follow
_EPSILON = 1e-6  # as in torch's clip_grad_norm_


class GradientBuffer:
    """The gradients of all trained parameters, and after them the step's totals: loss sum, weight sum, counters.

    Every parameter's `.grad` is a view into the buffer, so autograd and hand-written backwards accumulate in place.
    Nobody may replace it: `zero_grad(set_to_none=True)` would. One all-reduce per step sums everything over the ranks;
    a rank that had nothing to compute takes part with zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks = SINGLE, counters: int = 0) -> None:
        """`parameters` are the trained ones, of one dtype and device; `counters` further totals may be added up."""
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            raise ValueError(
                f"trained parameters of one dtype and device are needed, these have {sorted(map(str, kinds))}"
            )
        ((dtype, device),) = kinds
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"gradients are summed in float32 or float64, the parameters are {dtype}")
        self._parameters, self._ranks = list(parameters), ranks
        lengths = [self._length(parameter) for parameter in parameters]
        starts = _aligned_starts(lengths)
        size = starts.pop()
        self.flat = torch.zeros(size + 2 + counters, dtype=dtype, device=device)
        self.gradients, self.totals = self.flat[:size], self.flat[size:]
        self._segments = [self.flat[start : start + length] for start, length in zip(starts, lengths)]
        self._views = [s[: p.numel()].view_as(p) for s, p in zip(self._segments, self._parameters)]
        for parameter, view in zip(self._parameters, self._views):
            parameter.grad = view

    def _length(self, parameter: nn.Parameter) -> int:
        """Elements reserved for a parameter."""
        return parameter.numel()

    def zero(self) -> None:
        """Start an optimiser step."""
        self.flat.zero_()

    def add_totals(self, loss_sum: Tensor, *others: Tensor) -> None:
        """Add a pack's totals to the step's: the summed loss, then its rows' weight and the counters, in tensors of any
        shape. Waits for nothing."""
        self.totals += torch.cat([part.detach().flatten().to(self.totals.dtype) for part in (loss_sum, *others)])

    @property
    def counters(self) -> Tensor:
        """The counters of the step, summed over the ranks once `reduce` has run."""
        return self.totals[2:]

    def reduce(self) -> None:
        """Sum gradients and totals over the ranks."""
        self._check_views()
        self._ranks.add_up(self.flat)

    def normalise_and_clip(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """Mean loss and gradient norm before clipping; the gradients become the mean's, at most `max_norm` long.

        To be called after `reduce`. A step without any weight has loss 0 and gradient 0. Waits for no device.
        """
        weight = self.totals[_WEIGHT]
        share = torch.where(weight > 0, 1 / weight, 0)
        norm = self._norm() * share
        self._scale(share * (max_norm / (norm + _EPSILON)).clamp(max=1.0))
        return self.totals[_LOSS] * share, norm

    def _norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.gradients)

    def _scale(self, factor: Tensor) -> None:
        self.gradients.mul_(factor)

    def _check_views(self) -> None:
        """A gradient outside the buffer would silently be left out of the sum."""
        for parameter, view in zip(self._parameters, self._views):
            if parameter.grad is not view and (parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr()):
                raise RuntimeError(f"the gradient of a parameter of shape {tuple(view.shape)} has left the buffer")


def _aligned_starts(lengths: Sequence[int]) -> list[int]:
    """Where each piece starts, and last where the next one would."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // _ALIGNMENT) * _ALIGNMENT)
    return starts
