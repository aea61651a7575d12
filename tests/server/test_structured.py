"""Structured outputs and tools through the API, with the official client."""

import asyncio
import json
import queue
import re
import threading
import time

import openai
import pytest
from openai import OpenAI

from peagle.config import ServeConfig
from peagle.models.tokenizer import render_chat
from peagle.server.chat_style import ChatStyle
from peagle.server.errors import ApiError
from peagle.server.structured import MAX_COMPILING, Compiler
from peagle.server.tools import NamedTool, Tool, as_text, settle_tools
from peagle.structured.grammars import Grammars
from peagle.structured.outputs import StructuredOutputs
from peagle.structured.trials import Trials
from tests.server.serving import serving
from tests.structured.tiny_json import HANGING, json_llm

pytest.importorskip("xgrammar")

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.n }}{% endfor %}{% endfor %}A"
)
NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "x", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "gg", "parameters": NUMBER}},
]
NO_SPACE = {"logit_bias": {"18": -100, "79": -100}}  # " " and "  ": random weights love them


@pytest.fixture(scope="module")
def served():
    llm = json_llm(3)
    llm.tokenizer.chat_template = TEMPLATE
    with serving(llm, ServeConfig(tool_call_parser="hermes")) as served:
        yield served


@pytest.fixture
def client(served):
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields):
    usual = dict(model="tiny", messages=HELLO, max_tokens=100, seed=1, logit_bias=NO_SPACE["logit_bias"])
    return client.chat.completions.create(**usual | fields)


def streamed_text(client: OpenAI, **fields) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True, **fields))


def test_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    for seed in range(4):
        choice = ask(client, response_format=form, seed=seed).choices[0]
        assert choice.finish_reason == "stop"
        assert 0 <= json.loads(choice.message.content)["n"] <= 9
        assert streamed_text(client, response_format=form, seed=seed) == choice.message.content


def test_parse_helper(client):
    pydantic = pytest.importorskip("pydantic")
    number = pydantic.create_model("Number", n=(pydantic.conint(ge=0, le=9), ...))
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=number, seed=3, max_tokens=100, **NO_SPACE
    )
    assert 0 <= parsed.choices[0].message.parsed.n <= 9


def test_json_object_and_text(client):
    choice = ask(client, response_format={"type": "json_object"}, max_tokens=100, seed=7).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    plain = ask(client, max_tokens=9).choices[0].message.content
    assert ask(client, max_tokens=9, response_format={"type": "text"}).choices[0].message.content == plain


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"guided_regex": "[ab]{3}x"}, "[ab]{3}x"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"guided_json": {"enum": ["ab", "c"]}}, '"ab"|"c"'),
        ({"guided_json": '{"enum": ["ab", "c"]}'}, '"ab"|"c"'),
        ({"structured_outputs": {"regex": "[ab]{3}x"}}, "[ab]{3}x"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        ({"structured_outputs": {"json": {"enum": ["ab", "c"]}}}, '"ab"|"c"'),
    ],
)
def test_vllm_fields(client, fields, pattern):
    answer = ask(client, extra_body=fields, n=3)
    assert all(re.fullmatch(pattern, choice.message.content) for choice in answer.choices)
    completion = client.completions.create(model="tiny", prompt="x", max_tokens=30, extra_body=fields)
    assert re.fullmatch(pattern, completion.choices[0].text)


BAD = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"guided_json": {"type": "nope"}}, "guided_json", "nope"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", "json.properties.a has not"),
    ({"guided_json": {"$ref": "http://x/y"}}, "guided_json", "$ref"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": {"description": "x" * 70_000}}, "guided_json", "65536"),
    ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json", "range"),
    ({"guided_regex": "(a"}, "guided_regex", "parenthesis"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "Lookahead"),
    ({"guided_regex": ""}, "guided_regex", "at least one character"),
    ({"guided_grammar": "root ::= nobody"}, "guided_grammar", "nobody"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"structured_outputs": {}}, "structured_outputs", "nothing"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs", "whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_choice"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [{"type": "function"}]}, "tools", "function"),
    ({"tools": TOOLS + TOOLS}, "tools", "twice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "h"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "beside tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
        "not",
    ),
    ({"messages": [{"role": "tool", "content": None}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages", "tool_call_id"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "["}}]}
            ]
        },
        "messages",
        "arguments",
    ),
]


@pytest.mark.parametrize("fields, param, said", BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_named(client, fields, param, said):
    messages = fields.pop("messages", HELLO) if "messages" in fields else HELLO
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, extra_body=fields)
    assert error.value.param == param
    assert said in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "gg"}}])
