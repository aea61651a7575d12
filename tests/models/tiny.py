"""Tiny random models and GGUF files for the tests of `peagle.models`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 24, "num_key_value_heads": 6},
    "llama-llama3-rope": {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen2-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"head_dim": 16},
    "qwen3-tied-biases": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
}

HFModel = LlamaForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM


def hf_model(variant: str, **changes: Any) -> HFModel:
    """A float32 transformers model with every parameter random, biases and norms too."""
    torch.manual_seed(0)
    settings = {**SIZES, "tie_word_embeddings": False, **VARIANTS[variant], **changes}
    if variant.startswith("qwen2"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    elif variant.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2)
            if "norm" in name:
                parameter.add_(1.0)
    model.set_attn_implementation("eager")
    return model.eval()


def permute_rope_rows(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp's reordering of q and k rows: of each head 0, D/2, 1, D/2 + 1, ..."""
    half = rows.shape[0] // heads // 2
    order = [h * 2 * half + pair + part * half for h in range(heads) for pair in range(half) for part in range(2)]
    return rows[order]


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = (*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello")
MERGES = ["h e", "l l", "he ll", "hell o"]
CONTROL, UNUSED = 3, 5


def vocabulary(pre: str, size: int) -> dict[str, Any]:
    """Tokenizer metadata: special tokens first (smollm) or last (qwen2), then padding up to the matrix' `size`."""
    tokens = [*SPECIALS, *PLAIN] if pre == "smollm" else [*PLAIN, *SPECIALS]
    types = [CONTROL if token in SPECIALS else 1 for token in tokens]
    padding = size - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": types + [UNUSED] * padding,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def gguf_tensors(model: HFModel) -> dict[str, Tensor]:
    """The model's weights under GGUF names, q and k reordered as llama.cpp does for the llama architecture."""
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    }  # fmt: skip
    c = model.config
    heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}
    tensors = {}
    for name, parameter in model.named_parameters():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        part = name.split(".")[-2]
        permuted = c.model_type == "llama" and part in heads
        tensors[name] = permute_rope_rows(parameter.detach(), heads[part]) if permuted else parameter.detach()
    return tensors


def gguf_fields(model: HFModel) -> dict[str, Any]:
    """Metadata of the model in GGUF's vocabulary."""
    c = model.config
    pre = "smollm" if c.model_type == "llama" else "qwen2"
    key_length = {f"{c.model_type}.attention.key_length": c.head_dim} if c.model_type == "qwen3" else {}
    return {
        f"{c.model_type}.block_count": c.num_hidden_layers,
        f"{c.model_type}.context_length": c.max_position_embeddings,
        f"{c.model_type}.embedding_length": c.hidden_size,
        f"{c.model_type}.feed_forward_length": c.intermediate_size,
        f"{c.model_type}.attention.head_count": c.num_attention_heads,
        f"{c.model_type}.attention.head_count_kv": c.num_key_value_heads,
        f"{c.model_type}.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        f"{c.model_type}.rope.freq_base": 10000.0,
        **key_length,
        **vocabulary(pre, c.vocab_size),
    }


def write_gguf(path: Path, architecture: str, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A GGUF file with float32 tensors."""
    import gguf  # not every machine that runs the other tests has it

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, variant: str = "llama") -> Path:
    """A whole small file of one variant."""
    model = hf_model(variant)
    return write_gguf(path, model.config.model_type, gguf_fields(model), gguf_tensors(model))
