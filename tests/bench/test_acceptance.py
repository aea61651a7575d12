"""Acceptance over several suites in one batch is that of each suite alone."""

import pytest

from benchmarks.acceptance import measure_acceptance
from peagle.bench.acceptance import SuiteAcceptance
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams
from tests.engine.tiny import tiny_llm

SUITES = {"letters": ["ab", "xyz", "q"], "digits": ["12", "0034"]}


def conversations(name: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in SUITES[name]]


def chatting(llm: LLM) -> LLM:
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return llm


@pytest.mark.parametrize("parallel", [True, False])
def test_suites_share_a_batch_and_nothing_else(parallel: bool):
    settings = {"max_tokens": 16, "temperature": 0.8}
    together = measure_acceptance(
        chatting(tiny_llm(3, parallel=parallel)), {name: conversations(name) for name in SUITES}, **settings
    )
    for name in SUITES:
        alone = measure_acceptance(
            chatting(tiny_llm(3, parallel=parallel, max_num_seqs=1)), {name: conversations(name)}, **settings
        )
        assert alone[name] == together[name]
        assert together[name].prompts == len(SUITES[name])
        assert together[name].every.num_rounds > 0


def test_rounds_in_looping_text_are_told_apart():
    llm = tiny_llm(3)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    output.token_ids[:] = [7, 8, 9] * 20
    suite = SuiteAcceptance()
    suite.add(output, 3)
    assert suite.looping_tokens == 60 - 14  # the 15th token ends the first repeated run of 12
    assert 0 < suite.fresh.num_rounds < suite.every.num_rounds
