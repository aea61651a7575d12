"""gpt-oss' chats through the API: what the model says is dictated token by token, or only held to a form."""

import json
from contextlib import contextmanager
from dataclasses import replace

import openai
import pytest
from openai import OpenAI

from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.tokenizer import render_chat
from peagle.server.chat_style import ChatStyle
from peagle.server.harmony import Harmony, harmony_turns
from peagle.server.protocol import Message
from peagle.structured.outputs import StructuredOutputs
from tests.server.serving import chat_llm, serving
from tests.server.tiny_harmony import MARKED, TEMPLATE, dictation, harmony_llm, ids_of

pytest.importorskip("xgrammar")

HELLO = [{"role": "user", "content": "hi"}]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "x", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "gg", "parameters": NUMBER}},
]
THINK = "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>hello {you}"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 7}'


def style_of(llm: LLM, **config) -> ChatStyle:
    return ChatStyle.of(TEMPLATE, ServeConfig(**config), {name: ids_of(llm.tokenizer, name)[0] for name in MARKED})


@contextmanager
def client_of(llm: LLM, **config):
    with (
        serving(llm, ServeConfig(**config)) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def llm():
    return harmony_llm(3)


@pytest.fixture(scope="module")
def client(llm):
    with client_of(llm) as client:
        yield client


@pytest.fixture
def dictate(llm, monkeypatch):
    """Have every answer be this text, special tokens in it."""

    def set_up(said: str) -> None:
        form = dictation(llm.tokenizer, said)
        make = LLM.make_request

        def dictated(prompt, params, **rest):
            return make(llm, prompt, replace(params, structured_outputs=form), **rest)

        monkeypatch.setattr(llm, "make_request", dictated)

    return set_up


def ask(client: OpenAI, **fields):
    usual = dict(model="tiny", messages=HELLO, max_tokens=120, seed=1)
    return client.chat.completions.create(**usual | fields)


def message_of(client: OpenAI, **fields) -> tuple[str, str, list, str]:
    """(thought, text, calls, reason), and that they are the same streamed."""
    choice = ask(client, **fields).choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    whole = getattr(message, "reasoning_content", None) or "", message.content or "", calls, choice.finish_reason
    thought, text, told, reason = "", "", [], None
    for chunk in ask(client, stream=True, **fields):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        thought += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.id:
                told.append((call.function.name, ""))
            name, arguments = told[call.index]
            told[call.index] = name, arguments + (call.function.arguments or "")
    assert (thought, text, told, reason) == whole
    return whole


@pytest.mark.parametrize(
    "said, found",
    [
        (FINAL, ("", "hello {you}", [], "stop")),
        (THINK + FINAL, ("hm é", "hello {you}", [], "stop")),
        (THINK + CALL, ("hm é", "", [("f", '{"n": 7}')], "tool_calls")),
        ("hello <|message|>you", ("", "hello you", [], "stop")),
        ("<|channel|>ana", ("", "", [], "stop")),
        (CALL + "<|end|>" + THINK, ("hm é", "", [("f", '{"n": 7}')], "tool_calls")),
    ],
)
def test_channels(client, dictate, said, found):
    dictate(said)
    assert message_of(client, tools=TOOLS) == found


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tokens_of_a_traced_answer_add_up_to_what_is_said(client, dictate, tools):
    dictate(THINK + FINAL)
    told = []
    for chunk in ask(client, stream=True, tools=tools, extra_body={"peagle": {"trace": True}}):
        told += chunk.model_extra["peagle"]["tokens"] if "peagle" in chunk.model_extra else []
    assert "".join(token["text"] for token in told if token.get("thought")) == "hm é"
    assert "".join(token["text"] for token in told if not token.get("thought")) == "hello {you}"


def test_without_tools_there_are_no_calls(client, dictate):
    dictate(CALL)
    assert message_of(client) == ("", '{"n": 7}', [], "stop")
    assert message_of(client, tools=TOOLS, tool_choice="none") == ("", '{"n": 7}', [], "stop")


@pytest.mark.parametrize("most", range(1, 40))
def test_an_answer_that_is_cut_anywhere(client, dictate, most):
    dictate(THINK + FINAL)
    thought, text, calls, reason = message_of(client, max_tokens=most)
    assert "hm é".startswith(thought.rstrip("\ufffd"))
    assert "hello {you}".startswith(text)
    assert (calls, reason) == ([], "length")
    assert thought or text or most < 12


def test_calls_end_an_answer_without_the_model_s_own_list(dictate, monkeypatch):
    """Some files of the model name one end of text alone."""
    llm = harmony_llm(3)
    llm.target = replace(llm.target, spec=replace(llm.target.spec, eos_token_ids=(1,)))
    token = {"type": "token", "token": ids_of(llm.tokenizer, "<|call|>")[0]}
    any_token = {"type": "any_tokens", "exclude_tokens": [1]}
    form = StructuredOutputs(tag=json.dumps({"type": "sequence", "elements": [token, any_token]}))
    make = llm.make_request
    monkeypatch.setattr(
        llm,
        "make_request",
        lambda prompt, params, **rest: make(prompt, replace(params, structured_outputs=form), **rest),
    )
    with client_of(llm) as client:
        answer = ask(client)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 1)
        assert ask(client, extra_body={"ignore_eos": True}, max_tokens=5).usage.completion_tokens == 5


