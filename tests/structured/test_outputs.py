"""What may be asked for: every mistake is named, what cannot be enforced is refused, equal ones share a grammar."""

import json
import threading

import numpy as np
import pytest

from peagle.errors import PeagleError
from peagle.structured.grammars import MOST_KEPT, Grammars
from peagle.structured.outputs import MAX_CHARACTERS, StructuredOutputs
from peagle.structured.schema import check_schema, opened
from peagle.structured.vocabulary import Vocabulary
from tests.structured.tiny_json import json_tokenizer, random_schema

BAD = [
    ({}, "has nothing: give one of json, json_object"),
    ({"regex": "a", "grammar": "root ::= x"}, "has regex and grammar"),
    ({"json_object": True, "json": {}}, "has json and json_object"),
    ({"regex": ""}, "regex is ''"),
    ({"regex": 3}, "regex is 3"),
    ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"at most {MAX_CHARACTERS}"),
    ({"choice": "ab"}, "choice is 'ab'"),
    ({"choice": []}, "at least one text"),
    ({"choice": ["a", ""]}, "at least one character"),
    ({"choice": ["a", 1]}, "at least one character"),
    ({"choice": ["a" * 40_000, "b" * 40_000]}, "80000 characters"),
    ({"json": "{"}, "not valid JSON"),
    ({"json": "[" * 100_000}, "100000 characters"),
    ({"json": "[" * 60_000}, "not valid JSON"),
    ({"json": "3"}, "json is 3"),
    ({"json": [1]}, "json is \\[1\\]"),
    ({"json": {"enum": [{1, 2}]}}, "cannot be written as JSON"),
]
NOT_ENFORCED = [
    ({"type": "array", "uniqueItems": True}, "json has uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "object", "properties": {"a": {"if": {}}}}, "json.properties.a has if"),
    ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"not": {}}, "not"),
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "multipleOf"),
    ({"minimum": 3}, "json has minimum without the type"),
    ({"minLength": 3}, "minLength without the type"),
    ({"type": "string", "format": "regex"}, "format 'regex'"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern beside"),
    ({"type": "string", "enum": ["a"], "maxLength": 3}, "beside maxLength"),
    ({"anyOf": [{"type": "string"}], "properties": {}}, "anyOf beside properties"),
    ({"anyOf": [{"required": ["a"]}], "type": "object"}, "anyOf beside type"),
    ({"$ref": "#/$defs/a", "maxLength": 3, "type": "string"}, r"\$ref beside maxLength"),
    ({"$ref": "file:///etc/passwd"}, r"\$ref 'file"),
    ({"allOf": [{"type": "string"}, {"type": "string"}]}, "allOf of 2"),
    ({"anyOf": []}, "anyOf is \\[\\]"),
    ({"anyOf": {}}, "expected a list"),
    ({"properties": [1]}, "expected an object"),
    ({"items": 3}, "json.items is 3"),
]


@pytest.mark.parametrize("asked, said", BAD, ids=lambda value: str(value)[:30])
def test_mistakes_are_named(asked, said):
    with pytest.raises(PeagleError, match=said) as error:
        StructuredOutputs(**asked)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("schema, said", NOT_ENFORCED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_refused(schema, said):
    with pytest.raises(PeagleError, match=said):
        check_schema(schema)
    with pytest.raises(PeagleError, match=said):
        StructuredOutputs(json=json.dumps(schema))


def test_what_can_be_enforced_passes():
    for schema in (
        True, {}, {"type": "array", "uniqueItems": False},
        {"$ref": "#/$defs/a", "description": "x", "$defs": {"a": {"type": "string", "format": "date"}}},
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}], "default": None, "title": "T"},
        {"type": "object", "oneOf": [{"type": "object", "properties": {"not": {"type": "integer"}}}]},
        {"allOf": [{"type": "string"}]}, {"enum": [{"not": 1, "if": 2}]}, {"type": "string", "enum": ["a"]},
    ):  # fmt: skip
        check_schema(schema)
    rng = np.random.default_rng(0)
    for _ in range(100):
        check_schema(random_schema(rng)[0])


