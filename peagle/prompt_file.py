"""Prompt files: JSON lines whose rows hold `prompt`, or `turns`, or `messages`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from peagle.checks import parse_object
from peagle.errors import PeagleError
from peagle.models.tokenizer import check_unicode

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row of a prompts file, its three spellings made one.

    `messages` ends with the user message to answer (an answer that the file has after it is left out); `later_turns`
    are the user's turns that follow that answer. `output_tokens` is the length that the row gives its answer.
    """

    id: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    source: str = ""
    license: str = ""
    category: str = ""
    output_tokens: int | None = None

    @classmethod
    def of_user(cls, text: str) -> Self:
        """A conversation of one user message."""
        return cls(id="prompt", messages=({"role": "user", "content": check_unicode(text, "the prompt")},))


def read_prompts(path: Path | str) -> list[PromptRow]:
    """Read a prompts file; blank lines are skipped. A PeagleError names the file and the line that is wrong.

    A row without an id is called FILENAME:LINE, without the folder: sampling seeds follow the id, not the place.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand inside a string
    except UnicodeDecodeError as error:
        raise PeagleError(f"{path}: not UTF-8 text ({error.reason}); a prompts file is JSON lines") from None
    except OSError as error:
        raise PeagleError(f"cannot read the prompts file {path}: {error.strerror}; check the path") from None
    rows: list[PromptRow] = []
    line_of: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        row = _parse_line(text, f"{path}:{number}", f"{path.name}:{number}")
        first = line_of.setdefault(row.id, number)
        if first != number:
            raise PeagleError(f"{path}:{number}: id {row.id!r} is taken by line {first}; give every row its own id")
        rows.append(row)
    if not rows:
        raise PeagleError(f"{path} holds no prompts: give one JSON object a line with 'prompt', 'turns' or 'messages'")
    return rows


def _parse_line(text: str, where: str, default_id: str) -> PromptRow:
    row = parse_object(text, where, 'an object a line, such as {"prompt": "Hi"}')
    return parse_row(row, where, default_id)


def parse_row(row: Mapping[str, Any], where: str, default_id: str) -> PromptRow:
    """A row of a prompts file; `where` is what errors call it. Raises PeagleError."""
    spelled = [key for key in ("prompt", "turns", "messages") if key in row]
    if len(spelled) != 1:
        raise PeagleError(f"{where}: has {spelled or 'none'} of 'prompt', 'turns' and 'messages', expected exactly one")
    messages, later = _conversation(spelled[0], row[spelled[0]], where)
    label = {key: "" if row.get(key) is None else str(row[key]) for key in ("source", "license", "category")}
    row_id = default_id if row.get("id") is None else str(row["id"])
    for part in (row_id, *label.values(), *(message["content"] for message in messages), *later):
        check_unicode(part, f"{where}: a text")
    length = row.get("output_tokens")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise PeagleError(f"{where}: 'output_tokens' is {length!r}: give a whole number of at least 1, or leave it out")
    return PromptRow(id=row_id, messages=messages, later_turns=later, output_tokens=length, **label)


def _conversation(key: str, value: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """(messages up to the first answer wanted, the user's later turns) of the one key a row has."""
    if key == "messages":
        return tuple(_check_messages(value, where)), ()
    turns = [value] if key == "prompt" else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PeagleError(f"{where}: '{key}' must be {'text' if key == 'prompt' else 'a list of texts'}, not empty")
    return ({"role": "user", "content": turns[0]},), tuple(turns[1:])


def _check_messages(value: Any, where: str) -> Sequence[Message]:
    if not isinstance(value, list) or not value:
        raise PeagleError(f"{where}: 'messages' must be a list of objects with 'role' and 'content', not empty")
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise PeagleError(f"{where}: every message needs 'role' and 'content' as text")
        if message["role"] not in ROLES:
            raise PeagleError(f"{where}: role {message['role']!r} is not one of {', '.join(ROLES)}")
    users = [index for index, message in enumerate(value) if message["role"] == "user"]
    if not users:
        raise PeagleError(f"{where}: no message has the role 'user', so there is nothing to answer")
    return [{"role": message["role"], "content": message["content"]} for message in value[: users[-1] + 1]]
