"""What a chat answer is made of: a thought, text, calls of functions. Parsers read it piece by piece.

They decide by single characters, so that the pieces together are the same however the text was cut.
"""

from collections.abc import Set
from typing import Literal, NamedTuple, Protocol

from peagle.server.call_scanner import CallScanner, Malformed

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class Piece(NamedTuple):
    """A part of an answer. `call` numbers the calls from 0; each begins with its name."""

    kind: Literal["text", "thought", "name", "arguments"]
    text: str
    call: int = -1


class Parser(Protocol):
    """Takes text as it comes."""

    def push(self, text: str) -> list[Piece]:
        """What is decided with this text."""

    def finish(self) -> list[Piece]:
        """What is left at the end."""


class PlainText:
    """All is text."""

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        return [Piece("text", text)] if text else []

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        return []


class Thoughts:
    """A thought between `<think>` and `</think>` at the beginning, then what `rest` reads. Space around both is left
    out."""

    def __init__(self, rest: Parser, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the thought."""
        self._rest, self._held = rest, ""
        self._state: Literal["begins", "thinks", "ends", "rest"] = "thinks" if is_open else "begins"
        self._is_blank = True  # nothing but space of the thought yet

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        if self._state == "rest":
            return self._rest.push(text)
        self._held += text
        if self._state == "begins":
            start = self._held.lstrip()
            if THINK.startswith(start) and start != THINK:
                return []
            self._state = "thinks" if start.startswith(THINK) else "rest"
            if self._state == "rest":
                return self._release()
            self._held = start.removeprefix(THINK)
        pieces = self._think() if self._state == "thinks" else []
        if self._state == "ends":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "rest"
                pieces += self._release()
        return pieces

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece] = []
        if self._state == "begins":
            pieces = self._release()
        elif self._state == "thinks" and (left := self._held.rstrip()):
            pieces = [Piece("thought", left)]
        return pieces + self._rest.finish()

    def _think(self) -> list[Piece]:
        if self._is_blank:
            self._held = self._held.lstrip()
        thought, found, after = self._held.partition(END_THINK)
        if found:
            self._state, self._held = "ends", after
            thought = thought.rstrip()
        else:
            thought = self._held[: len(self._held) - _held_back(self._held, END_THINK)].rstrip()
            self._held = self._held[len(thought) :]
        self._is_blank = self._is_blank and not thought
        return [Piece("thought", thought)] if thought else []

    def _release(self) -> list[Piece]:
        held, self._held = self._held, ""
        return self._rest.push(held)


class _Call:
    """One call under way, as pieces."""

    def __init__(self, number: int, names: Set[str] | None = None) -> None:
        self._number, self._scanner, self._told = number, CallScanner(names), False

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to read."""
        return self._scanner.is_done

    @property
    def is_told(self) -> bool:
        """Whether its name is known to all: what follows belongs to it."""
        return self._told

    def feed(self, char: str) -> list[Piece]:
        """Read on. Raises Malformed for what is no call."""
        self._scanner.feed(char)
        pieces = []
        if self._scanner.name is not None and not self._told:
            self._told = True
            pieces.append(Piece("name", self._scanner.name, self._number))
        if said := self._scanner.take():
            pieces.append(Piece("arguments", said, self._number))
        return pieces


class HermesCalls:
    """Calls as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, with text around them. Space around calls is
    left out; what is no call stays text."""

    def __init__(self) -> None:
        self._held = ""  # the end of the text: space, or what may be the beginning of a mark
        self._raw = ""  # what has been read of the call, and the space before it
        self._call: _Call | None = None
        self._skips = False  # what is left until the end of a call
        self._num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece] = []
        for char in text:
            pieces += self._read_text(char) if self._call is None else self._read_call(char, self._call)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        if self._call is not None:
            return [] if self._call.is_told else [Piece("text", self._raw)]
        is_text = not self._skips and (self._held.strip() or not self._num_calls)
        return [Piece("text", self._held)] if is_text and self._held else []

    def _read_text(self, char: str) -> list[Piece]:
        self._held += char
        if self._skips:
            if self._held.endswith(END_CALL):
                self._held, self._skips = "", False
            return []
        if self._held.endswith(CALL):
            text = self._held.removesuffix(CALL).rstrip()
            self._held, self._raw, self._call = "", self._held[len(text) :], _Call(self._num_calls)
        else:
            text = self._held[: len(self._held) - _held_back(self._held, CALL)].rstrip()
            self._held = self._held[len(text) :]
        return [Piece("text", text)] if text else []

    def _read_call(self, char: str, call: _Call) -> list[Piece]:
        self._raw += char
        try:
            pieces = call.feed(char)
        except Malformed:
            self._call, raw = None, self._raw
            return [Piece("text", raw[:-1]), *self._read_text(raw[-1])]  # its last may begin another mark
        if call.is_done:
            self._call, self._held, self._skips = None, "<" if char == "<" else "", True
            self._num_calls += 1
        return pieces


class JsonCalls:
    """Llama 3's: the whole answer is `{"name": ..., "parameters": ...}`, or several of them, divided by `;`. An answer
    that does not begin so, or names no function there is, is text."""

    def __init__(self, names: Set[str]) -> None:
        self._names, self._raw, self._num_calls = names, "", 0
        self._call: _Call | None = _Call(0, names)

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece] = []
        for at, char in enumerate(text):
            if self._call is None:
                pieces.append(Piece("text", text[at:]))
                break
            pieces += self._read(char, self._call)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        is_text = self._call is not None and not self._call.is_told and self._raw and not self._num_calls
        return [Piece("text", self._raw)] if is_text else []

    def _read(self, char: str, call: _Call) -> list[Piece]:
        if not self._raw and self._num_calls and (char.isspace() or char == ";"):
            return []  # between two calls
        self._raw += char
        try:
            pieces = call.feed(char)
        except Malformed:
            self._call = None
            return [Piece("text", self._raw)]
        if call.is_done:
            self._num_calls, self._raw = self._num_calls + 1, ""
            self._call = _Call(self._num_calls, self._names)
        return pieces


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind and call as one."""
    result: list[Piece] = []
    for piece in pieces:
        if result and result[-1][::2] == piece[::2]:
            result[-1] = piece._replace(text=result[-1].text + piece.text)
        else:
            result.append(piece)
    return result


def _held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
