"""Answers are shown in prompt order, whatever order they finish in."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.acceptance import AcceptanceStats
from peagle.models.tokenizer import chat_prompt
from peagle.prompt_file import PromptRow
from peagle.sampling import SamplingParams
from peagle.terminal import OrderedAnswers, json_line, print_answers
from peagle.waiting import said_if_slow
from tests.server.tiny_harmony import dictation, harmony_llm, ids_of


def test_answers_come_in_prompt_order():
    seen = []
    answers = OrderedAnswers(3, seen.append, lambda output: seen.append(f"<{output}>"))
    answers.on_delta(1, "b1")
    answers.on_delta(0, "a1")
    answers.on_finish(2, "C")
    answers.on_delta(1, "b2")
    answers.on_delta(0, "a2")
    answers.on_finish(0, "A")
    answers.on_delta(1, "b3")
    answers.on_finish(1, "B")
    assert seen == ["a1", "a2", "<A>", "b1b2", "b3", "<B>", "", "<C>"]


CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>"
ANALYSIS = "<|channel|>analysis<|message|>hm"


def dictated(llm, *said):
    """Lets `llm` say these texts, one for each prompt."""
    generate = llm.generate

    def with_texts(prompts, params, **more):
        assert set(ids_of(llm.tokenizer, "<|return|><|call|>")) <= set(params.stop_token_ids)
        each = [replace(params, structured_outputs=dictation(llm.tokenizer, text)) for text in said]
        return generate(prompts, each, **more)

    llm.generate = with_texts
    return llm, [PromptRow.of_user("hi") for _ in said], SamplingParams(max_tokens=200)


def test_a_model_with_channels_says_what_is_thought(capsys):
    pytest.importorskip("xgrammar")
    print_answers(*dictated(harmony_llm(3), CHANNELS, "to", ANALYSIS), raw=False, as_json=False)
    shown = capsys.readouterr().out
    assert shown == "[thought] hm\n[answer] hello\nto\n[thought] hm\n"


def test_records_of_a_model_with_channels_hold_text_and_thought(capsys):
    pytest.importorskip("xgrammar")
    print_answers(*dictated(harmony_llm(3), ANALYSIS, CHANNELS), raw=False, as_json=True)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["text"], record["thought"]) for record in records] == [("", "hm"), ("hello", "hm")]


def test_a_raw_prompt_is_answered_as_the_model_writes(capsys):
    llm = harmony_llm(3)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    text = llm.generate(["hi"], params)[0].text
    for as_json in (False, True):
        print_answers(llm, [PromptRow.of_user("hi")], params, raw=True, as_json=as_json)
    plain, record = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert (plain, json.loads(record)["text"]) == (text, text)
    assert "thought" not in json.loads(record)


def test_what_takes_long_is_said(capsys):
    with said_if_slow("loading x", 0.02):
        time.sleep(0.2)
    assert capsys.readouterr().err == "peagle: loading x ...\n"
    with said_if_slow("loading x", 0.2):
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""


def test_a_prompt_without_a_template_is_the_text():
    tokenizer = SimpleNamespace(chat_template=None)
    assert chat_prompt(tokenizer, PromptRow.of_user("Hi").messages) == "Hi"


def test_a_record_is_one_line_for_every_reader():
    text = "a\u2028b\u2029c\u0085d\ne é"
    output = SimpleNamespace(
        prompt=text, text=text, token_ids=[1], finish_reason="stop", tokens_per_second=1.0, stats=AcceptanceStats()
    )
    line = json_line(text, output)
    assert len(line.splitlines()) == 1
    assert [json.loads(line)[key] for key in ("text", "prompt")] == [text, text]
    assert "é" in line
