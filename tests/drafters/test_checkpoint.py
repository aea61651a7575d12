import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from peagle.drafters import storage
from peagle.drafters.checkpoint import check_compatible, export_head, load_drafter, resolve_head, save_drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.drafters.vocab import membership
from peagle.errors import PeagleError
from tests.drafters.conftest import CONFIG, DRAFT_IDS, SPEC, make_drafter, make_target
from tests.drafters.files import edit_config, edit_tensors, logits, read_json, read_tensors

CPU = torch.device("cpu")
LAYER = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight",
    "post_attention_layernorm.weight",
)  # fmt: skip
# vLLM's plain layout, from its loader's names: written out here so that a change of ours cannot change it too.
PLAIN_KEYS = {
    "fc.weight", "input_norm.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "mask_hidden",
    "d2t", "t2d", "midlayer.hidden_norm.weight",
    *(f"midlayer.{name}" for name in LAYER),
    *(f"layers.{i}.{name}" for i in (1, 2) for name in LAYER),
}  # fmt: skip


def save(drafter: PEagleDrafter, path: Path, **settings) -> Path:
    save_drafter(drafter, path, **{"compact": False, "base_model": "tiny", "extra": {"recipe": "r1"}, **settings})
    return path


def load(path: Path, target=None, dtype=torch.float32, **settings) -> PEagleDrafter:
    return load_drafter(path, target, dtype=dtype, device=CPU, **settings)


def same(logits_UV: Tensor, expected_UV: Tensor) -> bool:
    """Not bit for bit: on AMD's processors MKL's sums of few rows follow where in memory the weights begin."""
    return torch.allclose(logits_UV, expected_UV, rtol=1e-5, atol=1e-5)


# --- round trips ----------------------------------------------------------------------------------------------------


def test_full_round_trip_is_exact_and_needs_no_target(drafter, tmp_path):
    head = load(save(drafter, tmp_path / "head", dtype=torch.float32))
    assert same(logits(head), logits(drafter))
    assert head.config == drafter.config
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_names_shapes_and_types_are_those_of_the_plain_layout(bias, target, tmp_path):
    drafter = make_drafter(replace(CONFIG, attention_bias=bias), target)
    path = save(drafter, tmp_path / "head")
    tensors = read_tensors(path)
    layers = ("midlayer", "layers.1", "layers.2")
    biases = {f"{layer}.self_attn.{part}_proj.bias" for layer in layers for part in "qkvo"} if bias else set()
    assert set(tensors) == PLAIN_KEYS | biases
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    floats = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in floats} == {torch.bfloat16}
    raw = read_json(path)
    assert (raw["torch_dtype"], raw["base_model"], raw["peagle_provenance"]) == ("bfloat16", "tiny", {"recipe": "r1"})
    rounded = drafter.to(torch.bfloat16).to(torch.float32)
    assert same(logits(load(path)), logits(rounded))


def test_merged_projections_are_split_in_order(drafter, tmp_path):
    tensors = read_tensors(save(drafter, tmp_path / "head", dtype=torch.float32))
    qkv, gate_up = drafter.fusion.self_attn.qkv_proj.weight, drafter.layers[1].mlp.gate_up_proj.weight
    assert torch.equal(tensors["midlayer.self_attn.q_proj.weight"], qkv[:32])
    assert torch.equal(tensors["midlayer.self_attn.k_proj.weight"], qkv[32:48])
    assert torch.equal(tensors["midlayer.self_attn.v_proj.weight"], qkv[48:])
    assert torch.equal(tensors["layers.2.mlp.gate_proj.weight"], gate_up[:48])
    assert torch.equal(tensors["layers.2.mlp.up_proj.weight"], gate_up[48:])


