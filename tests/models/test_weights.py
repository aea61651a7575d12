"""Loading weights: merged parts land where they belong, and damaged directories are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.errors import PeagleError
from peagle.models.target import load_target, read_spec
from peagle.models.tokenizer import encode
from peagle.models.weights import load_model, parameter_parts
from tests.helpers import causal_attend
from tests.models.tiny import hf_model

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return parameter_parts(load_model(path, read_spec(path), dtype=dtype, device=torch.device("cpu")))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(path / FILE)
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path / FILE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf_model("llama-tied-biases").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_every_part_holds_its_own_tensor(saved: Path) -> None:
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(saved / FILE).items()}
    parts = load(saved)
    assert parts.keys() == state.keys()
    assert all(torch.equal(parts[name], state[name]) for name in state)


def test_casts_to_the_dtype_asked_for(saved: Path) -> None:
    state, parts = load_file(saved / FILE), load(saved, torch.bfloat16)
    assert torch.equal(parts["norm.weight"], state["model.norm.weight"].bfloat16())
    assert {part.dtype for part in parts.values()} == {torch.bfloat16}


def test_a_second_copy_of_tied_embeddings_is_ignored(saved: Path) -> None:
    before = load(saved)["embed_tokens.weight"]
    rewrite(saved, lambda state: state.update({"lm_head.weight": torch.zeros(320, 48)}))
    assert torch.equal(load(saved)["embed_tokens.weight"], before)


def test_old_rotary_buffers_are_ignored(saved: Path) -> None:
    rewrite(saved, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: [state.pop(name) for name in sorted(state) if "mlp" in name],
            r"lacks 18 of the \d+ tensors .*model.layers.0.mlp.gate_proj.weight, .*, \.\.\.",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(47)}),
            r"model.norm.weight of shape \[47\]: expected \[48\]",
        ),
        (
            lambda state: state.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(48, 48)}),
            r"k_proj.weight of shape \[48, 48\]: expected \[16, 48\]",
        ),
        (
            lambda state: state.update({"model.layers.3.input_layernorm.weight": torch.ones(48)}),
            "model.layers.3.input_layernorm.weight, which the model described by config.json does not have",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "model.norm.weight as torch.int8: expected bfloat16, float16 or float32",
        ),
    ],
)
def test_wrong_tensors(saved: Path, change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(PeagleError, match=message):
        load(saved)


@pytest.mark.parametrize("size", [0, 5, 300, 20_000])
def test_truncated_file(saved: Path, size: int) -> None:
    (saved / FILE).write_bytes((saved / FILE).read_bytes()[:size])
    with pytest.raises(PeagleError, match=f"{FILE} cannot be read as safetensors"):
        load(saved)


def test_no_weight_file(saved: Path) -> None:
    (saved / FILE).rename(saved / "pytorch_model.bin")
    with pytest.raises(PeagleError, match=f"has no weights: expected {FILE} or {INDEX}"):
        load(saved)


def test_absent_shard(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-0*.safetensors"))
    shards[1].unlink()
    with pytest.raises(PeagleError, match=rf"lacks 1 of the {len(shards)} shards .*{shards[1].name}"):
        load(sharded)


def test_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-0*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PeagleError, match=f"{shard.name} cannot be read"):
        load(sharded)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"metadata": {}}), json.dumps({"weight_map": ["a"]})])
def test_malformed_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(PeagleError, match="is not a weight index"):
        load(sharded)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_malformed_config(saved: Path, text: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(PeagleError, match=r"config\.json"):
        load(saved)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3-tied-biases"])
def test_dummy_weights_need_a_config_only(variant: str, tmp_path: Path) -> None:
    """Unit scale everywhere: logits neither vanish nor explode; what a text would be is spelled out in token ids."""
    hf_model(variant).config.save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    target = load_target(str(tmp_path), dtype=torch.float32, device=cpu, load_format="dummy")
    parts = parameter_parts(target.model)
    embedding, down = parts["embed_tokens.weight"], parts["layers.0.mlp.down_proj.weight"]
    assert 0.95 < float(embedding.std()) < 1.05
    assert 0.9 < float(down.std()) * 80**0.5 < 1.1
    assert all(bool((part == 1).all()) for name, part in parts.items() if name.endswith("norm.weight"))
    assert not any(bool(part.any()) for name, part in parts.items() if name.endswith("bias"))
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    ids = torch.arange(12)
    hidden, _ = target.model(ids, ids, causal_attend([12]))
    assert 0.5 < float(target.model.logits(hidden).std()) < 2 * 48**0.5
    assert target.tokenizer.decode([5, 319]) == "<5> <319>"
    assert encode(target.tokenizer, "<7> <9> what") == [7, 9, 0]
    same = load_target(str(tmp_path), dtype=torch.float32, device=cpu, load_format="dummy")
    assert torch.equal(same.model.embed_tokens.weight, embedding)
