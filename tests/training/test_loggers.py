"""Loggers beside train.jsonl: what they are told, what a missing or failing one does."""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from peagle.errors import PeagleError
from peagle.training.loggers import Loggers, RunInfo, check_loggers, flat_numbers

RECORD = {
    "step": 20, "epoch": 0, "loss": 1.5, "depth_accuracy": [0.5, 0.25], "mfu": None, "name": "x",
    "held_out": {"loss": 2.0, "depths": {"counts": [3]}},
}  # fmt: skip
FLAT = {
    "epoch": 0.0, "loss": 1.5, "depth_accuracy/0": 0.5, "depth_accuracy/1": 0.25, "held_out/loss": 2.0,
    "held_out/depths/counts/0": 3.0,
}  # fmt: skip


def info(tmp_path, step=0):
    return RunInfo(out=tmp_path, recipe={"seed": 1}, step=step)


def fake(monkeypatch, name, **functions):
    """A package `name` that records its calls."""
    module, calls = ModuleType(name), []
    module.__spec__ = ModuleSpec(name, None)

    def recorder(what, result=None):
        def call(*arguments, **named):
            calls.append((what, arguments, named))
            return result

        return call

    run = SimpleNamespace(log=recorder("log"), finish=recorder("finish"), define_metric=recorder("define_metric"))
    for function in ("log", "finish"):
        setattr(module, function, recorder(function))
    module.init = recorder("init", run)
    for function, replacement in functions.items():
        setattr(module, function, replacement)
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_flat_numbers():
    assert flat_numbers({k: v for k, v in RECORD.items() if k != "step"}) == FLAT


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_as_others_see_it(tmp_path, monkeypatch, name):
    calls = fake(monkeypatch, name)
    loggers = Loggers((name, name), info(tmp_path), print)
    loggers.log(RECORD)
    loggers.close()
    assert [what for what, *_ in calls if what != "define_metric"] == ["init", "log", "finish"]
    settings = calls[0][2]
    assert settings["project"] == "peagle"
    assert settings["config"] == {"seed": 1}
    assert settings["resume"] == "allow"
    (values, *_), named = calls[-2][1:]
    assert (values, named) == (FLAT, {"step": 20}) if name == "trackio" else ({**FLAT, "step": 20}, {})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_has_the_same_identity(tmp_path, monkeypatch, name):
    calls = fake(monkeypatch, name)
    for step in (0, 10):
        Loggers((name,), info(tmp_path, step), print).close()
    key = "id" if name == "wandb" else "name"
    first, second = (named[key] for what, _, named in calls if what == "init")
    assert first == second
    assert info(tmp_path).identity() in first


def test_missing_and_unknown_loggers_are_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.training.loggers.find_spec", lambda name: None)
    with pytest.raises(PeagleError, match=r"'trackio' needs .* pip install 'peagle\[trackio\]'"):
        check_loggers(("trackio",))
    with pytest.raises(PeagleError, match="logger 'comet' is not known: use tensorboard, wandb, trackio"):
        Loggers(("comet",), info(tmp_path), print)


def test_a_failing_logger_is_left_out_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(*arguments, **named):
        raise ConnectionError("no\nnetwork")

    good = fake(monkeypatch, "wandb")
    fake(monkeypatch, "trackio", log=broken)
    notes = []
    loggers = Loggers(("trackio", "wandb"), info(tmp_path), notes.append)
    loggers.log(RECORD)
    loggers.log(RECORD)
    loggers.close()
    assert [what for what, *_ in good].count("log") == 2
    assert notes == ["logger trackio failed and is left out from here on (no network)"]


def test_a_logger_that_does_not_start_stops_the_run(tmp_path, monkeypatch):
    def broken(*arguments, **named):
        raise RuntimeError("no API key")

    calls = fake(monkeypatch, "wandb")
    fake(monkeypatch, "trackio", init=broken)
    with pytest.raises(PeagleError, match=r"logger 'trackio' did not start \(no API key\)"):
        Loggers(("wandb", "trackio"), info(tmp_path), print)
    assert calls[-1][0] == "finish", "one that started is closed again"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_for_real(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = Loggers(("tensorboard",), info(tmp_path), print)
    for step in (10, 20, 30):
        loggers.log({**RECORD, "step": step})
    loggers.close()
    resumed = Loggers(("tensorboard",), info(tmp_path, step=20), print)
    resumed.log({**RECORD, "step": 30, "loss": 9.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(FLAT)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(10, 1.5), (20, 1.5), (30, 9.0)]


def test_no_logger_is_imported_unless_asked_for():
    code = "import sys, peagle.training.loggers; print(*{'wandb', 'trackio', 'tensorboard'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "\n"
