from dataclasses import replace

import pytest
import torch

from peagle.drafters.init import new_drafter
from peagle.errors import PeagleError
from tests.drafters.conftest import DRAFT_IDS, SPEC, make_target
from tests.drafters.files import logits


def new(target, **settings):
    defaults = {"num_layers": 3, "mask_token_id": 7, "seed": 0, "target_init": True}
    return new_drafter(target, **{**defaults, **settings})


@pytest.mark.parametrize("target_init", [True, False])
def test_tables_are_copies_of_the_target(target_init, target):
    drafter = new(target, target_init=target_init)
    assert torch.equal(drafter.embed_tokens.weight, target.embed_tokens.weight)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    assert torch.equal(drafter.mask_embedding, target.embed_tokens.weight[7])
    assert drafter.config.tap_ids == (2, 3, 3)
    assert drafter.training
    owned = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    assert len(owned) == len(list(drafter.parameters()))
    assert not owned & {parameter.untyped_storage().data_ptr() for parameter in target.parameters()}
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in drafter.parameters())
    assert 0.5 < float(drafter.mask_hidden.detach().std()) < 1.5
    assert bool(logits(drafter).isfinite().all())


def test_layers_come_from_the_end_of_the_target(target):
    drafter, default = new(target), new(target, target_init=False)
    fused, original = drafter.fusion.self_attn.qkv_proj.weight, target.layers[3].self_attn.qkv_proj.weight
    assert torch.equal(fused[:, 32:], original)
    assert torch.equal(fused[:, :32], 0.5 * default.fusion.self_attn.qkv_proj.weight[:, :32])
    assert torch.equal(drafter.fusion.hidden_norm.weight, target.layers[3].input_layernorm.weight)
    assert torch.equal(drafter.fusion.input_layernorm.weight, torch.ones(32))
    for i, layer in enumerate(drafter.layers):
        for name, value in layer.named_parameters():
            assert torch.equal(value, target.layers[4 + i].get_parameter(name)), name
    assert torch.equal(drafter.norm.weight, target.norm.weight)
    identity = drafter.fc.weight - 0.1 * default.fc.weight
    torch.testing.assert_close(identity[:, 64:], torch.eye(32), atol=1e-6, rtol=0)
    torch.testing.assert_close(identity[:, :64], torch.zeros(32, 64), atol=1e-6, rtol=0)


def test_sliding_layers(target):
    assert new(target).config.windows == (None, None, None)
    assert new(target, sliding_window=16).config.windows == (16, 16, 16)
    assert new(target, sliding_window=16, sliding_layers=(0, 2)).config.windows == (16, None, 16)
    with pytest.raises(PeagleError, match="numbers from 0 to 2"):
        new(target, sliding_window=16, sliding_layers=(3,))


def test_seed_decides_and_leaves_the_global_generator_alone(target):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = new(target), new(target), new(target, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.mask_hidden, second.mask_hidden)
    assert not torch.equal(first.mask_hidden, other.mask_hidden)


def test_draft_vocabulary_takes_its_rows(target):
    drafter = new(target, draft_ids=DRAFT_IDS)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    assert torch.equal(drafter.to_target_ids(torch.arange(10)), DRAFT_IDS)


def test_biased_targets():
    """Query, key and value biases are copied with their layer; heads have no place for the others."""
    biased = make_target(replace(SPEC, qkv_bias=True, o_bias=True, mlp_bias=True))
    drafter = new(biased)
    for own, layer in zip([drafter.fusion, *drafter.layers], biased.layers[3:]):
        assert torch.equal(own.self_attn.qkv_proj.bias, layer.self_attn.qkv_proj.bias)
        assert own.self_attn.o_proj.bias is None
    assert not new(biased, target_init=False).config.attention_bias


def test_queries_and_keys_of_a_target_that_norms_them_are_not_copied():
    """Heads have no such norms: values, output and feed-forward come from the target, queries and keys do not."""
    normed = make_target(replace(SPEC, qk_norm=True, qkv_bias=True))
    assert normed.layers[3].self_attn.q_norm is not None
    drafter, default = new(normed), new(make_target(replace(SPEC, qkv_bias=True)))
    for i, own in enumerate([drafter.fusion, *drafter.layers]):
        source, projection = normed.layers[3 + i].self_attn, own.self_attn.qkv_proj
        first = sum(projection.splits[:2])
        weight = projection.weight[:, 32:] if i == 0 else projection.weight
        assert torch.equal(weight[first:], source.qkv_proj.weight[first:])
        assert torch.equal(projection.bias[first:], source.qkv_proj.bias[first:])
        assert not (weight[:first] == source.qkv_proj.weight[:first]).any()
        assert float(weight[:first].detach().abs().max()) <= projection.in_features**-0.5
        assert torch.equal(own.self_attn.o_proj.weight, source.o_proj.weight)
        assert torch.equal(own.mlp.gate_up_proj.weight, normed.layers[3 + i].mlp.gate_up_proj.weight)
    assert drafter.state_dict().keys() == default.state_dict().keys()
    assert bool(logits(drafter).isfinite().all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "0 drafter layers"),
        ({"num_layers": 7}, "7 drafter layers: expected 1 to 6"),
        ({"tap_ids": (2, 7)}, "taps layer 7"),
        ({"mask_token_id": 61}, "mask token 61"),
        ({"draft_ids": torch.tensor([3, 2])}, "ascending"),
        ({"draft_ids": torch.tensor([3, 61])}, "draft ids reach 61"),
    ],
)
def test_settings_the_target_rules_out(settings, message, target):
    with pytest.raises(PeagleError, match=message):
        new(target, **settings)
