"""What a request's text has to be: JSON of a schema, a regular expression, one of some choices, a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.errors import PeagleError
from peagle.structured.schema import check_schema, opened

MAX_CHARACTERS = 64 * 1024  # of a schema, an expression, a grammar or all choices
MAX_WHITESPACE = 24  # between two tokens of JSON: a model that falls in love with spaces would never end
KINDS = ("json", "json_object", "regex", "choice", "grammar", "tag")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One of these is given. Names follow vLLM. Equal ones share a compiled grammar.

    `json` is a JSON schema, as text or as an object; properties that an object's schema does not name are forbidden
    where it does not say `additionalProperties`, unless `strict` is off. `grammar` is in xgrammar's EBNF with a rule
    `root`, `tag` an xgrammar structural format as JSON text. With `thought`, what opens and what closes one, the text
    begins with a thought that is free, or may; "" to open it says that the prompt has done so.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    tag: str | None = None
    strict: bool = True
    thought: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise PeagleError(f"structured_outputs has {' and '.join(given) or 'nothing'}: give one of {_listed()}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _read_choice(self.choice))
        for name in ("regex", "grammar", "tag"):
            text = getattr(self, name)
            if text is not None:
                if not isinstance(text, str) or not text:
                    raise PeagleError(f"{name} is {text!r:.60}: give a text of at least one character")
                _check_length(name, len(text))

    @property
    def kind(self) -> str:
        """Which of the forms is given."""
        return self._given()[0]

    def format(self) -> dict[str, Any]:
        """The same as an xgrammar structural format."""
        main = self._main_format()
        if self.thought is None:
            return main
        begin, end = self.thought
        thought: dict[str, Any] = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        if begin:
            thought = {"type": "optional", "content": thought}
        gap = {"type": "regex", "pattern": r"\s{0,3}"}
        return {"type": "sequence", "elements": [thought, gap, main]}

    def _main_format(self) -> dict[str, Any]:
        if self.json is not None or self.json_object:
            schema = {"type": "object"} if self.json is None else json.loads(str(self.json))
            schema = schema if self.strict and self.json is not None else opened(schema)
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}
        if self.regex is not None:
            return {"type": "regex", "pattern": self.regex}
        if self.choice is not None:
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in self.choice]}
        if self.grammar is not None:
            return {"type": "grammar", "grammar": self.grammar}
        form: dict[str, Any] = json.loads(str(self.tag))
        return form

    def _given(self) -> list[str]:
        given = [name for name in KINDS if getattr(self, name) is not None]
        return given if self.json_object else [name for name in given if name != "json_object"]


def _listed() -> str:
    return ", ".join(KINDS)


def _check_length(name: str, length: int) -> None:
    if length > MAX_CHARACTERS:
        raise PeagleError(f"{name} has {length} characters: at most {MAX_CHARACTERS} are compiled, use a smaller one")


def _schema_text(schema: Any) -> str:
    """A schema, checked, as one text however it was given; the order of its properties is kept: it is the output's."""
    if isinstance(schema, str):
        _check_length("json", len(schema))
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise PeagleError(f"json is not valid JSON ({error}): give a JSON schema") from None
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise PeagleError(f"json cannot be written as JSON ({error}): give a JSON schema") from None
    _check_length("json", len(text))
    check_schema(schema)
    return text


def _read_choice(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
        raise PeagleError(f"choice is {choice!r:.60}: give a list of at least one text")
    if not all(isinstance(text, str) and text for text in choice):
        raise PeagleError("choice has an entry that is no text of at least one character: leave it out")
    _check_length("choice", sum(map(len, choice)))
    return tuple(dict.fromkeys(choice))
