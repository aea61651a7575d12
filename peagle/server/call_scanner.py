"""Reads a function call, `{"name": ..., "arguments": {...}}`, a character at a time, and hands on the arguments as they
come."""

import json
from collections.abc import Generator, Set

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"

Scan = Generator[None, str, str]  # takes characters, ends with what it has read


class Malformed(Exception):
    """What was read is no call."""


class CallScanner:
    """One call. The name is told once the arguments begin, or the call ends: until then it may turn out to be none.

    Brackets and strings are followed, nothing else is checked: the arguments are the model's own text.
    """

    def __init__(self, names: Set[str] | None = None) -> None:
        """With `names`, a call of another function is Malformed."""
        self.name: str | None = None  # set once told
        self.is_done = False
        self._names = names
        self._found: str | None = None
        self._said = ""  # arguments that nobody has taken
        self._has_arguments = False
        self._scan = self._object()
        next(self._scan)

    def feed(self, char: str) -> None:
        """Read on; not after the end. Raises Malformed, never once the name is told."""
        try:
            self._scan.send(char)
        except StopIteration:
            self.is_done = True
        except (Malformed, ValueError):
            if self.name is None:
                raise Malformed from None
            self.is_done = True

    def take(self) -> str:
        """The arguments since the last call, once there is a name."""
        if self.name is None:
            return ""
        said, self._said = self._said, ""
        return said

    def _object(self) -> Scan:
        if (yield from _solid()) != "{":
            raise Malformed
        char = yield from _solid()
        while char != "}":
            key = yield from _string(char)
            if (yield from _solid()) != ":":
                raise Malformed
            char = yield from _solid()
            if key in _ARGUMENTS and not self._has_arguments:
                char = yield from self._arguments(char)
            elif key == "name" and self._found is None:
                self._found = yield from _string(char)
                char = yield from _solid()
            else:
                _, char = yield from _value(char)
            if self._has_arguments:
                self._tell()
            if char == ",":
                char = yield from _solid()
            elif char != "}":
                raise Malformed
        if not self._has_arguments:
            self._said = "{}"
        self._tell(must=True)
        return ""

    def _arguments(self, char: str) -> Generator[None, str, str]:
        self._has_arguments = True
        if char == "{":
            self._said = char
            self._tell()
            yield from self._follow()
            return (yield from _solid())
        text, after = yield from _value(char)
        value = json.loads(text)
        if isinstance(value, str):  # some models write the object as text
            self._said = value
        elif value is None:
            self._said = "{}"
        else:
            raise Malformed
        return after

    def _follow(self) -> Generator[None, str, None]:
        """Hand on an object whose bracket has been read, to its end."""
        open_brackets, quoted, escaped = "}", False, False
        while open_brackets:
            char = yield
            if quoted:
                quoted, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                open_brackets += "}" if char == "{" else "]"
            elif char in "}]":
                if open_brackets[-1] != char:
                    raise Malformed
                open_brackets = open_brackets[:-1]
            elif char == "<":  # the end of the call, before that of its arguments
                raise Malformed
            self._said += char

    def _tell(self, must: bool = False) -> None:
        if self._found is None:
            if must:
                raise Malformed
            return
        if self._names is not None and self._found not in self._names:
            raise Malformed
        self.name = self._found


def _solid() -> Scan:
    """The next character that is no space."""
    char = yield
    while char in _SPACE:
        char = yield
    return char


def _string(char: str) -> Scan:
    """The value of a string whose first character has been read."""
    if char != '"':
        raise Malformed
    text, escaped = char, False
    while True:
        char = yield
        text += char
        if char == '"' and not escaped:
            value: str = json.loads(text)
            return value
        escaped = char == "\\" and not escaped


def _value(char: str) -> Generator[None, str, tuple[str, str]]:
    """The text of a value whose first character has been read, and the first solid character after it."""
    if char == '"':
        text = json.dumps((yield from _string(char)))
    elif char in "{[":
        text, depth = char, 1
        while depth:
            char = yield
            if char == '"':
                text += json.dumps((yield from _string(char)))
                continue
            text += char
            depth += (char in "{[") - (char in "}]")
    else:
        text = ""
        while char not in ",}" and char not in _SPACE:
            text += char
            char = yield
        if char in _SPACE:
            char = yield from _solid()
        return text, char
    return text, (yield from _solid())
