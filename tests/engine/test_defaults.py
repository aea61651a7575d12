"""`LLM` takes the settings of `EngineConfig`, and has no defaults of its own."""

import inspect
from dataclasses import MISSING, fields

from peagle.config import EngineConfig
from peagle.engine.engine import LLM


def test_keywords_are_those_of_the_config():
    keywords = {
        name: parameter.default
        for name, parameter in inspect.signature(LLM.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "speculative_config"
    }
    assert keywords == {field.name: field.default for field in fields(EngineConfig) if field.default is not MISSING}
