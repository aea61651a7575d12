"""Prompt sets by name, or any prompts file; what they hold is told by a hash of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import peagle
from peagle.bench.datasets import PromptRow, read_prompts
from peagle.errors import PeagleError

SHIPPED_SETS = ("mt_bench", "humaneval", "gsm8k", "mbpp")


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Prompts under one name. A benchmark asks the first turn of each."""

    name: str
    rows: tuple[PromptRow, ...]

    @property
    def conversations(self) -> list[list[dict[str, str]]]:
        """The messages to answer, a conversation per row."""
        return [list(row.messages) for row in self.rows]

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
    """The named sets (mt-bench and mt_bench are the same) or prompts files, `limit` rows of each from the top.

    Raises PeagleError for what is neither, and for two of one name.
    """
    sets = []
    for text in names:
        path = find_set(text)
        sets.append(NamedSet(path.stem, tuple(read_prompts(path)[:limit])))
    twice = [s.name for s in sets if sum(s.name == other.name for other in sets) > 1]
    if twice:
        raise PeagleError(f"two prompt sets are called {twice[0]}: rename one of the files, or leave one out")
    return sets