def test_compact_round_trip_shares_the_tables_of_the_target(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", compact=True, target=target, dtype=torch.float32)
    stored = set(read_tensors(path))
    assert stored == PLAIN_KEYS - {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} | {"mask_embedding"}
    assert read_json(path)["peagle_shared_with_target"] == ["embed_tokens.weight", "lm_head.weight"]
    head = load(path, target)
    assert same(logits(head), logits(drafter))
    assert head.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()


def test_compact_bfloat16_head_of_a_float32_target(drafter, target, tmp_path):
    """The usual case: float32 masters in training, a bfloat16 file, the target in either precision at load."""
    path = save(drafter, tmp_path / "head", compact=True, target=target)
    half = make_target().to(torch.bfloat16)
    for other, dtype in ((target, torch.float32), (half, torch.bfloat16), (half, torch.float32)):
        head = load(path, other, dtype=dtype)
        assert torch.equal(head.embed_tokens.weight.float(), target.embed_tokens.weight)
        assert torch.equal(head.mask_embedding.float(), drafter.mask_embedding.to(torch.bfloat16).float())
        assert head.rope.inv_freq.dtype == torch.float32


def test_small_draft_vocabulary_takes_the_target_rows_of_its_ids(small_vocab_drafter, target, tmp_path):
    path = save(small_vocab_drafter, tmp_path / "head", compact=True, target=target, dtype=torch.float32)
    tensors = read_tensors(path)
    assert "lm_head.weight" not in tensors
    assert torch.equal(tensors["t2d"], membership(DRAFT_IDS, 61))
    head = load(path, target)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[DRAFT_IDS])
    assert torch.equal(head.to_target_ids(torch.arange(10)), DRAFT_IDS)
    assert same(logits(head), logits(small_vocab_drafter))


def test_trained_tables_stay_in_a_compact_file(drafter, target, tmp_path):
    with torch.no_grad():
        drafter.lm_head.weight[3] += 1.0
    path = save(drafter, tmp_path / "head", compact=True, target=target, dtype=torch.float32)
    assert read_json(path)["peagle_shared_with_target"] == ["embed_tokens.weight"]
    assert same(logits(load(path, target)), logits(drafter))


