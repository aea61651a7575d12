"""Structured requests say the same with drafts and without, alone or in a batch, and what they say obeys."""

import json
import re

import numpy as np
import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from peagle.structured.outputs import StructuredOutputs
from tests.engine.tiny import force_drafts, random_prompts, tiny_parts
from tests.structured.tiny_json import json_llm, json_tokenizer, random_schema

pytest.importorskip("xgrammar")

WAYS = (
    {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
)  # fmt: skip


def random_regex(rng: np.random.Generator, depth: int = 2) -> str:
    kind = rng.integers(5 if depth else 2)
    if kind == 0:
        return "".join(rng.choice(list("ab12"), rng.integers(1, 4)))
    if kind == 1:
        return str(rng.choice(["[a-c]", "[0-9]", "[a-z]{2}", "(ab|abc)"]))
    inner = random_regex(rng, depth - 1)
    if kind == 2:
        return f"({inner}|{random_regex(rng, depth - 1)})"
    if kind == 3:
        return f"({inner}){{0,{rng.integers(1, 4)}}}x"
    return inner + random_regex(rng, depth - 1)


def random_structure(rng: np.random.Generator) -> tuple[StructuredOutputs, object]:
    """What to obey, and whether a complete text does."""
    kind = rng.integers(4)
    if kind == 0:
        pattern = random_regex(rng)
        return StructuredOutputs(regex=pattern), lambda text: re.fullmatch(pattern, text)
    if kind == 1:
        words = ["abc", "ab12x", "ab", "zz top"]
        return StructuredOutputs(choice=words), lambda text: text in words
    if kind == 2:
        grammar = 'root ::= "a" root "b" | [0-9] | "ab12"'
        return StructuredOutputs(grammar=grammar), lambda text: re.fullmatch("a*([0-9]|ab12)b*", text)
    schema, check = random_schema(rng)
    return StructuredOutputs(json=schema), lambda text: check(json.loads(text))


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def mixed(seed: int, count: int, max_tokens: int = 40) -> tuple[list[list[int]], list[SamplingParams], list]:
    """Requests, every third of them free; with the checks of the others."""
    rng = np.random.default_rng(seed)
    params, checks = [], []
    for i in range(count):
        structure, check = random_structure(rng) if i % 3 else (None, lambda text: True)
        way = {**WAYS[rng.integers(len(WAYS))], "logprobs": 2 if rng.random() < 0.2 else None}
        params.append(SamplingParams(max_tokens=max_tokens, seed=i, structured_outputs=structure, **way))
        checks.append(check)
    return random_prompts(count, seed), params, checks


def plain_outputs(prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    llm = json_llm(0)
    return [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_drafts_change_nothing_and_every_text_obeys(seed: int):
    prompts, params, checks = mixed(seed, 16)
    plain = plain_outputs(prompts, params)
    ended = 0
    for output, each, check in zip(plain, params, checks, strict=True):
        if output.finish_reason == "stop" and each.structured_outputs is not None:
            assert check(output.text), (each.structured_outputs, output.text)
            ended += 1
    assert ended > 4
    for k, right in ((1, 0.8), (3, None), (3, 1.0), (5, 0.8)):
        llm = json_llm(k)
        llm.core._steps_ahead = seed % 2  # as on a GPU
        if right is not None:
            force_drafts(llm, plain, seed, right)
        outputs = llm.generate(prompts, params)
        assert ids(outputs) == ids(plain)
        assert [o.text for o in outputs] == [o.text for o in plain]
        for output, each in zip(outputs, params, strict=True):
            assert output.stats.num_accepted_tokens <= output.stats.num_draft_tokens
            if right == 1.0 and each.structured_outputs is not None and output.stats.num_rounds > 2:
                assert output.stats.acceptance_length > 1


@pytest.mark.parametrize("parallel", [True, False])
def test_a_tight_pool_preempts_and_nothing_changes(parallel: bool):
    prompts, params, _ = mixed(11, 36, max_tokens=60)
    plain = json_llm(0, max_num_seqs=64).generate(prompts, params)
    llm = json_llm(
        3, parallel=parallel, block_size=2, num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=24,
    )  # fmt: skip
    llm.core._steps_ahead = 1
    force_drafts(llm, plain, 3, 0.7)
    assert ids(llm.generate(prompts, params)) == ids(plain)
    assert llm.core.scheduler.num_preemptions > 3


def test_only_proposed_drafts_are_counted():
    prompt, structure = [5, 6, 7], StructuredOutputs(regex="[ab]{12}")
    params = SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=structure)
    plain = json_llm(0).generate([prompt], params)
    llm = json_llm(3)
    force_drafts(llm, plain, 0, right=0.0)  # a wrong draft is the token's neighbour: "b" for "a", else forbidden
    output = llm.generate([prompt], params)[0]
    assert ids([output]) == ids(plain)
    assert output.stats.num_draft_tokens < 3 * output.stats.num_rounds


def test_slots_are_free_again_after_a_grammar():
    llm, structure = json_llm(2, max_num_seqs=2), StructuredOutputs(regex="abc[xyz]{3}")
    free = SamplingParams(max_tokens=8, temperature=0.0)
    held = SamplingParams(structured_outputs=structure, max_tokens=8, temperature=0.0)
    alone = llm.generate([[9, 8]], free)
    assert [output.text[:3] for output in llm.generate([[9, 8], [7]], held)] == ["abc", "abc"]
    for _ in range(2):  # in either slot
        assert ids(llm.generate([[7], [9, 8]], [held, free]))[1:] == ids(alone)
        assert ids(llm.generate([[9, 8], [7]], [free, held]))[:1] == ids(alone)


def test_an_ended_grammar_allows_only_the_end():
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["ab"]), max_tokens=8, ignore_eos=True)
    for k in (0, 3):
        output = json_llm(k).generate([[4]], params)[0]
        assert output.text == "ab"
        assert output.finish_reason == "length"
        assert output.token_ids[-4:] == [1] * 4


