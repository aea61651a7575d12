"""From runs to the rows of a sweep: means, speed-ups, intervals, and the K to choose.

Intervals come from drawing prompts anew, 95 %: a prompt's requests of all repeats count as one. All cells of a prompt
set and a concurrency share the draws, so in a speed-up both sides answer the same prompts and what makes a prompt fast
or slow for both cancels. A few prompts say little of others: with fewer than 8 of them intervals are Student's over the
repeats, of which a speed-up pairs those of the same number, and of one repeat there is none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

import numpy as np
from numpy.typing import NDArray

from peagle.bench.closed_loop import Run
from peagle.bench.statistics import DRAWS, FEWEST_REQUESTS, LEVEL, repeats_interval
from peagle.bench.sweep_plan import Cell, Setup
from peagle.bench.sweep_settings import EAGLE3, PLAIN

Range = Sequence[float]  # low and high end of an interval
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One cell of a sweep (result names `sweep-*` and `announcement-*`).

    `tokens_per_second` are output tokens over the whole time of the runs, prompts included and the end, in which fewer
    requests are left: `mean_in_flight` says how many there were on average. `tokens_per_second_repeats` are those of
    each repeat. `acceptance_length` = 1 + accepted drafts / rounds; shares of positions are unconditional: rounds in
    which it was accepted / rounds. `ms_per_step` is that of all steps, `decode_ms_per_step` of those without prompts.
    Speed-ups are ratios of tokens per second; EAGLE-3 stands for its best K of the same set and concurrency. None is
    what was not measured.
    """

    dataset: str
    method: str
    num_speculative_tokens: int
    concurrency: int
    tokens_per_second: float
    tokens_per_second_interval: Range | None
    tokens_per_second_repeats: Sequence[float]
    acceptance_length: float | None
    acceptance_length_interval: Range | None
    accepted_share_per_position: Sequence[float]
    speedup_over_none: float | None
    speedup_over_none_interval: Range | None
    speedup_over_eagle3: float | None
    speedup_over_eagle3_interval: Range | None
    ms_per_step: float | None
    decode_ms_per_step: float | None
    mean_in_flight: float
    prompts: int
    requests: int
    failed: int
    tokens: int
    seconds: float


@dataclass(slots=True)
class _Sums:
    """What a cell's runs add up to, and per prompt: tokens, request seconds, rounds, accepted drafts."""

    repeats: Mapping[int, Run]
    by_prompt: _Floats

    @classmethod
    def of(cls, repeats: Mapping[int, Run], prompts: Sequence[int]) -> "_Sums":
        place = {prompt: index for index, prompt in enumerate(prompts)}
        sums = np.zeros((len(prompts), 4))
        for run in repeats.values():
            for a in run.answers:
                sums[place[a.prompt]] += (a.tokens, a.seconds, a.rounds, a.accepted)
        return cls(repeats, sums)

    @property
    def runs(self) -> list[Run]:
        return list(self.repeats.values())

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def in_flight(self) -> float:
        """Mean over time: request seconds per second."""
        return float(self.by_prompt[:, 1].sum()) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(run.tokens for run in self.runs) / self.seconds

    def drawn_speed(self, times_DP: _Floats) -> _Floats:
        """Tokens per second of each draw: a request's tokens per second of its own, times how many there are."""
        tokens, seconds = (times_DP @ self.by_prompt[:, :2]).T
        return np.divide(tokens, seconds, out=np.zeros_like(tokens), where=seconds > 0) * self.in_flight

    def drawn_length(self, times_DP: _Floats) -> _Floats:
        rounds, accepted = (times_DP @ self.by_prompt[:, 2:]).T
        return 1.0 + np.divide(accepted, rounds, out=np.zeros_like(rounds), where=rounds > 0)


@dataclass(slots=True)
class Results:
    """All runs of a sweep so far, by cell and repeat, and the rows they make."""

    runs: dict[Cell, dict[int, Run]] = field(default_factory=dict)
    _rows: dict[tuple[str, int], list[SweepRow]] = field(default_factory=dict)

    def add(self, repeat: int, cell: Cell, run: Run) -> None:
        """Take a run; one of the same cell and repeat is replaced."""
        self.runs.setdefault(cell, {})[repeat] = run
        self._rows.pop((cell.dataset, cell.concurrency), None)

    def has(self, repeat: int, cell: Cell) -> bool:
        """Whether a cell has been measured in a repeat."""
        return repeat in self.runs.get(cell, {})

    def commits(self) -> dict[str, int]:
        """How many runs are of which commit."""
        return Counter(run.commit or "an unknown commit" for runs in self.runs.values() for run in runs.values())

    def failed(self) -> list[str]:
        """The runs in which requests failed: how many, and why the first did."""
        return [
            f"{cell.label}, repeat {repeat + 1}: {run.failed} of {run.failed + len(run.answers)} ({run.failure})"
            for cell, runs in self.runs.items()
            for repeat, run in runs.items()
            if run.failed
        ]

    def rows(self) -> list[SweepRow]:
        """A row per cell, in the order of their first runs; only what has changed is computed anew."""
        groups = dict.fromkeys((cell.dataset, cell.concurrency) for cell in self.runs)
        for group in groups:
            if group not in self._rows:
                self._rows[group] = self._group(*group)
        return [row for group in groups for row in self._rows[group]]

    def _group(self, dataset: str, concurrency: int) -> list[SweepRow]:
        cells = {c.setup: c for c in self.runs if (c.dataset, c.concurrency) == (dataset, concurrency)}
        every = {setup: self.runs[cell] for setup, cell in cells.items()}
        prompts = sorted({a.prompt for runs in every.values() for run in runs.values() for a in run.answers})
        sums = {setup: _Sums.of(runs, prompts) for setup, runs in every.items()}
        times_DP = _draws(len(prompts))
        eagle3 = [s for setup, s in sums.items() if setup.method == EAGLE3]
        bases = (
            next((s for setup, s in sums.items() if setup.method == PLAIN), None),
            max(eagle3, key=lambda s: s.tokens_per_second, default=None),
        )
        return [_row(cells[setup], s, times_DP, bases) for setup, s in sums.items()]


