"""From a Hugging Face `config.json` to the few numbers and switches that define a target model.

Whatever changes the mathematics and is not implemented is refused here, before any weight is read: a model that loads
but computes something slightly different is the one failure nobody would notice.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from peagle.errors import PeagleError
from peagle.models.layers import Llama3Scaling, RopeSpec, YarnScaling

Family = Literal["llama", "qwen2", "qwen3", "gpt_oss", "other"]  # "other": only through transformers, to train for

DENSE_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
FAMILIES: tuple[Family, ...] = (*DENSE_FAMILIES, "gpt_oss")  # that the engine computes
CAUSAL_LM_CLASS: dict[str, str] = {
    family: family.title().replace("_", "") + "ForCausalLM" for family in FAMILIES
}  # fmt: skip
MAX_SIZE = 2**31 - 1  # of any dimension or token id: beyond it, a file is damaged
_MOST_LAYERS = 10_000
DEFAULT_ROPE_THETA = 10000.0  # what all families assume when the config is silent
QWEN3_HEAD_DIM = 128  # what Qwen3 assumes when the config is silent, whatever the hidden size


class UnsupportedTarget(PeagleError):
    """A model that is no mistake of the user's, but nothing this engine computes."""


class LayerSizes(Protocol):
    """What a decoder layer's matrices depend on; a drafter's config and a target's spec both have it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MoESpec:
    """A mixture of experts. Of gate and up, gate is cut off above `gate_limit` and up on both sides; then
    (up + 1) * gate * sigmoid(`gate_alpha` * gate). `packed`: the experts' matrices are MXFP4, and stay so in memory."""

    num_experts: int
    experts_per_token: int
    gate_alpha: float
    gate_limit: float
    packed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything that shapes a target. Sizes are per model, not per device; `eos_token_ids` may be empty.

    `qk_norm`: each query and key head passes through an RMSNorm before RoPE. `windows`: how many of the last positions
    each layer sees, its own included; None is all of them, in a layer or in every one. `sinks`: attention may go
    nowhere. With `moe`, `intermediate_size` is one expert's.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False
    windows: tuple[int | None, ...] | None = None
    sinks: bool = False
    moe: MoESpec | None = None


