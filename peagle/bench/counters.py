"""Acceptance of a load: from what the server says of each request, or from its counters before and after."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.acceptance import AcceptanceStats
from peagle.bench.client import Answer

DEFINITION = (
    "acceptance length = 1 + accepted drafts / rounds (the target's own token counts); acceptance rate = accepted / "
    "drafted; unconditional at position j = rounds that accepted draft j / rounds; conditional = rounds that accepted "
    "draft j / rounds that accepted draft j - 1"
)
# vLLM's names, with the client library's ending or without; ours are the same.
_NUMBER = r"(\d{1,15}(?:\.\d*)?(?:[eE][+-]?\d\d?)?)(?!\S)"  # finite
_LINE = re.compile(r"vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})?\s+" + _NUMBER)
_PER_POSITION = "num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a server, of all its models and engines together."""

    rounds: int
    drafted: int
    accepted: int
    per_position: Mapping[int, int]

    def since(self, before: "Counters") -> AcceptanceStats:
        """What came to them since `before`."""
        positions = range(1 + max(self.per_position, default=-1))
        return AcceptanceStats(
            num_rounds=self.rounds - before.rounds,
            num_draft_tokens=self.drafted - before.drafted,
            num_accepted_tokens=self.accepted - before.accepted,
            accepted_per_position=[self.per_position.get(p, 0) - before.per_position.get(p, 0) for p in positions],
        )


def parse_counters(text: str) -> Counters | None:
    """Read Prometheus' text format; None where there are no counters of speculation."""
    sums: dict[str, float] = {}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        position = re.search(r'position="(\d{1,3})"', labels)
        if name == _PER_POSITION and position is not None:
            positions[int(position[1])] = positions.get(int(position[1]), 0) + int(value)
        else:
            sums[name] = sums.get(name, 0.0) + value
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    if any(name not in sums for name in names):
        return None
    rounds, drafted, accepted = (int(sums[name]) for name in names)
    return Counters(rounds, drafted, accepted, positions)


def acceptance(answers: Sequence[Answer], before: Counters | None, after: Counters | None) -> dict[str, Any] | None:
    """Acceptance of whole answers by what each said of itself, where all did; else of all that the server did between
    the two readings of its counters. None where neither is reported."""
    whole = [answer for answer in answers if answer.whole]
    if whole and all(answer.stats is not None for answer in whole):
        stats = AcceptanceStats()
        for answer in whole:
            if answer.stats is not None:
                stats.add(answer.stats)
        return _figures(stats, "requests")
    if before is None or after is None or after.rounds < before.rounds:  # a server that began anew
        return None
    return _figures(after.since(before), "counters")


def _figures(stats: AcceptanceStats, source: str) -> dict[str, Any]:
    """`acceptance_length` is None where nothing was drafted."""
    counts = stats.accepted_per_position
    earlier = [stats.num_rounds, *counts]
    drafts = stats.num_draft_tokens > 0
    return {
        "source": source,
        "rounds": stats.num_rounds,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": stats.acceptance_length if drafts else None,
        "acceptance_rate": stats.num_accepted_tokens / stats.num_draft_tokens if drafts else None,
        "per_position": stats.acceptance_per_position if drafts else [],
        "per_position_conditional": [n / e if e else None for n, e in zip(counts, earlier)] if drafts else [],
    }