def _draws(prompts: int) -> _Floats | None:
    """How often each prompt is drawn, [draws, prompts]; None for a few prompts."""
    if prompts < FEWEST_REQUESTS:
        return None
    return np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=DRAWS).astype(np.float64)


def _row(cell: Cell, sums: _Sums, times_DP: _Floats | None, bases: tuple[_Sums | None, _Sums | None]) -> SweepRow:
    runs = sums.runs
    over_none, over_eagle3 = (_speedup(sums, base, times_DP) for base in bases)
    rounds, accepted = sum(run.rounds for run in runs), sum(run.accepted for run in runs)
    speeds = [run.tokens_per_second for run in runs]
    positions = [sum(run.accepted_per_position[j] for run in runs) for j in range(_depth(runs) if rounds else 0)]
    steps = [run.steps for run in runs if run.steps]
    decode = [run.decode_ms for run in runs if run.decode_ms is not None]
    return SweepRow(
        dataset=cell.dataset,
        method=cell.setup.method,
        num_speculative_tokens=cell.setup.num_drafts,
        concurrency=cell.concurrency,
        tokens_per_second=round(sums.tokens_per_second, 2),
        tokens_per_second_interval=(
            _over_repeats(speeds, 2) if times_DP is None else _range(sums.drawn_speed(times_DP), 2)
        ),
        tokens_per_second_repeats=[round(speed, 2) for speed in speeds],
        acceptance_length=round(1 + accepted / rounds, 4) if rounds else None if cell.setup.num_drafts else 1.0,
        acceptance_length_interval=_length_range(sums, rounds, times_DP),
        accepted_share_per_position=[round(count / max(rounds, 1), 4) for count in positions],
        speedup_over_none=over_none[0],
        speedup_over_none_interval=over_none[1],
        speedup_over_eagle3=over_eagle3[0],
        speedup_over_eagle3_interval=over_eagle3[1],
        ms_per_step=round(1e3 * sums.seconds / sum(steps), 4) if len(steps) == len(runs) else None,
        decode_ms_per_step=round(float(np.median(decode)), 4) if decode else None,
        mean_in_flight=round(sums.in_flight, 3),
        prompts=int((sums.by_prompt[:, 1] > 0).sum()),
        requests=sum(len(run.answers) for run in runs),
        failed=sum(run.failed for run in runs),
        tokens=sum(run.tokens for run in runs),
        seconds=round(sums.seconds, 4),
    )


def _depth(runs: Sequence[Run]) -> int:
    return min((len(run.accepted_per_position) for run in runs), default=0)


def _length_range(sums: _Sums, rounds: int, times_DP: _Floats | None) -> Range | None:
    """None where there are few prompts, or where a server does not say what each request's rounds were."""
    if times_DP is None or not rounds or sums.by_prompt[:, 2].sum() != rounds:
        return None
    return _range(sums.drawn_length(times_DP), 4)


def _speedup(sums: _Sums, base: _Sums | None, times_DP: _Floats | None) -> tuple[float | None, Range | None]:
    """Ratio of the tokens per second, and its interval: over the same draws of prompts, or over the same repeats."""
    if base is None or not base.tokens_per_second:
        return None, None
    ratio = round(sums.tokens_per_second / base.tokens_per_second, 4)
    if times_DP is not None:
        under = base.drawn_speed(times_DP)
        drawn = sums.drawn_speed(times_DP)
        return ratio, _range(np.divide(drawn, under, out=np.zeros_like(drawn), where=under > 0), 4)
    both = [(run, base.repeats[n]) for n, run in sums.repeats.items() if n in base.repeats]
    return ratio, _over_repeats([a.tokens_per_second / b.tokens_per_second for a, b in both if b.tokens], 4)


def _range(drawn: _Floats, digits: int) -> Range:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [round(float(low), digits), round(float(high), digits)]


def _over_repeats(values: Sequence[float], digits: int) -> Range | None:
    return repeats_interval(values).rounded(digits) if len(values) > 1 else None


def best_drafts(rows: Sequence[SweepRow], method: str) -> dict[int, int]:
    """Concurrency -> the K of a method that is fastest over all prompt sets, 0 where none beats decoding without
    drafts. Speeds of several sets are joined by their geometric mean, so that each set counts alike; a K or a
    concurrency that lacks a set is left out."""
    datasets = {row.dataset for row in rows}
    speeds: dict[int, dict[Setup, dict[str, float]]] = {}
    for row in rows:
        if row.method in (method, PLAIN) and row.tokens_per_second > 0:
            setup = Setup(row.method, row.num_speculative_tokens)
            speeds.setdefault(row.concurrency, {}).setdefault(setup, {})[row.dataset] = row.tokens_per_second
    best = {}
    for concurrency, of in sorted(speeds.items()):
        of_all = {setup.num_drafts: by_set.values() for setup, by_set in of.items() if set(by_set) == datasets}
        whole = {k: geometric_mean(by_set) for k, by_set in of_all.items()}
        if any(whole):  # some K above 0
            best[concurrency] = max(whole, key=lambda k: (whole[k], -k))
    return best
