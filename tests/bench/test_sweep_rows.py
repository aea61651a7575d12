"""Rows, intervals and tables of a sweep, and the announcement's figures, from runs that are known."""

from dataclasses import asdict, replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from benchmarks.announcement import DRAFTS, length_of, rates_of
from benchmarks.tables import render_block
from peagle.bench.announcement import ANNOUNCED
from peagle.bench.closed_loop import Answer, Run
from peagle.bench.report import read_result, write_result
from peagle.bench.sweep_plan import Cell, Setup
from peagle.bench.sweep_plots import plot_sweep
from peagle.bench.sweep_rows import Results, best_drafts
from peagle.bench.sweep_settings import EAGLE3, P_EAGLE, PLAIN
from peagle.bench.sweep_tables import announcement_tables, print_tables, sweep_tables

FAST, SLOW, BASE = Setup(P_EAGLE, 3), Setup(EAGLE3, 3), Setup(PLAIN, 0)


def run(seconds, *, concurrency=2, rounds=0, accepted=0, positions=()):
    """Request i takes `seconds[i]` for 100 tokens; they fill the run."""
    answers = tuple(Answer(i, 100, s, rounds, accepted) for i, s in enumerate(seconds))
    return Run(
        concurrency=concurrency, seconds=sum(seconds) / concurrency, answers=answers, rounds=rounds * len(seconds),
        accepted=accepted * len(seconds), accepted_per_position=positions, steps=10, decode_ms=2.0,
    )  # fmt: skip


def results(runs, dataset="a", concurrency=2):
    made = Results()
    for setup, each in runs.items():
        for repeat, one in enumerate(each):
            made.add(repeat, Cell(dataset, concurrency, setup), one)
    return made


def row_of(made, setup, dataset="a", concurrency=2):
    wanted = (dataset, setup.method, setup.num_drafts, concurrency)
    (found,) = (
        r for r in made.rows() if (r.dataset, r.method, r.num_speculative_tokens, r.concurrency) == wanted
    )  # fmt: skip
    return found


def test_a_row_adds_its_repeats_up():
    made = results(
        {FAST: [run([1.0, 3.0], rounds=30, accepted=45, positions=(60, 20, 10)), run([1.0, 1.0], rounds=30)]}
    )
    row = row_of(made, FAST)
    assert row.tokens_per_second == round(400 / 3, 2)
    assert row.tokens_per_second_repeats == [100.0, 200.0]
    assert row.acceptance_length == 1 + 90 / 120
    assert row.accepted_share_per_position == []  # the second run had no position
    assert (row.requests, row.prompts, row.tokens, row.seconds) == (4, 2, 400, 3.0)
    assert row.mean_in_flight == 2.0
    assert row.ms_per_step == 150.0
    assert (row.speedup_over_none, row.speedup_over_eagle3) == (None, None)


def test_a_speed_up_answers_the_same_prompts_on_both_sides():
    rng = np.random.default_rng(0)
    prompts = rng.exponential(1.0, 40)  # prompts differ much, both methods feel it alike
    made = results({FAST: [run(prompts / 2)], BASE: [run(prompts)], SLOW: [run(prompts * 0.8)]})
    row = row_of(made, FAST)
    assert row.speedup_over_none == 2.0
    assert row.speedup_over_none_interval == [2.0, 2.0]
    assert row.speedup_over_eagle3 == 1.6
    low, high = row.tokens_per_second_interval
    assert low < 0.85 * row.tokens_per_second
    assert high > 1.15 * row.tokens_per_second


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        made = results({BASE: [run(rng.gamma(4.0, 0.25, 30))]})
        low, high = row_of(made, BASE).tokens_per_second_interval
        hits += low <= 200.0 <= high
    assert hits >= 51


