"""An exponential moving average of the trained parameters: smoother than the last step, for evaluation and export."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Decay of the 0-based `step`: rises to `decay`, so that the random start is forgotten within a few steps."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """The average of every parameter that is trained, in float32 or wider, beside the parameters themselves."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        """Starts as the named `parameters` are now; those that are frozen are left out."""
        self.decay = decay
        self._parameters = {name: p for name, p in parameters if p.requires_grad}
        self._averages = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """average = decay * average + (1 - decay) * parameter, after 0-based optimiser step `step`."""
        averages = list(self._averages.values())
        current = [p.detach().to(a.dtype) for p, a in zip(self._parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, current, 1.0 - decay_at(step, self.decay))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the parameters hold the averages; afterwards, whatever happens, their own values again."""
        with torch.no_grad():
            kept = [p.detach().clone() for p in self._parameters.values()]
            for parameter, average in zip(self._parameters.values(), self._averages.values(), strict=True):
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self._parameters.values(), kept, strict=True):
                    parameter.copy_(value)

    def state(self) -> Mapping[str, Tensor]:
        """The averages by parameter name, for a checkpoint; copying into them restores it."""
        return self._averages