def test_enforced_calls(client, choice):
    asked = dict(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    answer = ask(client, **asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.function.name in ("f", "gg") if choice == "required" else call.function.name == "gg"
    assert 0 <= json.loads(call.function.arguments)["n"] <= 9

    name, arguments, reason = None, "", None
    for chunk in ask(client, stream=True, **asked):
        choice_now = chunk.choices[0]
        reason = choice_now.finish_reason or reason
        for entry in choice_now.delta.tool_calls or ():
            assert entry.index == 0
            if name is None:
                assert entry.id
                name = entry.function.name
            arguments += entry.function.arguments
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")


def test_the_accumulating_helper(client):
    asked = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, seed=1, max_tokens=100, **asked, **NO_SPACE
    ) as stream:
        final = stream.get_final_completion()
    whole = ask(client, **asked).choices[0].message.tool_calls[0].function
    assert final.choices[0].message.tool_calls[0].function.arguments == whole.arguments


def test_going_on_after_a_call(client):
    call = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [*HELLO, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "7"}]
    answer = ask(client, messages=messages, tools=TOOLS, max_tokens=4)
    assert answer.usage.completion_tokens <= 4
    arguments = json.loads(call.tool_calls[0].function.arguments)
    assert answer.usage.prompt_tokens == len(f"fgguhia{arguments['n']}t7A")  # the template saw tools, call and result


def test_tools_that_may_be_called(client):
    answer = ask(client, tools=TOOLS, max_tokens=6).choices[0]
    assert answer.message.tool_calls is None
    without = ask(client, tools=TOOLS, tool_choice="none", max_tokens=6)
    assert without.usage.prompt_tokens == ask(client, max_tokens=6).usage.prompt_tokens
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    pushed = {"logit_bias": {**NO_SPACE["logit_bias"], "12": 100}}  # "<": the model would like to call
    choice = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=strict, max_tokens=60, seed=0, temperature=0, **pushed
    ).choices[0]
    assert choice.message.content is None or "<" in choice.message.content


def test_styles_of_models():
    qwen = "{% if tools %}<tools></tools><tool_call>{% endif %} </think>"
    llama = '{% if tools %} Respond in the format {"name": x, "parameters": y} {% endif %}'
    auto = ServeConfig()
    assert ChatStyle.of(qwen, auto) == ChatStyle("hermes", True, True)
    assert ChatStyle.of(llama, auto) == ChatStyle("llama3_json", True, False)
    assert ChatStyle.of("{{ messages }}", auto) == ChatStyle("hermes", False, False)
    assert ChatStyle.of("{% if tools %}[TOOL_CALLS]{% endif %}", auto) == ChatStyle("hermes", False, False)
    assert ChatStyle.of("{{ tools }}", ServeConfig(tool_call_parser="hermes")) == ChatStyle("hermes", True, False)
    assert ChatStyle.of(None, auto) == ChatStyle("hermes", False, False)
    told = ServeConfig(tool_call_parser="llama3_json", reasoning_parser="none")
    assert ChatStyle.of(qwen, told) == ChatStyle("llama3_json", True, False)
    digits, thinks = StructuredOutputs(regex="[0-9]"), ChatStyle.of("", ServeConfig(reasoning_parser="think"))
    assert thinks.behind_thought(digits, "a <think>\n", of_tools=False).thought == ("", "</think>")


