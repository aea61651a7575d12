"""Whole training runs on two processes: the same as one with twice the packs per step, stopped and resumed together."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from peagle.errors import PeagleError
from peagle.training.distributed import SINGLE, Ranks, process_group
from peagle.training.train_state import read_state
from peagle.training.trainer import Trainer, train_head
from tests.training.ranks import on_two_ranks
from tests.training.tiny_run import documents, recipe, tiny_target

SETTINGS = {"max_steps": 7, "log_interval": 1, "holdout": 2, "save_interval": 4, "ema_decay": 0.9, "serve_tokens": 4}
STOP_AFTER = 3


def train_on(ranks, out, config):
    target = tiny_target()
    target.tokenizer.decode = lambda *_, **__: ""  # the text of what is decoded in an evaluation does not matter
    return train_head(target, documents(10), "data", out, config, Console(quiet=True), ranks)


def lines(out, key):
    records = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return [record[key] for record in records if key in record]


def assert_same_run(one, other):
    for key in ("step", "positions", "rows"):
        assert lines(one, key) == lines(other, key), key
    for key in ("loss", "gradient_norm", "depth_accuracy"):
        np.testing.assert_allclose(lines(one, key), lines(other, key), rtol=2e-3, err_msg=key)
    assert lines(one, "loss")[0] == pytest.approx(lines(other, "loss")[0], rel=1e-6)
    for file in ("checkpoint/model.safetensors", "checkpoint/optimizer.safetensors"):
        mine, wanted = load_file(one / file), load_file(other / file)
        assert mine.keys() == wanted.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], wanted[name], rtol=1e-2, atol=1e-3, msg=f"{file}: {name}")
    assert (one / "head" / "config.json").is_file()


def straight(out, ranks_in_one=2):
    train_on(SINGLE, out, recipe(**SETTINGS, accumulate=ranks_in_one))


def stop_after(step):
    """Ctrl-C on rank 0 at the end of a step."""
    original = Trainer._step

    def patched(self, data, seconds):
        original(self, data, seconds)
        if self.state.step == step and self.ranks.is_main:
            signal.raise_signal(signal.SIGINT)

    return original, patched


def run_stop_and_resume(ranks, out, parallel):
    config = recipe(**SETTINGS, parallel=parallel)
    original, Trainer._step = stop_after(STOP_AFTER)
    with pytest.raises(KeyboardInterrupt):
        train_on(ranks, out / parallel, config)
    Trainer._step = original
    ranks.share([0.0])  # rank 0 has written its checkpoint
    assert read_state(out / parallel / "checkpoint")[0].step == STOP_AFTER, "both stopped after the same step"
    train_on(ranks, out / parallel, config)


def check_replicated(ranks, out):
    run_stop_and_resume(ranks, out, "ddp")


def check_sharded(ranks, out):
    run_stop_and_resume(ranks, out, "fsdp")
    # From a checkpoint of two sharded ranks to one process, which sums over the two packs itself.
    config = recipe(**SETTINGS, parallel="fsdp")
    original, Trainer._step = stop_after(STOP_AFTER)
    with pytest.raises(KeyboardInterrupt):
        train_on(ranks, out / "handed over", config)
    Trainer._step = original
    if ranks.is_main:
        train_on(SINGLE, out / "handed over", replace(config, accumulate=2, parallel="ddp"))
    ranks.share([0.0])
    if ranks.is_main:  # finds its run finished
        train_on(ranks, out / "handed over", config)
    else:
        with pytest.raises(PeagleError, match="rank 1 does not see the checkpoint"):
            train_on(ranks, out / "nowhere", config)


def check_death(ranks, out):
    original = Trainer._step

    def patched(self, data, seconds):
        if self.state.step == STOP_AFTER and not self.ranks.is_main:
            os._exit(0)  # as if it had run out of memory and said so
        original(self, data, seconds)

    Trainer._step = patched
    with pytest.raises(PeagleError, match=r"rank 0 lost the other ranks .* resume from the last checkpoint"):
        train_on(ranks, out, recipe(**SETTINGS | {"save_interval": 2}))
    assert read_state(out / "checkpoint")[0].step == 2
    os._exit(0)  # no farewell to wait for


def test_a_rank_that_dies_stops_the_others(tmp_path):
    on_two_ranks(check_death, tmp_path)


def test_replicated_run(tmp_path):
    straight(tmp_path / "straight")
    on_two_ranks(check_replicated, tmp_path)
    assert_same_run(tmp_path / "ddp", tmp_path / "straight")


def test_sharded_run(tmp_path):
    straight(tmp_path / "straight")
    on_two_ranks(check_sharded, tmp_path)
    assert_same_run(tmp_path / "fsdp", tmp_path / "straight")
    assert_same_run(tmp_path / "handed over", tmp_path / "straight")


def test_ctrl_c_stops_what_torchrun_started(tmp_path):
    """A terminal sends SIGINT to all processes, and torchrun sends it to its ranks once more."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(tmp_path)], env=environment, stdout=output, stderr=output, start_new_session=True
        )
        log = tmp_path / "run" / "train.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None and not (log.is_file() and log.read_text()):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    said = (tmp_path / "output").read_text()
    assert "rank 0 stopped" in said, said
    assert "rank 1 stopped" in said, said
    state = read_state(tmp_path / "run" / "checkpoint")[0]
    assert state.step > 0
    assert not state.finished


if __name__ == "__main__":  # what torchrun starts in the last test
    mine = Ranks.from_environment(os.environ)
    with process_group(mine, torch.device("cpu")):
        try:
            train_on(mine, Path(sys.argv[1]) / "run", recipe(max_steps=100_000, log_interval=1, holdout=0))
        except KeyboardInterrupt:
            sys.stdout.write(f"rank {mine.rank} stopped\n")
