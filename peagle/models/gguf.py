"""Convert a GGUF file of the llama, qwen2 or qwen3 architecture into a Hugging Face style directory in bfloat16.

A quantized file is dequantized: the result is a target of its own, not the model that was quantized. File format and
tensor names after the GGUF specification and llama.cpp's `convert_hf_to_gguf.py`, whose changes are undone here.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.errors import PeagleError, one_line
from peagle.files import save_tensors
from peagle.models.spec import CAUSAL_LM_CLASS, DENSE_FAMILIES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONVERTER_VERSION = 1  # part of cached directories' names: raise it when the same file converts differently

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QWEN = ("qwen2", "qwen3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Two quantizations of one matrix differ by a few percent of its norm, unrelated matrices by about 140 percent.
TIED_TOLERANCE = 0.25

# Token types of `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
# How Qwen2 cuts text before byte-pair merges: contractions, words, single digits, punctuation, line ends, spaces.
QWEN2_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CORRUPT = (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds: metadata by key, and tensors still as stored (memory-mapped)."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """`general.architecture`, checked to be one that `convert_gguf` supports."""
        return str(self.fields["general.architecture"])

    def number(self, key: str, default: float | None = None) -> Any:
        """A scalar of the architecture's own section, such as `llama.block_count`."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PeagleError(f"{self.path} has {name} {value!r}: expected one number; use the Hugging Face directory")
        return value

    def token_id(self, role: str) -> int | None:
        """Id of `bos`, `eos`, `padding` or `unknown`, if the file names one."""
        token = self.fields.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None and not 0 <= token < len(self.fields.get("tokenizer.ggml.tokens", ())):
            raise PeagleError(
                f"{self.path} has {role} token id {token}: expected an id of its vocabulary; download it again"
            )
        return token


def convert_gguf(src: Path, out_dir: Path) -> None:
    """Write config, generation config, tokenizer and bfloat16 weights of `src` to `out_dir`.

    Everything is written to a neighbouring directory that is renamed at the end, so `out_dir` exists only when whole.
    If another process put it there first, that one is kept. Raises PeagleError for unsupported or damaged files and
    for an unwritable or full disk.
    """
    source = read_gguf(src)
    config, state = _config(source), _state_dict(source)
    config["tie_word_embeddings"] = HEAD not in state
    tokenizer = _tokenizer(source)
    scratch = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
        _write_directory(scratch, source, config, state, tokenizer)
        _put_in_place(scratch, out_dir)
    except OSError as error:
        raise PeagleError(
            f"cannot write the converted model to {out_dir} ({error.strerror or error}): "
            "expected a writable disk with room for it; free space or set PEAGLE_CACHE to another directory"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and check that its kind of model is supported. Raises PeagleError."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise PeagleError(
            f"{path} needs the gguf library, which is not installed: pip install 'peagle[gguf]'"
        ) from error
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except CORRUPT as error:
        raise PeagleError(
            f"{path} cannot be read as GGUF ({one_line(error)}): it may be truncated; download it again"
        ) from error
    source = GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    _refuse_unsupported(source)
    return source


def _refuse_unsupported(source: GgufFile) -> None:
    path, architecture = source.path, source.fields.get("general.architecture")
    if architecture not in DENSE_FAMILIES:
        raise PeagleError(
            f"{path} has architecture {architecture!r}: expected {' or '.join(DENSE_FAMILIES)}; choose another model"
        )
    scaling = source.fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in source.tensors:
        raise PeagleError(
            f"{path} has scaled RoPE: expected none in a GGUF file; use the Hugging Face directory instead"
        )
    if source.number("expert_count", 0):
        raise PeagleError(f"{path} is a mixture of experts: expected a dense model; choose another model")
    rotated, head_dim = source.number("rope.dimension_count", _head_dim(source)), _head_dim(source)
    if rotated != head_dim:
        raise PeagleError(f"{path} rotates {rotated} of {head_dim} head dimensions: expected all; choose another model")


def _head_dim(source: GgufFile) -> int:
    default = source.number("embedding_length") // source.number("attention.head_count")
    return int(source.number("attention.key_length", default))