def test_a_template_without_tools():
    tools = [Tool(**TOOLS[0])]
    with pytest.raises(ApiError, match="takes no tools"):
        settle_tools(tools, None, True, "hermes", knows_tools=False)
    named = NamedTool(type="function", function={"name": "f"})
    use = settle_tools(tools, named, True, "hermes", knows_tools=False)
    assert "tags_with_separator" not in use.outputs().tag  # one call, though several are allowed
    assert "tags_with_separator" in settle_tools(tools, "required", True, "hermes", knows_tools=False).outputs().tag
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    turns = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "7"},
    ]  # fmt: skip
    said = use.introduced([as_text(turn) for turn in turns])
    assert [turn["role"] for turn in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"].startswith("Be kind.\n\nYou can call functions.")
    assert '"maximum": 9' in said[0]["content"]
    assert said[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert "7" in said[3]["content"]
    assert use.introduced(turns[1:])[0]["role"] == "system"
    assert use.for_template() is None


def test_tools_reach_the_template(served):
    use = settle_tools([Tool(**tool) for tool in TOOLS], "auto", True, "hermes", knows_tools=True)
    tokenizer = served.llm.tokenizer
    text = render_chat(tokenizer, HELLO, add_generation_prompt=True, tools=use.for_template())
    assert text == "fgguhiA"


def test_llama_calls_are_enforced():
    llm = json_llm(3)
    llm.tokenizer.chat_template = TEMPLATE
    config = ServeConfig(tool_call_parser="llama3_json")
    with serving(llm, config) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        choice = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments).keys() == {"n"}


def test_a_form_begins_behind_the_thought():
    """Random weights never end a thought: what says that one is allowed is looked at."""
    llm = json_llm(3)
    llm.tokenizer.chat_template = TEMPLATE + "<think>"
    asked, make = [], llm.make_request
    llm.make_request = lambda prompt, params, **rest: asked.append(params) or make(prompt, params, **rest)
    with (
        serving(llm, ServeConfig(reasoning_parser="think")) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        choice = ask(client, max_tokens=20, extra_body={"guided_regex": "[0-9]{3}"}).choices[0]
    assert asked[-1].structured_outputs == StructuredOutputs(regex="[0-9]{3}", thought=("", "</think>"))
    assert choice.finish_reason == "length"
    assert choice.message.reasoning_content
    assert not choice.message.content


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr("peagle.structured.vocabulary.find_spec", lambda name: None)
    llm = json_llm(3)
    llm.tokenizer.chat_template = TEMPLATE
    with serving(llm) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match=r"peagle\[structured\]") as error:
            ask(client, response_format={"type": "json_object"})
        assert error.value.param == "response_format"
        assert ask(client, max_tokens=3).choices


def asked_by(number: int) -> dict:
    return {"guided_regex": HANGING + f"[{number}]"}


def test_compilations_that_hang_are_ended(monkeypatch):
    """They are refused, one after the other, while good ones and plain requests are answered beside them."""
    llm = json_llm(3)
    llm.tokenizer.chat_template = TEMPLATE
    ended: queue.Queue[openai.BadRequestError] = queue.Queue()
    with (
        Trials(llm.grammars.vocabulary, seconds=3.0) as llm.grammars.trials,
        serving(llm) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask(client, extra_body={"guided_regex": "ready"})

        def hang(number: int) -> None:
            with pytest.raises(openai.BadRequestError) as error:
                ask(client, extra_body=asked_by(number))
            ended.put(error.value)

        hanging = [threading.Thread(target=hang, args=(i,)) for i in range(MAX_COMPILING - 1)]
        for thread in hanging:
            thread.start()
        number = 0
        while ended.empty():
            word = f"ab{number}"
            assert ask(client, extra_body={"guided_regex": word}).choices[0].message.content == word
            assert ask(client, max_tokens=3).choices
            number += 1
        assert number > 2, "the good ones waited for those that hang"
        for thread in hanging:
            thread.join()
        for _ in hanging:
            assert "takes more than 3 seconds to compile: use a simpler one" in str(error := ended.get())
            assert error.param == "guided_regex"
        began = time.perf_counter()
        hang(0)  # is known by now
        assert time.perf_counter() - began < 2
        assert ask(client, extra_body={"guided_regex": "abc"}).choices[0].message.content == "abc"


class _Slow(Grammars):
    """Compiles nothing, slowly."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutputs] = []
        self.may_end = threading.Event()

    def kept(self, asked: StructuredOutputs) -> None:
        return None

    def compile(self, asked: StructuredOutputs) -> None:
        self.asked.append(asked)
        self.may_end.wait()


def test_equal_ones_share_a_compilation_and_too_many_wait_in_vain(monkeypatch):
    monkeypatch.setattr("peagle.server.structured.WAIT_SECONDS", 0.1)

    async def main() -> None:
        compiler, grammars = Compiler(), _Slow()
        forms = [StructuredOutputs(regex=f"a{i}") for i in range(MAX_COMPILING + 1)]
        under_way = [asyncio.create_task(compiler.compile(grammars, form, "x")) for form in forms[:-1] * 3]
        await asyncio.sleep(0.05)
        under_way.pop(0).cancel()  # others want the same
        with pytest.raises(ApiError, match="try again later") as error:
            await compiler.compile(grammars, forms[-1], "x")
        assert (error.value.status, error.value.headers["Retry-After"]) == (503, "5")
        grammars.may_end.set()
        await asyncio.gather(*under_way)
        assert sorted(grammars.asked, key=str) == forms[:-1]
        await compiler.compile(grammars, forms[-1], "x")

    asyncio.run(main())
