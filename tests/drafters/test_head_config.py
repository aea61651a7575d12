from dataclasses import replace

import pytest
from transformers import LlamaConfig

from peagle.drafters.head_config import EXPLICIT_KEYS, config_from_dict, config_to_dict
from peagle.errors import PeagleError
from peagle.models.layers import Llama3Scaling, RopeSpec, YarnScaling
from tests.drafters.conftest import CONFIG

LLAMA3 = RopeSpec(
    theta=5e5,
    head_dim=8,
    scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
)  # fmt: skip
YARN = YarnScaling(
    factor=32.0, beta_fast=16.0, beta_slow=2.0, original_max_position_embeddings=64, attention_factor=1.25,
    truncate=False,
)  # fmt: skip
CONFIGS = {
    "plain": CONFIG,
    "llama3": replace(CONFIG, rope=LLAMA3),
    "yarn": replace(CONFIG, rope=replace(LLAMA3, scaling=YARN)),
    "switches": replace(CONFIG, norm_before_fc=False, norm_before_residual=True, attention_bias=True),
    "windows": replace(
        CONFIG, layer_types=("full_attention", "sliding_attention", "full_attention"), sliding_window=16
    ),
    "other shape": replace(CONFIG, draft_vocab_size=10, target_hidden_size=40, tap_ids=(1, 2, 3, 4, 6)),
}


def read(raw, target_layers=None):
    return config_from_dict(raw, target_layers=target_layers, where="head X")


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name):
    assert read(config_to_dict(CONFIGS[name])) == CONFIGS[name]


def test_every_key_is_explicit_and_mask_ids_and_taps_agree():
    raw = config_to_dict(CONFIG)
    assert set(EXPLICIT_KEYS) <= set(raw)
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["mask_token_id"] == raw["pard_token"] == raw["ptd_token_id"] == 7
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert raw["num_aux_hidden_states"] == 3
    assert (raw["parallel_drafting"], raw["tie_word_embeddings"], raw["fc_norm"]) == (True, False, False)


@pytest.mark.parametrize("name", ["plain", "llama3", "yarn"])
def test_transformers_reads_the_same_rope(name):
    rope, parameters = CONFIGS[name].rope, LlamaConfig.from_dict(config_to_dict(CONFIGS[name])).rope_parameters
    assert parameters["rope_theta"] == rope.theta
    assert parameters["rope_type"] == {"plain": "default"}.get(name, name)
    assert rope.scaling is None or parameters["factor"] == rope.scaling.factor


def test_windows_of_each_layer():
    assert CONFIG.windows == (None, None, None)
    assert CONFIGS["windows"].windows == (None, 16, None)
    raw = config_to_dict(CONFIGS["windows"])
    assert raw["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    assert raw["sliding_window"] == 16
    assert "layer_types" not in config_to_dict(CONFIG)
    for changes in ({"sliding_window": None}, {"layer_types": ("full_attention",)}, {"layer_types": ("other",) * 3}):
        with pytest.raises(PeagleError):
            replace(CONFIGS["windows"], **changes)


def without(*keys, **changes):
    raw = {key: value for key, value in config_to_dict(CONFIG).items() if key not in keys}
    return {**raw, **changes}


TAPS, MASKS = "eagle_aux_hidden_state_layer_ids", ("mask_token_id", "pard_token", "ptd_token_id")


@pytest.mark.parametrize(
    "raw",
    [
        without(TAPS),
        without("eagle_config"),
        without(TAPS, "eagle_config", eagle_config={"layer_ids": [2, 3, 5]}),
        without("mask_token_id", "ptd_token_id"),
        without("mask_token_id", "pard_token"),
        without("norm_before_fc", eagle_config={"norm_before_fc": True}),
        without("rope_theta", "rope_scaling"),
        without("rope_parameters"),
        without("rope_parameters", rope_scaling={"type": "default"}),
        without("head_dim", "draft_vocab_size", "target_hidden_size"),
        without("head_dim", head_dim=None, sliding_window=4096, use_sliding_window=False),
        without(sliding_window=4096, layer_types=["full_attention"] * 3),
        without(hidden_act="swish", fc_norm=None, norm_output=True),
    ],
)  # fmt: skip
def test_what_published_heads_leave_out_is_found_elsewhere(raw):
    assert read(raw) == CONFIG


def test_missing_taps_need_the_depth_of_the_target():
    raw = without(TAPS, "eagle_config")
    assert read(raw, target_layers=30).tap_ids == (2, 15, 27)
    with pytest.raises(PeagleError, match="depth"):
        read(raw)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fc_norm": True}, "fc_norm=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"sliding_window": 128}, "sliding_window=128 and no layer_types"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 128}, "each of the 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "each of the 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "no value for sliding_window"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 1}, "1 for sliding_window"),
        (
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": False},
            "use_sliding_window",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "expected one rule"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling 3"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle'"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"mask_token_id": 61}, "mask token 61"),
        ({"mask_token_id": "7"}, "'7' for mask_token_id"),
        (dict.fromkeys(MASKS), "no mask token"),
        ({"hidden_size": None}, "no value for hidden_size"),
        ({"num_hidden_layers": 0}, "0 for num_hidden_layers"),
        ({TAPS: "2,3"}, TAPS),
        ({TAPS: [2, -3]}, TAPS),
        ({"norm_before_residual": "yes"}, "norm_before_residual='yes'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes, named):
    with pytest.raises(PeagleError, match=named) as caught:
        read(without(**changes))
    assert "head X" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", 5),
        ("layer_types", "full_attention"),
        ("layer_types", [["full_attention"], 3]),
        ("vocab_size", 2**31),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("rope_theta", float("nan")),
    ],
)
def test_values_of_a_wrong_kind_are_named(key, value):
    raw = {**config_to_dict(CONFIG), key: value}
    if key == "rope_theta":
        del raw["rope_parameters"]
    with pytest.raises(PeagleError, match=key):
        read(raw)