def _kv_heads(source: GgufFile) -> int:
    return int(source.number("attention.head_count_kv", source.number("attention.head_count")))


def _config(source: GgufFile) -> dict[str, Any]:
    """`config.json`, except for the tying of embeddings, which only the weights tell."""
    family = source.architecture
    config: dict[str, Any] = {
        "architectures": [CAUSAL_LM_CLASS[family]],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": int(_stored(source, EMBEDDING if "token_embd.weight" in source.tensors else HEAD).shape[1]),
        "hidden_size": source.number("embedding_length"),
        "intermediate_size": source.number("feed_forward_length"),
        "num_hidden_layers": source.number("block_count"),
        "num_attention_heads": source.number("attention.head_count"),
        "num_key_value_heads": _kv_heads(source),
        "head_dim": _head_dim(source),
        "max_position_embeddings": source.number("context_length"),
        # Stored as float32; six digits bring back the decimal number that was meant (1e-05).
        "rms_norm_eps": float(f"{source.number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(source.number("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "bos_token_id": source.token_id("bos"),
        "eos_token_id": source.token_id("eos"),
        "pad_token_id": source.token_id("padding"),
        "torch_dtype": "bfloat16",
    }
    if family != "qwen2":
        config["attention_bias"] = "blk.0.attn_output.bias" in source.tensors
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in source.tensors
    else:
        config["use_sliding_window"] = False
    return config


def _stored(source: GgufFile, hf_name: str) -> Any:
    name = {EMBEDDING: "token_embd.weight", HEAD: "output.weight"}[hf_name]
    if name not in source.tensors:
        raise PeagleError(f"{source.path} has no token embedding: expected {name}; download the file again")
    return source.tensors[name]


def _state_dict(source: GgufFile) -> dict[str, Tensor]:
    """All weights under Hugging Face names. `lm_head.weight` is there only when it is a matrix of its own."""
    heads = {"attn_q": int(source.number("attention.head_count")), "attn_k": _kv_heads(source)}
    state: dict[str, Tensor] = {}
    for name, stored in source.tensors.items():
        hf_name, part = _hf_name(source, name)
        weight = _dequantize(source, stored)
        if source.architecture == "llama" and part in heads:
            weight = unpermute_rope_rows(weight, heads[part])
        state[hf_name] = torch.from_numpy(np.require(weight, requirements=["C", "W"])).to(torch.bfloat16)
    # Files of tied models may hold the shared matrix twice, or only as the output. The output copy has more bits.
    if HEAD in state and (EMBEDDING not in state or _nearly_equal(state[EMBEDDING], state[HEAD])):
        state[EMBEDDING] = state.pop(HEAD)
    return state


def _hf_name(source: GgufFile, name: str) -> tuple[str, str]:
    """Hugging Face name and bare GGUF part: blk.3.attn_q.weight -> (model.layers.3.self_attn.q_proj.weight, attn_q)."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}", stem
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise PeagleError(
            f"{source.path} holds tensor {name!r}, which a {source.architecture} model does not have: "
            "use the Hugging Face directory instead"
        )
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}", part


def _dequantize(source: GgufFile, stored: Any) -> npt.NDArray[np.float32]:
    from gguf import dequantize

    try:
        weight = dequantize(stored.data, stored.tensor_type)
    except NotImplementedError as error:
        raise PeagleError(
            f"{source.path} stores {stored.name} as {stored.tensor_type.name}: expected a type that the gguf library "
            "can dequantize; use another quantization"
        ) from error
    return weight.astype(np.float32, copy=False).reshape([int(size) for size in reversed(stored.shape)])


def unpermute_rope_rows(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder q or k rows (weights [heads * D, H] or biases [heads * D]) from GGUF's RoPE pairs to Hugging Face's.

    llama.cpp rotates neighbours, so it stores each head's rows as 0, D/2, 1, D/2+1, ...; we rotate (i, i + D/2).
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _nearly_equal(a_VH: Tensor, b_VH: Tensor, chunk: int = 8192) -> bool:
    """Whether two matrices differ by less than TIED_TOLERANCE of their norm. In chunks: float copies are large."""
    if a_VH.shape != b_VH.shape:
        return False
    difference = total = 0.0
    for a, b in zip(a_VH.split(chunk), b_VH.split(chunk), strict=True):
        difference += float((a.float() - b.float()).square().sum())
        total += float(b.float().square().sum())
    return difference <= TIED_TOLERANCE**2 * total


def _tokenizer(source: GgufFile) -> "Tokenizer":
    """A byte-level BPE tokenizer with exactly the file's token ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    tokens, types = _vocabulary(source)
    merges = [tuple(merge.split(" ")) for merge in source.fields.get("tokenizer.ggml.merges", ())]
    # Unused entries only pad the embedding matrix to a round size; as vocabulary they could collide and shift ids.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
    except Exception as error:  # the tokenizers library raises plain Exception for merges outside the vocabulary
        raise PeagleError(f"{source.path} has an inconsistent tokenizer ({error}): download it again") from error
    _split_like(str(source.fields.get("tokenizer.ggml.pre")), tokenizer, source.path)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for token, kind in zip(tokens, types, strict=True):  # one by one, so that they are registered in id order
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=kind == CONTROL, normalized=False)
            (tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens)([added])
    shifted = next((i for token, i in vocab.items() if tokenizer.token_to_id(token) != i), None)
    if shifted is not None or tokenizer.get_vocab_size() != len(vocab):
        raise PeagleError(f"{source.path} has a tokenizer whose ids shift (first at id {shifted}): download it again")
    return tokenizer


