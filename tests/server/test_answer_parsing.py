"""Thoughts and calls in answers: what is found, and that it is the same however the text arrives."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.server.answer_parsing import HermesCalls, JsonCalls, Parser, Piece, PlainText, Thoughts, joined
from peagle.server.chat import MessageWriter

ARGUMENTS = '{"a": "x</tool_call> \\" {", "b": [1, {"c": "}"}]}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
F = [Piece("name", "f", 0), Piece("arguments", ARGUMENTS, 0)]


def text(content: str) -> Piece:
    return Piece("text", content)


def thought(content: str) -> Piece:
    return Piece("thought", content)


def call(arguments: str, number: int = 0, name: str = "f") -> list[Piece]:
    return [Piece("name", name, number), Piece("arguments", arguments, number)]


HERMES = {
    "hello world ": [text("hello world ")],
    "  ": [text("  ")],
    CALL: F,
    f"Sure. {CALL}\n{CALL}\n": [text("Sure."), *F, *call(ARGUMENTS, 1)],
    "a <tool_call> b": [text("a <tool_call> b")],
    "<tool_call": [text("<tool_call")],
    '<tool_call>{"nam': [text('<tool_call>{"nam')],
    '<tool_call>{"name": "f"}</tool_call> and text': [*call("{}"), text(" and text")],
    '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>': call('{"x": 1}', name="g"),
    '<tool_call>{"name": "f", "parameters": {}}</tool_call>': call("{}"),
    '<tool_call>{"name": "f", "arguments": {"a": 1': call('{"a": 1'),
    '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> rest': [*call('{"a": 1'), text(" rest")],
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>': call('{"a": 1}'),
    '<tool_call>{"name": "f", "id": 3, "arguments": null}</tool_call>': call("{}"),
    '<tool_call>{"name": "f", "arguments": 3}</tool_call>': [
        text('<tool_call>{"name": "f", "arguments": 3}</tool_call>')
    ],
    '<tool_call>{"name": 3}</tool_call>': [text('<tool_call>{"name": 3}</tool_call>')],
    '<tool_call>{"x": {"name": "]}"}, "name": "f", "arguments": {}} junk </tool_call>\n\n' + CALL: [
        *call("{}"), *call(ARGUMENTS, 1),
    ],
    '<tool_call>{"x": "a\\\\", "y": ["\\\\"], "name": "f", "arguments": {"a": "b\\\\", "c": "}"}}</tool_call>': call(
        '{"a": "b\\\\", "c": "}"}'
    ),
    f"x <<tool_call>[1]<tool_call>{CALL}": [text("x <<tool_call>[1]<tool_call>"), *F],
}  # fmt: skip
THOUGHTS = {
    f"<think>\nhmm\n</think>\n\nyes {CALL}": [thought("hmm"), text("yes"), *F],
    " \n<think> a </thin k></think> ": [thought("a </thin k>")],
    "<think>a b  c \n\n d</think>z": [thought("a b  c \n\n d"), text("z")],
    "<think></think>x": [text("x")],
    "<think>never ends <": [thought("never ends <")],
    "<thin": [text("<thin")],
    "no thoughts</think>": [text("no thoughts</think>")],
}
LLAMA = {
    '{"name": "f", "parameters": {"a": 1}}': call('{"a": 1}'),
    ' {"name": "f", "arguments": {}} ': call("{}"),
    '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}': [
        *call('{"a": 1}'), *call("{}", 1, "g"),
    ],
    '{"name": "other", "parameters": {"a": 1}}': [text('{"name": "other", "parameters": {"a": 1}}')],
    '{"name": "f", "parameters": {"a"': call('{"a"'),
    '{"name": "f"': [text('{"name": "f"')],
    '{"a": 1}': [text('{"a": 1}')],
    "just text": [text("just text")],
    "": [],
}  # fmt: skip
MAKERS: dict[str, Callable[[], Parser]] = {
    "hermes": HermesCalls,
    "thoughts": lambda: Thoughts(HermesCalls(), is_open=False),
    "llama": lambda: JsonCalls({"f", "g"}),
    "open": lambda: Thoughts(PlainText(), is_open=True),
    "plain": PlainText,
}
CASES = [
    *(("hermes", said, found) for said, found in HERMES.items()),
    *(("thoughts", said, found) for said, found in (HERMES | THOUGHTS).items()),
    *(("llama", said, found) for said, found in LLAMA.items()),
    ("open", "so\n</think>\n\nyes </think>", [thought("so"), text("yes </think>")]),
    ("open", "so", [thought("so")]),
    ("plain", CALL, [text(CALL)]),
]


def read(parser: Parser, said: str, size: int) -> list[Piece]:
    pieces = []
    for at in range(0, len(said), size):
        pieces += parser.push(said[at : at + size])
    return joined(pieces + parser.finish())


@pytest.mark.parametrize("parser, said, found", CASES)
def test_what_is_found_at_every_chunk_size(parser: str, said: str, found: list[Piece]):
    for size in range(1, len(said) + 2):
        assert read(MAKERS[parser](), said, size) == found


MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {',
    '"',
    "}",
    "\\",
    "a",
    " \n",
]


@settings(max_examples=300, deadline=None)
@given(said=st.lists(st.sampled_from(MARKS), max_size=14).map("".join), parser=st.sampled_from(sorted(MAKERS)))
def test_random_texts_at_every_chunk_size(said: str, parser: str):
    whole = read(MAKERS[parser](), said, len(said) + 1)
    for size in (1, 2, 3, 5, 8, 13):
        assert read(MAKERS[parser](), said, size) == whole
    for one, next_one in pairwise(whole):  # a call begins with its name
        if next_one.kind == "arguments":
            assert one == Piece("name", "f", next_one.call)


def gathered(said: str, size: int, several: bool = True) -> dict:
    """A message put together from the chunks of a stream, as clients do."""
    writer = MessageWriter(MAKERS["thoughts"](), several)
    message: dict = {"content": None, "reasoning_content": None, "tool_calls": []}
    pushed = [said[at : at + size] for at in range(0, len(said), size)] or [""]
    for number, piece in enumerate(pushed):
        delta = writer.piece(piece, final=number == len(pushed) - 1)["delta"]
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = (message[name] or "") + delta[name]
        for entry in delta.get("tool_calls", ()):
            if entry["index"] == len(message["tool_calls"]):
                assert entry["id"].startswith("call_")
                assert entry["type"] == "function"
                message["tool_calls"].append({"name": entry["function"]["name"], "arguments": ""})
            else:
                assert entry.keys() == {"index", "function"}
                assert entry["function"].keys() == {"arguments"}
            message["tool_calls"][entry["index"]]["arguments"] += entry["function"]["arguments"]
    return {**message, "reason": writer.reason("stop")}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("said", [*HERMES, *THOUGHTS])
def test_a_stream_gives_the_whole_message(said: str, several: bool):
    writer = MessageWriter(MAKERS["thoughts"](), several)
    whole = writer.whole(said)["message"]
    calls = [entry["function"] for entry in whole.get("tool_calls", ())]
    assert len({entry["id"] for entry in whole.get("tool_calls", ())}) == len(calls)
    assert several or len(calls) <= 1
    for size in (1, 4, len(said) + 1):
        streamed = gathered(said, size, several)
        assert streamed["tool_calls"] == calls
        assert streamed["reason"] == writer.reason("stop") == ("tool_calls" if calls else "stop")
        assert (streamed["content"] or "") == (whole["content"] or "")
        assert streamed["reasoning_content"] == whole.get("reasoning_content")


def test_the_reason_of_a_call_that_was_cut():
    writer = MessageWriter(HermesCalls(), True)
    message = writer.whole('<tool_call>{"name": "f", "arguments": {"a": 1')["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1'}
    assert writer.reason("length") == "length"
    assert json.loads(json.dumps(message)) == message