def test_abort_and_stop_strings():
    llm = json_llm(3)
    structure = StructuredOutputs(regex="[a-c]{30}x")
    params = SamplingParams(structured_outputs=structure, max_tokens=40, temperature=0.8, seed=2)
    text = llm.generate([[3, 4]], params)[0].text
    stopped = SamplingParams(
        structured_outputs=structure, max_tokens=40, temperature=0.8, seed=2, stop=(text[7:10],)
    )  # fmt: skip
    output = llm.generate([[3, 4]], stopped)[0]
    assert output.text == text[: text.index(text[7:10])]
    assert output.finish_reason == "stop"
    requests = [llm.make_request([3, 4], params) for _ in range(3)]
    for request in requests:
        llm.core.add(request)
    llm.core.step(), llm.core.step()
    llm.core.abort(requests[1])
    while llm.core.has_work:
        llm.core.step()
    assert llm.tokenizer.decode(requests[0].output_ids, skip_special_tokens=True) == text
    assert requests[2].output_ids == requests[0].output_ids
    assert requests[1].finish_reason == "abort"


def test_hidden_tokens_are_none():
    """Special tokens would satisfy a grammar by the letters of their names, and nobody would see them."""
    llm = json_llm(0)
    params = SamplingParams(
        structured_outputs=StructuredOutputs(regex="<hidden>"), max_tokens=20, logit_bias={2: 100.0}
    )  # fmt: skip
    assert llm.generate([[5]], params)[0].text == "<hidden>"


def test_a_vocabulary_that_cannot_go_on():
    llm = json_llm(3)
    with pytest.raises(PeagleError, match="regex allows nothing that the tokens"):
        llm.make_request([3], SamplingParams(structured_outputs=StructuredOutputs(regex="é+")))
    output = llm.generate([[3]], SamplingParams(structured_outputs=StructuredOutputs(regex="abé+"), max_tokens=9))[0]
    assert output.text == "ab"  # the end, for want of anything else
    assert output.finish_reason == "stop"


def test_synthetic_acceptance_is_refused():
    target, drafter = tiny_parts()
    llm = LLM.from_parts(target, drafter, 3, EngineConfig(block_size=4), synthetic_rates=(0.9, 0.9, 0.9))
    llm.tokenizer = json_tokenizer()
    with pytest.raises(PeagleError, match="real acceptance"):
        llm.make_request([3], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
def test_on_gpu(graphs: bool):
    prompts, params, _ = mixed(5, 60, max_tokens=60)
    plain = json_llm(0, max_num_seqs=64, device="cuda").generate(prompts, params)
    llm = json_llm(3, num_kv_blocks=60, max_num_seqs=16, max_num_batched_tokens=64, graphs=graphs, device="cuda")
    force_drafts(llm, plain, 3, 0.8)
    assert ids(llm.generate(prompts, params)) == ids(plain)
    assert ids(llm.generate(prompts, params)) == ids(plain)  # with what the prefix cache has now


def test_forbidden_drafts_say_nothing_about_the_head(monkeypatch):
    """How many were kept then follows from the grammar: K is chosen by what free requests kept."""
    llm, told = json_llm(3, max_num_seqs=2), []
    monkeypatch.setattr(llm.core.policy, "record", lambda accepted, _drafts, _others: told.append(len(accepted)))
    held = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="[a-z]{8}"), ignore_eos=True)
    llm.generate(random_prompts(2, longest=6), [held, SamplingParams(max_tokens=40, ignore_eos=True)])
    assert set(told) == {1}  # both decode side by side at first