def _vocabulary(source: GgufFile) -> tuple[list[str], list[int]]:
    kind = source.fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise PeagleError(
            f"{source.path} has tokenizer model {kind!r}: expected 'gpt2' (byte-level BPE); "
            "use the Hugging Face directory instead"
        )
    tokens = source.fields.get("tokenizer.ggml.tokens", [])
    types = source.fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens or len(tokens) != len(types):
        raise PeagleError(f"{source.path} has {len(tokens)} tokens and {len(types)} token types: download it again")
    return tokens, types


def _split_like(pre: str, tokenizer: "Tokenizer", path: Path) -> None:
    """Install the text splitting that goes with `tokenizer.ggml.pre`."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if pre == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        first = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        raise PeagleError(
            f"{path} has pre-tokenizer {pre!r}: expected 'smollm' or 'qwen2'; use the Hugging Face directory instead"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])


def _tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """The settings beside tokenizer.json. The class that takes tokenizer.json as it is loads alike everywhere."""
    tokens = source.fields["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.number("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    # Qwen2 names a begin token in the file but has none; its unknown token is likewise a formality.
    roles = {"eos": "eos", "pad": "padding"} if source.architecture in QWEN else {
        "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding",
    }  # fmt: skip
    for name, role in roles.items():
        token_id = source.token_id(role)
        if token_id is not None:
            settings[f"{name}_token"] = tokens[token_id]
    template = source.fields.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
    return settings


def _generation_config(source: GgufFile) -> dict[str, Any]:
    """Which tokens end a text. The chat models of Qwen2 also stop at the end of a document, unlike the file says."""
    eos, tokens = source.token_id("eos"), source.fields["tokenizer.ggml.tokens"]
    ends: int | list[int] | None = eos
    if source.architecture in QWEN and eos is not None and "<|endoftext|>" in tokens:
        end_of_document = tokens.index("<|endoftext|>")
        ends = [eos] if end_of_document == eos else [eos, end_of_document]
    return {"bos_token_id": source.token_id("bos"), "eos_token_id": ends, "pad_token_id": source.token_id("padding")}


def _write_directory(
    folder: Path, source: GgufFile, config: dict[str, Any], state: dict[str, Tensor], tokenizer: "Tokenizer"
) -> None:
    documents = {
        "config.json": config,
        "generation_config.json": _generation_config(source),
        "tokenizer_config.json": _tokenizer_config(source),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    save_tensors(folder / "model.safetensors", state)


def _put_in_place(scratch: Path, out_dir: Path) -> None:
    try:
        os.replace(scratch, out_dir)
    except OSError:
        # A directory with content cannot be replaced: another process finished the same conversion first.
        if not (out_dir / "config.json").is_file():
            raise