def test_log_probabilities_and_stop_strings(client, dictate):
    dictate(THINK + FINAL)
    answer = ask(client, logprobs=True, top_logprobs=2, stop=["{"])
    assert answer.choices[0].message.content == "hello "
    tokens = [entry.token for entry in answer.choices[0].logprobs.content]
    assert len(tokens) == answer.usage.completion_tokens
    assert tokens[0] == "<|channel|>"
    streamed = [
        entry.token
        for chunk in ask(client, logprobs=True, top_logprobs=2, stop=["{"], stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == tokens


def bias_of(llm: LLM, weights: dict[str, float]) -> dict[str, float]:
    """Of tokens by their text; and no space, which random weights love."""
    return {str(ids_of(llm.tokenizer, name)[0]): weight for name, weight in ({" ": -100, "\n": -100} | weights).items()}


@pytest.mark.parametrize("seed", range(3))
def test_a_form_holds_for_the_final_message(llm, client, seed):
    """Random weights think on and on: a bias against all but what ends a thought gets them to the point."""
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    fields = {"response_format": form, "seed": seed, "logit_bias": bias_of(llm, {"<|end|>": 40, "f": 3})}
    _, text, calls, reason = message_of(client, **fields)
    assert (calls, reason) == ([], "stop")
    assert 0 <= json.loads(text)["n"] <= 9


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "gg"}}])
def test_calls_are_enforced(llm, client, choice):
    bias = bias_of(llm, {"<|end|>": 40, "c": 3})
    for seed in range(3):
        _, text, calls, reason = message_of(client, tools=TOOLS, tool_choice=choice, seed=seed, logit_bias=bias)
        assert (text, reason, len(calls)) == ("", "tool_calls", 1)
        assert calls[0][0] == "gg" if choice != "required" else calls[0][0] in ("f", "gg")
        assert 0 <= json.loads(calls[0][1])["n"] <= 9


def test_strict_functions_leave_the_choice(llm, client):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for channel in ("analysis", "commentary", "final"):
        bias = bias_of(llm, {"<|end|>": 8, "</s>": 8, channel[0]: 30})
        kinds = set()
        for seed in range(2):
            thought, text, calls, reason = message_of(client, tools=strict, seed=seed, logit_bias=bias, max_tokens=50)
            assert all(0 <= json.loads(arguments)["n"] <= 9 for _, arguments in calls if reason != "length")
            kinds |= {name for name, part in (("thought", thought), ("text", text), ("call", calls)) if part}
        assert kinds & {"analysis": {"thought"}, "commentary": {"text", "call"}, "final": {"text"}}[channel]


def test_forms_and_functions_exclude_each_other(client):
    with pytest.raises(openai.BadRequestError, match="response_format beside tools"):
        ask(client, tools=TOOLS, response_format={"type": "json_object"})


