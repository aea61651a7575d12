"""Two result files: rows find each other, noise is told from change, and what else differs is said."""

import ast
import json
import re

import numpy as np
import pytest
from rich.console import Console

from peagle.bench.compare import REGRESSION_STATUS, compare, run_compare
from peagle.bench.groups import pack_requests
from peagle.bench.report import write_result
from peagle.bench.result_figures import direction
from peagle.errors import PeagleError
from tests.test_cli import ROOT, flags_of

SETTINGS = {"max_tokens": 16, "datasets": {"mt_bench": {"sha256": "a"}}}


def result(rows, settings=SETTINGS, **lists):
    part = {"machine": {"gpu": None}, "versions": {"torch": "2"}, "settings": settings}
    return {"name": "eval-a", "created": "", **part, "results": {"rows": rows, **lists}}


def speed(value, spread=None, repeats=None, **more):
    row = {"method": "p-eagle", "num_speculative_tokens": 3, "concurrency": 1, "tokens_per_second": value, **more}
    row |= {"tokens_per_second_interval": [value - spread, value + spread]} if spread is not None else {}
    return row | ({"tokens_per_second_repeats": repeats} if repeats else {})


def the(changes, name="tokens_per_second"):
    (change,) = [change for change in changes if change.name == name]
    return change


def test_intervals_decide_what_is_noise():
    assert the(compare(result([speed(100, 8)]), result([speed(105, 8)])).changes).verdict == "noise"
    moved = the(compare(result([speed(100, 1)]), result([speed(105, 1)])).changes)
    assert (moved.verdict, moved.percent, moved.difference.value) == ("moved", 5.0, 5.0)
    assert the(compare(result([speed(100)]), result([speed(105)])).changes).verdict == "cannot tell"
    assert the(compare(result([speed(100)]), result([speed(100)])).changes).verdict == "same"


def test_a_handful_of_requests_says_nothing():
    few, many = ([speed(value, 1, prompts=count) for value in (100, 105)] for count in (7, 8))
    assert the(compare(result(few[:1]), result(few[1:])).changes).verdict == "cannot tell"
    assert the(compare(result(many[:1]), result(many[1:])).changes).verdict == "moved"


def test_enough_repeats_go_before_an_interval():
    wide, far = [80.0, 120.0, 100.0], [85.0, 125.0, 105.0]
    before, after = result([speed(100, 0.1, wide)]), result([speed(105, 0.1, far)])
    assert the(compare(before, after).changes).verdict == "noise"
    two = compare(result([speed(100, 0.1, wide[:2])]), result([speed(105, 0.1, far[:2])]))
    assert the(two.changes).verdict == "moved"


def test_requests_are_paired_where_the_prompts_are_the_same():
    rng = np.random.default_rng(0)
    table = rng.multinomial(40, [0.25] * 4, size=30)
    table[:15, 3] += 60  # requests differ much more from each other than the runs do
    worse = table.copy()
    worse[:, 2:] -= 1
    worse[:, :2] += 1

    def row(counts):
        accepted, rounds = counts @ np.arange(4), counts.sum(axis=1)
        length = 1 + accepted.sum() / rounds.sum()
        return {"suite": "mt_bench", "acceptance_length": length, "per_request": pack_requests(counts)}

    before, after = result([row(table)]), result([row(worse)])
    assert the(compare(before, after).changes, "acceptance_length").verdict == "moved"
    other = result([row(worse)], {"max_tokens": 16, "datasets": {"mt_bench": {"sha256": "b"}}})
    assert the(compare(before, other).changes, "acceptance_length").verdict == "noise"


