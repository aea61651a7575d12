"""config.json of a head: `DrafterConfig` <-> the plain `LlamaForCausalLMEagle3` keys that vLLM reads.

Writing is explicit: every key a reader could otherwise guess is there, and keys that moved between reader versions are
written under each of their names. Reading follows vLLM's lookup order and refuses what this drafter cannot compute.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from peagle.drafters.eagle3 import FULL, SLIDING, DrafterConfig
from peagle.errors import PeagleError
from peagle.models.layers import RopeSpec, YarnScaling
from peagle.models.spec import MAX_SIZE, rope_from_config

ARCHITECTURE = "LlamaForCausalLMEagle3"
MASK_ID_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # vLLM's order; releases before 0.26 know the last two
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
PARALLEL_KEY = "parallel_drafting"

# Keys that change what is computed, so leaving one to a reader's default is worth a warning in `inspect_head`.
EXPLICIT_KEYS = (
    "architectures", "model_type", "head_dim", "num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_theta",
    "max_position_embeddings", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", TAP_KEY,
    "norm_before_fc", "norm_before_residual", "attention_bias",
)  # fmt: skip

# (key, values this drafter computes, what the value would mean). An absent or null key is always fine.
_SUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("model_type", ("llama",), "layers of another family"),
    ("fc_norm", (False,), "one norm per tap (EAGLE-3.1)"),
    ("hidden_act", ("silu", "swish"), "another activation"),
    ("mlp_bias", (False,), "biases in the feed-forward layers"),
    ("logit_scale", (1, 1.0), "scaled logits"),
    ("partial_rotary_factor", (1, 1.0), "rotation of a part of each head"),
    ("use_aux_hidden_state", (True,), "an EAGLE-1 head that reads the last hidden state"),
    ("speculators_model_type", (), "the speculators layout"),
    ("quantization_config", (), "quantised matrices in another scheme"),
)


def config_to_dict(config: DrafterConfig) -> dict[str, Any]:
    """The explicit config.json of a head (training reference 15.1), without `torch_dtype` and provenance."""
    c, taps = config, list(config.tap_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        **_rope_to_dict(c.rope),
        "attention_bias": c.attention_bias,
        "mlp_bias": False,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "tie_word_embeddings": False,
        "target_hidden_size": c.target_hidden_size,
        "num_aux_hidden_states": len(taps),
        TAP_KEY: taps,
        # vLLM counts the taps from this copy; older readers know no other.
        "eagle_config": {TAP_KEY: taps, "use_aux_hidden_state": True},
        **(dict.fromkeys(MASK_ID_KEYS, c.mask_token_id) if c.parallel else {}),
        PARALLEL_KEY: c.parallel,
        "norm_before_fc": c.norm_before_fc,
        "norm_before_residual": c.norm_before_residual,
        "fc_norm": False,
        "norm_output": False,
        **({} if c.layer_types is None else {"layer_types": list(c.layer_types), "sliding_window": c.sliding_window}),
    }


def config_from_dict(raw: Mapping[str, Any], *, target_layers: int | None, where: str) -> DrafterConfig:
    """Read a head's config.json. `target_layers` fills in missing tap ids by vLLM's default (2, n//2, n-3).

    `where` names the head in errors. Raises PeagleError for a missing or malformed key and for unsupported values.
    """
    refuse_target(raw, where)
    refuse_unsupported(raw, where)
    hidden, heads = _positive(raw, "hidden_size", where), _positive(raw, "num_attention_heads", where)
    kv_heads = _positive(raw, "num_key_value_heads", where, heads)
    vocab, head_dim = _positive(raw, "vocab_size", where), _positive(raw, "head_dim", where, hidden // heads)
    mask_token_id = _mask_token_id(raw, vocab, where)
    if mask_token_id is None and _flag(raw, "norm_output", where):
        raise PeagleError(
            f"{where}: config.json has norm_output=True (an EAGLE-3.1 head that feeds back its normed output), "
            "which is not supported: expected False; use another head"
        )
    if heads % kv_heads or head_dim % 2:
        raise PeagleError(
            f"{where}: config.json has {heads} heads, {kv_heads} key/value heads and head_dim {head_dim}: "
            "expected heads in whole groups and an even head_dim; fix the file"
        )
    layers = _positive(raw, "num_hidden_layers", where)
    layer_types, sliding_window = _layer_types(raw, layers, where)
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", where),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        rope=_rope_from_dict(raw, head_dim, where),
        max_position_embeddings=_positive(raw, "max_position_embeddings", where, 2048),
        vocab_size=vocab,
        draft_vocab_size=_positive(raw, "draft_vocab_size", where, vocab),
        target_hidden_size=_positive(raw, "target_hidden_size", where, hidden),
        tap_ids=_tap_ids(raw, target_layers, where),
        mask_token_id=mask_token_id,
        norm_before_fc=_flag(raw, "norm_before_fc", where),
        norm_before_residual=_flag(raw, "norm_before_residual", where),
        attention_bias=_flag(raw, "attention_bias", where),
        layer_types=layer_types,
        sliding_window=sliding_window,
    )


def default_tap_ids(target_layers: int) -> tuple[int, int, int]:
    """The taps of published heads: streams entering layers 2, n//2 and n-3."""
    return 2, target_layers // 2, target_layers - 3


def refuse_target(raw: Mapping[str, Any], where: str) -> None:
    """Raise PeagleError for the config.json of a target: a causal language model without any key of a head."""
    named = raw.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    of_head = mask_token_ids(raw) or lookup(raw, TAP_KEY) is not None or any("eagle" in n.lower() for n in names)
    if not of_head and any(name.endswith("ForCausalLM") for name in names):
        raise PeagleError(
            f"{where} is a target, not a head (architectures {', '.join(names)}): "
            "give the directory of a head, such as `peagle train` writes"
        )


def refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """Raise PeagleError when a key asks for something this drafter does not compute."""
    for key, supported, meaning in _SUPPORTED:
        value = lookup(raw, key)
        if value is not None and value not in supported:
            expected = f"expected {supported[0]!r}" if supported else "expected no such key"
            raise PeagleError(
                f"{where}: config.json has {key}={_short(value)} ({meaning}), which is not supported: {expected}; "
                "convert the head to the plain layout or use another one"
            )


def lookup(raw: Mapping[str, Any], key: str) -> Any:
    """A key at the top level, else inside `eagle_config` (where some published heads keep it), else None."""
    if raw.get(key) is not None:
        return raw[key]
    nested = raw.get("eagle_config")
    return nested.get(key) if isinstance(nested, Mapping) else None


def mask_token_ids(raw: Mapping[str, Any]) -> list[Any]:
    """All mask ids the config names, in the order in which they are looked up."""
    return [raw[key] for key in MASK_ID_KEYS if raw.get(key) is not None]


def _layer_types(raw: Mapping[str, Any], layers: int, where: str) -> tuple[tuple[str, ...] | None, int | None]:
    """`layer_types` and `sliding_window`, both None for a head without sliding layers."""
    types, window, switch = (raw.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    if types is None or types == []:
        if window is not None and switch is not False:
            raise PeagleError(
                f"{where}: config.json has sliding_window={_short(window)} and no layer_types: say which layers slide "
                f"({FULL!r} or {SLIDING!r} for each), or set sliding_window to null"
            )
        return None, None
    if not isinstance(types, list) or len(types) != layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise PeagleError(
            f"{where}: config.json has layer_types={_short(types)}: expected {FULL!r} or {SLIDING!r} for each of the "
            f"{layers} layers; fix the file"
        )
    if SLIDING not in types:
        return None, None
    if switch is False:
        raise PeagleError(f"{where}: config.json has sliding layer_types and use_sliding_window=False: remove one")
    return tuple(types), _integer(window, "sliding_window", 2, where)


def _mask_token_id(raw: Mapping[str, Any], vocab_size: int, where: str) -> int | None:
    """The mask token of a P-EAGLE head; None for an EAGLE-3 head, whose config says so or names no mask token."""
    named = mask_token_ids(raw)
    stated = lookup(raw, PARALLEL_KEY) is not None
    parallel = _flag(raw, PARALLEL_KEY, where) if stated else bool(named)
    if not parallel:
        return None
    if not named:
        raise PeagleError(
            f"{where}: config.json names no mask token: expected one of {', '.join(MASK_ID_KEYS)}; "
            f"an EAGLE-3 head trained one token at a time cannot draft in parallel, set {PARALLEL_KEY} to false"
        )
    mask_id = _integer(named[0], "mask_token_id", 0, where)
    if mask_id >= vocab_size:
        raise PeagleError(
            f"{where}: config.json has mask token {mask_id}, expected an id below vocab_size {vocab_size}; fix the file"
        )
    return mask_id


def _tap_ids(raw: Mapping[str, Any], target_layers: int | None, where: str) -> tuple[int, ...]:
    value = lookup(raw, TAP_KEY)
    if value is None:
        value = lookup(raw, "layer_ids")
    if value is None and target_layers is None:
        raise PeagleError(
            f"{where}: config.json names no tap ids ({TAP_KEY}) and their default depends on the target's depth: "
            "name the target, or add the key"
        )
    taps = default_tap_ids(target_layers) if value is None and target_layers is not None else value
    if not isinstance(taps, list | tuple) or not taps:
        raise PeagleError(f"{where}: config.json has {TAP_KEY}={_short(taps)}: expected a list of layer ids")
    return tuple(_integer(tap, TAP_KEY, 0, where) for tap in taps)


def _rope_to_dict(rope: RopeSpec) -> dict[str, Any]:
    """RoPE in the keys of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`)."""
    scaling: dict[str, Any] | None = None
    if rope.scaling is not None:
        kind = "yarn" if isinstance(rope.scaling, YarnScaling) else "llama3"
        scaling = {"rope_type": kind, **asdict(rope.scaling)}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _rope_from_dict(raw: Mapping[str, Any], head_dim: int, where: str) -> RopeSpec:
    try:
        return rope_from_config(raw, head_dim, _positive(raw, "max_position_embeddings", where, 2048))
    except PeagleError as error:
        raise PeagleError(f"{where}: {error}") from None


def _positive(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = raw.get(key)
    return _integer(default if value is None else value, key, 1, where)


def _integer(value: object, key: str, least: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
        shown = "no value" if value is None else _short(value)
        raise PeagleError(
            f"{where}: config.json has {shown} for {key}: expected an integer from {least} to {MAX_SIZE}; fix the file"
        )
    return value


def _number(value: object, key: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        shown = "no value" if value is None else _short(value)
        raise PeagleError(f"{where}: config.json has {shown} for {key}: expected a number > 0; fix the file")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = lookup(raw, key)
    if value is not None and not isinstance(value, bool):
        raise PeagleError(f"{where}: config.json has {key}={_short(value)}: expected true or false; fix the file")
    return bool(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
