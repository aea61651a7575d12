"""Intervals against known answers: coverage on seeded data, invariances, and what cannot be told."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.bench.statistics import (
    Interval,
    acceptance_length_interval,
    interval_difference,
    mean_difference,
    ratio_difference,
    ratio_interval,
    ratio_intervals,
    repeats_difference,
    repeats_interval,
    share_interval,
)
from peagle.errors import PeagleError


def mean_interval(values, **settings) -> Interval:
    """Of one figure per request."""
    return ratio_interval(values, np.ones(np.shape(values)), **settings)


def coverage(interval_of, truth: float, trials: int = 300) -> float:
    """Share of seeded trials whose interval holds the truth."""
    intervals = [interval_of(np.random.default_rng(trial)) for trial in range(trials)]
    return sum(i.low <= truth <= i.high for i in intervals) / trials


def test_nineteen_of_twenty_intervals_hold_the_mean():
    share = coverage(lambda rng: mean_interval(rng.exponential(2.0, 60), draws=400), 2.0)
    assert 0.89 <= share <= 0.98


def test_acceptance_of_unlike_requests_is_covered_where_rounds_would_be_too_sure():
    def requests(rng):
        rounds = rng.integers(5, 40, 60)
        chance = rng.beta(2, 2, 60)  # a chance of its own per request: rounds of one are alike
        return rng.binomial(rounds, chance), rounds

    assert 0.89 <= coverage(lambda rng: acceptance_length_interval(*requests(rng), draws=400), 1.5) <= 0.98

    def by_round(rng):
        accepted, rounds = requests(rng)
        flat = np.concatenate([np.repeat([1, 0], [a, r - a]) for a, r in zip(accepted, rounds)])
        return mean_interval(flat, draws=200).shifted(1.0)

    assert coverage(by_round, 1.5, 100) < 0.85


def test_three_repeats_are_covered_by_t_and_not_by_the_bootstrap():
    draw = lambda rng: rng.normal(10.0, 1.0, 3)  # noqa: E731
    assert 0.91 <= coverage(lambda rng: repeats_interval(draw(rng)), 10.0) <= 0.98
    assert coverage(lambda rng: mean_interval(draw(rng), draws=200), 10.0) < 0.85


def test_no_difference_is_noise_and_a_large_one_is_not():
    same = coverage(lambda rng: mean_difference(rng.normal(5, 1, 50), rng.normal(5, 1, 50), draws=400), 0.0)
    assert same >= 0.9
    rng = np.random.default_rng(0)
    moved = mean_difference(rng.normal(5, 1, 50), rng.normal(7, 1, 50))
    assert not moved.includes_zero
    assert moved.low < 2 < moved.high
    assert coverage(lambda rng: repeats_difference(rng.normal(5, 1, 4), rng.normal(5, 2, 4)), 0.0) >= 0.92


def test_known_answers():
    assert repeats_interval([1.0, 2.0, 3.0]).rounded(3) == [round(2 - 4.303 / math.sqrt(3), 3), 4.484]
    assert mean_interval([4.0] * 5) == Interval(4.0, 4.0, 4.0)
    assert acceptance_length_interval([2, 4], [2, 2]).value == 2.5
    assert ratio_interval([0, 0], [0, 0]) == Interval(0.0, 0.0, 0.0)
    assert repeats_interval([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert repeats_difference([3.0], [5.0, 6.0]).includes_zero
    assert repeats_difference([3.0, 3.0], [5.0, 5.0]) == Interval(2.0, 2.0, 2.0)
    joined = interval_difference(Interval(1, 0.7, 1.4), Interval(5, 4.7, 5.3))
    assert (joined.value, joined.low, joined.high) == pytest.approx((4, 3.5, 4 + math.hypot(0.3, 0.3)))


def test_shares_have_a_width_even_where_all_are_alike():
    assert share_interval(0, 10).rounded(3) == [0.0, 0.278]
    assert share_interval(5, 10).rounded(3) == [0.237, 0.763]
    assert share_interval(10, 10).rounded(3) == [0.722, 1.0]
    assert coverage(lambda rng: share_interval(int(rng.binomial(40, 0.1)), 40), 0.1) >= 0.9


def test_pairs_of_ratios_see_what_two_samples_cannot():
    rng = np.random.default_rng(2)
    rounds = rng.integers(20, 60, 40)
    accepted = rng.binomial(rounds * 4, rng.beta(2, 2, 40))
    worse = accepted - rng.binomial(accepted, 0.05)
    assert not ratio_difference((accepted, rounds), (worse, rounds), paired=True).includes_zero
    assert ratio_difference((accepted, rounds), (worse, rounds)).includes_zero
    assert ratio_difference((accepted, rounds), (accepted, rounds), paired=True) == Interval(0.0, 0.0, 0.0)


def test_columns_are_those_of_the_single_figure():
    rng = np.random.default_rng(3)
    over, under = rng.integers(0, 9, (30, 3)), rng.integers(1, 9, (30, 3))
    for column, interval in enumerate(ratio_intervals(over, under)):
        alone = ratio_interval(over[:, column], under[:, column])
        assert (interval.low, interval.high) == pytest.approx((alone.low, alone.high))


def test_the_seed_decides_and_parts_do_not_matter(monkeypatch):
    values = np.random.default_rng(0).normal(size=50)
    assert mean_interval(values, seed=3) == mean_interval(values, seed=3) != mean_interval(values, seed=4)
    whole = ratio_difference((values, np.ones(50)), (values[:20], np.ones(20)))
    monkeypatch.setattr("peagle.bench.statistics._CELLS", 64)
    again = ratio_difference((values, np.ones(50)), (values[:20], np.ones(20)))
    assert (again.low, again.high) == pytest.approx((whole.low, whole.high))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30))
def test_a_ratio_lies_between_the_extremes(pairs):
    accepted, rounds = map(list, zip(*pairs))
    interval = ratio_interval(accepted, rounds, draws=50)
    assert interval.low <= interval.high
    assert interval.value == pytest.approx(sum(accepted) / sum(rounds) if sum(rounds) else 0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_interval([]),
        lambda: mean_interval([[1.0]]),
        lambda: mean_interval([1.0, math.nan]),
        lambda: ratio_interval([1, 2], [1]),
        lambda: mean_interval([1.0], level=1.0),
        lambda: share_interval(2, 1),
        lambda: share_interval(0, 0),
        lambda: ratio_intervals([[1, 2]], [[1]]),
        lambda: ratio_difference(([1], [1]), ([1, 1], [1, 1]), paired=True),
        lambda: mean_interval([1.0], draws=0),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(PeagleError):
        call()