def test_deep_schemas_end():
    schema: dict = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(PeagleError, match="deeper than 64"):
        check_schema(schema)


def test_opened_schemas():
    schema = {"type": "object", "properties": {"a": {"properties": {}, "additionalProperties": False}}, "enum": [1]}
    assert opened(schema) == {**schema, "additionalProperties": True}
    assert opened({"items": {"type": ["object", "null"]}})["items"]["additionalProperties"] is True
    assert "additionalProperties" not in schema


def test_kinds_are_equal_however_they_are_written():
    schema = {"type": "string"}
    assert StructuredOutputs(json=schema) == StructuredOutputs(json=json.dumps(schema))
    assert len({StructuredOutputs(choice=["a", "b", "a"]), StructuredOutputs(choice=("a", "b"))}) == 1
    assert StructuredOutputs(json=False).kind == "json"
    assert StructuredOutputs(json_object=True).kind == "json_object"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pytest.importorskip("xgrammar")
    return Grammars(Vocabulary.of(json_tokenizer(), 96, (1,)))


@pytest.mark.parametrize(
    ("opening", "obeys", "does_not"),
    [
        ("<think>", ["<think>hm < x</think>\nab", "<think></think>ab", "ab"], ["<think>ab", "hm</think>ab", "abab"]),
        ("", ["hm < x</think>\n\nab", "</think>ab"], ["ab", "hm</think>hm", "hm</think>ab</think>ab"]),
    ],
)
def test_a_thought_is_free_and_the_rest_is_not(grammars, opening, obeys, does_not):
    asked = StructuredOutputs(regex="ab", thought=(opening, "</think>"))

    def follows(text):
        matcher = grammars.matcher(asked)
        return all(map(matcher.accept, [*json_tokenizer().encode(text), 1]))  # 1 ends the text

    assert [text for text in [*obeys, *does_not] if follows(text)] == obeys


def test_grammars_are_kept_a_while(grammars):
    first = StructuredOutputs(regex="a0")
    compiled = grammars.compile(first)
    assert grammars.compile(StructuredOutputs(regex="a0")) is compiled
    for i in range(1, MOST_KEPT + 1):
        grammars.compile(StructuredOutputs(regex=f"a{i}"))
    assert grammars.compile(first) is not compiled


def test_many_threads_compile(grammars):
    found = []
    work = [threading.Thread(target=lambda i=i: found.append(grammars.compile(StructuredOutputs(regex=f"b{i % 5}x"))))
            for i in range(20)]  # fmt: skip
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(found) == 20


def test_a_slow_grammar_is_refused(grammars, monkeypatch):
    monkeypatch.setattr("peagle.structured.vocabulary._SLOWEST_STEP", 1e-7)
    with pytest.raises(PeagleError, match="regex can be read in too many ways"):
        grammars.compile(StructuredOutputs(regex="[ab]{5}c"))


def test_a_model_without_an_end_is_refused():
    pytest.importorskip("xgrammar")
    with pytest.raises(PeagleError, match="end-of-text"):
        Vocabulary.of(json_tokenizer(), 96, ())


def test_rollback_over_the_end(grammars):
    """Accept and take back in every pattern: the masks are those of a matcher that went there straight."""
    rng, asked = np.random.default_rng(5), StructuredOutputs(regex="(ab|a)[0-9]{0,2}")
    matcher, path = grammars.matcher(asked), []
    for _ in range(300):
        row = np.empty(3, dtype=np.int32)
        matcher.fill(row)
        straight, expected = grammars.matcher(asked), np.empty(3, dtype=np.int32)
        assert all(map(straight.accept, path))
        straight.fill(expected)
        assert (row == expected).all()
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if rng.random() < 0.4 and path:
            count = int(rng.integers(1, len(path) + 1))
            matcher.rollback(count)
            path = path[:-count]
        elif len(path) < 12:
            path.append(int(rng.choice(allowed)))
            assert matcher.accept(path[-1])
