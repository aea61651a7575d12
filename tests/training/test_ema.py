"""The average of the weights: the recurrence by hand, swapping without a trace, exact state."""

import pytest
import torch
from torch import nn

from peagle.training.ema import WeightAverage, decay_at


def module(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    net[1].bias.requires_grad_(False)
    return net


def steps(net, average, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape, generator=generator)
        average.update(step)


def values(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_recurrence_by_hand(dtype):
    net = module(dtype)
    average, expected = WeightAverage(net.named_parameters(), 0.5), net[0].weight.detach().double().clone()
    for step in range(6):
        steps(net, average, step, step + 1)
        d = min(0.5, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * net[0].weight.detach().double()
    found = average.state()["0.weight"]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_decay_rises_to_its_value():
    assert decay_at(0, 0.999) == 0.1
    assert decay_at(0, 0.05) == 0.05
    assert decay_at(10**6, 0.999) == 0.999


def test_frozen_parameters_have_no_average():
    assert set(WeightAverage(module().named_parameters(), 0.9).state()) == {"0.weight", "0.bias", "1.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapping_leaves_no_trace(dtype):
    net = module(dtype)
    average = WeightAverage(net.named_parameters(), 0.9)
    steps(net, average, 0, 3)
    before, kept = values(net), {name: tensor.clone() for name, tensor in average.state().items()}

    def fail_inside():
        with average.swapped_in():
            for name, tensor in kept.items():
                assert torch.equal(net.get_parameter(name), tensor.to(dtype))
            assert not torch.equal(net[0].weight, before["0.weight"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in average.state().items())


def test_state_restores_to_the_bit():
    straight = module()
    one = WeightAverage(straight.named_parameters(), 0.9)
    steps(straight, one, 0, 8)
    first = module()
    two = WeightAverage(first.named_parameters(), 0.9)
    steps(first, two, 0, 5)
    resumed = module()
    resumed.load_state_dict(first.state_dict())
    three = WeightAverage(resumed.named_parameters(), 0.9)
    for name, tensor in three.state().items():
        tensor.copy_(two.state()[name])
    steps(resumed, three, 5, 8)
    assert all(torch.equal(tensor, three.state()[name]) for name, tensor in one.state().items())
