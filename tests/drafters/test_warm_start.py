"""A new head that starts as another one: what is copied, what stays fresh, and which pairs are refused."""

from dataclasses import replace

import pytest
import torch

from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.init import new_drafter
from peagle.drafters.warm_start import load_start, warm_drafter
from peagle.errors import PeagleError
from tests.drafters.conftest import CONFIG, DRAFT_IDS, SPEC, make_drafter, make_target
from tests.helpers import causal_attend, random_weights

# An architecture that no flag of a run could ask for, and no fresh head has.
EAGLE3 = replace(
    CONFIG, num_layers=1, mask_token_id=None, norm_before_fc=False, norm_before_residual=True, intermediate_size=40,
    tap_ids=(1, 3, 4),
)  # fmt: skip


def eagle3_head(config=EAGLE3):
    drafter = Eagle3Drafter(config)
    random_weights(drafter, seed=4)
    return drafter.to(torch.bfloat16).float().eval()


def saved(drafter, path, target=None, **settings):
    save_drafter(drafter, path, **{"compact": False, "base_model": "t", "extra": {}, "target": target, **settings})
    return path


def warm(head, target, *, num_layers=1, mask_token_id=7, **wanted):
    start = load_start(head, target, num_layers=num_layers, **wanted)
    like = {"tap_ids": start.config.tap_ids, "norm_before_fc": start.config.norm_before_fc}
    sizes = {"num_layers": num_layers, "mask_token_id": mask_token_id}
    fresh = new_drafter(target, **sizes, seed=0, target_init=True, **like)
    return warm_drafter(start, fresh, seed=0)


def hidden(drafter, rows=6):
    """Hidden states of depth-0 rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(drafter.config.vocab_size, (rows,), generator=generator)
    features = drafter.combine(torch.randn(rows, drafter.config.feature_size, generator=generator))
    return drafter(drafter.embed_tokens(ids), features, torch.arange(rows), causal_attend([rows]))


def test_an_eagle3_head_keeps_its_function_and_gets_mask_parameters(target, tmp_path):
    head = eagle3_head()
    drafter = warm(saved(head, tmp_path / "head"), target)
    assert drafter.config == replace(EAGLE3, mask_token_id=7)
    torch.testing.assert_close(hidden(drafter), hidden(head), atol=0, rtol=0)
    assert torch.equal(drafter.lm_head.weight, head.lm_head.weight)
    assert torch.equal(drafter.mask_embedding, target.embed_tokens.weight[7])
    assert 0.5 < float(drafter.mask_hidden.detach().std()) < 1.5
    assert drafter.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in drafter.parameters())
    owned = {parameter.untyped_storage().data_ptr() for parameter in target.parameters()}
    assert not owned & {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}


def test_a_p_eagle_head_keeps_everything(target, tmp_path):
    head = make_drafter().to(torch.bfloat16).float()
    drafter = warm(saved(head, tmp_path / "head"), target, num_layers=3)
    expected = head.state_dict()
    expected["embed_tokens.weight"][7] = head.mask_embedding.detach()  # how files hold the mask slot
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, expected[name]), name
    single = warm(tmp_path / "head", target, num_layers=3, mask_token_id=None)
    assert not hasattr(single, "mask_hidden"), "it can start an EAGLE-3 head as well"


def test_further_layers_are_those_of_a_fresh_head(target, tmp_path):
    head = eagle3_head(replace(EAGLE3, intermediate_size=48))
    saved(head, tmp_path / "head")
    drafter = warm(tmp_path / "head", target, num_layers=3)
    fresh = new_drafter(target, num_layers=3, mask_token_id=7, seed=0, target_init=True)
    assert torch.equal(drafter.fusion.self_attn.qkv_proj.weight, head.fusion.self_attn.qkv_proj.weight)
    for name, value in fresh.layers.state_dict().items():
        assert torch.equal(drafter.layers.state_dict()[name], value), name
    again = warm(tmp_path / "head", target, num_layers=3)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), again.parameters(), strict=True))


def test_further_layers_of_another_width_start_at_random(target, tmp_path):
    drafter = warm(saved(eagle3_head(), tmp_path / "head"), target, num_layers=2)
    assert drafter.layers[0].mlp.down_proj.weight.shape == (32, 40)
    assert 0 < float(drafter.layers[0].mlp.down_proj.weight.detach().std()) < 1
    assert torch.equal(drafter.layers[0].self_attn.o_proj.weight, target.layers[5].self_attn.o_proj.weight)


@pytest.mark.parametrize("int8", [False, True])
def test_compact_heads_borrow_the_tables_of_the_target(drafter, target, tmp_path, int8):
    saved(drafter, tmp_path / "head", target, compact=True, int8_layers=int8)
    found = warm(tmp_path / "head", target, num_layers=3)
    assert torch.equal(found.lm_head.weight, target.lm_head.weight)
    assert found.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()


def test_the_draft_vocabulary_is_the_heads(small_vocab_drafter, target, tmp_path):
    saved(small_vocab_drafter, tmp_path / "head")
    found = warm(tmp_path / "head", target, num_layers=3)
    assert torch.equal(found.d2t, small_vocab_drafter.d2t)
    assert found.lm_head.weight.shape == (len(DRAFT_IDS), 32)
    assert warm(tmp_path / "head", target, num_layers=3, draft_vocab_size=10).config == found.config
    with pytest.raises(PeagleError, match=r"drafts 10 tokens, this run asks for 20: leave --draft-vocab-size out"):
        warm(tmp_path / "head", target, num_layers=3, draft_vocab_size=20)


def test_disagreements_name_both_sides(target, tmp_path):
    head = saved(make_drafter(), tmp_path / "head")
    with pytest.raises(PeagleError, match=r"taps layers \[2, 3, 5\], this run asks for \[1, 2, 3\]"):
        warm(head, target, num_layers=3, tap_ids=(1, 2, 3))
    with pytest.raises(PeagleError, match=r"has 3 layers, this run 2: .* --num-layers 3 or more"):
        warm(head, target, num_layers=2)
    for change, says in (
        ({"vocab_size": 62}, "vocabulary size 61, this target has 62"),
        ({"hidden_size": 48}, "hidden size 32, this target has 48"),
        ({"num_layers": 4}, r"taps \[2, 3, 5\]\), this target has ids 0 to 4"),
    ):
        with pytest.raises(PeagleError, match=says):
            warm(head, make_target(replace(SPEC, **change)), num_layers=3)
    with pytest.raises(PeagleError, match="does not exist"):
        warm(tmp_path / "missing", target)
