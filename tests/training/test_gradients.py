"""The gradient buffer on one process: gradients of a mean, clipping, empty steps, and gradients that leave it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from peagle.training.gradients import GradientBuffer
from peagle.training.optim import build_optimizers
from tests.training.many_passes import run_pack, small_drafter


def trained(drafter):
    return [parameter for parameter in drafter.parameters() if parameter.requires_grad]


def test_equals_autograds_gradient_of_the_mean():
    drafter, reference = small_drafter(), small_drafter()
    buffer = GradientBuffer(trained(drafter), counters=5)
    buffer.flat.fill_(torch.nan)  # poison: zero() must clear everything, the gaps between gradients too
    buffer.zero()
    for number in (1, 2):
        run_pack(drafter, number, buffer)
        run_pack(reference, number, None)
    weight, total = buffer.totals[1].clone(), buffer.totals[0].clone()
    buffer.reduce()
    loss, norm = buffer.normalise_and_clip(0.01)
    for parameter in trained(reference):
        parameter.grad /= weight
    wanted = clip_grad_norm_(trained(reference), 0.01)
    torch.testing.assert_close(loss, total / weight, rtol=1e-12, atol=0)
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    for mine, theirs in zip(trained(drafter), trained(reference), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    assert buffer.counters.tolist() == [50, 5, 5, 5, 5], "10 positions and a table of ones in each of 2 + 3 chunks"


def test_short_gradients_are_not_clipped():
    parameter = nn.Parameter(torch.ones(3))
    buffer = GradientBuffer([parameter])
    (2 * parameter).sum().backward()
    buffer.add_totals(torch.tensor(6.0), torch.tensor(4.0))
    loss, norm = buffer.normalise_and_clip(10.0)
    assert (loss, norm) == (1.5, pytest.approx(0.5 * 3**0.5))
    assert parameter.grad.tolist() == [0.5] * 3


def test_a_step_without_weight_changes_nothing():
    drafter = small_drafter(torch.float32)
    optimizers = build_optimizers(drafter, 1e-2, 1e-2, "adamw")
    before = [parameter.detach().clone() for parameter in trained(drafter)]
    buffer = GradientBuffer(trained(drafter))
    buffer.zero()
    buffer.reduce()
    loss, norm = buffer.normalise_and_clip(1.0)
    assert (loss, norm) == (0.0, 0.0)
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, trained(drafter)))


def test_infinite_gradients_are_seen():
    parameter = nn.Parameter(torch.ones(3))
    buffer = GradientBuffer([parameter])
    (parameter * torch.inf).sum().backward()
    buffer.add_totals(torch.tensor(1.0), torch.tensor(1.0))
    assert not buffer.normalise_and_clip(1.0)[1].isfinite()


def test_gradients_outside_the_buffer_are_an_error():
    parameter = nn.Parameter(torch.ones(3))
    buffer = GradientBuffer([parameter])
    parameter.grad = None
    parameter.sum().backward()
    with pytest.raises(RuntimeError, match="left the buffer"):
        buffer.reduce()
    with pytest.raises(ValueError, match="one dtype and device"):
        GradientBuffer([parameter, nn.Parameter(torch.ones(3, dtype=torch.float64))])
    with pytest.raises(ValueError, match="float32 or float64"):
        GradientBuffer([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
