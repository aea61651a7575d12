"""Muon, AdamW, the schedule, and exact resume."""

import copy
import math

import pytest
import torch
from torch import nn

from peagle.errors import PeagleError
from peagle.models.layers import MergedLinear
from peagle.training.optim import (
    AdamW,
    Muon,
    build_optimizers,
    learning_rate_factor,
    newton_schulz,
    set_learning_rate,
)
from tests.training.tiny_drafter import tiny_drafter


def fill_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)


def train(drafter, optimizers, steps, first_seed=0):
    for step in range(steps):
        fill_gradients(drafter.parameters(), first_seed + step)
        set_learning_rate(optimizers, 0.5 + 0.1 * step)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("shape", [(4, 4), (8, 24), (48, 48)])
def test_singular_values_end_near_one(shape):
    torch.manual_seed(0)
    batch = torch.randn(5, *shape) * torch.logspace(-3, 3, 5)[:, None, None]
    result = newton_schulz(batch)
    values = torch.linalg.svdvals(result)
    wanted = torch.linalg.svdvals(batch)
    large = wanted > 0.02 * wanted.norm(dim=-1, keepdim=True)  # five steps lift the rest only part of the way
    assert values[large].min() > 0.65
    assert values.max() < 1.25
    u, _, vh = torch.linalg.svd(batch, full_matrices=False)
    rotated = u.mT @ result @ vh.mT
    off_diagonal = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-3, "the singular vectors are kept"


def test_batched_equals_one_by_one():
    torch.manual_seed(0)
    batch = torch.randn(6, 8, 20)
    singles = torch.cat([newton_schulz(matrix[None]) for matrix in batch])
    torch.testing.assert_close(newton_schulz(batch), singles, rtol=1e-5, atol=1e-6)


def test_muon_step_by_hand():
    torch.manual_seed(0)
    tall = nn.Parameter(torch.randn(12, 5))
    before, optimizer = tall.detach().clone(), Muon([tall], [(12,)], lr=0.1)
    momentum = torch.zeros(12, 5)
    for seed in range(3):
        fill_gradients([tall], seed)
        momentum = 0.95 * momentum + tall.grad
        direction = newton_schulz((tall.grad + 0.95 * momentum).T[None].contiguous())[0].T
        before -= 0.1 * 0.2 * math.sqrt(12) * direction
        optimizer.step()
        torch.testing.assert_close(tall.detach(), before, rtol=1e-4, atol=1e-5)


def test_merged_projections_equal_separate_ones():
    torch.manual_seed(0)
    merged = MergedLinear(6, (8, 4, 4))
    parts = [nn.Parameter(part.detach().clone()) for part in merged.weight.split((8, 4, 4))]
    whole = nn.Parameter(merged.weight.detach().clone())
    together = Muon([merged.weight], [merged.splits], lr=0.1)
    apart = Muon(parts, [(len(part),) for part in parts], lr=0.1)
    as_one = Muon([whole], [(16,)], lr=0.1)
    for seed in range(2):
        fill_gradients([merged.weight], seed)
        for part, grad in zip(parts, merged.weight.grad.split((8, 4, 4)), strict=True):
            part.grad = grad.clone()
        whole.grad = merged.weight.grad
        for optimizer in (together, apart, as_one):
            optimizer.step()
    torch.testing.assert_close(merged.weight.detach(), torch.cat([p.detach() for p in parts]), rtol=1e-5, atol=1e-6)
    assert (merged.weight - whole).abs().max() > 1e-2, "orthogonalising the merged matrix is something else"


