"""EAGLE-3 heads on disk: the same layout without mask parameters, and never mistaken for P-EAGLE heads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.drafters.checkpoint import export_head, load_drafter, save_drafter
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.head_config import MASK_ID_KEYS, config_from_dict, config_to_dict
from peagle.drafters.init import new_drafter
from peagle.drafters.inspect import inspect_head
from peagle.drafters.p_eagle import PEagleDrafter, drafter_for
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from tests.drafters.conftest import CONFIG, SPEC
from tests.drafters.files import edit_config, edit_tensors, logits, read_json, read_tensors
from tests.drafters.test_checkpoint import PLAIN_KEYS
from tests.helpers import random_weights

EAGLE3 = replace(CONFIG, mask_token_id=None)


@pytest.fixture
def eagle3(target: TargetModel) -> Eagle3Drafter:
    """A head whose embedding and output rows are the target's."""
    drafter = drafter_for(EAGLE3)
    random_weights(drafter, seed=2)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.embed_tokens.weight)
        drafter.lm_head.weight.copy_(target.lm_head.weight)
    return drafter.eval()


def save(drafter: Eagle3Drafter, path: Path, **settings: object) -> Path:
    save_drafter(drafter, path, **{"compact": False, "base_model": "tiny", "extra": {}, **settings})
    return path


def load(path: Path, target: TargetModel | None = None) -> Eagle3Drafter:
    return load_drafter(path, target, dtype=torch.float32, device=torch.device("cpu"))


def test_the_mask_token_makes_the_kind():
    assert (CONFIG.parallel, EAGLE3.parallel) == (True, False)
    assert type(drafter_for(EAGLE3)) is Eagle3Drafter
    assert isinstance(drafter_for(CONFIG), PEagleDrafter)
    with pytest.raises(PeagleError, match="mask token"):
        PEagleDrafter(EAGLE3)


@pytest.mark.parametrize("storage", ["full", "compact", "compact, int8 layers"])
def test_round_trip(storage, eagle3, target, tmp_path):
    compact, int8 = storage != "full", "int8" in storage
    path = save(eagle3, tmp_path / "head", compact=compact, int8_layers=int8, target=target, dtype=torch.float32)
    shared = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} if compact else set()
    stored = {name for name in read_tensors(path) if not name.endswith("_scale")}
    assert stored == PLAIN_KEYS - {"mask_hidden"} - shared
    head = load(path, target)
    assert type(head) is Eagle3Drafter
    assert head.config == EAGLE3
    if int8:
        assert (logits(head) - logits(eagle3)).norm() / logits(eagle3).norm() < 0.03
    else:
        assert torch.equal(logits(head), logits(eagle3))
    report = inspect_head(path, SPEC)
    assert report.problems == []
    assert report.storage == storage
    assert "EAGLE-3 (LlamaForCausalLMEagle3)" in report.lines()[1]


def test_config_is_what_vllm_reads_as_eagle3(eagle3, tmp_path):
    raw = read_json(save(eagle3, tmp_path / "head"))
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["parallel_drafting"] is False
    assert not set(MASK_ID_KEYS) & set(raw)
    assert config_from_dict(raw, target_layers=None, where="head") == EAGLE3
    del raw["parallel_drafting"]  # published heads say nothing
    assert config_from_dict(raw, target_layers=None, where="head") == EAGLE3


def test_export_writes_the_whole_head(eagle3, target, tmp_path):
    compact = save(eagle3, tmp_path / "compact", compact=True, target=target)
    export_head(compact, target, tmp_path / "full")
    assert set(read_tensors(tmp_path / "full")) == PLAIN_KEYS - {"mask_hidden"}
    assert torch.equal(logits(load(tmp_path / "full")), logits(load(compact, target)))


def test_missing_tables_are_the_targets(eagle3, target, tmp_path):
    path = save(eagle3, tmp_path / "head", dtype=torch.float32)
    edit_tensors(path, lambda t: (t.pop("embed_tokens.weight"), t.pop("d2t"), t.pop("t2d")))
    assert torch.equal(logits(load(path, target)), logits(eagle3))
    assert not any("mask row" in problem for problem in inspect_head(path, SPEC).problems)


@pytest.mark.parametrize("stray", ["mask_hidden", "mask_embedding"])
def test_mask_parameters_without_a_mask_token(stray, eagle3, tmp_path):
    path = save(eagle3, tmp_path / "head")
    edit_tensors(path, lambda t: t.update({stray: torch.ones(32)}))
    with pytest.raises(PeagleError, match=f"{stray} belongs to a P-EAGLE head"):
        load(path)
    assert any(f"{stray} belongs" in problem for problem in inspect_head(path).problems)


def test_a_p_eagle_head_that_lost_its_mask_token(drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    edit_config(path, lambda c: [c.pop(key) for key in (*MASK_ID_KEYS, "parallel_drafting")])
    with pytest.raises(PeagleError, match="mask_hidden belongs to a P-EAGLE head"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_drafting": True}, "no mask token"),
        ({"norm_output": True}, "norm_output=True"),
        ({"parallel_drafting": "no"}, "parallel_drafting='no'"),
    ],
)
def test_configs_that_cannot_be_computed(changes, named):
    with pytest.raises(PeagleError, match=named):
        config_from_dict({**config_to_dict(EAGLE3), **changes}, target_layers=None, where="head X")


def test_new_heads_of_both_kinds_start_alike(target):
    sizes = dict(num_layers=2, seed=3, target_init=True)
    plain = new_drafter(target, mask_token_id=None, **sizes)
    parallel = new_drafter(target, mask_token_id=7, **sizes)
    assert type(plain) is Eagle3Drafter
    assert plain.training
    of_parallel = dict(parallel.named_parameters())
    assert set(of_parallel) - {name for name, _ in plain.named_parameters()} == {"mask_embedding", "mask_hidden"}
    for name, value in plain.named_parameters():
        assert torch.equal(value, of_parallel[name]), name
