"""How sure a figure is: intervals by resampling requests, intervals of a few repeats, and what difference is noise.

Requests are what is drawn, not rounds: the rounds of one answer are alike, so counting each as evidence of its own
would make every interval too narrow. An interval is the percentile bootstrap's at 95 % unless said otherwise.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from peagle.errors import PeagleError

LEVEL = 0.95
DRAWS = 2000
FEWEST_REQUESTS = 8  # a bootstrap of fewer knows too little of how unlike requests are
_CELLS = 4_000_000  # of the table of how often each request was drawn, made in parts no larger

# Student's t at 97.5 %, by degrees of freedom from 1; beyond the table the normal distribution's.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.960

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the range that it lies in with the probability asked for."""

    value: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        """Of a difference: whether it may be none, so that it cannot be told from noise."""
        return self.low <= 0.0 <= self.high

    def shifted(self, by: float) -> "Interval":
        """The interval of the figure plus a constant."""
        return Interval(self.value + by, self.low + by, self.high + by)

    def rounded(self, digits: int = 4) -> list[float]:
        """[low, high] as a result file has them."""
        return [round(self.low, digits), round(self.high, digits)]


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Sum of numerators / sum of denominators, one pair per request; 0 where the denominators are 0."""
    over, under = _pairs(numerators, denominators)
    return _interval(_ratio(over.sum(), under.sum()), _draw(over, under, draws, seed), level)


def ratio_intervals(
    numerators: ArrayLike, denominators: ArrayLike, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> list[Interval]:
    """`ratio_interval` of every column of two tables [requests, columns], from one and the same draw of requests."""
    over, under = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if over.ndim != 2 or over.shape != under.shape or not len(over):
        raise PeagleError(f"intervals need two tables of one size, not {over.shape} and {under.shape}")
    values, drawn = _ratio(over.sum(axis=0), under.sum(axis=0)), _draw(over, under, draws, seed)
    return [_interval(value, column, level) for value, column in zip(values, drawn.T, strict=True)]


def acceptance_length_interval(
    accepted: ArrayLike, rounds: ArrayLike, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """1 + accepted / rounds, of every request's accepted drafts and its rounds."""
    return ratio_interval(accepted, rounds, level=level, draws=draws, seed=seed).shifted(1.0)


def repeats_interval(values: ArrayLike) -> Interval:
    """The mean of a few repeats, by Student's t at 95 %; of one repeat the interval is without bounds.

    A bootstrap of three values knows three values and gives far too narrow an interval.
    """
    sample = _sample(values)
    mean = float(sample.mean())
    if len(sample) == 1:
        return Interval(mean, -math.inf, math.inf)
    reach = _t(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return Interval(mean, mean - reach, mean + reach)


def share_interval(successes: int, count: int) -> Interval:
    """A share of yes or no answers, by Wilson at 95 %: unlike a bootstrap it has a width where all are alike."""
    if not 0 <= successes <= count or not count:
        raise PeagleError(f"{successes} of {count} is no share")
    share, z2 = successes / count, _NORMAL**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = _NORMAL / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return Interval(share, max(middle - reach, 0.0), min(middle + reach, 1.0))


def mean_difference(
    first: ArrayLike, second: ArrayLike, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Mean of `second` less mean of `first`, two samples of different requests."""
    a, b = _sample(first), _sample(second)
    return ratio_difference((a, np.ones_like(a)), (b, np.ones_like(b)), level=level, draws=draws, seed=seed)


def ratio_difference(
    first: tuple[ArrayLike, ArrayLike],
    second: tuple[ArrayLike, ArrayLike],
    *,
    paired: bool = False,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Ratio of sums of `second` less that of `first`, each (numerators, denominators) by request.

    `paired`: the same requests in the same order, drawn together, so that what they have in common does not blur it.
    """
    a, b = _pairs(*first), _pairs(*second)
    if paired and len(a[0]) != len(b[0]):
        raise PeagleError(f"{len(a[0])} requests cannot be paired with {len(b[0])}")
    value = _ratio(b[0].sum(), b[1].sum()) - _ratio(a[0].sum(), a[1].sum())
    drawn = _draw(*b, draws, seed if paired else seed + 1) - _draw(*a, draws, seed)
    return _interval(value, drawn, level)


def interval_difference(first: Interval, second: Interval) -> Interval:
    """Difference of two figures of which only the intervals are left: half-widths add as errors of independent sums."""
    value = second.value - first.value
    low = math.hypot(second.value - second.low, first.high - first.value)
    high = math.hypot(second.high - second.value, first.value - first.low)
    return Interval(value, value - low, value + high)


def repeats_difference(first: ArrayLike, second: ArrayLike) -> Interval:
    """Mean of a few repeats of `second` less that of `first`, by Welch's t at 95 %; unbounded where one ran once."""
    a, b = _sample(first), _sample(second)
    value = float(b.mean() - a.mean())
    if min(len(a), len(b)) == 1:
        return Interval(value, -math.inf, math.inf)
    variances = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    if not sum(variances):
        return Interval(value, value, value)
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True))
    reach = _t(int(freedom)) * math.sqrt(sum(variances))
    return Interval(value, value - reach, value + reach)


def _t(freedom: int) -> float:
    return _T[max(freedom, 1) - 1] if freedom <= len(_T) else _NORMAL


def _sample(values: ArrayLike) -> Floats:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample):
        raise PeagleError(f"an interval needs a list of figures, at least one, not shape {sample.shape}")
    if not np.isfinite(sample).all():
        raise PeagleError("an interval needs finite figures: some are not numbers or have no bound")
    return sample


def _pairs(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = _sample(first), _sample(second)
    if len(a) != len(b):
        raise PeagleError(f"{len(a)} figures cannot be paired with {len(b)}: give one of each per request")
    return a, b


def _draw(over: Floats, under: Floats, draws: int, seed: int) -> Floats:
    """The ratio of sums in each of `draws` samples of the requests, drawn with replacement."""
    if draws < 1:
        raise PeagleError(f"draws is {draws}: it must be at least 1")
    rng, count = np.random.default_rng(seed), len(over)
    part = max(1, _CELLS // count)
    ratios = []
    for begin in range(0, draws, part):
        times = rng.multinomial(count, np.full(count, 1 / count), size=min(part, draws - begin))
        ratios.append(_ratio(times @ over, times @ under))
    return np.concatenate(ratios)


def _ratio(over: Floats, under: Floats) -> Floats:
    return np.divide(over, under, out=np.zeros_like(over, dtype=np.float64), where=np.asarray(under) != 0)


def _interval(value: Floats | float, drawn: Floats, level: float) -> Interval:
    if not 0 < level < 1:
        raise PeagleError(f"level is {level}: it must be between 0 and 1")
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value), float(low), float(high))