def test_adamw_is_torchs():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3, 4))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    mine = AdamW(ours, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for seed in range(4):
        fill_gradients(ours, seed)
        fill_gradients(theirs, seed)
        mine.step()
        reference.step()
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


def test_masters_keep_updates_that_bfloat16_would_lose():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=1e-4)  # bfloat16's spacing below 1 is 0.0039
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(optimizer.masters([parameter])[0], torch.full((4,), 0.99), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parameter.detach().float(), torch.full((4,), 0.99), rtol=0, atol=0.003)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_rate_may_be_a_tensor(kind):
    """As it is on a GPU, where a captured step reads the rate of its time from it."""
    drafters = [tiny_drafter(torch.float32) for _ in range(2)]
    plain, tensors = (build_optimizers(drafter, 2e-3, 1e-3, kind) for drafter in drafters)
    for optimizer in tensors:
        optimizer.rate_tensor = torch.tensor(torch.nan)
    train(drafters[0], plain, 3)
    train(drafters[1], tensors, 3)
    for (name, actual), wanted in zip(drafters[1].named_parameters(), drafters[0].parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-7, msg=name)


def test_who_goes_where():
    drafter = tiny_drafter(torch.float32)
    names = {id(p): name for name, p in drafter.named_parameters()}
    muon, adamw = build_optimizers(drafter, 2e-3, 1e-3, "muon")
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    in_muon = {names[id(p)] for p in muon.parameters}
    assert in_muon == {
        n for n, p in drafter.named_parameters() if n.startswith(("fc", "fusion", "layers")) and p.ndim == 2
    }
    assert {"embed_tokens.weight", "lm_head.weight", "mask_hidden", "mask_embedding", "norm.weight"} <= {
        names[id(p)] for p in adamw.parameters
    }
    assert len(muon.parameters) + len(adamw.parameters) == len(names)
    (only,) = build_optimizers(drafter, 2e-3, 1e-3, "adamw")
    assert len(only.parameters) == len(names)
    with pytest.raises(PeagleError, match="expected 'muon' or 'adamw'"):
        build_optimizers(drafter, 2e-3, 1e-3, "sgd")


def test_frozen_parameters_are_left_alone():
    drafter = tiny_drafter(torch.float32)
    drafter.embed_tokens.requires_grad_(False)
    drafter.fusion.self_attn.qkv_proj.requires_grad_(False)
    before = copy.deepcopy(drafter.state_dict())
    train(drafter, build_optimizers(drafter, 2e-3, 1e-3, "muon"), 2)
    same = {name for name, value in drafter.state_dict().items() if (value == before[name]).all()}
    assert same == {"embed_tokens.weight", "fusion.self_attn.qkv_proj.weight", "d2t"}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_equal(kind, dtype):
    drafter = tiny_drafter(dtype)
    optimizers = build_optimizers(drafter, 2e-3, 1e-3, kind)
    train(drafter, optimizers, 3)
    saved = copy.deepcopy((drafter.state_dict(), [o.state_dict() for o in optimizers]))
    train(drafter, optimizers, 2, first_seed=10)

    resumed = tiny_drafter(dtype)
    resumed.load_state_dict(saved[0])
    again = build_optimizers(resumed, 2e-3, 1e-3, kind)
    for optimizer, state in zip(again, saved[1], strict=True):
        optimizer.load_state_dict(state)
    train(resumed, again, 2, first_seed=10)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_learning_rate():
    assert learning_rate_factor(0, 100, 10) == pytest.approx(0.1)
    assert learning_rate_factor(9, 100, 10) == 1.0
    assert learning_rate_factor(10, 100, 10) == 1.0
    assert learning_rate_factor(55, 100, 10) == pytest.approx(0.5)
    assert learning_rate_factor(100, 100, 10) == pytest.approx(0.0)
    assert learning_rate_factor(500, 100, 10) == pytest.approx(0.0)
    assert learning_rate_factor(0, 100, 0) == 1.0
    factors = [learning_rate_factor(step, 100, 10) for step in range(10, 101)]
    assert factors == sorted(factors, reverse=True)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([parameter], lr=0.4)
    set_learning_rate([optimizer], 0.25)
    set_learning_rate([optimizer], 0.5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
