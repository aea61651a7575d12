"""Synthetic accept lengths follow their profile and are a pure function of (seed, position)."""

import pytest
import torch

from peagle.errors import PeagleError
from peagle.kernels.synthetic_acceptance import synthetic_accept_lengths, synthetic_profile


def test_lengths_follow_the_profile():
    rates = torch.tensor([0.9, 0.5, 0.8])
    seeds, positions = torch.arange(40_000) // 200, torch.arange(40_000) % 200 * 3
    lengths = synthetic_accept_lengths(rates, seeds, positions)
    assert lengths.dtype == torch.int64
    shares = torch.stack([(lengths >= j + 1).float().mean() for j in range(3)])
    assert (shares - rates.cumprod(0)).abs().max() < 0.01
    # Alone, or among others: the same draw.
    assert synthetic_accept_lengths(rates, seeds[777:778], positions[777:778]).item() == lengths[777]


def test_certain_and_impossible_drafts():
    positions = torch.arange(1000)
    assert (synthetic_accept_lengths(torch.ones(2), positions, positions) == 2).all()
    assert not synthetic_accept_lengths(torch.tensor([0.0, 1.0]), positions, positions).any()


@pytest.mark.parametrize(
    ("mean", "rates"), [(1.0, (0.0,) * 3), (2.25, (1.0, 0.25, 0.0)), (3.0, (1.0, 1.0, 0.0)), (4.0, (1.0,) * 3)]
)
def test_profile_of_a_mean(mean: float, rates: tuple[float, ...]):
    assert synthetic_profile(mean, 3) == rates
    positions = torch.arange(4000)
    lengths = synthetic_accept_lengths(torch.tensor(rates), torch.full_like(positions, 2**60), positions)
    assert abs(1 + lengths.double().mean() - mean) < 0.03


@pytest.mark.parametrize("mean", [0.9, 4.1, float("nan")])
def test_impossible_means_are_refused(mean: float):
    with pytest.raises(PeagleError, match="synthetic acceptance length"):
        synthetic_profile(mean, 3)
