"""The cells of a sweep, the order they are measured in, and the file that keeps every run."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from peagle.bench.closed_loop import Answer, Run
from peagle.bench.sweep_settings import PLAIN
from peagle.errors import PeagleError


@dataclass(frozen=True, slots=True, order=True)
class Setup:
    """A way to decode: a method and its K, 0 without drafts."""

    method: str
    num_drafts: int

    @property
    def label(self) -> str:
        """Short and unique."""
        return f"{self.method} K={self.num_drafts}" if self.num_drafts else self.method


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What is measured at once: one prompt set, decoded one way, so many requests in flight."""

    dataset: str
    concurrency: int
    setup: Setup

    @property
    def label(self) -> str:
        """Short and unique."""
        return f"{self.dataset} {self.setup.label} c={self.concurrency}"


def setups_of(methods: Sequence[str], drafts: Sequence[int]) -> list[Setup]:
    """Every method with every K."""
    return [Setup(m, k) for m in methods for k in ((0,) if m == PLAIN else drafts)]


def in_turns(
    datasets: Sequence[str], setups: Sequence[Setup], concurrency: Sequence[int], repeats: int
) -> Iterator[tuple[int, Cell]]:
    """(repeat, cell) in the order of measuring: within a repeat, all ways to decode follow each other at the same
    concurrency, so that a machine that drifts favours none; each repeat begins with another of them. All prompt sets
    come at the first concurrency before the next: a sweep that is cut short can still compare them."""
    for repeat in range(repeats):
        first = repeat % len(setups)
        turn = [*setups[first:], *setups[:first]]
        for count in concurrency:
            for dataset in datasets:
                for setup in turn:
                    yield repeat, Cell(dataset, count, setup)


def runs_of(result: Path) -> Path:
    """The file of the runs that a result is made from."""
    return result.with_suffix(".runs.jsonl")


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short digest of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class RunFile:
    """Every run as a line of JSON, beside the result that is made from them: what `--resume` reads.

    A line that a kill cut off is passed over, as is one of other settings.
    """

    def __init__(self, result: Path, key_of: Callable[[Cell], str]) -> None:
        """The runs of a result file; `key_of` is the fingerprint of all that decides what a cell's run is."""
        self.path, self._key_of = runs_of(result), key_of

    def read(self) -> Iterator[tuple[int, Cell, Run]]:
        """(repeat, cell, run) of every line of these settings. Raises PeagleError when the file cannot be read."""
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise PeagleError(f"cannot read the runs {self.path} ({error}): move it away to start anew") from None
        for line in text.splitlines():
            entry = _parsed(line)
            if entry is None:
                continue
            try:
                cell = Cell(entry["dataset"], entry["concurrency"], Setup(entry["method"], entry["k"]))
                if entry["settings"] == self._key_of(cell):
                    yield entry["repeat"], cell, _run(entry)
            except (KeyError, TypeError) as error:
                raise PeagleError(
                    f"{self.path} has a line that is no run ({error!r}): mend it, or move the file away"
                ) from None

    def add(self, repeat: int, cell: Cell, run: Run) -> None:
        """Append a run. Raises PeagleError when the disk does not take it."""
        entry = {
            "settings": self._key_of(cell), "repeat": repeat, "dataset": cell.dataset, "method": cell.setup.method,
            "k": cell.setup.num_drafts, **asdict(replace(run, answers=())),
            "answers": [[a.prompt, a.tokens, round(a.seconds, 6), a.rounds, a.accepted] for a in run.answers],
        }  # fmt: skip
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_off = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write("\n" * cut_off + json.dumps(entry) + "\n")
        except OSError as error:
            raise PeagleError(f"cannot write the runs {self.path}: {error.strerror}; choose another folder") from None


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and "settings" in entry else None


def _run(entry: Mapping[str, Any]) -> Run:
    answers = tuple(Answer(*answer) for answer in entry["answers"])
    given = {field.name: entry[field.name] for field in fields(Run) if field.name in entry}
    run = Run(**given | {"answers": answers, "accepted_per_position": tuple(entry["accepted_per_position"])})
    figures = [entry["repeat"], entry["k"], run.concurrency, run.seconds, run.rounds, run.accepted, run.failed]
    figures += [run.steps or 0, run.decode_ms or 0, *run.accepted_per_position, *chain(*entry["answers"])]
    if not all(isinstance(figure, int | float) and 0 <= figure < math.inf for figure in figures):
        raise TypeError("a figure is none")
    return run
