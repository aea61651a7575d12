"""GGUF files become Hugging Face style directories: same function, same token ids; bad files leave nothing."""

import builtins
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from peagle.errors import PeagleError
from peagle.models.gguf import convert_gguf, unpermute_rope_rows
from peagle.models.target import load_target, read_spec
from peagle.models.tokenizer import encode, load_tokenizer, render_chat
from tests.helpers import causal_attend
from tests.models.tiny import (
    PLAIN,
    SPECIALS,
    gguf_fields,
    gguf_tensors,
    hf_model,
    permute_rope_rows,
    tiny_gguf,
    vocabulary,
    write_gguf,
)

pytest.importorskip("gguf")


def changed_gguf(
    path: Path, *, fields: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """The tiny llama file with some entries replaced; None removes one."""
    model = hf_model("llama")
    merged = [
        {name: value for name, value in {**own, **(new or {})}.items() if value is not None}
        for own, new in ((gguf_fields(model), fields), (gguf_tensors(model), tensors))
    ]
    return write_gguf(path, "llama", *merged)


def test_unpermute_inverts_the_permutation() -> None:
    rows = torch.randn(6 * 8, 5)
    for original in (rows, rows[:, 0].contiguous()):
        restored = unpermute_rope_rows(permute_rope_rows(original, 6).numpy(), 6)
        assert np.array_equal(restored, original.numpy())


def test_unpermute_worked_example() -> None:
    """One head of size 6: the file's order is 0 3 1 4 2 5."""
    stored = np.array([0, 3, 1, 4, 2, 5], dtype=np.float32)
    assert unpermute_rope_rows(stored, 1).tolist() == [0, 1, 2, 3, 4, 5]
    assert unpermute_rope_rows(np.concatenate([stored, stored + 6]), 2).tolist() == list(range(12))


@pytest.mark.parametrize("variant", ["llama", "llama-tied-biases", "qwen2", "qwen2-tied", "qwen3"])
def test_converted_model_computes_the_same(variant: str, tmp_path: Path) -> None:
    reference = hf_model(variant)
    file = tiny_gguf(tmp_path / "tiny.gguf", variant)
    convert_gguf(file, tmp_path / "out")
    target = load_target(str(tmp_path / "out"), dtype=torch.float32, device=torch.device("cpu"))
    assert target.spec.tie_word_embeddings == reference.config.tie_word_embeddings
    assert target.name == "out"
    with torch.no_grad():
        for parameter in reference.parameters():  # the conversion rounds the weights
            parameter.copy_(parameter.bfloat16())
    ids = torch.arange(0, 300, 25)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    hidden, _ = target.model(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    torch.testing.assert_close(target.model.logits(hidden), expected, atol=1e-4, rtol=0)


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(tmp_path / "tiny.gguf", "qwen2"), tmp_path / "out")
    spec, own = read_spec(tmp_path / "out"), hf_model("qwen2").config
    assert (spec.family, spec.num_layers, spec.num_kv_heads, spec.head_dim) == ("qwen2", 3, 2, 8)
    assert spec.rms_norm_eps == own.rms_norm_eps
    end, document = (len(PLAIN) + SPECIALS.index(token) for token in ("<|im_end|>", "<|endoftext|>"))
    assert spec.eos_token_ids == (end, document)


@pytest.mark.parametrize(("variant", "first_special"), [("llama", 0), ("qwen2", len(PLAIN))])
def test_tokenizer_keeps_every_id(variant: str, first_special: int, tmp_path: Path) -> None:
    convert_gguf(tiny_gguf(tmp_path / "tiny.gguf", variant), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    tokens = vocabulary("qwen2" if variant == "qwen2" else "smollm", 320)["tokenizer.ggml.tokens"]
    used = len(PLAIN) + len(SPECIALS)
    assert len(tokenizer) == used  # rows that only pad the matrix are no tokens
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens[:used]] == list(range(used))
    text = render_chat(tokenizer, [{"role": "user", "content": "hello"}], add_generation_prompt=True)
    ids = encode(tokenizer, text)
    assert ids == [first_special + 1, tokens.index("hello"), first_special + 2]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"


def test_smollm_splits_digits_and_qwen2_normalizes(tmp_path: Path) -> None:
    for variant in ("llama", "qwen2"):
        convert_gguf(tiny_gguf(tmp_path / f"{variant}.gguf", variant), tmp_path / variant)
    smollm, qwen2 = (load_tokenizer(tmp_path / variant) for variant in ("llama", "qwen2"))
    assert smollm.convert_ids_to_tokens(encode(smollm, "a 12")) == ["a", "Ġ", "1", "2"]
    assert encode(qwen2, "e\u0301") == encode(qwen2, "\u00e9") != encode(qwen2, "e")
    assert encode(smollm, "e\u0301") != encode(smollm, "\u00e9")


def test_output_copy_replaces_the_embedding_when_nearly_equal(tmp_path: Path) -> None:
    embedding = hf_model("llama").model.embed_tokens.weight.detach()
    better = embedding + 0.05 * embedding.std() * torch.randn_like(embedding)
    convert_gguf(changed_gguf(tmp_path / "a.gguf", tensors={"output.weight": better}), tmp_path / "near")
    convert_gguf(changed_gguf(tmp_path / "b.gguf", tensors={"token_embd.weight": None}), tmp_path / "only")
    convert_gguf(changed_gguf(tmp_path / "c.gguf"), tmp_path / "apart")
    near, only, apart = (load_file(tmp_path / name / "model.safetensors") for name in ("near", "only", "apart"))
    assert torch.equal(near["model.embed_tokens.weight"], better.bfloat16())
    assert torch.equal(only["model.embed_tokens.weight"], hf_model("llama").lm_head.weight.bfloat16())
    assert torch.equal(apart["model.embed_tokens.weight"], embedding.bfloat16())
    tied = [read_spec(tmp_path / name).tie_word_embeddings for name in ("near", "only", "apart")]
    assert tied == [True, True, False] == ["lm_head.weight" not in state for state in (near, only, apart)]


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.03, 0.05, 0.1, 0.5, 0.9, 0.999])
def test_truncated_file(part: float, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(PeagleError, match="cannot be read as GGUF"):
        convert_gguf(file, tmp_path / "cache" / "out")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "scaled RoPE"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.block_count": None}, r"llama\.block_count None"),
        ({"llama.attention.head_count": [6, 6, 6]}, r"llama\.attention\.head_count \[6, 6, 6\]: expected one number"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama': expected 'gpt2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe': expected 'smollm' or 'qwen2'"),
        ({"tokenizer.ggml.tokens": ["a", "b", "c"] * 100}, "300 tokens and 320 token types"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "inconsistent tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "eos token id 4000"),
    ],
)
def test_unsupported_metadata(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = changed_gguf(tmp_path / "tiny.gguf", fields=fields)
    with pytest.raises(PeagleError, match=message):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_unsupported_tensors(tmp_path: Path) -> None:
    for name, message in (("rope_freqs.weight", "scaled RoPE"), ("blk.0.attn_sinks.weight", "attn_sinks")):
        file = changed_gguf(tmp_path / "tiny.gguf", tensors={name: torch.ones(4)})
        with pytest.raises(PeagleError, match=message):
            convert_gguf(file, tmp_path / "out")


def test_unsupported_architecture(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "gemma3", {}, {"token_embd.weight": torch.ones(4, 4)})
    with pytest.raises(PeagleError, match="architecture 'gemma3': expected llama or qwen2"):
        convert_gguf(file, tmp_path / "out")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"something else entirely")
    with pytest.raises(PeagleError, match=r"a\.gguf cannot be read as GGUF"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")


def test_without_the_gguf_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_gguf(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_gguf)
    with pytest.raises(PeagleError, match=r"pip install 'peagle\[gguf\]'"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(PeagleError, match=r"No space left on device.*PEAGLE_CACHE"):
        convert_gguf(file, tmp_path / "cache" / "out")
    assert list((tmp_path / "cache").iterdir()) == []


def test_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, tmp_path / "cache" / "out")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_finished_conversion_of_another_process_is_kept(tmp_path: Path) -> None:
    file, out = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    convert_gguf(file, out)
    (out / "config.json").write_text(json.dumps({"first": True}))
    convert_gguf(file, out)
    assert json.loads((out / "config.json").read_text()) == {"first": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
