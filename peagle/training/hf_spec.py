"""What the config of a transformers model says: sizes of the target, and of a fresh Llama-style head for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from peagle.errors import PeagleError
from peagle.models.layers import RopeSpec
from peagle.models.spec import DEFAULT_ROPE_THETA, ModelSpec, UnsupportedTarget
from peagle.models.target import read_spec

# Keys that put something between the output matrix and the logits, and the value with which they do nothing.
LOGIT_KEYS: Mapping[str, float | None] = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "output_multiplier_scale": 1.0,
}


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What is known of a target before its weights are loaded. `context` is its longest sequence in tokens."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    context: int


def target_sizes(path: Path) -> TargetSizes:
    """Sizes of the model at `path`, be it the engine's or one for transformers. Raises PeagleError for neither."""
    try:
        spec = read_spec(path)
    except UnsupportedTarget as error:
        config = _read_config(path, str(error))
        keys = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
        return TargetSizes(*(_whole(config, key) for key in keys))
    return TargetSizes(spec.hidden_size, spec.num_layers, spec.vocab_size, spec.max_position_embeddings)


def _read_config(path: Path, reason: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise unknown_model(reason, error) from error


def unknown_model(reason: str, error: Exception) -> PeagleError:
    """What to say of a model that the engine does not run, for `reason`, and transformers does not load."""
    why = " ".join(str(error).split())[:200]
    return PeagleError(f"{reason}; transformers cannot load it either ({why})")


def hf_spec(network: Any) -> ModelSpec:
    """Sizes of the target and of a fresh Llama-style head for it, from a transformers config.

    The head's RoPE is its own: the target's base without scaling, over whole heads. Raises PeagleError for a target
    whose tables or logits do not fit a head.
    """
    config = network.config.get_text_config()
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    _check_tables(network, embedding, head)
    vocab, hidden = head.weight.shape
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_dim = _whole(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise PeagleError(
            f"{heads} heads, {kv_heads} key/value heads, head_dim {head_dim}: no head of the Llama kind can take over "
            "these sizes; choose another target"
        )
    eps = [getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")]
    theta = float(rope_rules(network).get("rope_theta") or DEFAULT_ROPE_THETA)
    return ModelSpec(
        family="other",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size", 4 * hidden),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(next(filter(None, eps), 1e-6)),
        rope=RopeSpec(theta=theta, head_dim=head_dim),
        max_position_embeddings=_whole(config, "max_position_embeddings"),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_word_embeddings=embedding.weight is head.weight,
        bos_token_id=next(iter(_token_ids(network, "bos_token_id")), None),
        eos_token_ids=_token_ids(network, "eos_token_id"),
    )


def _check_tables(network: Any, embedding: Any, head: Any) -> None:
    name = type(network).__name__
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise PeagleError(
            f"{name} has no plain embedding and output matrix to train a head with: choose another target"
        )
    if embedding.weight.shape != head.weight.shape:
        raise PeagleError(
            f"{name} has an embedding of {tuple(embedding.weight.shape)} and an output matrix of "
            f"{tuple(head.weight.shape)}: a head needs both alike, choose another target"
        )
    config = network.config.get_text_config()
    for key, neutral in LOGIT_KEYS.items():
        value = getattr(config, key, None)
        if value is not None and value != neutral:
            raise PeagleError(
                f"{name} computes logits with {key} {value:g}: only plain logits, the output matrix times the hidden "
                "state, can be trained on; choose another target"
            )
    if head.bias is not None:
        raise PeagleError(
            f"{name} adds a bias to its logits: only plain logits can be trained on, choose another target"
        )


def _whole(config: Any, key: str, default: int | None = None) -> int:
    value = getattr(config, key, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise PeagleError(
            f"{type(config).__name__} has {key} {value!r}: expected a whole number; choose another target"
        )
    return value


def rope_rules(network: Any) -> Mapping[str, Any]:
    """The RoPE parameters of full attention, {} for a model without RoPE."""
    rules = getattr(network.config.get_text_config(), "rope_parameters", None) or {}
    nested = rules.get("full_attention")
    return nested if isinstance(nested, Mapping) else rules


def _token_ids(network: Any, key: str) -> tuple[int, ...]:
    """The ids of the first source that names any, generation settings first."""
    for source in (network.generation_config, network.config.get_text_config()):
        value = getattr(source, key, None)
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()
