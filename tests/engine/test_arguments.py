"""Wrong arguments of the Python API: one error that names them, before any work."""

import re
from collections.abc import Callable

import pytest

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import tiny_llm, tiny_parts


def from_parts(k: object, **settings: object) -> LLM:
    return LLM.from_parts(*tiny_parts(), k, EngineConfig(), **settings)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tiny_llm(3).generate(None, SamplingParams()), "generate got None for prompts"),
        (lambda: tiny_llm(3).generate([[5]], None), "generate got None for params"),
        (lambda: tiny_llm(3).generate([[5]], SamplingParams(stop_token_ids=[10**9])), "stop_token_ids has 1000000000"),
        (lambda: from_parts(2.5), "num_speculative_tokens is 2.5"),
        (lambda: from_parts(None), "num_speculative_tokens is None"),
        (lambda: from_parts(3, synthetic_rates=(0.5,)), "give 3 numbers in 0 .. 1"),
        (lambda: from_parts(1, synthetic_rates=(2.0,)), "give 1 numbers in 0 .. 1"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], says: str):
    with pytest.raises(PeagleError, match=re.escape(says)):
        call()
