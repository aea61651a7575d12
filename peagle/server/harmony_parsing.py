"""Reads answers in the harmony format: marks of `peagle.server.harmony` and the text between them."""

import re
from collections.abc import Set
from typing import Literal

from peagle.server.answer_parsing import Piece, joined
from peagle.server.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

_MARK = re.compile(f"([{START}{END}{MESSAGE}{CHANNEL}{CONSTRAIN}])")
_RECIPIENT = re.compile(r"to=(\S+)")
# What a header says, whatever follows it: a role, a channel, the kind of content.
_ROLE = re.compile(r"\s*(assistant|user|system|developer|tool|functions\.\S*|)\s*(to=\S*)?\s*")
_CHANNEL = re.compile(r"\s*(analysis|commentary|final|\S*)\s*(to=\S*)?\s*")
_KIND = re.compile(r"\s*(json|code|text|\S*)\s*")
_KINDS = ("json", "code", "text")

Place = Literal["role", "channel", "kind", "body"]


class HarmonyMessages:
    """The analysis channel is thought, the others are text; a message to a function is a call of it.

    Messages of one sort are divided by a line end. Nothing is lost of an answer that keeps no form: text outside a
    message, in an unknown channel or behind a header that never ended is text (or thought) too. Only what names role,
    channel, recipient and kind of content is left out, and a header that was cut while it did.
    """

    def __init__(self, names: Set[str] | None) -> None:
        """`names` are the functions that may be called; None: there are none, messages to functions are text. The
        prompt has ended with `<|start|>assistant`."""
        self._names = names
        self._num_calls = 0
        self._said: set[str] = set()  # sorts of pieces that there were
        self._is_first = True  # no mark yet
        self._begin(started=False)

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        pieces: list[Piece] = []
        for run in _MARK.split(text):
            if _MARK.fullmatch(run):
                pieces += self._divide(run)
                self._is_first = False
            elif run:
                pieces += self._read(run)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        return [] if self._place == "body" else self._release()

    def _begin(self, *, started: bool) -> None:
        """A new message; `started`: behind `<|start|>`, where all is header."""
        self._place: Place = "role"
        self._header = {"role": "", "channel": "", "kind": ""}
        self._started = started

    def _divide(self, mark: str) -> list[Piece]:
        """What a mark decides."""
        if mark in (START, END):
            pieces = self._close() if self._place == "body" else self._release()
            self._begin(started=mark == START)
            return pieces
        if mark == CHANNEL:
            pieces = []
            if self._place == "body":
                pieces = self._close()
                self._begin(started=False)
            elif self._place != "role":  # of two channels, the second
                pieces = self._release()
                self._begin(started=False)
            self._place = "channel"
            return pieces
        if self._place == "body":
            return []  # no header to end
        if mark == CONSTRAIN:
            self._place = "kind"
            return []
        return self._open()

    def _read(self, run: str) -> list[Piece]:
        if self._place == "body":
            return self._say(run)
        self._header[self._place] += run
        if self._place == "role" and not self._started and not self._may_be_role():
            text, self._header["role"] = self._header["role"], ""
            return self._open() + self._say(text)
        return []

    def _may_be_role(self) -> bool:
        """Whether what came without `<|start|>` may still be a header: a recipient, or, behind a message, a role."""
        words = self._header["role"].split()
        roles = ("to=",) if self._is_first else ("to=", "assistant")
        return len(words) < 3 and all(
            word.startswith("to=") or any(role.startswith(word) for role in roles) for word in words
        )

    def _open(self) -> list[Piece]:
        """The body begins: what sort it is."""
        self._place, self._is_empty = "body", True
        self._sort: Literal["text", "thought", "arguments"] = "text"
        match = _CHANNEL.match(self._header["channel"])
        if match is not None and match[1] == "analysis":
            self._sort = "thought"
        to = _RECIPIENT.search(f"{self._header['role']} {self._header['channel']}")
        if to is None or self._names is None:
            return []
        name = to[1].removeprefix("functions.")
        if not name or (name == to[1] and name not in self._names):
            return []  # to a tool that the model was never told of
        self._sort = "arguments"
        self._num_calls += 1
        return [Piece("name", name, self._num_calls - 1)]

    def _say(self, text: str) -> list[Piece]:
        """Text of the body."""
        is_next = self._is_empty and self._sort in self._said
        self._is_empty = False
        if self._sort == "arguments":
            return [Piece("arguments", text, self._num_calls - 1)]
        self._said.add(self._sort)
        return [Piece(self._sort, "\n" + text if is_next else text)]

    def _close(self) -> list[Piece]:
        """The end of a body. A call without arguments has none; one that was merely cut does not come here."""
        return self._say("{}") if self._sort == "arguments" and self._is_empty else []

    def _release(self) -> list[Piece]:
        """What there is besides a header that never came to its message."""
        header = dict(self._header)
        if self._place == "role":
            is_text = self._is_first and "to=" not in header["role"]
            left = header["role"] if is_text else _behind(_ROLE, header["role"])
            left = "" if not is_text and "assistant".startswith(left) else left
        else:
            left = _behind(_CHANNEL, header["channel"])
            left = "" if any(kind.startswith(left) for kind in _KINDS) else left
            left += _behind(_KIND, header["kind"])
        return self._open() + self._say(left) if left else []


def _behind(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return text[match.end() :] if match is not None else text
