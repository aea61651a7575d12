"""Settings of the engine and of speculation: what is accepted, what is refused and how it is said."""

import re

import pytest

from peagle.config import EngineConfig, ProfileConfig, ServeConfig, SpeculativeConfig
from peagle.errors import PeagleError


def speculative(**values):
    return SpeculativeConfig.from_mapping({"model": "head", "num_speculative_tokens": 3, **values})


def synthetic(**values):
    return speculative(rejection_sample_method="synthetic", **values)


def test_a_fixed_k_is_the_largest_k():
    config = speculative()
    assert (config.is_auto, config.max_drafts, config.synthetic_rates) == (False, 3, None)
    assert config.for_head(8) == config


@pytest.mark.parametrize(
    ("values", "trained", "most"),
    [
        ({}, None, 7),
        ({}, 4, 4),
        ({}, 40, 16),
        ({"max_speculative_tokens": 5}, 8, 5),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.9, 0.4]},
            8,
            2,
        ),
    ],
)
def test_the_maximum_of_auto(values, trained, most):
    config = speculative(num_speculative_tokens="auto", **values)
    assert config.is_auto
    assert config.for_head(trained).max_drafts == most


def test_synthetic_rates_are_conditional():
    assert synthetic(synthetic_acceptance_rates=[0.8, 0.4, 0.4]).synthetic_rates == pytest.approx((0.8, 0.5, 1.0))
    assert synthetic(synthetic_acceptance_rates=[0.5, 0, 0]).synthetic_rates == (0.5, 0.0, 0.0)
    assert synthetic(synthetic_acceptance_length=2.25).synthetic_rates == (1.0, 0.25, 0.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_speculative_tokens": 0}, "from 1 to 16, or 'auto'"),
        ({"num_speculative_tokens": 17}, "from 1 to 16"),
        ({"num_speculative_tokens": "all"}, "'all'"),
        ({"num_speculative_tokens": True}, "must be an integer"),
        ({"num_speculative_tokens": "auto", "max_speculative_tokens": 17}, "max_speculative_tokens is 17"),
        ({"max_speculative_tokens": 5}, "needs num_speculative_tokens 'auto', not 3"),
        ({"k_table": {"1": 3}}, "k_table needs"),
        ({"num_speculative_tokens": "auto", "k_table": 3}, "k_table is 3"),
        ({"rejection_sample_method": "block"}, "'block' is not supported"),
        ({"rejection_sample_method": "synthetic"}, "has neither"),
        ({"synthetic_acceptance_length": 2}, "add rejection_sample_method 'synthetic'"),
        ({"num_speculative_token": 2}, "unknown key"),
    ],
)
def test_speculation_that_cannot_be(values, says):
    with pytest.raises(PeagleError, match=says):
        speculative(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 1, 1]}, "has both"),
        ({"synthetic_acceptance_length": 4.5}, "must be 1 to 4"),
        ({"synthetic_acceptance_length": float("nan")}, "must be 1 to 4"),
        ({"synthetic_acceptance_rates": [0.5, 0.4]}, "has 2 numbers: give one for each of the 3"),
        ({"synthetic_acceptance_rates": [0.5, 0.4, 0.45]}, "rises from 0.4 to 0.45"),
        ({"synthetic_acceptance_rates": [1.5, 0.4, 0.4]}, "has 1.5"),
        ({"synthetic_acceptance_rates": "0.5"}, "give a list"),
        ({"num_speculative_tokens": "auto", "synthetic_acceptance_rates": [1] * 17}, "has 17 numbers: give 1 to 16"),
        ({"num_speculative_tokens": "auto", "synthetic_acceptance_rates": []}, "has 0 numbers: give 1 to 16"),
    ],
)
def test_synthetic_acceptance_that_cannot_be(values, says):
    with pytest.raises(PeagleError, match=says):
        synthetic(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization is 0: it must be in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"kernels": "cuda"}, "use auto, torch, triton or invariant"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_model_len": 0}, "at least 1"),
        ({"max_num_seqs": 10**12}, r"max_num_seqs is 1000000000000: it must be in 1 \.\. 65536"),
        ({"block_size": True}, "block_size is True"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no': it must be true or false"),
        ({"graphs": None}, "graphs is None: it must be true or false"),
    ],
)
def test_an_engine_that_cannot_be(values, says):
    with pytest.raises(PeagleError, match=says):
        EngineConfig(**values)
    assert EngineConfig(gpu_memory_utilization=1).graphs


@pytest.mark.parametrize(
    ("values", "says"),
    [({"dtype": "float16"}, "float16"), ({"kernels": "x"}, "kernels 'x'"), ({"concurrency": 10**9}, "concurrency is")],
)
def test_a_profile_that_cannot_be(values, says):
    with pytest.raises(PeagleError, match=says):
        ProfileConfig(**values)


def test_origins_are_addresses():
    assert ServeConfig(allowed_origins=("*", "null", "https://a.example")).page
    for other in ("foo", "*.example", "nullify"):
        with pytest.raises(PeagleError, match=re.escape(f"allowed_origins has {other!r}: begin it with http")):
            ServeConfig(allowed_origins=("https://a.example", other))


def test_a_method_of_another_kind_is_named_before_keys_it_does_not_have():
    with pytest.raises(PeagleError, match=r"speculative method 'ngram' is not supported: use 'eagle3'"):
        SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 5})
    with pytest.raises(PeagleError, match="lacks 'model'"):
        SpeculativeConfig.from_mapping({"num_speculative_tokens": 5})
