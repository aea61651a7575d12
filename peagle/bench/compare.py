"""`peagle bench compare`: what moved from one result file to another, by how much, and whether it is noise."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from peagle.bench.markdown import Block, print_block
from peagle.bench.report import read_result
from peagle.bench.result_figures import (
    NO_SPREAD,
    TOO_FEW,
    Figure,
    Key,
    as_list,
    depends_on_amount,
    direction,
    figures_by_row,
    other_amounts,
)
from peagle.bench.statistics import Interval
from peagle.errors import PeagleError
from peagle.meter import say

REGRESSION_STATUS = 1
# What differs between any two runs, and what is shown otherwise.
_ALWAYS_OTHER = ("command", "seconds", "label", "out", "result_filename", "result_dir", "stopped_by", "partial")
# What gives a verb's results more of what they lack; no other verb has something that does.
_FLAGS = MappingProxyType(
    {
        (TOO_FEW, "eval"): "--limit",
        (TOO_FEW, "bench serve"): "--num-prompts",
        (TOO_FEW, "bench sweep"): "--num-prompts, --min-prompts",
        (NO_SPREAD, "bench sweep"): "--repeats",
    }
)

Verdict = Literal["same", "noise", "moved", "cannot tell"]
Json = Mapping[str, Any]
Rows = Mapping[Key, Mapping[str, Figure]]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of a row in both files. `difference` is after less before; None where no interval can be had, and then
    `unsure` says why."""

    row: Key
    name: str
    before: float
    after: float
    difference: Interval | None
    unsure: str

    @property
    def verdict(self) -> Verdict:
        """Whether the figure moved. An interval at 95 % calls one in twenty unmoved figures moved."""
        if self.before == self.after:
            return "same"
        if self.difference is None:
            return "cannot tell"
        return "noise" if self.difference.includes_zero else "moved"

    @property
    def telling(self) -> bool:
        """Whether it may have got better or worse. Counts that are neither are shown on demand."""
        return self.verdict in ("moved", "cannot tell") and direction(self.name) != 0

    @property
    def percent(self) -> float | None:
        """Of the figure before; None where that is 0."""
        return 100 * (self.after - self.before) / abs(self.before) if self.before else None

    def worse_by(self, percent: float) -> bool:
        """Whether it got worse by more than that, beyond noise."""
        worse = direction(self.name) * (self.after - self.before) < 0
        return self.verdict == "moved" and worse and self._exceeds(percent)

    def unjudged(self, percent: float) -> bool:
        """Whether it changed by more than that, for better or worse, and noise cannot be told."""
        return self.verdict == "cannot tell" and direction(self.name) != 0 and self._exceeds(percent)

    def _exceeds(self, percent: float) -> bool:
        return self.percent is None or abs(self.percent) > percent


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures that both files have, and what stands in the way of comparing them."""

    changes: Sequence[Change]
    warnings: Sequence[str]

    def regressions(self, percent: float) -> list[Change]:
        """The figures that got worse by more than `percent`."""
        return [change for change in self.changes if change.worse_by(percent)]


def compare(before: Json, after: Json) -> Comparison:
    """Compare two result files. Raises PeagleError where they have no figure in common."""
    old, new = figures_by_row(before), figures_by_row(after)
    pairs = _matched(old, new)
    other = other_amounts(before["settings"], after["settings"])
    changes = [c for first, second in pairs for c in _changes(first, old[first], new[second], sums=not other)]
    if not changes:
        raise PeagleError(
            f"{before['name']} and {after['name']} have no row in common: compare two results of the same command"
        )
    alone = {
        "first": [key for key in old if key not in dict(pairs)],
        "second": [key for key in new if key not in dict(pairs).values()],
    }
    warnings = [f"only in the {which} file: {_some(keys)}" for which, keys in alone.items() if keys]
    if other:
        warnings.append(f"{', '.join(other)} differ: seconds, counts and other sums are not compared")
    return Comparison(changes, [*_other_prompts(pairs, old, new), *_differences(before, after), *warnings])


def run_compare(
    first: Path, second: Path, console: Console, *, show_all: bool = False, fail_on_regression: float | None = None
) -> int:
    """Read, compare, print; the exit status of the command."""
    if fail_on_regression is not None and not fail_on_regression >= 0:
        raise PeagleError(f"--fail-on-regression is {fail_on_regression}: give a percentage of at least 0")
    results = read_result(first), read_result(second)
    found = compare(*results)
    for warning in found.warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)
    verdicts = [change.verdict for change in found.changes]
    shown = [change for change in found.changes if show_all or change.telling]
    if shown:
        say(console, f"first: {first}, second: {second}")
        print_block(console, _table(shown))
    counted = ", ".join(f"{verdicts.count(v)} {v}" for v in ("same", "noise", "moved", "cannot tell") if v in verdicts)
    say(console, f"{len(verdicts)} figures: {counted}")
    reasons = Counter(change.unsure for change in found.changes if change.verdict == "cannot tell")
    for reason, count in reasons.items():
        say(console, f"cannot tell of {count}: {reason}; {_remedy(reason, results[1]['settings'].get('command'))}")
    return 0 if fail_on_regression is None else _judge(found, fail_on_regression, console)


def _remedy(reason: str, command: object) -> str:
    """What to do about figures that nobody can judge, with the flags of the command that measured them."""
    words = str(command).split()
    verb = " ".join(words[1 : 3 if words[1:2] == ["bench"] else 2])
    flags = _FLAGS.get((reason, verb)) if words[:1] == ["peagle"] else None
    if flags is None and reason == NO_SPREAD:
        return "two runs of one kind show how far it moves by itself"
    return "measure again with more" + (f" (peagle {verb} {flags})" if flags else "")


def _judge(found: Comparison, percent: float, console: Console) -> int:
    """Say what got worse by more than `percent`, and what nobody can judge; the exit status."""
    worse = found.regressions(percent)
    lines = [f"worse by more than {percent:g} %: {' '.join(change.row)} {change.name}" for change in worse]
    unjudged = sum(change.unjudged(percent) for change in found.changes)
    if unjudged:
        lines.append(
            f"not judged: {unjudged} of the figures changed by more than {percent:g} %, for better or worse, and noise "
            "cannot be told; they do not fail the command"
        )
    for line in lines:
        say(console, line)
    return REGRESSION_STATUS if worse else 0


def _matched(old: Mapping[Key, Any], new: Mapping[Key, Any]) -> list[tuple[Key, Key]]:
    """Keys of the same row; where each file has one row left over, these two."""
    pairs = [(key, key) for key in old if key in new]
    left, right = [key for key in old if key not in new], [key for key in new if key not in old]
    return [*pairs, (left[0], right[0])] if len(left) == len(right) == 1 else pairs


def _changes(row: Key, old: Mapping[str, Figure], new: Mapping[str, Figure], *, sums: bool) -> Iterator[Change]:
    """The figures that both rows have; with `sums` also those that are sums, if both are over as many prompts."""
    counts = [{name: of[name].value for name in ("prompts", "asked") if name in of} for of in (old, new)]
    sums = sums and counts[0] == counts[1]
    for name, figure in old.items():
        if name in new and (sums or not depends_on_amount(name)):
            other = new[name]
            unsure = figure.why_unsure(other)
            yield Change(row, name, figure.value, other.value, figure.difference(other), unsure)


def _other_prompts(pairs: Sequence[tuple[Key, Key]], old: Rows, new: Rows) -> Iterator[str]:
    """Rows that were measured over fewer or more prompts, as with --limit: their figures may move by that alone."""
    counts = [(key, old[key].get("prompts"), new[other].get("prompts")) for key, other in pairs]
    other = [(key, f"{a.value:g}", f"{b.value:g}") for key, a, b in counts if a and b and a.value != b.value]
    if other:
        key, first, second = other[0]
        more = f", and in {len(other) - 1} more rows" if len(other) > 1 else ""
        yield f"prompts differ: {' '.join(key)} has {first} in the first file, {second} in the second{more}"


def _differences(before: Json, after: Json) -> Iterator[str]:
    """What else than the code may have moved the figures."""
    for result, which in ((before, "first"), (after, "second")):
        rows = [row for row in as_list(result["results"].get("rows")) if isinstance(row, dict)]
        if result["settings"].get("partial") or any(row.get("partial") for row in rows):
            yield f"the {which} file is partial: its run was stopped"
    for part in ("machine", "versions", "settings"):
        old, new = before[part], after[part]
        for name in dict.fromkeys((*old, *new)):
            if name not in _ALWAYS_OTHER and old.get(name) != new.get(name):
                yield f"{part} differ in {name}: {_short(old.get(name))} -> {_short(new.get(name))}"


def _some(keys: Sequence[Key]) -> str:
    """The first rows by name, and how many there are."""
    named = ", ".join(" ".join(key) for key in keys[:3])
    return named if len(keys) <= 3 else f"{named} and {len(keys) - 3} more"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _table(changes: Sequence[Change]) -> Block:
    """A line per figure, below its row's name, which as a column would leave the figures no room."""
    lines = []
    for row, of_row in groupby(changes, lambda change: change.row):
        lines.append([" ".join(row), *[""] * 5])
        lines += [[f"  {change.name}", *_cells(change)] for change in of_row]
    return Block("", ("figure", "first", "second", "change", "95 %", ""), lines)


def _cells(change: Change) -> Sequence[str]:
    interval, percent = change.difference, change.percent
    return (
        f"{change.before:.5g}",
        f"{change.after:.5g}",
        "" if percent is None else f"{percent:+.1f} %",
        "" if interval is None else f"[{interval.low:+.4g}, {interval.high:+.4g}]",
        _word(change),
    )


def _word(change: Change) -> str:
    if change.verdict != "moved":
        return change.verdict
    better = direction(change.name) * (change.after - change.before)
    return "better" if better > 0 else "worse" if better < 0 else "moved"
