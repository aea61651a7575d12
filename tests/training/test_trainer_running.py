"""Running a run: signals, kept checkpoints, averaged weights, warm starts, loggers, and what goes wrong with a name."""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from peagle.drafters.checkpoint import load_drafter, save_drafter
from peagle.drafters.init import new_drafter
from peagle.errors import PeagleError
from peagle.training import trainer as trainer_module
from peagle.training.monitor import Monitor
from peagle.training.train_state import CheckpointNotWritten, find_checkpoint, read_state
from peagle.training.trainer import Trainer, train_head
from tests.training.tiny_run import MASK, documents, recipe, run, tiny_target


def reports(out):
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def after_step(monkeypatch, step, act):
    """Call `act(trainer)` at the end of optimiser step `step`."""
    original = Trainer._step

    def patched(self, *arguments):
        original(self, *arguments)
        if self.state.step == step:
            act(self)

    monkeypatch.setattr(Trainer, "_step", patched)


@pytest.fixture
def notes(monkeypatch):
    said = []
    monkeypatch.setattr(Monitor, "note", lambda self, line: said.append(line))
    return said


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_sigterm_saves_and_leaves_with_status_143(tmp_path, monkeypatch):
    config = recipe(max_steps=8, log_interval=1, holdout=0)
    run(tmp_path / "straight", config)
    with monkeypatch.context() as patch:
        after_step(patch, 3, lambda trainer: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as raised:
            run(tmp_path / "ended", config)
    assert raised.value.code == 143
    assert read_state(find_checkpoint(tmp_path / "ended"))[0].step == 3
    run(tmp_path / "ended", config)
    straight, ended = ([line["loss"] for line in reports(tmp_path / name)] for name in ("straight", "ended"))
    assert straight == ended
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_checkpoints_are_kept_and_an_older_one_can_be_gone_back_to(tmp_path):
    config = recipe(max_steps=8, save_interval=2, keep=3, log_interval=1, holdout=0)
    run(tmp_path, config)
    losses = [line["loss"] for line in reports(tmp_path)]
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint", "checkpoint-4", "checkpoint-6"]
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    result = run(tmp_path, recipe(max_steps=8, save_interval=2, keep=1, log_interval=1, holdout=0))
    assert result.state.finished
    assert [line["loss"] for line in reports(tmp_path)] == losses
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint"]


def test_averaged_weights_are_evaluated_exported_and_resumed(tmp_path, monkeypatch):
    config = recipe(max_steps=8, ema_decay=0.9, log_interval=1)
    straight = run(tmp_path / "straight", config)
    with monkeypatch.context() as patch:
        after_step(patch, 5, lambda trainer: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "resumed", config)
    resumed = run(tmp_path / "resumed", config)
    folders = [tmp_path / name / "checkpoint" for name in ("straight", "resumed")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert equal(*(load_file(folder / file) for folder in folders)), file
    assert straight.evaluation == resumed.evaluation
    target, cpu = tiny_target(), torch.device("cpu")
    head = load_drafter(straight.head, target.model, dtype=torch.float32, device=cpu).state_dict()
    own = load_file(folders[0] / "model.safetensors")
    averages = load_file(folders[0] / "optimizer.safetensors")
    assert torch.equal(head["fc.weight"], averages["ema.fc.weight"].bfloat16().float())
    assert not torch.equal(head["fc.weight"], own["fc.weight"].bfloat16().float())
    plain = run(tmp_path / "plain", recipe(max_steps=8, log_interval=1))
    assert equal(own, load_file(tmp_path / "plain/checkpoint/model.safetensors")), "averaging changes no training"
    assert plain.evaluation != straight.evaluation


def test_a_run_without_an_average_cannot_go_on_with_one(tmp_path):
    run(tmp_path, recipe())
    with pytest.raises(PeagleError, match=r"ema_decay = None, this one has 0\.9"):
        run(tmp_path, recipe(ema_decay=0.9))


def test_a_bad_step_is_named_with_its_documents_and_saves_nothing(tmp_path, monkeypatch):
    config = recipe(max_steps=8, save_interval=2, log_interval=4, holdout=0)
    original = Trainer._step

    def patched(self, *arguments):
        if self.state.step == 2:
            with torch.no_grad():
                self.drafter.fc.weight[0, 0] = float("nan")
        original(self, *arguments)

    monkeypatch.setattr(Trainer, "_step", patched)
    with pytest.raises(
        PeagleError, match=r"NaN or infinite at step 3 \(epoch 0, pack 2 with documents 'prompt-"
    ) as raised:
        run(tmp_path, config)
    assert "muon_lr (0.002)" in str(raised.value)
    assert read_state(find_checkpoint(tmp_path))[0].step == 2
    assert load_file(tmp_path / "checkpoint/model.safetensors")["fc.weight"].isfinite().all()


def test_out_of_memory_says_which_knob_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    config = recipe(max_steps=8, save_interval=2, holdout=0, partition="algorithm1", segments=2)
    text = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 9 GiB of which 1.25 GiB is free."
    )

    def fail(trainer):
        raise torch.OutOfMemoryError(text)

    with monkeypatch.context() as patch:
        after_step(patch, 3, fail)
        with pytest.raises(
            PeagleError, match=r"2\.50 GiB more were asked for.*--segments from 2 to 4.*checkpoints are as they were"
        ):
            run(tmp_path, config)
    assert read_state(find_checkpoint(tmp_path))[0].step == 2
    more = recipe(max_steps=8, save_interval=2, holdout=0, partition="algorithm1", segments=4)
    assert run(tmp_path, more).state.step == 8, "the advice can be followed without starting again"


def test_other_runtime_errors_keep_their_traceback(tmp_path, monkeypatch):
    def fail(trainer):
        raise RuntimeError("a bug")

    after_step(monkeypatch, 1, fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, recipe())


def full(*arguments, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_refuses_checkpoints_on_the_way_ends_no_run(tmp_path, monkeypatch, notes):
    real, tries = trainer_module.save_checkpoint, []

    def save(*arguments, **named):
        tries.append(arguments)
        if len(tries) == 1:
            raise CheckpointNotWritten("checkpoint cannot be written (full)")
        real(*arguments, **named)

    monkeypatch.setattr(trainer_module, "save_checkpoint", save)
    result = run(tmp_path, recipe(max_steps=6, save_interval=2, holdout=0))
    assert result.state.finished
    assert "step 2: checkpoint cannot be written (full); training goes on" in notes


def test_a_full_disk_at_the_end_is_an_error_and_the_older_checkpoint_stays(tmp_path, monkeypatch):
    def fill(trainer):
        monkeypatch.setattr("safetensors.torch.save_file", full)

    after_step(monkeypatch, 5, fill)
    with pytest.raises(PeagleError, match="free some space and run the same command to resume"):
        run(tmp_path, recipe(max_steps=6, save_interval=4, holdout=0))
    assert read_state(find_checkpoint(tmp_path))[0].step == 4
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint"], "nothing half-written is left"


def test_a_log_that_cannot_be_written_waits_and_a_checkpoint_is_tried(tmp_path, monkeypatch, notes):
    real, blocked = Path.open, set()

    def opened(self, mode="r", *arguments, **named):
        return full() if "a" in mode and self.name in blocked else real(self, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", opened)
    steps_saved = []
    original = Trainer._save
    monkeypatch.setattr(Trainer, "_save", lambda self, *a: (steps_saved.append(self.state.step), original(self, *a)))
    after_step(monkeypatch, 3, lambda trainer: blocked.add("train.jsonl"))
    after_step(monkeypatch, 5, lambda trainer: blocked.clear())
    run(tmp_path, recipe(max_steps=6, log_interval=1, holdout=0))
    assert [line["step"] for line in reports(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert steps_saved == [3, 6]
    said = "\n".join(notes)
    assert "its lines wait in memory and training goes on; free some space" in said
    assert "is written again, nothing is missing" in said


def test_loggers_hear_what_the_log_file_holds(tmp_path, monkeypatch):
    module, heard = ModuleType("trackio"), []
    module.__spec__ = ModuleSpec("trackio", None)
    module.init = lambda **named: heard.append(named["config"]["num_depths"])
    module.log = lambda values, step: heard.append((step, values))
    module.finish = lambda: heard.append("finish")
    monkeypatch.setitem(sys.modules, "trackio", module)
    run(tmp_path, recipe(logger=("trackio",)))
    assert heard[0] == 4
    assert heard[-1] == "finish"
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [entry[0] for entry in heard[1:-1]] == [line["step"] for line in lines]
    assert heard[1][1]["depth_accuracy/3"] == lines[0]["depth_accuracy"][3]


def test_a_missing_logger_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(PeagleError, match="logger 'comet' is not known"):
        trainer_module.train("no-model", tmp_path / "no-data", tmp_path, recipe(logger=("comet",)), Console(quiet=True))


def test_rates_and_mfu_are_logged(tmp_path, monkeypatch):
    run(tmp_path / "cpu", recipe(holdout=0))
    line = reports(tmp_path / "cpu")[-1]
    assert line["mfu"] is None
    assert line["rows_per_second"] > 0
    monkeypatch.setattr(trainer_module, "peak_flops", lambda device, dtype: 1e9)
    run(tmp_path / "fast", recipe(holdout=0))
    assert 0 < reports(tmp_path / "fast")[-1]["mfu"] < 1e3


def test_flops_of_a_run_add_up(tmp_path, monkeypatch):
    """Every pack is counted once, with as many keys as its rows see."""
    pairs = []

    def check(trainer):
        rows = pairs[-1]
        real = rows.doc_R >= 0
        assert int((rows.position_R[real] + 1).sum()) == int(seen[-1].sum())

    seen = []
    original = trainer_module.PackCost.of

    def of(self, batch):
        pairs.append(batch.rows)
        seen.append(batch.seen_R)
        assert (batch.seen_R[: batch.positions] == batch.rows.position_R[: batch.positions].numpy() + 1).all()
        return original(self, batch)

    monkeypatch.setattr(trainer_module.PackCost, "of", of)
    after_step(monkeypatch, 4, check)
    run(tmp_path, recipe(holdout=0))
    assert len(seen) == 6


def eagle3_head(path):
    target = tiny_target()
    head = new_drafter(target.model, num_layers=1, mask_token_id=None, seed=3, target_init=True, tap_ids=(1, 2, 3))
    save_drafter(head, path, compact=False, base_model="tiny", extra={})
    return head


def test_a_warm_start_trains_and_resumes(tmp_path, monkeypatch):
    head = eagle3_head(tmp_path / "eagle3")
    config = recipe(init_head=str(tmp_path / "eagle3"), tap_ids=None, num_layers=2, log_interval=1, holdout=0)
    started = {}
    original = Trainer.run

    def patched(self):
        started.update({name: value.clone() for name, value in self.drafter.state_dict().items()})
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", patched)
        result = run(tmp_path / "run", config)
    assert torch.equal(started["fc.weight"], head.fc.weight.detach().bfloat16().float())
    assert result.state.finished
    found = json.loads((result.head / "config.json").read_text())
    assert (found["num_hidden_layers"], found["mask_token_id"], found["parallel_drafting"]) == (2, MASK, True)


def test_a_warm_start_that_does_not_fit_names_both_sides(tmp_path):
    eagle3_head(tmp_path / "eagle3")
    config = recipe(init_head=str(tmp_path / "eagle3"), tap_ids=(0, 1, 2))
    with pytest.raises(PeagleError, match=r"taps layers \[1, 2, 3\], this run asks for \[0, 1, 2\]"):
        run(tmp_path / "run", config)


KILLED = """
import os, signal, sys
from pathlib import Path
from peagle.training.trainer import Trainer, train_head
from tests.training.tiny_run import recipe, run

step, original = int(sys.argv[2]), Trainer._step

def patched(self, *arguments):
    original(self, *arguments)
    if self.state.step == step:
        os.kill(os.getpid(), signal.SIGKILL)

Trainer._step = patched
run(Path(sys.argv[1]), recipe(max_steps=9, log_interval=1, save_interval=2, ema_decay=0.9, keep=2, holdout=0))
"""


def test_kill_9_at_a_random_step_costs_nothing(tmp_path):
    config = recipe(max_steps=9, log_interval=1, save_interval=2, ema_decay=0.9, keep=2, holdout=0)
    run(tmp_path / "straight", config)
    step = random.randint(1, 8)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(step)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    run(tmp_path / "killed", config)
    straight, killed = (
        [(line["step"], line["loss"], line["gradient_norm"]) for line in reports(tmp_path / name)]
        for name in ("straight", "killed")
    )
    assert straight == killed, f"killed after step {step}"
    folders = [tmp_path / name / "checkpoint" for name in ("straight", "killed")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert equal(*(load_file(folder / file) for folder in folders)), file


def test_brackets_in_a_path_are_no_markup(tmp_path):
    shown = Console(file=io.StringIO(), width=400)
    out = tmp_path / "a[b][" / "c]"
    train_head(tiny_target(), documents(10), "data", out, recipe(max_steps=2), shown)
    assert f"head after 2 steps: {out / 'head'}" in shown.file.getvalue()
    assert f"results go to {out}:" in shown.file.getvalue()