def spec_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a decoded `config.json` (and `generation_config.json`, if there is one) of a supported family.

    Raises PeagleError for everything that cannot be computed exactly.
    """
    family = _family(config)
    if family == "gpt_oss":
        config = {**_GPT_OSS_DEFAULTS, **config}
    _refuse_unsupported(config, family)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", default=heads)
    head_dim = _size(config, "head_dim", default=QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise PeagleError(
            f"config.json has num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim {head_dim}: "
            "expected heads to be a multiple of key/value heads and an even head_dim; check the file"
        )
    max_positions = _size(config, "max_position_embeddings")
    attention_bias = True if family == "qwen2" else _flag(config, "attention_bias")
    return ModelSpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope=rope_from_config(config, head_dim, max_positions),
        max_position_embeddings=max_positions,
        qkv_bias=attention_bias,
        o_bias=attention_bias and family != "qwen2",
        mlp_bias=_flag(config, "mlp_bias") if family == "llama" else False,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        bos_token_id=_bos(config, generation_config),
        eos_token_ids=_eos(config, generation_config),
        qk_norm=family == "qwen3",
        windows=_windows(config) if family == "gpt_oss" else None,
        sinks=family == "gpt_oss",
        moe=_moe(config) if family == "gpt_oss" else None,
    )


def _family(config: Mapping[str, Any]) -> Family:
    named = config.get("model_type")
    family = next((known for known in FAMILIES if known == named), None)
    if family is None:
        raise UnsupportedTarget(
            f"model_type {named!r} is not supported: expected 'llama', 'qwen2', 'qwen3' or 'gpt_oss'; choose a target "
            "of these families"
        )
    architectures = _list(config, "architectures") or [CAUSAL_LM_CLASS[family]]
    if CAUSAL_LM_CLASS[family] not in architectures:
        raise PeagleError(
            f"architecture {', '.join(map(str, architectures))} is not a target model: expected "
            f"{CAUSAL_LM_CLASS[family]}; a drafter head goes with --head, not in place of MODEL"
        )
    return family


# What transformers assumes where a config of the family is silent.
_GPT_OSS_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"attention_bias": True, "head_dim": 64, "rope_theta": 150000.0, "sliding_window": 128, "num_experts_per_tok": 4}
)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Of each layer; by default every other one slides, the first does."""
    layers = _size(config, "num_hidden_layers")
    types = _list(config, "layer_types") or ["sliding_attention", "full_attention"] * (-(-layers // 2))
    types = types[:layers]
    if len(types) < layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise PeagleError(
            f"config.json has layer_types {types}: expected 'sliding_attention' or 'full_attention' for each of the "
            f"{layers} layers; check the file"
        )
    window = _size(config, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _moe(config: Mapping[str, Any]) -> MoESpec:
    experts, chosen = _size(config, "num_local_experts"), _size(config, "num_experts_per_tok")
    if chosen > experts:
        raise PeagleError(f"config.json has num_experts_per_tok {chosen} of {experts} experts; check the file")
    return MoESpec(
        num_experts=experts,
        experts_per_token=chosen,
        gate_alpha=_number(config, "swiglu_alpha", default=1.702),
        gate_limit=_number(config, "swiglu_limit", default=7.0),
        packed=_quantization(config) == "mxfp4",
    )


def _quantization(config: Mapping[str, Any]) -> object:
    """The method with which the weights are stored; falsy for plain ones."""
    settings = config.get("quantization_config")
    return settings.get("quant_method") if isinstance(settings, Mapping) else settings


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedTarget(f"hidden_act {activation!r} is not supported: expected 'silu'; choose another target")
    sliding = config.get("use_sliding_window") or "sliding_attention" in _list(config, "layer_types")
    if sliding and family != "gpt_oss":
        raise UnsupportedTarget(
            "use_sliding_window true is not supported: expected full attention in every layer; choose another target"
        )
    if family == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
        raise PeagleError("config.json has no rope_scaling: gpt-oss targets need their YaRN rule; check the file")
    method = _quantization(config)
    if method and not (family == "gpt_oss" and method == "mxfp4"):
        raise UnsupportedTarget(
            f"quantization_config with method {method!r} is not supported: expected float weights "
            "(bfloat16, float16, float32) or a .gguf file; use the unquantized model"
        )


def rope_from_config(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """RoPE of a target's or a head's config.json; raises PeagleError for a rule that is not supported.

    Both spellings: `rope_theta` + `rope_scaling`, and the one dict `rope_parameters` of transformers 5; a file that
    has both may say different things, then the older spelling wins.
    """
    rules: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key) or {}
        if not isinstance(found, Mapping):
            raise PeagleError(f"{key} {found!r} is not an object: expected null or a JSON object; check config.json")
        rules.update(found)
    given = [of["rope_theta"] for of in (rules, config) if of.get("rope_theta") is not None]
    theta = given[0] if given else DEFAULT_ROPE_THETA
    rope_type = rules.get("rope_type", rules.get("type", "default"))
    if rope_type not in ("default", "llama3", "yarn") or rules.get("mscale") or rules.get("mscale_all_dim"):
        raise UnsupportedTarget(
            f"rope type {rope_type!r} is not supported: expected 'default', 'llama3' or 'yarn' (without mscale); "
            "choose another model"
        )
    partial = rules.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0 or any(isinstance(rule, Mapping) for rule in rules.values()):
        raise UnsupportedTarget(
            f"rope parameters {rules!r} (partial_rotary_factor {partial}) are not supported: expected one rule "
            "that rotates the whole head in every layer; choose another model"
        )
    scaling: Llama3Scaling | YarnScaling | None = None
    if rope_type == "yarn":
        scaling = _yarn(rules, max_positions)
    elif rope_type == "llama3":
        scaling = Llama3Scaling(
            factor=_number(rules, "factor"),
            low_freq_factor=_number(rules, "low_freq_factor"),
            high_freq_factor=_number(rules, "high_freq_factor"),
            original_max_position_embeddings=_size(rules, "original_max_position_embeddings", default=max_positions),
        )
    return RopeSpec(theta=_number({"rope_theta": theta}, "rope_theta"), head_dim=head_dim, scaling=scaling)


def _yarn(rules: Mapping[str, Any], max_positions: int) -> YarnScaling:
    factor, truncate = _number(rules, "factor"), rules.get("truncate")
    return YarnScaling(
        factor=factor,
        beta_fast=_number(rules, "beta_fast", default=32.0),
        beta_slow=_number(rules, "beta_slow", default=1.0),
        original_max_position_embeddings=_size(rules, "original_max_position_embeddings", default=max_positions),
        attention_factor=_number(rules, "attention_factor", default=max(1.0, 0.1 * math.log(factor) + 1.0)),
        truncate=True if truncate is None else _flag(rules, "truncate"),
    )


def _number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise PeagleError(f"config.json has {key} {value!r}: expected a positive number; check the file")
    return float(value)


def _size(config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = MAX_SIZE) -> int:
    value = _number(config, key, default=default)
    if value > most or value != int(value):
        raise PeagleError(f"config.json has {key} {value:g}: expected a whole number up to {most}; check the file")
    return int(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise PeagleError(f"config.json has {key} {value!r}: expected true or false; check the file")
    return bool(value)


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    """A list of the config, empty where the key is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise PeagleError(f"config.json has {key} {value!r}: expected a list; check the file")
    return value or []


def _token_id(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise PeagleError(f"{key} is {value!r}: expected a token id; check config.json and generation_config.json")
    return value


def _bos(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> int | None:
    """The first token id of the first source that names one; generation settings override the model's."""
    for source in (generation_config or {}, config):
        value = source.get("bos_token_id")
        if value is not None:
            return _token_id(value, "bos_token_id")
    return None


def _eos(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """All end tokens of the first source that names any (an int or a list), generation settings first."""
    for source in (generation_config or {}, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(_token_id(token, "eos_token_id") for token in (value if isinstance(value, list) else [value]))
    return ()