def call(number: int) -> dict:
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": f"f{number}", "arguments": f'{{"n": {number}}}'},
    }


def test_a_conversation_comes_back_as_it_was_said(llm):
    messages = [
        {"role": "developer", "content": "be kind"}, *HELLO,
        {"role": "assistant", "content": "hello", "reasoning_content": "forgotten"},
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": None, "reasoning_content": "a thought", "tool_calls": [call(1)]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]  # fmt: skip
    turns = style_of(llm).turns([Message(**message).turn() for message in messages])
    assert render_chat(llm.tokenizer, turns, add_generation_prompt=True) == (
        "<|start|>system<|message|>be kind<|end|><|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>hello<|end|><|start|>user<|message|>call<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>a thought<|end|>"
        '<|start|>assistant to=functions.f1<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        "<|start|>functions.f1 to=assistant<|channel|>commentary<|message|>7<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("said", ["lo there", "to=x", "assistant", "to", "<|end|><|start|>assistant" + FINAL])
def test_a_message_that_goes_on_has_no_header(client, dictate, said):
    dictate(said)
    begun = [*HELLO, {"role": "assistant", "content": "hel"}]
    text = "hello {you}" if said.endswith(FINAL) else said
    found = message_of(client, messages=begun, extra_body={"continue_final_message": True})
    assert found == ("", text, [], "stop")


def test_an_answer_that_nothing_opens_has_a_header(client, dictate):
    dictate("<|start|>assistant" + THINK + FINAL)
    found = message_of(client, extra_body={"add_generation_prompt": False})
    assert found == ("hm é", "hello {you}", [], "stop")


def test_how_much_to_think(client):
    plain = ask(client, max_tokens=1).usage.prompt_tokens
    high = ask(client, max_tokens=1, reasoning_effort="high").usage.prompt_tokens
    assert high - plain == len("system") + len("high") + 3  # and three special tokens
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        ask(client, reasoning_effort="xhigh")
    also = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    assert ask(client, max_tokens=1, reasoning_effort="high", extra_body=also).usage.prompt_tokens == high
    with pytest.raises(openai.BadRequestError, match="reasoning_effort is 'low', and another in chat_template_kwargs"):
        ask(client, reasoning_effort="low", extra_body=also)
    with client_of(chat_llm()) as other, pytest.raises(openai.BadRequestError, match="no place for it") as error:
        ask(other, reasoning_effort="high")
    assert error.value.param == "reasoning_effort"


def test_turns_of_a_template_that_takes_one_call_and_one_text():
    calls = [call(number) for number in (1, 2, 3)]
    turns = [
        {"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *HELLO,
        {"role": "assistant", "content": "so", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "c2"}, {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x"}, {"role": "user", "content": "and"},
    ]  # fmt: skip
    before = json.dumps(turns)
    made = harmony_turns(turns)
    assert json.dumps(turns) == before
    assert made[0] == {"role": "system", "content": "a\n\nb"}
    said = [turn["tool_calls"][0]["id"] if "tool_calls" in turn else turn["role"] for turn in made[2:]]
    assert said == ["c1", "tool", "c2", "tool", "c3", "tool", "user"]
    assert made[5]["tool_call_id"] == "c2"
    assert [turn["thinking"] for turn in made if "tool_calls" in turn] == ["hm\n\nso", "", ""]
    assert harmony_turns(turns[3:]) == made[2:]
    with pytest.raises(PeagleError, match="system message behind others"):
        harmony_turns([*HELLO, turns[0]])


def test_what_is_taken_for_harmony():
    tokens = {name: number for number, name in enumerate(MARKED)}
    style = ChatStyle.of(TEMPLATE, ServeConfig(), tokens, (99,))
    assert style.harmony == Harmony(tokens, (99,))
    assert style.knows_tools
    assert ChatStyle.of(TEMPLATE, ServeConfig(), {"<|channel|>": 3}).harmony is None  # text of other tokens
    assert ChatStyle.of("{{ tools }}", ServeConfig(), tokens).harmony is None
    assert ChatStyle.of(TEMPLATE, ServeConfig(reasoning_parser="none"), tokens).harmony is None
