"""What must not lose a training run or let it hang: failing ends, wrong data, a second run, bad settings."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.files import lock_output, write_atomic
from peagle.training import corpus as corpus_module
from peagle.training import trainer as trainer_module
from peagle.training.batches import Place, batches
from peagle.training.corpus import check_prepared_for, split_corpus
from peagle.training.dataset import Document
from peagle.training.evaluate import evaluate
from peagle.training.features import OnlineFeatures
from peagle.training.log_file import LogFile
from peagle.training.monitor import Monitor
from peagle.training.rows import RowLayout
from peagle.training.setup import plan_rule
from peagle.training.shards import Manifest
from peagle.training.train_state import find_checkpoint, prepare_output, read_state
from peagle.training.trainer import Trainer, train
from tests.training.tiny_run import documents, recipe, run, tiny_target

TOO_NARROW = "batch_positions 2"
RULE = plan_rule(recipe())


def fail(*args, **kwargs):
    raise PeagleError("disk full")


def test_failed_export_costs_nothing_but_the_export(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "save_drafter", fail)
        with pytest.raises(PeagleError, match="disk full"):
            run(tmp_path, recipe())
    state, _ = read_state(find_checkpoint(tmp_path))
    assert (state.step, state.finished) == (6, False)
    monkeypatch.setattr(Trainer, "_step", fail)  # not one more step
    result = run(tmp_path, recipe())
    assert result.evaluation is not None
    assert (result.head / "config.json").is_file()
    assert read_state(tmp_path / "checkpoint")[0] == result.state
    assert result.state.finished
    steps = [json.loads(line)["step"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6, 6], "the evaluation ran twice and is logged once"


def test_failed_picture_does_not_fail_the_run(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(trainer_module, "plot_training", fail)
    monkeypatch.setattr(Monitor, "note", lambda self, line: notes.append(line))
    assert run(tmp_path, recipe()).state.finished
    assert "not drawn (disk full)" in notes[-1]


def test_foreign_head_directory_is_refused_before_training(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "thesis.txt").write_text("mine")
    with pytest.raises(PeagleError, match="holds no head"):
        train("no-such-model", tmp_path / "no-data", tmp_path, recipe(), Console(quiet=True))


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.old"])
def test_a_file_where_checkpoints_go_is_refused_before_training(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(PeagleError, match=f"{name} is a file where checkpoints go: move it away"):
        train("no-such-model", tmp_path / "no-data", tmp_path, recipe(), Console(quiet=True))
    assert (tmp_path / name).read_text() == "mine"


def late(name, length=20):
    """A document that is supervised from token 10 on."""
    return Document(name, np.arange(3, 3 + length, dtype=np.int32), np.arange(length) >= 10)


@pytest.mark.timeout(60)
def test_documents_that_fit_no_pack_are_refused_or_left_out(tmp_path):
    with pytest.raises(PeagleError, match=f"no document fits {TOO_NARROW} .* raise it"):
        run(tmp_path, recipe(batch_positions=2, num_depths=2))
    mixed = [*documents(10), late("late")]
    assert len(split_corpus(mixed, recipe(batch_positions=9, holdout=0)).documents) == 10
    assert len(split_corpus(mixed, recipe(batch_positions=10, holdout=0)).documents) == 11


@pytest.mark.timeout(60)
def test_batches_and_evaluation_without_a_pack_raise(tmp_path):
    layout = RowLayout(positions=2, mask_rows=128, num_depths=4)
    features = OnlineFeatures(tiny_target().model, (1,), "reference")
    with pytest.raises(PeagleError, match=f"no document fits {TOO_NARROW}"):
        next(batches([late("a")], layout, RULE, features, 0, Place()))
    with pytest.raises(PeagleError, match=f"no held-out document fits {TOO_NARROW}"):
        evaluate(None, [late("a")], 0, layout, RULE, torch.device("cpu"))


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_data_of_another_target_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("config")
    settings = {"model": "one", "target_config_sha256": sha256("config"), "tokenizer_sha256": None}
    data = Path("data")
    check_prepared_for("two", tmp_path, data, settings)
    check_prepared_for("two", tmp_path, data, {})
    for key, file in (("target_config_sha256", "config.json"), ("tokenizer_sha256", "tokenizer.json")):
        other = {**settings, key: sha256("other")}
        with pytest.raises(PeagleError, match=f"data was prepared with one, whose {file} .* two: train .* prepare"):
            check_prepared_for("two", tmp_path, data, other)


def test_train_checks_the_target_and_notes_unfinished_data(tmp_path, monkeypatch):
    manifest = json.loads(Manifest(settings={}, prompt_files=[], sources={}, num_shards=2).to_json())
    monkeypatch.setattr(corpus_module, "load_documents", lambda data: (documents(10), manifest))
    monkeypatch.setattr(corpus_module, "resolve_model", lambda model: tmp_path)
    monkeypatch.setattr(trainer_module, "load_training_target", fail)
    console = Console(record=True, quiet=False, width=200)
    with pytest.raises(PeagleError, match="disk full"):
        train("tiny", tmp_path / "data", tmp_path / "out", recipe(), console)
    assert "is not complete" in console.export_text()
    manifest["settings"] = {"model": "one", "tokenizer_sha256": "0"}
    with pytest.raises(PeagleError, match="prepared with one"):
        train("tiny", tmp_path / "data", tmp_path / "out", recipe(), console)


def test_one_run_per_output_directory(tmp_path):
    code = (
        "import sys; from pathlib import Path; from peagle.files import lock_output; "
        "lock_output(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PeagleError, match="another run is writing to"):
            prepare_output(tmp_path)
        other.kill()
    prepare_output(tmp_path)
    lock_output(tmp_path)  # this process may take it again


def test_temporary_files_are_unique_and_stale_checkpoints_go(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr("peagle.files.os.replace", lambda source, target: names.append(source))
    write_atomic(tmp_path / "a", b"1")
    write_atomic(tmp_path / "a", b"2")
    assert len(set(names)) == 2
    (tmp_path / "checkpoint.0123abcd.new").mkdir()
    prepare_output(tmp_path)
    assert not list(tmp_path.glob("checkpoint.*"))


@pytest.mark.parametrize("name", ["epochs", "max_seconds", "muon_lr", "adamw_lr", "clip_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rates_and_lengths_must_be_finite_and_positive(name, value):
    with pytest.raises(PeagleError, match=f"{name} is {value}: .* finite and above 0"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("depth_decay", (0.0, 1.1, math.nan)),
        ("keep_ratio", (0.0, 1.1, math.nan)),
        ("supervised_share", (0.0, 1.1, math.nan)),
        ("min_keep", (-0.1, 1.1, math.nan)),
        ("max_steps", (0, -1)),
        ("seed", (-1, 2**63)),
        ("warmup_steps", (-1, math.nan)),
        ("ema_decay", (0.0, 1.0, -0.1, math.nan)),
        ("keep", (0, -1)),
    ],
)
def test_other_settings_have_ranges(name, values):
    for value in values:
        with pytest.raises(PeagleError, match=f"^{name} is {value}: it must be"):
            TrainConfig(**{name: value})


def test_int8_needs_compact():
    with pytest.raises(PeagleError, match=r"^int8 needs compact: "):
        TrainConfig(int8=True)
    assert TrainConfig(int8=True, compact=True, seed=2**63 - 1, max_steps=1, depth_decay=1.0).int8


def test_torn_log_lines_are_dropped_on_resume(tmp_path):
    log = tmp_path / "train.jsonl"
    log.write_bytes(b'{"step": 2}\n{"step": 4}\n{"step": 6}\n{"step": 4, "held_out": {"loss": 1.}\n\xff\x00{"st')
    LogFile(log, keep_to_step=4)
    assert log.read_text() == '{"step": 2}\n{"step": 4}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
