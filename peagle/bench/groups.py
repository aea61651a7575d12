"""Acceptance of groups of requests or of some of their rounds: an evaluation's figures, with intervals by request.

Every group is a table [requests, K + 1]: in how many of a request's rounds 0, 1, ... K drafts were accepted. All
figures follow from it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peagle.bench.acceptance import RequestRounds
from peagle.bench.statistics import Interval, acceptance_length_interval, ratio_intervals

# Tokens of prompt and answer at which a bucket of context lengths begins; the last has no end.
CONTEXT_EDGES = (0, 256, 1024, 4096, 16384, 65536)

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFigures:
    """Acceptance of a group. Shares are of rounds; the conditional one of position j of those that accepted j - 1.

    Without rounds there is no length and no share: nothing was verified.
    """

    requests: int  # that had a round in the group
    rounds: int
    acceptance_length: Interval | None = None
    share_per_position: Sequence[Interval] = ()
    conditional_per_position: Sequence[Interval] = ()


def counts(requests: Iterable[RequestRounds], num_drafts: int) -> Counts:
    """The table of whole requests."""
    table = [_histogram(r.accepted, num_drafts) for r in requests]
    return np.array(table, dtype=np.int64).reshape(-1, num_drafts + 1)


def by_context(requests: Sequence[RequestRounds], num_drafts: int) -> Mapping[str, Counts]:
    """A table per bucket of context lengths that any round began in, shortest first."""
    tables = {}
    ends: tuple[int | None, ...] = (*CONTEXT_EDGES[1:], None)
    for low, high in zip(CONTEXT_EDGES, ends, strict=True):
        below = math.inf if high is None else high
        table = [
            _histogram((a for c, a in zip(r.contexts, r.accepted) if low <= c < below), num_drafts) for r in requests
        ]
        if any(map(any, table)):
            tables[bucket_name(low, high)] = np.array(table, dtype=np.int64)
    return tables


def by_category(requests: Sequence[RequestRounds], categories: Sequence[str], num_drafts: int) -> dict[str, Counts]:
    """A table per category, in the order in which they first come."""
    whole = counts(requests, num_drafts)
    names = list(dict.fromkeys(categories))
    return {name: whole[[category == name for category in categories]] for name in names}


def figures(table: Counts, *, seed: int = 0) -> GroupFigures:
    """The figures of a group; requests without a round in it say nothing about it and are left out."""
    table = table[table.sum(axis=1) > 0]
    if not len(table):
        return GroupFigures(requests=0, rounds=0)
    accepted, rounds = per_request(table)
    at_least = np.flip(np.flip(table, axis=1).cumsum(axis=1), axis=1)  # rounds that accepted 0, 1, ... K or more
    reached, kept = at_least[:, :-1], at_least[:, 1:]
    every = np.broadcast_to(rounds[:, None], kept.shape)
    return GroupFigures(
        requests=len(table),
        rounds=int(rounds.sum()),
        acceptance_length=acceptance_length_interval(accepted, rounds, seed=seed),
        share_per_position=ratio_intervals(kept, every, seed=seed),
        conditional_per_position=ratio_intervals(kept, reached, seed=seed),
    )


def per_request(table: Counts) -> tuple[Counts, Counts]:
    """(accepted drafts, rounds) of every request."""
    return table @ np.arange(table.shape[1]), table.sum(axis=1)


def pack_requests(table: Counts) -> str:
    """Accepted drafts and rounds of every request as a result file holds them: `23/11 40/12 ...`."""
    return " ".join(f"{accepted}/{rounds}" for accepted, rounds in zip(*per_request(table), strict=True))


def unpack_requests(text: str) -> tuple[list[int], list[int]]:
    """What `pack_requests` wrote. Raises ValueError for anything else."""
    pairs = [tuple(map(int, part.split("/"))) for part in text.split()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"no list of accepted/rounds: {text[:40]!r}")
    return [accepted for accepted, _ in pairs], [rounds for _, rounds in pairs]


def bucket_name(low: int, high: int | None) -> str:
    """A bucket of context lengths for people: 256-1k."""
    return f"{_short(low)}+" if high is None else f"{_short(low)}-{_short(high)}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _histogram(accepted: Iterable[int], num_drafts: int) -> list[int]:
    held = [0] * (num_drafts + 1)
    for count in accepted:
        held[count] += 1
    return held
