"""The harmony format, in which gpt-oss chats: messages with a channel each, divided by tokens that no text contains.

An answer is `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`, or
ends in a call: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. The tokens reach
the parser as marks, lone surrogates, which text from UTF-8 never holds: what a model merely spells out divides nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from peagle.errors import PeagleError
from peagle.structured.outputs import StructuredOutputs

START, END, MESSAGE, CHANNEL, CONSTRAIN = "\ud800", "\ud801", "\ud802", "\ud803", "\ud804"
_MARKS = {
    "<|start|>": START, "<|end|>": END, "<|message|>": MESSAGE, "<|channel|>": CHANNEL, "<|constrain|>": CONSTRAIN,
    "<|call|>": END, "<|return|>": END,
}  # fmt: skip
_STOPS = ("<|return|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class Harmony:
    """The format with a model's ids of its tokens, by name."""

    ids: Mapping[str, int]
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, template: str, tokens: Mapping[str, int], eos_ids: Sequence[int] = ()) -> Self | None:
        """The format if a template writes it in tokens of the model; `tokens` are those beyond its vocabulary of text,
        `eos_ids` end a text anyway."""
        if "<|channel|>" not in template or not tokens.keys() >= _MARKS.keys():
            return None
        return cls({name: tokens[name] for name in _MARKS}, tuple(eos_ids))

    @property
    def marks(self) -> dict[int, str]:
        """What stands for each token in the text that a parser reads."""
        return {self.ids[name]: mark for name, mark in _MARKS.items()}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends an answer."""
        return tuple(self.ids[name] for name in _STOPS)

    def answer(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """Hold the final message to a form; only thoughts may come before it."""
        final = _sequence(*self._header("final"), outputs.format())
        return self._behind((self._message("analysis"),), final)

    def calls(self, forms: Mapping[str, Mapping[str, Any]], *, must: bool) -> StructuredOutputs:
        """Hold calls to the forms of their arguments, by function. Unless one is a must, an answer may do without."""
        json_mark = (self._token("<|constrain|>"), _text("json"))
        ends = [
            _sequence(*self._header(f"commentary to=functions.{name} ", *json_mark), dict(form))
            for name, form in forms.items()
        ]
        before = [self._message("analysis")]
        if not must:
            before.append(self._message("commentary"))
            ends.append(_sequence(*self._header("final"), self._free()))
        return self._behind(before, _either(*ends))

    def _behind(self, messages: Sequence[dict[str, Any]], last: dict[str, Any]) -> StructuredOutputs:
        form = _sequence({"type": "star", "content": _either(*messages)}, last)
        return StructuredOutputs(tag=json.dumps(form))

    def _message(self, channel: str) -> dict[str, Any]:
        """A whole message that is not the last one, and the beginning of the next."""
        after = (self._token("<|end|>"), self._token("<|start|>"), _text("assistant"))
        return _sequence(*self._header(channel), self._free(), *after)

    def _header(self, channel: str, *kind: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._token("<|channel|>"), _text(channel), *kind, self._token("<|message|>")]

    def _free(self) -> dict[str, Any]:
        return {"type": "any_tokens", "exclude_tokens": sorted({*self.ids.values(), *self.eos_ids})}

    def _token(self, name: str) -> dict[str, Any]:
        return {"type": "token", "token": self.ids[name]}


def begun_header(prompt: str) -> str:
    """The header of the message within which a rendered prompt ends, as its answer would have it; mostly nothing."""
    header, found, body = prompt.rpartition("<|start|>")[2].partition("<|message|>")
    if not found or body.endswith(("<|end|>", *_STOPS)):
        return ""
    for name, mark in _MARKS.items():
        header = header.replace(name, mark)
    return START + header + MESSAGE


def harmony_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as gpt-oss' template takes it without leaving anything out.

    It reads one system message, at the beginning, and one call of a turn, with a thought or a text but not both.
    """
    count = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    if any(turn["role"] == "system" for turn in turns[count:]):
        raise PeagleError("messages has a system message behind others: this model reads them at the beginning alone")
    made: list[dict[str, Any]] = []
    if count:
        made.append({"role": "system", "content": "\n\n".join(turn["content"] for turn in turns[:count])})
    rest = [dict(turn) for turn in turns[count:]]
    while rest:
        turn = rest.pop(0)
        calls = turn.get("tool_calls", ())
        if calls:
            said = [turn.get("thinking"), turn["content"]]
            turn |= {"content": "", "thinking": "\n\n".join(filter(None, said))}
        if len(calls) > 1:
            rest = [*_one_by_one(turn, rest), *rest[_num_results(rest) :]]
            turn = rest.pop(0)
        made.append(turn)
    return made


def _num_results(turns: Sequence[Mapping[str, Any]]) -> int:
    """How many results of functions stand at the beginning."""
    return next((at for at, turn in enumerate(turns) if turn["role"] != "tool"), len(turns))


def _one_by_one(turn: Mapping[str, Any], behind: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call of a turn with what it gave, by id or else in order; the first has the thought."""
    results = list(behind[: _num_results(behind)])
    made: list[dict[str, Any]] = []
    for number, call in enumerate(turn["tool_calls"]):
        made.append({**turn, "thinking": "" if number else turn["thinking"], "tool_calls": [call]})
        own = [result for result in results if call["id"] and result.get("tool_call_id") == call["id"]]
        own = own or [result for result in results if not result.get("tool_call_id")][:1]
        results = [result for result in results if not any(result is other for other in own)]
        made += own
    return [*made, *results]


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}
