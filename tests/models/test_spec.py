"""Reading config.json: what is understood, in every spelling, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from peagle.errors import PeagleError
from peagle.models.layers import Llama3Scaling, YarnScaling
from peagle.models.spec import ModelSpec, MoESpec, spec_from_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GPT_OSS = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"}, "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3, "num_local_experts": 8,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
RULE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)


def read(config: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return spec_from_hf({**config, **changes}, generation)


def test_defaults_follow_transformers() -> None:
    bare = {
        k: v for k, v in LLAMA.items() if k not in ("architectures", "num_key_value_heads", "rope_theta", "hidden_act")
    }
    spec = spec_from_hf(bare)
    assert (spec.head_dim, spec.num_kv_heads, spec.rope.theta, spec.rope.scaling) == (8, 8, 10000.0, None)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.tie_word_embeddings) == (False, False, False, False)


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        ({**LLAMA, "attention_bias": True}, (True, True, False)),
        ({**LLAMA, "mlp_bias": True}, (False, False, True)),
        (QWEN3, (False, False, False)),
        ({**QWEN3, "attention_bias": True, "mlp_bias": True}, (True, True, False)),
        ({**QWEN2, "attention_bias": False}, (True, False, False)),  # Qwen2 has its biases whatever the config says
    ],
)
def test_biases(config: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    spec = spec_from_hf(config)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == biases


def test_qwen3_norms_its_heads_and_has_its_own_head_size() -> None:
    assert [read(config).qk_norm for config in (LLAMA, QWEN2, QWEN3)] == [False, False, True]
    assert (read(QWEN3).head_dim, read(QWEN3, head_dim=32).head_dim) == (128, 32)
    with pytest.raises(PeagleError, match="use_sliding_window true"):
        read(QWEN3, use_sliding_window=True)
    assert read(QWEN3, use_sliding_window=False, sliding_window=4096, max_window_layers=2).qk_norm


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {**RULE, "original_max_position_embeddings": 128}},
        {"rope_theta": 5e5, "rope_scaling": {**RULE, "original_max_position_embeddings": 128, "type": "llama3"}},
        {"rope_theta": None, "rope_parameters": {**RULE, "original_max_position_embeddings": 128, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {**RULE, "original_max_position_embeddings": 128}},
    ],
)
def test_both_spellings_of_rope_scaling(rope: dict[str, Any]) -> None:
    spec = read(LLAMA, **rope)
    assert spec.rope.theta == 5e5
    assert spec.rope.scaling == SCALING


@pytest.mark.parametrize("change", [{"rope_theta": 0}, {"num_hidden_layers": 10**9}])
def test_numbers_that_no_model_has(change: dict[str, Any]) -> None:
    with pytest.raises(PeagleError, match=f"config.json has {next(iter(change))}"):
        read(LLAMA, **change)


def test_yarn_has_the_defaults_of_transformers() -> None:
    rule = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    scaling = read(LLAMA, rope_scaling=rule).rope.scaling
    assert scaling == YarnScaling(
        factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096,
        attention_factor=pytest.approx(1.3465736), truncate=True,
    )  # fmt: skip
    told = {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}
    assert read(LLAMA, rope_scaling={**rule, **told}).rope.scaling == replace(scaling, **told)


def test_gpt_oss() -> None:
    spec = read(GPT_OSS)
    assert (spec.qkv_bias, spec.o_bias, spec.sinks, spec.head_dim) == (True, True, True, 64)
    assert spec.windows == (128, None, 128)  # every other layer
    assert spec.moe == MoESpec(num_experts=8, experts_per_token=4, gate_alpha=1.702, gate_limit=7.0)
    assert spec.rope.theta == 150000.0
    told = read(
        GPT_OSS, layer_types=["full_attention", "sliding_attention", "sliding_attention"], sliding_window=5,
        num_experts_per_tok=2, swiglu_limit=3.0, head_dim=16, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    assert (told.windows, told.moe.experts_per_token, told.moe.gate_limit) == ((None, 5, 5), 2, 3.0)
    assert (spec.moe.packed, told.moe.packed) == (False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "num_local_experts None"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        ({"layer_types": ["full_attention"]}, "each of the 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"sliding_window": None}, "sliding_window None"),
        ({"rope_scaling": None}, "no rope_scaling"),
        ({"swiglu_limit": -1.0}, "swiglu_limit -1.0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    ],
)
def test_gpt_oss_refusals_name_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PeagleError, match=message):
        read(GPT_OSS, **changes)


def test_plain_rope_parameters() -> None:
    spec = read(LLAMA, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 7e4})
    assert spec.rope.theta == 7e4
    assert spec.rope.scaling is None


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        ([2, 3], {}, (2, 3)),
        ([2, 3], {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens(own: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert read(LLAMA, generation, eos_token_id=own).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma3_text"},
            r"model_type 'gemma3_text' is not supported: expected 'llama', 'qwen2', 'qwen3' or 'gpt_oss'",
        ),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3 is not a target"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'.*'llama3'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "rope type 'yarn'.*without mscale"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate 1"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None"),
        ({"rope_scaling": "llama3"}, "rope_scaling 'llama3' is not an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention in every layer"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"vocab_size": "many"}, "vocab_size 'many'"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers 1.5"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
    ],
)
def test_refusals_name_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PeagleError, match=message) as caught:
        read(LLAMA, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": "LlamaForCausalLM"},
        {"layer_types": 5},
        {"hidden_size": float("nan")},
        {"hidden_size": float("inf")},
        {"vocab_size": 2**31},
        {"vocab_size": 10**400},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": float("inf")},
        {"rope_theta": "many"},
        {"rope_theta": float("nan")},
        {"eos_token_id": "2"},
        {"eos_token_id": {}},
        {"eos_token_id": [2, None]},
        {"eos_token_id": True},
        {"bos_token_id": [1]},
        {"tie_word_embeddings": "false"},
    ],
)
def test_values_of_a_wrong_kind_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(PeagleError) as error:
        read(LLAMA, **changes)
    assert next(iter(changes)) in str(error.value) or "architecture" in str(error.value)
