import json
from dataclasses import replace

import pytest
import torch

from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.inspect import inspect_head
from tests.drafters.conftest import CONFIG, SPEC, make_drafter
from tests.drafters.files import edit_config, edit_tensors
from tests.drafters.test_checkpoint import BROKEN


def save(drafter, path, **settings):
    save_drafter(drafter, path, **{"compact": False, "base_model": "tiny", "extra": {"recipe": "r1"}, **settings})
    return path


@pytest.mark.parametrize("storage", ["full", "compact", "compact, int8 layers"])
@pytest.mark.parametrize("vocabulary", ["full", "small"])
def test_good_heads_have_no_problems(storage, vocabulary, drafter, small_vocab_drafter, target, tmp_path):
    head = drafter if vocabulary == "full" else small_vocab_drafter
    compact = storage != "full"
    path = save(head, tmp_path / "head", compact=compact, int8_layers="int8" in storage, target=target)
    report = inspect_head(path, SPEC)
    assert report.problems == []
    assert report.storage == storage
    assert report.config == head.config
    assert report.base_model == "tiny"
    assert report.size_bytes == sum(file.stat().st_size for file in path.iterdir())
    tables = head.embed_tokens.weight.numel() + head.lm_head.weight.numel()
    everything = sum(parameter.numel() for parameter in head.parameters())
    assert report.num_parameters == (everything - tables if compact else everything - CONFIG.hidden_size)
    text = "\n".join(report.lines())
    for fact in (
        "P-EAGLE",
        storage,
        "[2, 3, 5]",
        f"{'mask token':<24} 7",
        "recipe",
        "r1",
        f"{'problems':<24} none",
        "hidden 32",
    ):
        assert fact in text


def test_attention_bias_is_fine(target, tmp_path):
    drafter = make_drafter(replace(CONFIG, attention_bias=True), target)
    assert inspect_head(save(drafter, tmp_path / "head")).problems == []


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads_are_reported_not_raised(case, drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    BROKEN[case][0](path)
    report = inspect_head(path, SPEC)
    assert report.problems
    assert report.lines()[-1].startswith("  - ")


CONFIG_FLAWS = {
    "not explicit.*head_dim": lambda c: c.pop("head_dim"),
    "not explicit.*rope_theta": lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")),
    "architectures is": lambda c: c.update(architectures=["PEagleDraftModel"]),
    "disagree": lambda c: c.update(pard_token=9),
    "num_aux_hidden_states is 5": lambda c: c.update(num_aux_hidden_states=5),
    "inside eagle_config": lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    "fc_norm=True": lambda c: c.update(fc_norm=True),
}
TENSOR_FLAWS = {
    r"fc\.weight holds 2 NaN": lambda t: t["fc.weight"][0, :2].fill_(float("nan")),
    "mask_hidden is all zeros": lambda t: t["mask_hidden"].zero_(),
    "embedding is all zeros": lambda t: t["embed_tokens.weight"][7].zero_(),
    "trained mask row is lost": lambda t: t.pop("embed_tokens.weight"),
    r"lm_head\.weight is missing": lambda t: t.pop("lm_head.weight"),
    "strictly increasing": lambda t: t["d2t"].copy_(torch.arange(61).flip(0) - torch.arange(61)),
    "offsets": lambda t: t["d2t"].add_(1),
    "t2d does not": lambda t: t["t2d"][4].zero_(),
    "does not account for": lambda t: t.update(extra=torch.ones(2)),
}


@pytest.mark.parametrize("message", CONFIG_FLAWS)
def test_flaws_of_the_config(message, drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    edit_config(path, CONFIG_FLAWS[message])
    assert_reports(path, message)


@pytest.mark.parametrize("message", TENSOR_FLAWS)
def test_flaws_of_the_tensors(message, drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    edit_tensors(path, TENSOR_FLAWS[message])
    assert_reports(path, message)


def assert_reports(path, message):
    problems = inspect_head(path, SPEC).problems
    with pytest.raises(AssertionError, match=message):  # the same matching rule as for errors
        raise AssertionError("; ".join(problems))


def test_several_problems_at_once_and_another_target(drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    edit_tensors(path, lambda t: (t.pop("norm.weight"), t.pop("layers.1.mlp.up_proj.weight")))
    problems = inspect_head(path, replace(SPEC, hidden_size=64)).problems
    assert len(problems) == 3


def test_compact_head_without_its_mask_row(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", compact=True, target=target)
    edit_tensors(path, lambda t: t.pop("mask_embedding"))
    edit_config(path, lambda c: c.pop("peagle_target_embedding_sha256"))
    assert len(inspect_head(path).problems) == 2


def test_nothing_there(tmp_path):
    assert len(inspect_head(tmp_path / "nowhere").problems) == 1
    assert len(inspect_head(tmp_path).problems) == 1


def test_8_bit_floats_are_reported(drafter, tmp_path):
    path = save(drafter, tmp_path / "head")

    def to_float8(tensors):
        for name in tensors:
            if tensors[name].is_floating_point():
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_tensors(path, to_float8)
    assert any("float8_e4m3fn without usable row scales" in problem for problem in inspect_head(path, SPEC).problems)


def test_a_target_is_no_head(drafter, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_head(tmp_path)
    assert report.config is None
    assert "is a target, not a head" in report.problems[0]


def test_only_the_heads_own_files_are_counted(drafter, tmp_path):
    path = save(drafter, tmp_path / "head")
    size = inspect_head(path).size_bytes
    (path / "deep").mkdir()
    (path / "deep" / "model.safetensors").write_bytes(b"x" * 100)
    (path / "README.md").write_text("card")
    assert inspect_head(path).size_bytes == size > 0


def test_folders_that_are_no_head(tmp_path):
    assert "no config.json" in inspect_head(tmp_path).problems[0]
    assert "home directory that does not exist" in inspect_head("~no-such-user/head").problems[0]
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "cannot" in inspect_head(tmp_path).problems[0]
