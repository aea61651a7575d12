"""The driver of the GPU's benchmarks: what it runs, what it leaves out, and what it says of what failed."""

import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import typer

from benchmarks import h200
from benchmarks.common import ROOT
from benchmarks.h200 import DONE, FAILED, SKIPPED, TASKS, Run, Task, chosen, manifest
from peagle.bench.report import read_result
from peagle.cli import app
from peagle.errors import PeagleError

WHERE = {"machine": {"gpu": "a GPU"}, "versions": {}}
STAND_IN = """
import sys, time
what, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else None
if what == "sleep":
    print("asleep", flush=True)
    time.sleep(60)
if what in ("write", "write-and-fail"):
    time.sleep(0.1)
    open(out, "w").write("{}")
sys.exit(3 if what.endswith("fail") else 0)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))


def task(name, flags, **changes):
    return Task(name, "stand_in", flags, 1.0, **changes)


def test_one_that_fails_stops_no_other(tmp_path, capsys):
    tasks = (
        task("good", "write"),
        task("bad", "write-and-fail"),
        task("nothing", "skip-writing"),
        task("vllm", "write", runs_vllm=True),
        task("reads-bad", "write", after=("good", "bad")),
        task("reads-good", "write --of {out}/good.json", after=("good", "elsewhere")),
        task("tests", "pass", has_result=False),
    )
    run = Run(tasks, tmp_path, [], WHERE)
    run.all()
    said = read_result(manifest(tmp_path))
    rows = {row["name"]: row for row in said["results"]["rows"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": DONE, "bad": FAILED, "nothing": FAILED, "vllm": SKIPPED, "reads-bad": SKIPPED, "reads-good": DONE,
        "tests": DONE,
    }  # fmt: skip
    assert rows["good"]["result"] == str(tmp_path / "good.json")
    assert rows["bad"]["reason"] == "exit status 3"
    assert rows["bad"]["result"] == str(tmp_path / "bad.json")  # what it wrote before it failed
    assert rows["nothing"]["reason"] == f"{tmp_path / 'nothing.json'} was not written"
    assert "--kit" in rows["vllm"]["reason"]
    assert rows["reads-bad"]["reason"] == "it reads what was not measured: bad"
    assert f"--of {tmp_path}/good.json" in rows["reads-good"]["command"]
    assert rows["tests"]["result"] is None
    assert rows["good"]["seconds"] > 0
    assert said["settings"]["partial"] is False
    assert said["machine"] == WHERE["machine"]
    assert run.has_failures
    assert run.summary().splitlines()[:2] == [
        f"3 of 7 done; results are in {tmp_path}, what ran in h200-run.json there", "failed: bad: exit status 3",
    ]  # fmt: skip
    progress = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert progress[0] == "[1/7, 0 min, about 6 min left] good"  # vLLM's will not run
    assert len(progress) == 7


def test_a_result_of_before_is_not_one(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    run = Run((task("old", "pass"),), tmp_path, [], WHERE)
    run.all()
    assert [(row.status, row.result) for row in run.rows] == [(FAILED, None)]


def test_where_vllm_is(tmp_path):
    run = Run((task("vllm", "write", runs_vllm=True),), tmp_path, ["--kit", "KIT"], WHERE)
    run.all()
    assert "--kit KIT" in run.rows[0].command
    assert not run.has_failures


@pytest.mark.parametrize(("flags", "status"), [("write", 0), ("fail", 1)])
def test_the_exit_status(flags, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(h200, "TASKS", (task("one", flags), task("other", "fail")))
    monkeypatch.setattr(h200, "provenance", lambda: WHERE)
    monkeypatch.setattr(sys, "argv", ["benchmarks/h200.py", "--only", "on", "--out", str(tmp_path)])
    if status:
        with pytest.raises(SystemExit) as ended:
            h200.main()
        assert ended.value.code == status
    else:
        h200.main()
    assert f"{1 - status} of 1 done" in capsys.readouterr().out


def test_the_list_runs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/h200.py", "--list"])
    h200.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [one.name for one in TASKS]
    assert max(map(len, lines)) <= 120
    for line, one in zip(lines, TASKS, strict=True):
        assert f" {one.minutes:.1f} min " in line
        assert not line.endswith(" ")  # it says what is measured
        assert ("needs vLLM" in line) == one.name.startswith(("peer-vllm", "over-vllm"))


def test_names():
    assert [one.name for one in chosen(["savings", "auto-k"])] == ["savings-h200", "auto-k-h200"]
    assert chosen(None) == list(TASKS)
    with pytest.raises(PeagleError, match="beginning of no name"):
        chosen(["savings", "saving-h200"])
    names = [one.name for one in TASKS]
    assert len(set(names)) == len(names)
    for i, one in enumerate(TASKS):
        assert set(one.after) <= set(names[:i])


@pytest.mark.parametrize("one", TASKS, ids=lambda one: one.name)
def test_scripts_know_their_flags(one, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    _, module, *flags = one.arguments(tmp_path, ["--kit", str(tmp_path)])
    if module == "peagle":
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, flags = command.commands[flags[0]], flags[1:]
        monkeypatch.chdir(ROOT)
        assert command.make_context("sweep", flags).params
    elif hasattr(script := importlib.import_module(module), "_arguments"):
        monkeypatch.setattr(sys, "argv", [module, *flags])
        with suppress(PeagleError):  # without a GPU, once the flags are read
            assert script._arguments().out == one.result(tmp_path)


def test_it_is_for_a_gpu(monkeypatch):
    monkeypatch.setattr(h200, "_PROVENANCE", 'print(\'{"machine": {"gpu": null}}\')')
    with pytest.raises(PeagleError, match="no GPU here"):
        h200.provenance()
    monkeypatch.setattr(h200, "_PROVENANCE", "import nothing_of_that_name")
    with pytest.raises(PeagleError, match="nothing_of_that_name"):
        h200.provenance()


def test_the_end_of_the_driver_is_that_of_what_it_runs():
    code = "from benchmarks import common, h200; common.run_script(lambda: h200._run(['-m', 'stand_in', 'sleep']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "asleep\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == ""  # the end of all who hold it
    assert process.wait(30) == 143
    assert time.monotonic() - began < 30