def test_few_prompts_leave_the_interval_to_the_repeats():
    made = results({FAST: [run([1.0, 1.0]), run([0.5, 0.5])], BASE: [run([2.0, 2.0]), run([1.0, 1.0])]})
    row = row_of(made, FAST)
    assert row.speedup_over_none_interval == [2.0, 2.0]  # each repeat beside its own
    assert row.tokens_per_second_interval[0] < 0 < row.tokens_per_second_interval[1]
    alone = row_of(results({FAST: [run([1.0, 1.0])], BASE: [run([2.0, 2.0])]}), FAST)
    assert (alone.speedup_over_none, alone.speedup_over_none_interval) == (2.0, None)
    assert alone.tokens_per_second_interval is None
    assert "**2.00x** |" in sweep_tables([asdict(alone)])


def test_a_speed_up_over_repeats_takes_the_same_ones():
    """The machine was slow in the first repeat, which the base lacks."""
    made = results({FAST: [run([9.0] * 3), run([1.0] * 3), run([1.1] * 3)]})
    for repeat, seconds in ((1, 2.0), (2, 2.2)):
        made.add(repeat, Cell("a", 2, BASE), run([seconds] * 3))
    assert row_of(made, FAST).speedup_over_none_interval == [2.0, 2.0]


def test_acceptance_that_no_request_has_of_its_own():
    counted = replace(run([1.0] * 10), rounds=100, accepted=150, accepted_per_position=(100, 50))
    row = row_of(results({Setup(P_EAGLE, 2): [counted]}), Setup(P_EAGLE, 2))
    assert row.acceptance_length == 2.5
    assert row.acceptance_length_interval is None
    assert row.accepted_share_per_position == [1.0, 0.5]


@pytest.mark.parametrize("prompts", [2, 10])
def test_acceptance_that_nobody_counted_is_none(tmp_path, prompts):
    """A server without counters, or answers of one token: 1.00 would say that every draft was refused."""
    made = results(
        {BASE: [run([1.0] * prompts)], FAST: [replace(run([1.0] * prompts), accepted_per_position=(0, 0, 0))]}
    )
    row = row_of(made, FAST)
    assert (row.acceptance_length, row.acceptance_length_interval, row.accepted_share_per_position) == (None, None, [])
    assert "| p-eagle | 3 | ? |" in sweep_tables([asdict(row) for row in made.rows()])
    assert len(plot_sweep(made.rows(), tmp_path / "x.json", "")) == 6


def test_the_best_k_joins_all_sets():
    made = Results()
    speeds = {  # set, concurrency -> seconds of none, K = 3, K = 5
        ("a", 1): (2.0, 1.0, 0.5), ("b", 1): (2.0, 1.0, 1.5), ("a", 8): (1.0, 1.2, 1.5), ("b", 8): (1.0, 0.9, 2.0),
        ("a", 16): (1.0, 0.5, 0.4),
    }  # fmt: skip
    for (dataset, c), seconds in speeds.items():
        for setup, s in zip((BASE, FAST, Setup(P_EAGLE, 5)), seconds, strict=True):
            made.add(0, Cell(dataset, c, setup), run([s, s]))
    # c = 1: K = 5 has 4 x 1.33, K = 3 2 x 2; c = 8: 0.83 x 1.11 is below 1; c = 16 lacks a set.
    assert best_drafts(made.rows(), P_EAGLE) == {1: 5, 8: 0}
    assert best_drafts(made.rows(), EAGLE3) == {}


def test_of_equally_fast_k_the_least_is_best():
    made = results({Setup(P_EAGLE, k): [run([1.0])] for k in (5, 3, 7)})
    assert best_drafts(made.rows(), P_EAGLE) == {2: 3}
    made.add(0, Cell("a", 2, BASE), run([1.0]))
    assert best_drafts(made.rows(), P_EAGLE) == {2: 0}


def test_only_what_changed_is_computed_anew():
    made = results({FAST: [run([1.0])]})
    made.add(0, Cell("b", 2, FAST), run([1.0]))
    first = {row.dataset: row for row in made.rows()}
    made.add(0, Cell("b", 2, BASE), run([2.0]))
    second = {row.dataset: row for row in made.rows() if row.method == P_EAGLE}
    assert second["a"] is first["a"]
    assert second["b"].speedup_over_none == 2.0


