"""Answers are shown in prompt order, whatever order they finish in."""

import json
import time
from types import SimpleNamespace

from peagle.acceptance import AcceptanceStats
from peagle.models.tokenizer import chat_prompt
from peagle.prompt_file import PromptRow
from peagle.terminal import OrderedAnswers, json_line
from peagle.waiting import said_if_slow


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
    line = json_line(output)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == text
    assert "é" in line
