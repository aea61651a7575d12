"""Answers in the harmony format: what is found in them, however they arrive and whatever is wrong with them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.request import Request
from peagle.engine.text import MeasuredStream, TextStream
from peagle.sampling import SamplingParams
from peagle.server.answer_parsing import Piece, joined
from peagle.server.chat import MessageWriter
from peagle.server.harmony import Harmony
from peagle.server.harmony_parsing import HarmonyMessages
from tests.server.tiny_harmony import MARKED, harmony_tokenizer, ids_of

TOKENIZER = harmony_tokenizer()
HARMONY = Harmony.of("<|channel|>", {name: ids_of(TOKENIZER, name)[0] for name in MARKED}, (1,))
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n":1}'
F = [Piece("name", "f", 0), Piece("arguments", '{"n":1}', 0)]


def text(content: str) -> Piece:
    return Piece("text", content)


def thought(content: str) -> Piece:
    return Piece("thought", content)


ANSWERS = {
    "<|channel|>final<|message|>hello you": [text("hello you")],
    "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final<|message|>yes": [
        thought("hmm"), text("yes"),
    ],
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    "<|start|>assistant<|channel|>final<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d": [
        thought("a\nb"), text("c\nd"),
    ],
    CALL: F,
    f"<|channel|>analysis<|message|>hmm<|end|><|start|>assistant{CALL}<|call|>": [thought("hmm"), *F],
    f"<|channel|>commentary<|message|>so:<|end|><|start|>assistant{CALL}": [text("so:"), *F],
    ' to=functions.f<|channel|>commentary json<|message|>{"n":1}': F,
    '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n":1}': F,
    '<|channel|>commentary to=functions.f<|message|>{"n":1}': F,
    '<|channel|>analysis to=functions.f code<|message|>{"n":1}': F,
    '<|channel|>commentary to=f json<|message|>{"n":1}': F,
    '<|channel|>commentary to=functions.x.y<|message|>{}': [Piece("name", "x.y", 0), Piece("arguments", "{}", 0)],
    f"{CALL}<|end|><|start|>assistant{CALL}<|call|>": [*F, Piece("name", "f", 1), Piece("arguments", '{"n":1}', 1)],
    "<|channel|>commentary to=functions.f json<|message|><|call|>": [F[0], Piece("arguments", "{}", 0)],
    "<|channel|>commentary to=functions.f json<|message|>": [F[0]],  # cut: nobody knows what was to come
    "<|channel|>commentary to=python code<|message|>print": [text("print")],
    "<|channel|>analysis to=browser.search<|message|>print": [thought("print")],
    "<|channel|>commentary to=functions.<|message|>x": [text("x")],
    # Something is wrong with these.
    "": [],
    "hello you": [text("hello you")],
    " ": [text(" ")],
    "to": [text("to")],
    "to be": [text("to be")],
    "to=functions.f": [],
    "a <|message|>b": [text("a b")],
    "<|message|>b": [text("b")],
    "<|channel|>": [],
    "<|channel|>anal": [],
    "<|channel|>analysis": [],
    "<|channel|>commentary to=func": [],
    "<|channel|>commentary to=functions.f js": [],
    "<|channel|>commentary to=functions.f <|constrain|>js": [],
    "<|channel|>analysis<|message|>cut": [thought("cut")],
    "<|channel|>analysis<|message|>a<|end|>": [thought("a")],
    "<|channel|>analysis<|message|>a<|end|><|start|>assis": [thought("a")],
    "<|channel|>analysis<|message|>a<|end|>assis": [thought("a")],
    "<|channel|>analysis<|message|>a<|end|>  ": [thought("a")],
    "<|channel|>analysis<|message|>a<|end|>and more": [thought("a"), text("and more")],
    "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b": [thought("a"), text("b")],
    "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b": [thought("a"), text("b")],
    "<|channel|>analysis<|message|>a<|channel|>final<|message|>b": [thought("a"), text("b")],
    "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b": [thought("a"), text("b")],
    "<|channel|>analysis<|channel|>final<|message|>b": [text("b")],
    "<|channel|>final<|message|>a<|message|>b<|constrain|>c": [text("abc")],
    "<|channel|>secret<|message|>b": [text("b")],
    "<|channel|><|message|>b": [text("b")],
    "<|start|>user<|message|>b<|end|>": [text("b")],
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7": [text("7")],
    "<|channel|>analysis so it is<|end|>": [thought("so it is")],
    "<|channel|>finalhello<|end|>": [text("hello")],
    "<|start|>assistant hello you": [text("hello you")],
    '<|channel|>commentary to=functions.f <|constrain|>json{"n":1}<|call|>': F,
    "<|end|><|end|>": [],
}  # fmt: skip


def stream_of(measured: bool = False, stop: tuple[str, ...] = ()) -> TextStream:
    return (MeasuredStream if measured else TextStream)(TOKENIZER, stop, HARMONY.marks)


def read(ids: list[int], cuts: list[int], names: set[str] | None = frozenset({"f"})) -> list[Piece]:
    """The pieces of an answer whose tokens arrive in rounds that end at `cuts`."""
    stream, parser, pieces = stream_of(), HarmonyMessages(names), []
    for number, token in enumerate(ids):
        assert not stream.push(token)
        if number in cuts:
            pieces += parser.push(stream.take())
    stream.finish(ids)
    return joined(pieces + parser.push(stream.take(final=True)) + parser.finish())


@pytest.mark.parametrize("said, found", ANSWERS.items())
def test_what_is_found_at_every_chunk_size(said: str, found: list[Piece]):
    ids = ids_of(TOKENIZER, said)
    for size in range(1, len(ids) + 2):
        assert read(ids, list(range(size - 1, len(ids), size))) == found


def test_without_functions_messages_to_them_are_text():
    assert read(ids_of(TOKENIZER, CALL), [], None) == [text('{"n":1}')]


def test_marks_that_are_only_spelled_divide_nothing():
    """In characters, not in the special tokens: a user may ask a model to say them."""
    spelled = [token for char in "<|end|>" for token in ids_of(TOKENIZER, char)]
    assert ids_of(TOKENIZER, "<|end|>") != spelled
    assert read([*ids_of(TOKENIZER, "<|channel|>final<|message|>"), *spelled], []) == [text("<|end|>")]


RUNS = st.lists(st.sampled_from([*MARKED, "assistant", "analysis", "final", "commentary", " to=functions.f", "json",
                                 "é", "\n", "Q", "Q Q"]), max_size=16)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(runs=RUNS, data=st.data())
def test_any_answer_is_read_alike_in_any_rounds(runs: list[str], data: st.DataObject):
    ids = [token for run in runs for token in ids_of(TOKENIZER, run)]
    whole = read(ids, [])
    cuts = data.draw(st.sets(st.integers(0, max(len(ids) - 1, 0))))
    assert read(ids, sorted(cuts)) == whole
    assert not re.search("[\ud800-\udfff]", "".join(piece.text for piece in whole))
    bodies = "".join(piece.text for piece in whole if piece.kind != "name")
    assert sum(piece.kind == "name" for piece in whole) == len({piece.call for piece in whole} - {-1})
    # A message keeps all it holds: behind `<|message|>` and up to the next mark, nothing is taken for a header.
    for body in re.findall(r"<\|message\|>([^<]+)", "".join(runs)):
        assert body in bodies


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40), data=st.data())
def test_any_tokens_are_read_alike_in_any_rounds(ids: list[int], data: st.DataObject):
    """Half characters, special tokens without a mark and names of nothing among them."""
    cuts = data.draw(st.sets(st.integers(0, max(len(ids) - 1, 0))))
    assert read(ids, sorted(cuts)) == read(ids, [])


def test_half_a_character_stays_in_its_message():
    first, last = ids_of(TOKENIZER, "é")
    ids = [*ids_of(TOKENIZER, "<|channel|>final<|message|>a"), first, *ids_of(TOKENIZER, "<|end|>"), last]
    assert read(ids, []) == [text("a\ufffd\n\ufffd")]
    assert read(ids, list(range(len(ids)))) == [text("a\ufffd\n\ufffd")]


def test_stop_strings_and_measures_know_the_marks():
    stream = stream_of(measured=True, stop=("lo",))
    shown = [(stream.push(token), stream.take()) for token in ids_of(TOKENIZER, "<|channel|>final<|message|>hello")]
    assert shown[-1] == (True, "")
    pieces = HarmonyMessages(None).push("".join(piece for _, piece in shown))
    assert pieces == [text("hel")]
    assert len(stream.text) == stream.ends[-1] == len("final") + 2 + len("hel")


def ended(said: str, measured: bool) -> Request:
    """A request whose answer a token of `stop_ids` ended, as `<|call|>` does in an engine."""
    ids = ids_of(TOKENIZER, said)
    request = Request(
        0, "", [0], SamplingParams(max_tokens=99), seed=0, stop_ids=frozenset(HARMONY.stop_ids), max_tokens=99,
        stream=stream_of(measured),
    )  # fmt: skip
    assert request.emit(ids) == len(ids)
    assert request.finish_reason == "stop"
    return request


@pytest.mark.parametrize("measured", [False, True])
def test_a_call_without_arguments_has_none_where_its_token_ends_the_answer(measured: bool):
    called = ended("<|channel|>commentary to=functions.f<|message|><|call|>", measured)
    parser = HarmonyMessages({"f"})
    pieces = parser.push(called.stream.take())
    shown = called.output(TOKENIZER).text
    pieces += parser.push(called.stream.take(final=True)) + parser.finish()
    assert joined(pieces) == [Piece("name", "f", 0), Piece("arguments", "{}", 0)]
    assert called.output(TOKENIZER).text == shown  # asked again, it is the same
    if measured:
        assert called.output(TOKENIZER).text_ends[-1] <= len(shown)


def test_what_was_not_pushed_of_an_answer_is_in_its_text_once():
    """`LLM.generate` without anybody who reads along makes the text at the end."""
    ids = ids_of(TOKENIZER, "<|channel|>final<|message|>hello")
    for pushed in range(len(ids) - len("hello"), len(ids) + 1):
        stream = stream_of()
        for token in ids[:pushed]:
            stream.push(token)
        text = stream.finish(ids)
        assert text.endswith("hello"), pushed
        assert stream.finish(ids) == text


@pytest.mark.parametrize("said", ANSWERS)
def test_a_stream_gives_the_whole_message(said: str):
    marked = stream_of()
    for token in ids_of(TOKENIZER, said):
        marked.push(token)
    writer = MessageWriter(HarmonyMessages({"f"}), True)
    whole = writer.whole(marked.text)["message"]
    calls = [entry["function"] for entry in whole.get("tool_calls", ())]
    for size in (1, 3):
        parts = [marked.text[at : at + size] for at in range(0, len(marked.text), size)] or [""]
        streamed = MessageWriter(HarmonyMessages({"f"}), True)
        deltas = [streamed.piece(part, final=n == len(parts) - 1)["delta"] for n, part in enumerate(parts)]
        assert "".join(delta.get("content", "") for delta in deltas) == (whole["content"] or "")
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole.get("reasoning_content", "")
        told = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
        names = [entry["function"]["name"] for entry in told if "id" in entry]
        assert names == [call["name"] for call in calls]
        assert streamed.reason("stop") == writer.reason("stop") == ("tool_calls" if calls else "stop")