def test_latencies_of_a_load_are_judged_by_its_requests():
    def load(shift, count=40):
        times = np.random.default_rng(1).normal(50 + shift, 2, count).tolist()
        row = {"dataset": "mt-bench", "latency_ms": {"ttft": {"mean": float(np.mean(times)), "p99": max(times)}}}
        return result([row], requests=[{"id": str(i), "ttft_ms": time} for i, time in enumerate(times)])

    changes = compare(load(0), load(5)).changes
    assert the(changes, "latency_ms.ttft.mean").verdict == "moved"
    assert the(changes, "latency_ms.ttft.p99").verdict == "cannot tell"
    assert the(compare(load(0), load(0.1)).changes, "latency_ms.ttft.mean").verdict == "noise"
    assert the(compare(load(0), load(5, 7)).changes, "latency_ms.ttft.mean").verdict == "cannot tell"


def test_rows_match_by_what_identifies_them_and_strays_are_named():
    rows = [speed(100), speed(50) | {"concurrency": 8}, speed(70) | {"method": "none"}]
    found = compare(result(rows), result([rows[1], rows[0]]))
    assert {change.verdict for change in found.changes} == {"same"}
    assert found.warnings == ["only in the first file: none K=3 concurrency=1"]
    lone = compare(result([speed(100)]), result([speed(90) | {"method": "other"}]))
    assert the(lone.changes).after == 90


def test_what_else_differs_is_said():
    other = result([speed(1, partial=True)], {"max_tokens": 32})
    other["versions"] = {"torch": "3"}
    warnings = compare(result([speed(1)]), other).warnings
    assert "the second file is partial: its run was stopped" in warnings
    assert "settings differ in max_tokens: 16 -> 32" in warnings
    assert "versions differ in torch: 2 -> 3" in warnings


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("tokens_per_second", 1), ("acceptance_length", 1), ("accepted_share_per_position[2]", 1), ("goodput", 1),
        ("speedup_over_none", 1), ("ratio", 1), ("ms_per_step", -1), ("latency_ms.tpot.p99", -1), ("seconds", -1),
        ("peak_gib", -1), ("failed", -1), ("latency_ms.tpot.std", 0), ("prompts", 0), ("output_tokens", 0),
    ],
)  # fmt: skip
def test_better_is_known_by_name(name, way):
    assert direction(name) == way


def write(path, rows):
    write_result(path, path.stem, SETTINGS, {"rows": rows})
    return path


def test_a_regression_fails_the_command_and_noise_does_not(tmp_path, capsys):
    before = write(tmp_path / "a.json", [speed(100, 1)])
    console = Console(width=200)
    for rows, status in (([speed(90, 1)], REGRESSION_STATUS), ([speed(97, 1)], 0), ([speed(110, 1)], 0)):
        after = write(tmp_path / "b.json", rows)
        assert run_compare(before, after, console, fail_on_regression=5) == status
    noisy = write(tmp_path / "b.json", [speed(80, 50)])
    assert run_compare(before, noisy, console, fail_on_regression=5) == 0
    unknown = write(tmp_path / "b.json", [speed(80)])
    for pair in ((before, unknown), (unknown, before)):  # nobody knows, so the order must not decide
        assert run_compare(*pair, console, fail_on_regression=5) == 0
        text = capsys.readouterr().out
        assert "not judged: 1 of the figures changed by more than 5 %, for better or worse" in text
        assert "cannot tell of 1: the files have no interval and fewer than 3 repeats of it" in text
    assert run_compare(before, write(tmp_path / "b.json", [speed(90, 1)]), console, fail_on_regression=5) == 1
    assert "worse by more than 5 %: p-eagle K=3 concurrency=1 tokens_per_second" in capsys.readouterr().out
    assert run_compare(before, unknown, console) == 0


def test_the_reason_why_nobody_can_tell_is_the_true_one(tmp_path, capsys):
    few = [write(tmp_path / f"{value}.json", [speed(value, 1, prompts=7)]) for value in (100, 80)]
    assert run_compare(*few, Console(width=200), fail_on_regression=5) == 0
    text = capsys.readouterr().out
    assert "cannot tell of 1: fewer than 8 prompts; measure again with more" in text
    assert "no interval" not in text


