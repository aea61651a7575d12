"""Checkpoints: how many are kept, which one a run goes on from, what a kill leaves, averages that come back."""

import json

import pytest
import torch
from torch import nn

from peagle.errors import PeagleError
from peagle.files import remove_stale
from peagle.training import train_state
from peagle.training.distributed import SINGLE
from peagle.training.ema import WeightAverage
from peagle.training.monitor import Running
from peagle.training.placement import Placement
from peagle.training.regenerate import open_data_set
from peagle.training.shards import Manifest
from peagle.training.train_state import RunState, find_checkpoint, load_checkpoint, read_state, save_checkpoint


def save(out, step, *, keep=1, average=None, net=None):
    net = net or nn.Linear(2, 2)
    running = Running(2, torch.device("cpu"))
    save_checkpoint(
        out, Placement(net, SINGLE), [], running, RunState(step=step), {"seed": 0}, average=average, keep=keep
    )


def names(out):
    return sorted(path.name for path in out.iterdir())


def step_of(directory):
    return read_state(directory)[0].step


def test_one_checkpoint_is_replaced(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    assert names(tmp_path) == ["checkpoint"]
    assert step_of(tmp_path / "checkpoint") == 20
    modes = {path.stat().st_mode for path in (tmp_path / "checkpoint").iterdir()}
    assert len(modes) == 1, "tensors are as readable as the state"


def test_the_last_n_are_kept_under_their_step(tmp_path):
    for step in (80, 90, 100, 110):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["checkpoint", "checkpoint-100", "checkpoint-90"]
    assert [step_of(tmp_path / name) for name in names(tmp_path)] == [110, 100, 90]
    save(tmp_path, 110, keep=3)  # the same step again is the same checkpoint
    assert names(tmp_path) == ["checkpoint", "checkpoint-100", "checkpoint-90"]
    save(tmp_path, 120, keep=2)
    assert names(tmp_path) == ["checkpoint", "checkpoint-110"]
    save(tmp_path, 130)
    assert names(tmp_path) == ["checkpoint"]


def test_a_run_goes_on_from_the_newest_whole_one(tmp_path):
    assert find_checkpoint(tmp_path) is None
    for step in (90, 100, 110):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoint-notes").mkdir()  # somebody's own
    assert step_of(find_checkpoint(tmp_path)) == 110
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    assert step_of(find_checkpoint(tmp_path)) == 100
    (tmp_path / "checkpoint-100" / "state.json").unlink()
    assert step_of(find_checkpoint(tmp_path)) == 90
    save(tmp_path, 95, keep=3)
    assert (tmp_path / "checkpoint-notes").is_dir()


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_at_any_rename_leaves_a_whole_checkpoint(tmp_path, monkeypatch, keep, renames):
    save(tmp_path, 10, keep=keep)
    real, calls = train_state.os.replace, []

    def replace(source, target):
        if source.name == "state.json" or target.name == "state.json":
            return real(source, target)
        if len(calls) == renames:
            raise KeyboardInterrupt
        calls.append(target)
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(train_state.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 20, keep=keep)
    assert step_of(find_checkpoint(tmp_path)) == 10
    remove_stale(tmp_path)
    assert len(names(tmp_path)) == 1
    save(tmp_path, 20, keep=keep)
    assert step_of(tmp_path / "checkpoint") == 20


def test_averages_are_saved_and_restored(tmp_path):
    net = nn.Linear(3, 3)
    average = WeightAverage(net.named_parameters(), 0.9)
    with torch.no_grad():
        net.weight += 1
    average.update(0)
    save(tmp_path, 1, average=average, net=net)
    other = nn.Linear(3, 3)
    restored = WeightAverage(other.named_parameters(), 0.9)
    load_checkpoint(tmp_path / "checkpoint", Placement(other, SINGLE), [], Running(2, torch.device("cpu")), restored)
    assert torch.equal(other.weight, net.weight)
    assert all(torch.equal(value, restored.state()[name]) for name, value in average.state().items())
    save(tmp_path, 2, net=net)
    with pytest.raises(PeagleError, match=r"is damaged .* go on from an older one, or to start afresh"):
        load_checkpoint(
            tmp_path / "checkpoint", Placement(other, SINGLE), [], Running(2, torch.device("cpu")), restored
        )


def test_leftovers_of_killed_writes_go_and_nothing_else(tmp_path):
    stale = (".state.json.0123abcd.tmp", "checkpoint.0123abcd.new", ".head.0123abcd.new", ".train.jsonl.ffffffff.tmp")
    kept = ("train.jsonl", ".head.0123abcd.old", "notes.tmp", ".0123abcd.tmp.md", "a.0123ABCD.tmp")
    for name in (*stale, *kept):
        (tmp_path / name).mkdir() if name.endswith(".new") else (tmp_path / name).write_text("")
    remove_stale(tmp_path)
    assert names(tmp_path) == sorted(kept)
    remove_stale(tmp_path / "missing")


def test_preparing_data_removes_them_too(tmp_path):
    (tmp_path / ".shard-00000.parquet.0123abcd.tmp").write_text("half")
    open_data_set(tmp_path, Manifest(settings={}, prompt_files=[], sources={}, num_shards=1))
    assert names(tmp_path) == [".lock", "manifest.json"]
    assert json.loads((tmp_path / "manifest.json").read_text())["num_shards"] == 1


def test_no_memory_for_a_checkpoint_is_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def load(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_state, "load_file", load)
    placement, running = Placement(nn.Linear(2, 2), SINGLE), Running(2, torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        load_checkpoint(tmp_path / "checkpoint", placement, [], running)
