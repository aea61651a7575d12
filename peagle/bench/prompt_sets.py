"""Prompt sets by name, or any prompts file; what they hold is told by a hash of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peagle
from peagle.errors import PeagleError
from peagle.prompt_file import PromptRow, read_prompts

SHIPPED_SETS = ("mt_bench", "humaneval", "gsm8k", "mbpp")


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Prompts under one name. A benchmark asks the first turn of each. `whole` is False of a part of a file."""

    name: str
    rows: tuple[PromptRow, ...]
    whole: bool = True

    @property
    def conversations(self) -> list[list[dict[str, str]]]:
        """The messages to answer, a conversation per row."""
        return [list(row.messages) for row in self.rows]

    @property
    def summary(self) -> dict[str, Any]:
        """As the settings of a result have it: hash and count, and of a part of a file which rows it took."""
        ids = {} if self.whole else {"ids": [row.id for row in self.rows]}
        return {"sha256": self.sha256, "prompts": len(self.rows), **ids}

    @property
    def sha256(self) -> str:
        """Of the ids and messages, whatever else stands in the file."""
        text = json.dumps([[row.id, row.messages] for row in self.rows], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def shipped_file(name: str) -> Path | None:
    """A file that ships with the project's prompt sets, by its name; None where it was not installed."""
    package = Path(peagle.__file__).parent
    # A checkout keeps them beside the package, an installed wheel inside it.
    folders = (package.parent / "benchmarks" / "data", package / "prompts")
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def shipped_set(name: str) -> Path:
    """The prompts file of a set that ships with the project (mt-bench and mt_bench are the same). Raises PeagleError if
    it was not installed."""
    path = shipped_file(f"{name.replace('-', '_')}.jsonl")
    if path is None:
        raise PeagleError(f"the prompts of {name} are not installed here: give the path of their file")
    return path


def find_set(text: str) -> Path:
    """The file of a set that ships (mt-bench and mt_bench are the same), or the prompts file of that path.

    Raises PeagleError for what is neither."""
    if text.replace("-", "_") in SHIPPED_SETS:
        return shipped_set(text)
    if Path(text).is_file():
        return Path(text)
    raise PeagleError(f"prompt set {text!r} is neither a file nor one of {', '.join(SHIPPED_SETS)}: correct it")


def load_sets(names: Sequence[str], limit: int | None = None) -> list[NamedSet]:
    """The named sets (mt-bench and mt_bench are the same) or prompts files, `limit` rows of each spread over the file.

    Raises PeagleError for what is neither, and for two of one name.
    """
    sets = []
    for text in names:
        path = find_set(text)
        rows = read_prompts(path)
        taken = spread(rows, limit)
        sets.append(NamedSet(path.stem, tuple(taken), whole=len(taken) == len(rows)))
    twice = [s.name for s in sets if sum(s.name == other.name for other in sets) > 1]
    if twice:
        raise PeagleError(f"two prompt sets are called {twice[0]}: rename one of the files, or leave one out")
    return sets


def spread(rows: Sequence[PromptRow], limit: int | None) -> list[PromptRow]:
    """`limit` rows at even distances, the first among them, always the same: a file may be ordered by category."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[place * len(rows) // limit] for place in range(limit)]