@pytest.mark.parametrize("verb", ["eval", "bench serve", "bench sweep", "profile", "-m benchmarks.auto_k"])
@pytest.mark.parametrize("prompts", [7, 8])
def test_a_hint_names_flags_of_the_verb_that_measured(verb, prompts, tmp_path, capsys):
    program = "python" if verb.startswith("-m") else "peagle"
    for name, value in (("a", 100), ("b", 80)):
        settings = SETTINGS | {"command": f"{program} {verb} --seed 1"}
        write_result(tmp_path / f"{name}.json", name, settings, {"rows": [speed(value, prompts=prompts)]})
    run_compare(tmp_path / "a.json", tmp_path / "b.json", Console(width=200))
    hint = re.search(r"cannot tell of 1: .*", capsys.readouterr().out)[0]
    assert ("fewer than 8 prompts; measure again with more" in hint) == (prompts == 7)
    named = re.search(r"\(peagle ([a-z ]+?) (--.*)\)", hint)
    has_one = {("eval", 7), ("bench serve", 7), ("bench sweep", 7), ("bench sweep", 8)}
    assert (named is not None) == ((verb, prompts) in has_one)
    assert named is not None or "--" not in hint
    if named is not None:
        assert named[1] == verb
        assert set(named[2].split(", ")) <= flags_of(verb)


def test_what_a_load_test_says_names_its_own_flags():
    """In its messages, whichever they are: flags of other verbs would be refused."""
    rooms = ("client", "foreign_sets", "latency", "load", "load_progress", "serve", "serve_view", "server_info", "sets")
    said = set()
    for name in rooms:
        tree = ast.parse((ROOT / "peagle" / "bench" / f"{name}.py").read_text())
        texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        said |= {flag for text in texts for flag in re.findall(r"--[a-z][a-z-]*[a-z]", text)}
    assert len(said) > 5
    assert said <= flags_of("bench serve")


def test_sums_are_compared_only_over_the_same_work():
    rows = [speed(100, 1, seconds=value, tokens=9, prompts=9, failed=0) for value in (10.0, 30.0)]
    same = compare(result(rows[:1]), result(rows[1:]))
    assert the(same.changes, "seconds").verdict == "cannot tell"
    longer = compare(result(rows[:1]), result(rows[1:], SETTINGS | {"max_tokens": 32, "repeats": 3}))
    assert [change.name for change in longer.changes] == ["tokens_per_second"]
    assert "max_tokens, repeats differ: seconds, counts and other sums are not compared" in longer.warnings
    more = compare(result(rows[:1]), result([rows[1] | {"prompts": 10}]))
    assert [change.name for change in more.changes] == ["tokens_per_second"]
    assert "has 9 in the first file, 10 in the second" in more.warnings[0]


def test_numbers_of_a_list_share_a_line_and_texts_stay(tmp_path):
    row = {"text": "[\n  1,\n  2\n]", "shares": [0.5, -1e-5, 3], "nested": [[1, 2], []], "mixed": [1, "a"]}
    path = write(tmp_path / "a.json", [row])
    assert '"shares": [0.5, -1e-05, 3]' in path.read_text()
    assert json.loads(path.read_text())["results"]["rows"] == [row]


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": "many"}, {"prompts": float("nan")}, {"concurrency": [1]}, {"suite": ["mt_bench"]},
        {"tokens_per_second_repeats": [1, "two", 3]}, {"tokens_per_second_interval": [1]}, {"seconds": 10**400},
        {"acceptance_length": 2.0, "per_request": "1 of 2"},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_measures_says_nothing_and_is_no_traceback(tmp_path, change):
    rows = [speed(100, 1, [99.0, 100.0, 101.0], prompts=9) | {"acceptance_length": 1.5, "seconds": 1}]
    other = rows[0] | {"tokens_per_second": 101} | change
    good, edited = write(tmp_path / "a.json", rows), write(tmp_path / "b.json", [other])
    for pair in ((good, edited), (edited, good), (edited, edited)):
        assert run_compare(*pair, Console(), show_all=True, fail_on_regression=1.0) in (0, REGRESSION_STATUS)


