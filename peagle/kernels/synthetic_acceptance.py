"""SYNTHETIC acceptance: accept lengths drawn from a given profile, to time a system without a trained head.

The tokens that come out mean nothing. How the profile of a mean is chosen follows vLLM's `synthetic` rejection mode.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.sampling import uniform_noise

_PURPOSE = -1  # no token has this id: these draws are independent of those of the sampling rule


def synthetic_profile(acceptance_length: float, num_drafts: int) -> tuple[float, ...]:
    """Conditional rates of K drafts whose mean acceptance length, the bonus token counted, is the given one.

    The lengths it makes vary as little as they can: certain drafts, one by chance, then none. Raises PeagleError for a
    mean outside of 1 .. K + 1.
    """
    if not 1.0 <= acceptance_length <= num_drafts + 1:
        raise PeagleError(f"synthetic acceptance length is {acceptance_length}: it must be 1 to {num_drafts + 1}")
    return tuple(min(max(acceptance_length - 1 - j, 0.0), 1.0) for j in range(num_drafts))


def synthetic_accept_lengths(rates_K: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Accepted drafts of each request, int64 [B] in 0..K; draft j is kept with probability `rates[j]` (float32, on the
    device) if those before it were.

    The draw is a pure function of the seed and of the position of each draft; `positions_B` is that of the first.
    """
    indices_BK = positions_B[:, None] + torch.arange(len(rates_K), device=positions_B.device)
    purpose = torch.full((1,), _PURPOSE, device=positions_B.device)
    uniform_BK = uniform_noise(seeds_B.repeat_interleave(len(rates_K)), indices_BK.flatten(), purpose)
    kept_BK = uniform_BK.view_as(indices_BK) < rates_K
    return kept_BK.to(torch.int64).cumprod(dim=1).sum(dim=1)


class SyntheticLengths:
    """Accept lengths drawn in advance, one for each remainder of a position: looking one up is all that a step does."""

    _COUNT = 1 << 14

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        self._lengths = torch.empty(self._COUNT, dtype=torch.int64, device=device)
        self.change(rates)

    def change(self, rates: Sequence[float]) -> None:
        """Draw from another profile from now on, in captured steps too."""
        rates_K = torch.tensor(rates, dtype=torch.float32)
        one = torch.zeros(self._COUNT, dtype=torch.int64)
        self._lengths.copy_(synthetic_accept_lengths(rates_K, one, torch.arange(self._COUNT) * len(rates)))

    def at(self, index_B: Tensor) -> Tensor:
        """Accepted drafts at indices of any size, int64 [B]."""
        return self._lengths[index_B & (self._COUNT - 1)]
