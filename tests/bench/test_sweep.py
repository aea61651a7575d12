"""A sweep from its plan to its files: order, resumption, budget, interruption, and bad input on the command line."""

import io
import json
import math
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from peagle.bench.closed_loop import Answer, Run
from peagle.bench.report import read_result
from peagle.bench.sweep import Sweep, read_sets, write_k_tables
from peagle.bench.sweep_plan import Cell, RunFile, Setup, in_turns, setups_of
from peagle.bench.sweep_rows import SweepRow
from peagle.bench.sweep_settings import EAGLE3, P_EAGLE, PLAIN, SweepConfig
from peagle.bench.sweep_source import EngineSource
from peagle.engine.speculation import load_k_table
from peagle.errors import PeagleError
from tests.engine.tiny import random_prompts, tiny_parts

SETUPS = setups_of([P_EAGLE, EAGLE3, PLAIN], [3, 5])
CONFIG = SweepConfig(k=(3, 5), concurrency=(1, 4), num_prompts=8, repeats=2)


def made_up(setup, concurrency, speed=1.0):
    """A run whose speed is that of its setup: P-EAGLE is fast, most so at K = 5 with one request."""
    factor = {P_EAGLE: 2.0 if concurrency == 1 else 0.5, EAGLE3: 1.5, PLAIN: 1.0}[setup.method]
    factor += 0.1 * setup.num_drafts * (1 if setup.method == P_EAGLE else -1) if setup.num_drafts else 0
    seconds = 1 / (factor * speed)
    drafts, rounds = setup.num_drafts, 10 if setup.num_drafts else 0
    answers = tuple(Answer(i, 100, seconds, rounds, min(drafts, 2) * rounds) for i in range(4))
    positions = (10 * len(answers),) * min(drafts, 2) + (0,) * max(drafts - 2, 0)
    return Run(
        concurrency=concurrency, seconds=4 * seconds / concurrency, answers=answers, rounds=4 * rounds,
        accepted=4 * min(drafts, 2) * rounds, accepted_per_position=positions, steps=50, decode_ms=1.0,
    )  # fmt: skip


class MadeUp:
    """A source without models that notes what it is asked for."""

    def __init__(self, fail_at=None, error=KeyboardInterrupt):
        self.asked, self.warmed, self._fail_at, self._error = [], [], fail_at, error

    def warm_up(self, setups):
        self.warmed += setups
        yield from ()

    def run(self, dataset, setup, concurrency):
        if len(self.asked) == self._fail_at:
            raise self._error
        self.asked.append(Cell(dataset, concurrency, setup))
        return made_up(setup, concurrency)


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """Drawing takes seconds; one test does it."""
    if request.node.name != "test_a_whole_sweep_and_what_it_writes":
        monkeypatch.setattr("peagle.bench.sweep._plots", lambda *_: [])


def sweep_of(source, out, config=CONFIG, *, resume=False, setting=None, begin=None):
    import time

    console = Console(file=io.StringIO(), width=200)
    begin = time.perf_counter() if begin is None else begin
    setting = (
        {"target": "made up", "datasets": {"a": {"sha256": "1"}, "b": {"sha256": "2"}}} if setting is None else setting
    )
    return Sweep(source, config, out, setting, console, begin=begin, resume=resume), console


def test_ways_to_decode_take_turns_and_each_repeat_begins_with_another():
    plan = list(in_turns(["a", "b"], SETUPS, [1, 4], 2))
    assert len(plan) == len(set(plan)) == 2 * 2 * 5 * 2
    firsts = [cell.setup for repeat, cell in plan[::5] if repeat == 0], [cell.setup for r, cell in plan[::5] if r == 1]
    assert set(firsts[0]) == {SETUPS[0]}
    assert set(firsts[1]) == {SETUPS[1]}
    for start in range(0, len(plan), 5):
        group = plan[start : start + 5]
        assert len({(repeat, cell.dataset, cell.concurrency) for repeat, cell in group}) == 1
        assert {cell.setup for _, cell in group} == set(SETUPS)
    assert [cell.dataset for _, cell in plan[:20:5]] == ["a", "b", "a", "b"]  # all sets before the next concurrency


def test_no_k_table_without_plain_decoding_or_where_requests_failed(tmp_path):
    sweep, _ = sweep_of(MadeUp(), tmp_path / "sweep-x.json")
    sweep.measure(["a", "b"], SETUPS)
    rows = [SweepRow(**row) for row in read_result(tmp_path / "sweep-x.json")["results"]["rows"]]
    failed = [replace(row, failed=int(row.concurrency == 4 and row.method == P_EAGLE)) for row in rows]
    assert [load_k_table(str(path)) for path in write_k_tables(failed, tmp_path / "s.json")] == [{1: 3}, {1: 5}]
    assert write_k_tables([row for row in rows if row.method != PLAIN], tmp_path / "s.json") == []