def test_an_interval_that_is_none_says_nothing():
    odd = speed(105) | {"tokens_per_second_interval": [104]}
    assert the(compare(result([speed(100, 1)]), result([odd])).changes).verdict == "cannot tell"


@pytest.mark.parametrize("odd", [None, 5, "x", [1], [{"ttft_ms": "fast"}], {"a": 1}], ids=str)
def test_lists_of_a_file_may_be_anything(odd):
    settings = {"datasets": odd}
    rows = [{"method": "none", "latency_ms": {"ttft": {"mean": value}}} for value in (10.0, 20.0)]
    before, after = (result([row], settings, requests=odd, more=odd) for row in rows)
    assert the(compare(before, after).changes, "latency_ms.ttft.mean").verdict == "cannot tell"


def test_a_mistake_of_ours_is_not_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.compare.other_amounts", lambda *_: {}["name"])
    paths = [write(tmp_path / name, [speed(100)]) for name in ("a.json", "b.json")]
    with pytest.raises(KeyError):
        run_compare(*paths, Console())


def test_names_are_no_markup(tmp_path, capsys):
    paths = []
    for value in (100, 50):
        settings = SETTINGS | {"dataset_path": f"[/red] {value}"}
        paths.append(tmp_path / f"[bold]{value}.json")
        write_result(paths[-1], "eval-a", settings, {"rows": [speed(value, 1, model="[/red] of [bold] kind")]})
    run_compare(*paths, Console(width=200))
    run_compare(*paths[:1], write(tmp_path / "c.json", [speed(9, 1, model="[/x]")]), Console(width=200))
    text = capsys.readouterr().out
    assert "[/red] of [bold] kind" in text
    assert "[bold]50.json" in text
    assert "settings differ in dataset_path: [/red] 100 -> None" in text


def test_in_80_columns_no_name_is_cut(tmp_path, capsys):
    def load(path, shift):
        spread = {name: dict.fromkeys(("mean", "p50", "p95"), 1000.0 + shift) for name in ("ttft", "tpot")}
        return write(path, [{"model": f"smollm2-135m in a folder of {n} words", "latency_ms": spread} for n in "ab"])

    folders = [tmp_path / name for name in ("before", "after")]
    assert run_compare(*(load(one / "load.json", 9 * n) for n, one in enumerate(folders)), Console(width=80)) == 0
    text = capsys.readouterr().out
    head, _, table = text.partition("figure ")
    assert f"first: {folders[0] / 'load.json'}, second: {folders[1] / 'load.json'}" in head
    assert max(map(len, table.partition("figures:")[0].splitlines())) <= 80
    assert "smollm2-135m in a folder of b words" in " ".join(table.split())
    for name in ("ttft", "tpot"):
        assert [table.count(f"latency_ms.{name}.{part} ") for part in ("mean", "p50", "p95")] == [2, 2, 2]


def test_bad_input_is_named(tmp_path):
    good = write(tmp_path / "a.json", [speed(1)])
    with pytest.raises(PeagleError, match="no row in common"):
        compare(result([speed(1)]), result([{"suite": "x", "loss": 2.0}, {"suite": "y", "loss": 2.0}]))
    with pytest.raises(PeagleError, match="cannot read"):
        run_compare(good, tmp_path / "none.json", Console())
    (tmp_path / "other.json").write_text("[1]")
    for content, words in (
        (b"[1]", "JSON list; give a file that peagle wrote"),
        (b"7", "JSON int"),
        (b"", "not JSON"),
        (b"\xff\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"name": "a"}', "lacks 'created'"),
        (good.read_bytes().replace(b'"results": {', b'"results": 1, "x": {'), "another kind of 'results'"),
    ):
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(PeagleError, match=f"no result file.*{words}"):
            run_compare(good, tmp_path / "other.json", Console())
    with pytest.raises(PeagleError, match="Is a directory; check the path"):
        run_compare(good, tmp_path, Console())
    with pytest.raises(PeagleError, match="percentage"):
        run_compare(good, good, Console(), fail_on_regression=-1)
