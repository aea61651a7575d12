"""How many tokens to draft in the next step: a fixed K, a table's, or the K that pays best by measurement.

Plain host logic over counts and seconds. With per-position acceptance rates a_1 .. a_K, each given that the drafts
before were kept, a step that drafts K tokens emits AL(K) = 1 + a_1 + a_1 a_2 + ... tokens per request and takes as long
as was measured for its batch, so the K to choose is the one with the largest AL(K) / seconds(batch, K).
"""

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import log2
from operator import mul
from pathlib import Path
from typing import Any, Protocol

from peagle.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from peagle.drafters import storage
from peagle.drafters.checkpoint import PROVENANCE_KEY, resolve_head
from peagle.errors import PeagleError

CostTable = Mapping[tuple[int, int], float]  # (requests, K) -> seconds of a step

_log = logging.getLogger(__name__)
_EXAMPLE = '{"1": 7, "32": 3}'
_MEASURED = (0, 1, 2, 3, 5, 7, 10, 13, 16)  # K worth a graph of their own

_ODDS, _ODDS_WEIGHT = 0.5, 4.0  # acceptance before anything was seen, and how many observations outweigh it
_TRIAL = 8  # drafts to see before a head is judged: of useless ones, few steps; fewer would reject good ones by chance
_STALE = 512  # steps after which a judgement is too old: a trial costs a few plain steps, below 1 % of these
_WINDOW_REQUESTS, _WINDOW_STEPS = 256, 16  # an estimate spans at least so many observations and so many steps
_FORGET_STEPS = 1024  # while less is drafted, what is known of greater depths fades at this pace
_DWELL = 16  # steps between changes of K
_GAIN = 1.03  # what a change must promise
# Plain decoding is taken to be so much faster for each doubling of the batch. Requests that draft end at different
# times, by chance, and the last ones run by themselves: by chance alone 64 of 512 tokens take 4 % more steps.
_CAUTION = 0.01
_MARGIN = 0.02  # slack over plain decoding: below the 3 % allowed, for a step may cost more than was measured
_ALLOWANCE = 8.0  # plain steps that drafting may be behind besides: once, for the life of an engine


class KPolicy(Protocol):
    """What the engine asks before each decode step, and tells after it."""

    @property
    def max_drafts(self) -> int:
        """The largest K it ever chooses."""

    def choose(self, num_running: int, fresh: bool = True) -> int:
        """K of the next step, 0 .. `max_drafts`. `fresh`: a request runs of which the drafter has seen everything."""

    def record(self, accepted: Sequence[int], num_drafts: int, others: Sequence[int] = ()) -> None:
        """Say how many of `num_drafts` drafts each request of a decode step kept; in the order of the steps.

        `others` are those of requests that say little about the head; they are learned from where there are no others.
        """


class TableK:
    """K by concurrency: the entry of the smallest concurrency that is not below the batch, else the last."""

    def __init__(self, table: Mapping[int, int]) -> None:
        self._sizes = sorted(table)
        self._drafts = [table[size] for size in self._sizes]

    @property
    def max_drafts(self) -> int:
        return max(self._drafts)

    def choose(self, num_running: int, fresh: bool = True) -> int:  # noqa: ARG002
        return self._drafts[min(bisect_left(self._sizes, num_running), len(self._drafts) - 1)]

    def record(self, accepted: Sequence[int], num_drafts: int, others: Sequence[int] = ()) -> None:
        """Nothing to learn."""