def test_int8_layers_stay_within_their_bound(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", compact=True, target=target, int8_layers=True, dtype=torch.float32)
    tensors, head = read_tensors(path), load(path, target)
    matrices = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    assert len(matrices) == 3 * 7
    assert all(name.startswith(("midlayer.", "layers.")) for name in matrices)
    assert tensors["fc.weight"].dtype == torch.float32
    for name, value in drafter.named_parameters():
        error = (head.get_parameter(name) - value).detach().abs()
        bound = value.detach().abs().amax(-1, keepdim=True) / 254  # of a row's elements, see quantize_rows
        assert bool((error <= bound * 1.0001).all()), name
    difference, reference = logits(head) - logits(drafter), logits(drafter)
    assert difference.norm() / reference.norm() < 0.03  # rounding noise of 0.4 % a matrix through 21 of them


# --- the mask row ---------------------------------------------------------------------------------------------------


def test_trained_mask_row_is_written_where_readers_look_and_the_target_is_untouched(drafter, target, tmp_path):
    before = target.embed_tokens.weight.clone()
    compact = save(drafter, tmp_path / "compact", compact=True, target=target, int8_layers=True)
    export_head(compact, target, tmp_path / "full")
    tensors, trained = read_tensors(tmp_path / "full"), drafter.mask_embedding.to(torch.bfloat16)
    assert set(tensors) == PLAIN_KEYS
    assert torch.equal(tensors["embed_tokens.weight"][7], trained)
    others = torch.arange(61) != 7
    assert torch.equal(tensors["embed_tokens.weight"][others], before[others].to(torch.bfloat16))
    assert torch.equal(target.embed_tokens.weight, before)
    exported = load(tmp_path / "full")
    assert torch.equal(exported.mask_embedding, trained.float())
    difference = logits(exported) - logits(load(compact, target))
    assert difference.norm() / logits(exported).norm() < 0.02  # int8 values rounded to bfloat16
    bf16 = logits(load(tmp_path / "full", dtype=torch.bfloat16))
    assert torch.equal(bf16, logits(load(compact, target, dtype=torch.bfloat16)))
    assert read_json(tmp_path / "full")["peagle_provenance"] == {"recipe": "r1"}
    assert "peagle_shared_with_target" not in read_json(tmp_path / "full")


def test_trainable_head_owns_its_memory(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", compact=True, target=target)
    before = target.embed_tokens.weight.clone()
    head = load(path, target, trainable=True)
    with torch.no_grad():
        for parameter in head.parameters():
            assert parameter.requires_grad
            parameter.add_(1.0)
    assert torch.equal(target.embed_tokens.weight, before)
    assert not target.embed_tokens.weight.requires_grad


# --- what published heads look like ---------------------------------------------------------------------------------


def rename(old: str, new: str):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    "change",
    [
        rename("midlayer.", "layers.0."),
        rename("", "model."),
        rename("mask_hidden", "module.mask_hidden_state"),
        lambda tensors: tensors.update(mask_hidden=tensors["mask_hidden"].flatten()),
        lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")),
        lambda tensors: tensors.update({"layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        lambda tensors: tensors.update({"layers.1.self_attn.o_proj.bias": torch.zeros(32)}),
    ],
)
def test_other_spellings_load_to_the_same_head(change, drafter, tmp_path):
    path = save(drafter, tmp_path / "head", dtype=torch.float32)
    edit_tensors(path, change)
    assert same(logits(load(path)), logits(drafter))


def test_missing_tables_are_the_targets(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", dtype=torch.float32)
    edit_tensors(path, lambda tensors: (tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")))
    head = load(path, target)
    assert torch.equal(head.lm_head.weight, target.lm_head.weight)
    assert torch.equal(head.mask_embedding, target.embed_tokens.weight[7])
    with pytest.raises(PeagleError, match=r"embed_tokens\.weight and lm_head\.weight.*tiny"):
        load(path)


# --- bad input ------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN = {
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda p: (p / "config.json").write_text("{"), "cannot read config.json"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "holds a list, expected an object"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    "truncated weights": (truncate, "truncated"),
    "empty weights": (lambda p: (p / "model.safetensors").write_bytes(b""), "truncated"),
    "no mask_hidden": (lambda p: edit_tensors(p, lambda t: t.pop("mask_hidden")), "missing tensor mask_hidden.*96"),
    "no mask token": (
        lambda p: edit_config(p, lambda c: [c.pop(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")]),
        "no mask token",
    ),
    "missing layer": (
        lambda p: edit_tensors(p, lambda t: t.pop("layers.2.mlp.up_proj.weight")),
        r"missing tensor layers\.2\.mlp\.up_proj\.weight, expected shape \[48, 32\]",
    ),
    "misshapen fc": (
        lambda p: edit_tensors(p, lambda t: t.update({"fc.weight": torch.zeros(32, 64)})),
        r"fc\.weight has shape \[32, 64\], expected \[32, 96\]",
    ),
    "a layer too many": (
        lambda p: edit_config(p, lambda c: c.update(num_hidden_layers=2)),
        r"9 unexpected tensors \(layers\.2",
    ),
    "query norms": (
        lambda p: edit_tensors(p, lambda t: t.update({"layers.1.self_attn.q_norm.weight": torch.ones(8)})),
        "unexpected",
    ),
    "o_proj bias": (
        lambda p: edit_tensors(p, lambda t: t.update({"layers.1.self_attn.o_proj.bias": torch.ones(32)})),
        "unexpected",
    ),
    "stored twice": (
        lambda p: edit_tensors(p, lambda t: t.update({"model.norm.weight": torch.ones(32)})),
        "stored twice",
    ),
    "8 bits without scales": (
        lambda p: edit_tensors(p, lambda t: t.update({"fc.weight": torch.zeros(32, 96, dtype=torch.int8)})),
        "int8 without usable row scales",
    ),
    "ids for offsets": (
        lambda p: edit_tensors(p, lambda t: t.update(d2t=torch.arange(61))),
        r"0\.\.120.*offsets",
    ),
    "draft vocabulary without map": (
        lambda p: (
            edit_config(p, lambda c: c.update(draft_vocab_size=10)),
            edit_tensors(p, lambda t: (t.update({"lm_head.weight": torch.ones(10, 32)}), t.pop("d2t"))),
        ),
        "missing tensor d2t",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads_are_refused_in_one_line(case, drafter, tmp_path):
    damage, message = BROKEN[case]
    path = save(drafter, tmp_path / "head")
    damage(path)
    with pytest.raises(PeagleError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, hidden_size=64), "hidden size 32, this target has 64"),
        (replace(SPEC, vocab_size=100), "vocabulary size 61, this target has 100"),
        (replace(SPEC, num_layers=4), r"taps layer 5 \(taps \[2, 3, 5\]\), this target has ids 0 to 4"),
    ],
)
def test_head_of_another_target_is_refused(spec, message, drafter, target, tmp_path):
    path, target.spec = save(drafter, tmp_path / "head"), spec
    with pytest.raises(PeagleError, match=message):
        load(path, target)


def test_last_tap_may_be_the_stream_after_the_last_layer():
    check_compatible(replace(CONFIG, tap_ids=(0, 3, 6)), SPEC)
    with pytest.raises(PeagleError, match="mask token 61"):
        check_compatible(replace(CONFIG, mask_token_id=61), SPEC)


def test_compact_head_knows_its_target_from_one_of_equal_shape(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head", compact=True, target=target, base_model="tiny-chat")
    with pytest.raises(PeagleError, match=r"of tiny-chat .*not those of tiny-code"):
        load(path, make_target(seed=9), target_name="tiny-code")


def test_compact_settings_that_contradict_each_other(drafter, tmp_path):
    with pytest.raises(PeagleError, match="name the target"):
        save(drafter, tmp_path / "head", compact=True)
    with pytest.raises(PeagleError, match="compact"):
        save(drafter, tmp_path / "head", int8_layers=True)
    assert list(tmp_path.iterdir()) == []


def test_diverged_weights_are_not_saved(drafter, tmp_path):
    with torch.no_grad():
        drafter.fusion.mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(PeagleError, match=r"midlayer\.mlp\.down_proj\.weight holds NaN"):
        save(drafter, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_resolving_a_head(tmp_path):
    file = tmp_path / "head.safetensors"
    file.write_text("x")
    assert resolve_head(str(tmp_path)) == tmp_path
    with pytest.raises(PeagleError, match="is a file"):
        resolve_head(file)
    with pytest.raises(PeagleError, match="does not exist"):
        resolve_head(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("no\nnetwork"), r"org/head.*\(no network\)"),
        (LocalEntryNotFoundError("many words"), r"the Hub cannot be reached: check the path, or go online once$"),
    ],
)
def test_unknown_hub_id(monkeypatch, error, says):
    def refuse(*args, **settings):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(PeagleError, match=says):
        resolve_head("org/head")


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_rename", [1, 2])
def test_a_crash_while_saving_leaves_the_old_head(failing_rename, drafter, tmp_path, monkeypatch):
    path = save(drafter, tmp_path / "head", dtype=torch.float32)
    (path / "README.md").write_text("card")
    expected, calls, rename = logits(drafter), [], os.replace

    def crash(source, destination):
        calls.append(source)
        if len(calls) == failing_rename:
            raise OSError("disk gone")
        rename(source, destination)

    monkeypatch.setattr(storage.os, "replace", crash)
    with torch.no_grad():
        drafter.fc.weight.zero_()
    with pytest.raises(PeagleError, match=r"cannot write.*disk gone"):
        save(drafter, path)
    assert same(logits(load(path)), expected)
    assert (path / "README.md").read_text() == "card"
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_full_disk_leaves_nothing_half_written(drafter, tmp_path, monkeypatch):
    def fail(*args, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(PeagleError, match="No space left"):
        save(drafter, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces_the_weights_and_keeps_the_model_card(drafter, target, tmp_path):
    path = save(drafter, tmp_path / "head")
    (path / "README.md").write_text("card")
    (path / "old.safetensors").write_bytes(b"stale shard")
    save(drafter, path, compact=True, target=target)
    assert sorted(entry.name for entry in path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]


def test_a_link_keeps_pointing_to_the_replaced_head(drafter, tmp_path):
    path, link = save(drafter, tmp_path / "head"), tmp_path / "latest"
    link.symlink_to(path)
    with torch.no_grad():
        drafter.fc.weight.zero_()
    save(drafter, link)
    assert link.is_symlink()
    assert not load(path).fc.weight.any()


def test_what_is_not_a_head_is_never_replaced(drafter, tmp_path):
    file, folder, model, empty = (tmp_path / name for name in ("file", "folder", "model", "empty"))
    file.write_text("mine")
    for directory in (folder, model, empty):
        directory.mkdir()
    (folder / "notes.txt").write_text("mine")
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for path in (file, folder, model):
        with pytest.raises(PeagleError, match="left as it is"):
            save(drafter, path)
    assert (file.read_text(), (folder / "notes.txt").read_text()) == ("mine", "mine")
    assert (save(drafter, empty) / "model.safetensors").exists()


def test_parent_that_cannot_be_written(drafter, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(PeagleError, match="cannot write"):
        save(drafter, blocker / "sub" / "head")