def test_the_table():
    made = results(
        {FAST: [run([0.1] * 8)], Setup(P_EAGLE, 7): [run([0.05] * 8)], SLOW: [run([0.2] * 8)], BASE: [run([0.4] * 8)]}
    )
    made.add(0, Cell("a", 16, BASE), replace(run([0.1] * 8, concurrency=16), failed=3))
    text = sweep_tables([asdict(row) for row in made.rows()])
    assert "| p-eagle | 3 | ? | 2,000 (4.00x) |  |" in text
    assert "| p-eagle | 7 | ? | **4,000** (8.00x) |  |" in text
    assert "| none |  |  | 500 | 16,000, 3 failed |" in text
    assert "| p-eagle over none | K=7: **8.00x** [8.00–8.00] |  |" in text
    assert "| p-eagle over eagle3 | **4.00x** [4.00–4.00] |  |" in text


def test_a_terminal_gets_no_markdown():
    made = results({FAST: [run([0.1] * 8)], BASE: [run([0.4] * 8)]})
    rows = [asdict(row) for row in made.rows()]
    for terminal in (True, False):
        said = StringIO()
        print_tables(Console(file=said, force_terminal=terminal, width=100), rows, synthetic=False)
        assert "K=3: " in said.getvalue()
        assert ("**" in said.getvalue(), "|" in said.getvalue()) == (not terminal, not terminal)
    assert said.getvalue() == sweep_tables(rows) + "\n"


def test_result_names_have_their_tables(tmp_path):
    rows = results({FAST: [run([0.1] * 8)], SLOW: [run([0.2] * 8)]}, "humaneval", 1).rows()
    for name in ("sweep-x", "announcement-x"):
        write_result(tmp_path / "r.json", name, {"partial": True}, {"rows": rows})
        text = render_block(name, read_result(tmp_path / "r.json"))
        assert "p-eagle over eagle3" in text
        assert "**partial**" in text
        assert ("SYNTHETIC" in text) == name.startswith("announcement")


def test_our_speed_ups_stand_beside_the_announced():
    made = results({FAST: [run([0.1] * 8)], SLOW: [run([0.2] * 8)]}, "humaneval", 1)
    for setup, seconds in ((FAST, 0.1), (SLOW, 0.11)):
        made.add(0, Cell("humaneval", 64, setup), run([seconds] * 8))
    text = announcement_tables([asdict(row) for row in made.rows()])
    assert "| HumanEval | 1 | 1.55x | **2.00x** [2.00–2.00] | 3, 3 | 7, 3 |" in text
    assert "| HumanEval | 64 | 1.05x to 1.25x | **1.10x** [1.10–1.10] | 3, 3 | 7, 3 |" in text
    assert "MT-Bench" not in text


def test_announced_lengths():
    assert length_of("humaneval", P_EAGLE, 3) == 3.02
    assert length_of("humaneval", EAGLE3, 7) == 3.03
    assert length_of("speed-bench", P_EAGLE, 7) == 3.38
    for dataset in ANNOUNCED:
        for method in (P_EAGLE, EAGLE3):
            lengths = [length_of(dataset, method, k) for k in DRAFTS]
            assert lengths == sorted(lengths)
            assert all(1 < length <= k + 1 for length, k in zip(lengths, DRAFTS, strict=True))
        # What the announcement says of the heads: P-EAGLE is ahead, and gains more from a larger K.
        gains = [length_of(dataset, m, 7) - length_of(dataset, m, 3) for m in (P_EAGLE, EAGLE3)]
        assert gains[0] > gains[1]
    assert length_of("humaneval", P_EAGLE, 5) == pytest.approx(3.57, abs=0.1)


def test_synthetic_rates_have_the_announced_lengths():
    for dataset in ANNOUNCED:
        for k in DRAFTS:
            rates = rates_of(dataset, Setup(EAGLE3, k))
            assert len(rates) == 7
            assert 1 + sum(np.cumprod(rates)) == pytest.approx(length_of(dataset, EAGLE3, k))
            assert not any(rates[k:])