class FixedK(TableK):
    """The same K, whatever the batch."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__({1: num_drafts})


class KChooser:
    """K by measured costs and running acceptance; 0 where drafting does not pay.

    A head that nobody knows is tried: until 8 drafts were seen, K is the one above 0 that pays best at even odds. Then
    it is the one that pays best by what was seen, with depths never seen taken to be as good as the last one that was,
    and plain decoding taken to be faster the larger the batch. Changes come at most every 16 steps, those to plain
    decoding at once, and only for 3 % more speed. What nothing was seen of for 512 steps is forgotten, and so tried
    anew: when there is a request without gaps, or after twice as long.

    An account of the steps that plain decoding would have taken for the same tokens bounds the loss whatever happens:
    once drafting is 2 % and 8 steps behind, plain steps follow until they have paid for another try.
    """

    def __init__(self, costs: CostTable) -> None:
        """`costs` holds for every batch size measured the same K, 0 among them."""
        self._buckets = sorted({size for size, _ in costs})
        self._drafts = sorted({k for _, k in costs})
        if 0 not in self._drafts or any((size, k) not in costs for size in self._buckets for k in self._drafts):
            raise ValueError("a cost table needs K = 0 and every K for every batch size")
        # In steps of plain decoding, so that batches of all sizes share one account.
        self._costs = {(size, k): costs[size, k] / costs[size, 0] for size in self._buckets for k in self._drafts}
        self._trials = {  # what would pay if all drafts were kept
            size: [k for k in self._drafts if k + 1 > self._costs[size, k]] or [0] for size in self._buckets
        }
        self._kept, self._seen = [0.0] * self.max_drafts, [0.0] * self.max_drafts
        self._unseen = 0  # steps since a draft was observed
        self._current, self._since = 0, _DWELL
        self._drafted = 0  # K of the last step recorded
        self._balance = _ALLOWANCE

    @property
    def max_drafts(self) -> int:
        return self._drafts[-1]

    @property
    def rates(self) -> list[float]:
        """Estimated acceptance of each position, given that the drafts before it were kept; one that was never observed
        is taken to be as good as the one before."""
        rates, odds = [], _ODDS
        for kept, seen in zip(self._kept, self._seen, strict=True):
            odds = (kept + odds * _ODDS_WEIGHT) / (seen + _ODDS_WEIGHT)
            rates.append(odds)
        return rates

    def choose(self, num_running: int, fresh: bool = True) -> int:
        """K of the next step of so many requests."""
        bucket = self._bucket(num_running)
        if self._unseen >= (_STALE if fresh else 2 * _STALE):
            self._forget()
        is_trial = self._seen[0] < _TRIAL
        self._since = _DWELL if is_trial else self._since + 1  # the end of a trial is a time to change
        speed = self._speeds(bucket, [_ODDS] * self.max_drafts if is_trial else self.rates)
        best = max(self._trials[bucket] if is_trial else self._drafts, key=lambda k: speed[k])
        worst = _TRIAL * (self._costs[bucket, best] - 1)
        if self._balance < (0 if self._current else min(worst, _ALLOWANCE)):
            self._change(0)
        elif is_trial or ((best == 0 or self._since > _DWELL) and speed[best] > _GAIN * speed[self._current]):
            self._change(best)
        return self._current

    def record(self, accepted: Sequence[int], num_drafts: int, others: Sequence[int] = ()) -> None:
        """Learn from a decode step: how many drafts each of its requests kept, and the step's K."""
        # Where K has just been raised, the step before drafted fewer: the rest are leftovers that say nothing.
        observed, self._drafted = min(num_drafts, self._drafted), num_drafts
        batch = [*accepted, *others]
        if not batch:
            return
        self._unseen = 0 if observed else self._unseen + 1
        for position in range(self.max_drafts):
            reached = sum(count >= position for count in accepted or others) if position < observed else 0
            if reached:
                keep = 1 - min(reached / _WINDOW_REQUESTS, 1 / _WINDOW_STEPS)
                kept = sum(count > position for count in accepted or others)
                self._kept[position] = self._kept[position] * keep + kept
                self._seen[position] = self._seen[position] * keep + reached
            elif position >= observed > 0:
                self._kept[position] *= 1 - 1 / _FORGET_STEPS
                self._seen[position] *= 1 - 1 / _FORGET_STEPS
        emitted = 1 + sum(batch) / len(batch)
        spent = self._costs[self._bucket(len(batch)), num_drafts]
        self._balance = min(self._balance + (1 + _MARGIN) * emitted - spent, _ALLOWANCE)

    def _forget(self) -> None:
        self._kept, self._seen, self._unseen = [0.0] * self.max_drafts, [0.0] * self.max_drafts, 0

    def _bucket(self, requests: int) -> int:
        return self._buckets[min(bisect_left(self._buckets, requests), len(self._buckets) - 1)]

    def _speeds(self, bucket: int, rates: Sequence[float]) -> dict[int, float]:
        lengths = list(accumulate(accumulate(rates, mul), initial=1.0))  # AL(0), AL(1), ...
        plain = 1 + _CAUTION * log2(bucket)
        return {k: lengths[k] / self._costs[bucket, k] if k else plain for k in self._drafts}

    def _change(self, num_drafts: int) -> None:
        if num_drafts != self._current:
            self._current, self._since = num_drafts, 0


def draft_counts(max_drafts: int) -> list[int]:
    """The K to measure and to choose among: 0, the maximum, and steps that grow in between."""
    return sorted({k for k in _MEASURED if k < max_drafts} | {max_drafts})


def choose_policy(config: SpeculativeConfig, measure: Callable[[], CostTable]) -> KPolicy:
    """The policy a config asks for; `measure` is called only if it is the one that needs costs."""
    if not config.is_auto:
        return FixedK(config.max_drafts)
    if config.k_table is not None:
        return TableK(load_k_table(config.k_table, config.max_drafts))
    return KChooser(measure())


def load_k_table(source: Mapping[Any, Any] | str, max_drafts: int = MAX_SPECULATIVE_TOKENS) -> dict[int, int]:
    """Concurrency to K, from a mapping or a JSON file of an object; keys may be strings, as JSON has no others.

    Raises PeagleError that names what cannot be used.
    """
    where, entries = "k_table", source
    if isinstance(source, str):
        where = f"k_table {source}"
        try:
            entries = json.loads(Path(source).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: brackets too deep, or ~nobody
            raise PeagleError(f"{where} cannot be read ({error}): give a JSON file such as {_EXAMPLE}") from None
    if not isinstance(entries, Mapping) or not entries:
        raise PeagleError(f"{where} holds no entries: give an object of concurrency and K, such as {_EXAMPLE}")
    table = {}
    for size, k in entries.items():
        if not str(size).isdecimal() or len(str(size)) > 9 or int(size) < 1:
            raise PeagleError(f"{where} has concurrency {str(size)[:40]!r}: expected a whole number of at least 1")
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= max_drafts:
            raise PeagleError(
                f"{where} has K {k!r} for {size} requests: expected a whole number from 0 to {max_drafts}"
            )
        table[int(size)] = k
    return table


def trained_depth(head: Path | str) -> int | None:
    """How many tokens a head learned to draft, where its provenance says so; None for heads from elsewhere."""
    provenance = storage.read_config(resolve_head(head)).get(PROVENANCE_KEY)
    recipe = provenance.get("recipe") if isinstance(provenance, Mapping) else None
    depth = recipe.get("num_depths") if isinstance(recipe, Mapping) else None
    return depth if isinstance(depth, int) and depth > 0 else None


def check_depth(max_drafts: int, trained: int | None) -> bool:
    """Whether a head was trained for so many drafts, or does not say; if not, a warning is logged."""
    if trained is None or max_drafts <= trained:
        return True
    _log.warning(
        "up to %d tokens are drafted and the head was trained to draft %d: the others will rarely be accepted; "
        "lower num_speculative_tokens to %d",
        max_drafts,
        trained,
        trained,
    )
    return False