def test_a_whole_sweep_and_what_it_writes(tmp_path, capsys):
    source, out = MadeUp(), tmp_path / "sweep-x.json"
    sweep, console = sweep_of(source, out)
    assert sweep.measure(["a", "b"], SETUPS) is True
    assert len(source.asked) == 40
    assert sorted(source.warmed) == sorted(SETUPS)
    result = read_result(out)
    assert result["settings"]["partial"] is False
    rows = result["results"]["rows"]
    assert len(rows) == 20
    assert all(len(row["tokens_per_second_repeats"]) == 2 for row in rows)
    table = tmp_path / "sweep-x.k-table-p-eagle.json"
    assert load_k_table(str(table)) == {1: 5, 4: 0}  # at c = 4 no K is faster than none
    assert load_k_table(str(tmp_path / "sweep-x.k-table-eagle3.json")) == {1: 3, 4: 3}
    assert json.loads(table.read_text()) == {"1": 5, "4": 0}
    text = console.file.getvalue()
    assert "[40/40" in text
    assert "PARTIAL" not in text
    assert "p-eagle over eagle3" in capsys.readouterr().out
    for name in ("acceptance", "heat-map", "speed-up"):
        assert (tmp_path / f"sweep-x-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"sweep-x-{name}.svg").read_text()
        assert str(tmp_path / f"sweep-x-{name}.svg") in text


def test_an_interrupted_sweep_is_kept_and_resumed(tmp_path):
    out, whole = tmp_path / "sweep-x.json", tmp_path / "sweep-y.json"
    sweep, _ = sweep_of(MadeUp(fail_at=13), out)
    with pytest.raises(KeyboardInterrupt):
        sweep.measure(["a", "b"], SETUPS)
    settings = read_result(out)["settings"]
    assert (settings["partial"], settings["missing_runs"]) == (True, 27)
    with (tmp_path / "sweep-x.runs.jsonl").open("a") as stream:
        stream.write('{"settings": "cut o')
    source = MadeUp()
    again, console = sweep_of(source, out, resume=True)
    assert again.measure(["a", "b"], SETUPS)
    assert len(source.asked) == 27
    assert "13 of 40 runs are there" in console.file.getvalue()
    sweep_of(MadeUp(), whole)[0].measure(["a", "b"], SETUPS)
    assert read_result(out)["results"] == read_result(whole)["results"]
    third = MadeUp()
    assert sweep_of(third, out, resume=True)[0].measure(["a", "b"], SETUPS)
    assert not third.asked
    assert not third.warmed


@pytest.mark.parametrize(("done", "table"), [(9, None), (10, {"1": 5}), (19, {"1": 5}), (20, {"1": 5, "4": 0})])
def test_no_k_is_the_best_while_others_are_missing(tmp_path, done, table):
    """Ten cells at c = 1, ten at c = 4; the last of each set is that without drafts."""
    out = tmp_path / "sweep-x.json"
    sweep, console = sweep_of(MadeUp(fail_at=done), out)
    with pytest.raises(KeyboardInterrupt):
        sweep.measure(["a", "b"], SETUPS)
    path = tmp_path / "sweep-x.k-table-p-eagle.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == table
    assert f"PARTIAL: {40 - done} runs are missing, the same command with --resume" in console.file.getvalue()


def test_a_stop_before_the_first_run_says_that_there_is_nothing(tmp_path):
    sweep, console = sweep_of(MadeUp(fail_at=0), tmp_path / "sweep-x.json")
    with pytest.raises(KeyboardInterrupt):
        sweep.measure(["a"], SETUPS)
    assert "no run has ended: there is no result" in console.file.getvalue()
    assert not list(tmp_path.iterdir())


def test_sigterm_keeps_what_is_there(tmp_path):
    class Ended(MadeUp):
        def run(self, dataset, setup, concurrency):
            if len(self.asked) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().run(dataset, setup, concurrency)

    before, out = signal.getsignal(signal.SIGTERM), tmp_path / "sweep-x.json"
    with pytest.raises(SystemExit) as ended:
        sweep_of(Ended(), out)[0].measure(["a"], SETUPS)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_result(out)["settings"]["missing_runs"] == 17


def test_sigterm_while_plots_are_drawn_leaves_a_whole_result(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.sweep._plots", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or [])
    default = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens"))
    out = tmp_path / "sweep-x.json"
    with pytest.raises(SystemExit) as ended:
        sweep_of(MadeUp(), out)[0].measure(["a"], SETUPS)
    signal.signal(signal.SIGTERM, default)
    assert ended.value.code == 143
    assert read_result(out)["settings"]["missing_runs"] == 0


def test_a_larger_grid_keeps_its_runs_and_other_settings_do_not(tmp_path):
    from dataclasses import replace

    out = tmp_path / "sweep-x.json"
    sweep_of(MadeUp(), out)[0].measure(["a"], SETUPS)
    larger = MadeUp()
    config = replace(CONFIG, concurrency=(1, 4, 8), repeats=3)
    sweep_of(larger, out, config, resume=True)[0].measure(["a"], SETUPS)
    assert len(larger.asked) == 5 * 3 * 3 - 20
    for changed, setting in (
        (replace(CONFIG, max_tokens=64), None),
        (replace(CONFIG, temperature=1.0), None),
        (CONFIG, {"target": "made up", "datasets": {"a": {"sha256": "other"}}}),
        (CONFIG, {"target": "another", "datasets": {"a": {"sha256": "1"}}}),
    ):
        other = MadeUp()
        sweep_of(other, out, changed, resume=True, setting=setting)[0].measure(["a"], SETUPS)
        assert len(other.asked) == 20


def test_a_smaller_grid_leaves_runs_out_and_keeps_them(tmp_path):
    from dataclasses import replace

    out, alone = tmp_path / "sweep-x.json", tmp_path / "sweep-y.json"
    sweep_of(MadeUp(), out)[0].measure(["a", "b"], SETUPS)
    (tmp_path / "sweep-x-speed-up.png").write_text("of the larger grid")
    (tmp_path / "sweep-x-large-speed-up.png").write_text("of another sweep")
    runs = (tmp_path / "sweep-x.runs.jsonl").read_text()
    config, fewer = replace(CONFIG, k=(3,), concurrency=(1,), repeats=1), setups_of([P_EAGLE, PLAIN], [3])
    source = MadeUp()
    again, console = sweep_of(source, out, config, resume=True)
    assert again.measure(["a"], fewer)
    assert not source.asked
    assert "left out: 38 runs outside this grid, which stay in" in console.file.getvalue()
    assert (tmp_path / "sweep-x.runs.jsonl").read_text() == runs
    sweep_of(MadeUp(), alone, config)[0].measure(["a"], fewer)
    assert read_result(out)["results"] == read_result(alone)["results"]
    assert json.loads((tmp_path / "sweep-x.k-table-p-eagle.json").read_text()) == {"1": 3}
    assert not (tmp_path / "sweep-x.k-table-eagle3.json").exists()
    assert not (tmp_path / "sweep-x-speed-up.png").exists()
    assert (tmp_path / "sweep-x-large-speed-up.png").exists()


def test_runs_of_another_commit_are_kept_and_named(tmp_path, monkeypatch):
    """Nobody measures for hours again because a document changed; that figures of two codes are mixed is said."""
    out = tmp_path / "sweep-x.json"
    for commit, fail_at in (("first", 13), ("second", None)):
        monkeypatch.setattr("peagle.bench.report._commit", lambda commit=commit: commit)
        sweep, console = sweep_of(MadeUp(fail_at=fail_at), out, resume=True)
        if fail_at is not None:
            with pytest.raises(KeyboardInterrupt):
                sweep.measure(["a"], SETUPS)
            assert "warning" not in console.file.getvalue()
            assert read_result(out)["settings"]["commits"] is None
    assert sweep.measure(["a"], SETUPS)
    assert "warning: runs that are there: 13 of first; this is second" in console.file.getvalue()
    assert read_result(out)["settings"]["commits"] == {"first": 13, "second": 7}
    runs = [json.loads(line) for line in (tmp_path / "sweep-x.runs.jsonl").read_text().splitlines()]
    assert [run["commit"] for run in runs] == ["first"] * 13 + ["second"] * 7


def test_runs_of_before_commits_were_kept_are_of_an_unknown_one(tmp_path):
    out = tmp_path / "sweep-x.json"
    sweep_of(MadeUp(), out)[0].measure(["a"], SETUPS)
    path = tmp_path / "sweep-x.runs.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{name: value for name, value in e.items() if name not in ("commit", "failure")} for e in entries]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in old))
    sweep, console = sweep_of(MadeUp(), out, resume=True)
    assert sweep.measure(["a"], SETUPS)
    assert "runs that are there: 20 of an unknown commit; this is" in console.file.getvalue()


def test_another_head_is_measured_anew_alone(tmp_path):
    out, base = tmp_path / "sweep-x.json", {"datasets": {"a": {"sha256": "1"}}}
    heads = {P_EAGLE: {"sha256": "1"}, EAGLE3: {"sha256": "2"}}
    sweep_of(MadeUp(), out, setting=base | {"heads": heads})[0].measure(["a"], SETUPS)
    source = MadeUp()
    changed = base | {"heads": heads | {EAGLE3: {"sha256": "3"}}}
    sweep_of(source, out, resume=True, setting=changed)[0].measure(["a"], SETUPS)
    assert {cell.setup.method for cell in source.asked} == {EAGLE3}


def test_the_time_is_over(tmp_path):
    from dataclasses import replace
    from time import perf_counter

    source, out = MadeUp(), tmp_path / "sweep-x.json"
    config = replace(CONFIG, seconds=50.0)
    sweep, console = sweep_of(source, out, config, begin=perf_counter() - 100)
    with pytest.raises(PeagleError, match="nothing was measured in 50 seconds: raise --seconds"):
        sweep.measure(["a"], SETUPS)
    assert not source.asked
    assert "20 runs are left" in console.file.getvalue()
    assert not out.exists()

    class Slow(MadeUp):
        def run(self, dataset, setup, concurrency):
            clock[0] += 20.0
            return super().run(dataset, setup, concurrency)

    clock, source = [0.0], Slow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.bench.sweep.time.perf_counter", lambda: clock[0])
        sweep, console = sweep_of(source, out, config, begin=0.0)
        assert sweep.measure(["a"], SETUPS) is False
    assert "PARTIAL: 18 runs are missing, the same command with --resume goes on" in console.file.getvalue()
    assert len(source.asked) == 2  # a third would end at 60 s
    assert read_result(out)["settings"]["missing_runs"] == 18


def test_a_failure_keeps_what_is_there(tmp_path):
    out = tmp_path / "sweep-x.json"
    with pytest.raises(RuntimeError, match="broken"):
        sweep_of(MadeUp(fail_at=4, error=RuntimeError("broken")), out)[0].measure(["a"], SETUPS)
    assert len(read_result(out)["results"]["rows"]) == 4


def test_runs_survive_their_file(tmp_path):
    file = RunFile(tmp_path / "r.json", lambda cell: cell.label)
    cell = Cell("a", 4, Setup(P_EAGLE, 3))
    file.add(1, cell, made_up(cell.setup, 4))
    ((repeat, back, run),) = file.read()
    assert (repeat, back, run) == (1, cell, made_up(cell.setup, 4))
    assert not list(RunFile(tmp_path / "r.json", lambda cell: "other").read())
    assert not list(RunFile(tmp_path / "none.json", lambda cell: "").read())
    file.path.write_text(
        json.dumps({"settings": cell.label, "dataset": "a", "concurrency": 4, "method": P_EAGLE, "k": 3})
    )
    with pytest.raises(PeagleError, match=r"r\.runs\.jsonl has a line that is no run"):
        list(file.read())


@pytest.mark.parametrize(
    "changed",
    [
        {"repeat": [1]}, {"k": [3]}, {"concurrency": "4"}, {"seconds": None}, {"seconds": math.nan}, {"failed": "x"},
        {"answers": [["a", 1, 1, 1, 1]]}, {"answers": [[0, 1]]}, {"accepted_per_position": [None]}, {"steps": "x"},
        {"rounds": -1}, {"decode_ms": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_edited_into_none_is_named(tmp_path, changed):
    file = RunFile(tmp_path / "r.json", lambda cell: "same")
    file.add(1, Cell("a", 4, Setup(P_EAGLE, 3)), made_up(Setup(P_EAGLE, 3), 4))
    file.path.write_text("[" * 100_000 + "\n" + json.dumps(json.loads(file.path.read_text()) | changed))
    with pytest.raises(PeagleError, match=r"r\.runs\.jsonl has a line that is no run"):
        list(file.read())


@pytest.fixture(scope="module")
def engines():
    """A tiny target with both kinds of heads."""
    target, parallel = tiny_parts()
    _, serial = tiny_parts(parallel=False)
    config = SweepConfig(k=(2, 3), concurrency=(1, 3), num_prompts=5, max_tokens=8, prompts_per_client=2)
    return EngineSource(target, {P_EAGLE: parallel, EAGLE3: serial}, {"a": random_prompts(4)}, config)


def test_a_cell_has_prompts_for_its_clients_and_for_an_interval():
    config = SweepConfig(num_prompts=96, prompts_per_client=3, min_prompts=16)
    assert [config.prompts_of(c) for c in (1, 2, 8, 16, 64)] == [16, 16, 24, 48, 96]
    assert SweepConfig(num_prompts=70, min_prompts=70).prompts_of(1) == 70


@pytest.mark.parametrize("ahead", [0, 1])  # 1: as on a GPU
def test_engines_answer_every_prompt_alike_with_their_k(engines, ahead, monkeypatch):
    for llm in engines._engines.values():
        monkeypatch.setattr(llm.core, "_steps_ahead", ahead)
    runs = {}
    for setup in setups_of([P_EAGLE, EAGLE3, PLAIN], [2, 3]):
        assert list(engines.warm_up([setup]))
        runs[setup] = engines.run("a", setup, 3)
        assert len(runs[setup].accepted_per_position) in (setup.num_drafts, 0)
        assert bool(runs[setup].rounds) == (setup.method != PLAIN)
    answers = {setup: sorted((a.prompt, a.tokens) for a in run.answers) for setup, run in runs.items()}
    assert all(each == answers[Setup(PLAIN, 0)] for each in answers.values())
    assert [prompt for prompt, _ in answers[Setup(PLAIN, 0)]] == [0, 0, 1, 2, 3]  # five of four prompts
    assert len(engines.run("a", Setup(PLAIN, 0), 1).answers) == 2  # two per client


def test_synthetic_acceptance_follows_set_and_k():
    target, parallel = tiny_parts()
    lengths = {("a", 1): 2.0, ("a", 3): 3.0, ("b", 3): 4.0}

    def rates(dataset, setup):
        kept = int(lengths[dataset, setup.num_drafts]) - 1
        return (1.0,) * kept + (0.0,) * (3 - kept)

    config = SweepConfig(k=(1, 3), concurrency=(2,), num_prompts=4, max_tokens=25, ignore_eos=True)
    sets = dict.fromkeys("ab", random_prompts(4))
    source = EngineSource(target, {P_EAGLE: parallel}, sets, config, plain=False, pack=False, rates=rates)
    for (dataset, k), length in lengths.items():
        run = source.run(dataset, Setup(P_EAGLE, k), 2)
        assert run.acceptance_length == pytest.approx(length, abs=0.35)  # the last round is cut


def test_a_prompt_that_fills_the_context_is_refused():
    target, parallel = tiny_parts()
    with pytest.raises(PeagleError, match="a has a prompt of 200 tokens: the target's context is 128"):
        EngineSource(target, {P_EAGLE: parallel}, {"a": [[3] * 200]}, CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k=(3, 17)), "k has 17: K is 1 to 16"),
        (dict(k=(0,)), "add the method none"),
        (dict(k=()), "k is empty"),
        (dict(k=(3, 3)), "k has 3 twice"),
        (dict(methods=("p-eagle", "medusa")), "methods has 'medusa': choose among p-eagle, eagle3, none"),
        (dict(concurrency=(0, 1)), "concurrency has 0"),
        (dict(concurrency=(128,)), "num_prompts is 80: fewer than the 128"),
        (dict(datasets=()), "datasets is empty"),
        (dict(min_prompts=0), "min_prompts is 0: it must be a whole number of at least 1"),
        (dict(min_prompts=81), "min_prompts is 81: more than the 80 of num_prompts"),
        (dict(repeats=0), "repeats is 0"),
        (dict(seconds=0.0), "seconds is 0.0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(PeagleError, match=message):
        SweepConfig(**changes)


def test_prompt_sets(tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(20)))
    sets = read_sets(["mt-bench", str(tmp_path / "mine.jsonl")], seed=0)
    assert [*sets] == ["mt-bench", "mine"]
    assert len(sets["mt-bench"]) == 80
    texts = [row.messages[0]["content"] for row in sets["mine"]]
    assert texts != sorted(texts)
    assert texts == [row.messages[0]["content"] for row in read_sets([str(tmp_path / "mine.jsonl")], 0)["mine"]]
    with pytest.raises(PeagleError, match="'mine' is neither a file nor one of mt_bench"):
        read_sets(["mine"], 0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(PeagleError, match="holds no prompts"):
        read_sets([str(tmp_path / "empty.jsonl")], 0)
    with pytest.raises(PeagleError, match="two prompt sets are called mt-bench"):
        read_sets(["mt-bench", "mt_bench"], 0)
