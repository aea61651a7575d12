"""The training loop: it learns, resumes to the bit, survives Ctrl-C, and leaves frozen tables alone."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from peagle.drafters.checkpoint import load_drafter
from peagle.errors import PeagleError
from peagle.training import trainer as trainer_module
from peagle.training.corpus import split_corpus
from peagle.training.objective import Objective
from peagle.training.schedule import schedule_factor
from peagle.training.train_state import RunState, find_checkpoint, make_recipe
from peagle.training.trainer import Trainer, train
from tests.training.tiny_run import MASK, documents, recipe, run, tiny_target


def log_lines(out):
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def training_lines(out):
    return [line for line in log_lines(out) if "loss" in line]


def interrupt_after(monkeypatch, step, how):
    """Call `how` at the end of optimiser step `step`."""
    original = Trainer._step

    def patched(self, batch, seconds):
        original(self, batch, seconds)
        if self.state.step == step:
            how()

    monkeypatch.setattr(Trainer, "_step", patched)


def test_overfits_a_tiny_data_set(tmp_path):
    config = recipe(max_steps=100, log_interval=10, holdout=0, adamw_lr=3e-3, muon_lr=1e-2, keep_ratio=1.0)
    run(tmp_path, config, documents(3))
    first, last = training_lines(tmp_path)[0], training_lines(tmp_path)[-1]
    assert last["loss"] < 0.7 * first["loss"]
    assert last["depth_accuracy"][0] > 0.95
    for depth in range(1, 4):
        assert last["depth_accuracy"][depth] > first["depth_accuracy"][depth] + 0.3
    assert last["acceptance_length"] > 3.0


def test_run_leaves_head_log_and_recipe(tmp_path):
    result = run(tmp_path, recipe())
    assert result.state.finished
    assert result.state.step == 6
    assert result.evaluation is not None
    assert result.evaluation.documents == 2
    assert [line["step"] for line in log_lines(tmp_path)] == [2, 4, 6, 6]
    assert json.loads((tmp_path / "recipe.json").read_text())["num_depths"] == 4
    target = tiny_target()
    head = load_drafter(result.head, target.model, dtype=torch.float32, device=torch.device("cpu"))
    assert head.config.mask_token_id == MASK
    again = run(tmp_path, recipe())
    assert again.state == result.state, "a finished run is left alone"


def test_resume_is_bit_equal(tmp_path, monkeypatch):
    config = recipe(max_steps=12, log_interval=4, holdout=0)
    run(tmp_path / "straight", config)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "resumed", config)
    assert find_checkpoint(tmp_path / "resumed") is not None
    run(tmp_path / "resumed", config)
    one, two = (load_file(tmp_path / name / "checkpoint/model.safetensors") for name in ("straight", "resumed"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for key in ("step", "epoch", "loss", "depth_accuracy", "gradient_norm", "positions", "rows"):
        straight, resumed = ([line[key] for line in training_lines(tmp_path / n)] for n in ("straight", "resumed"))
        assert straight == resumed, key


def test_killed_run_resumes_from_its_last_checkpoint(tmp_path, monkeypatch):
    """No chance to save: the steps since the last checkpoint run again and appear once in the log."""
    config = recipe(max_steps=9, log_interval=1, save_interval=4, holdout=0)
    run(tmp_path / "straight", config)

    def kill():
        raise SystemError

    with monkeypatch.context() as patch:
        interrupt_after(patch, 6, kill)
        with pytest.raises(SystemError):
            run(tmp_path / "killed", config)
    run(tmp_path / "killed", config)
    straight, killed = ([(x["step"], x["loss"]) for x in training_lines(tmp_path / n)] for n in ("straight", "killed"))
    assert straight == killed


def test_second_interrupt_stops_at_once(tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    interrupt_after(monkeypatch, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, recipe(holdout=0))
    assert find_checkpoint(tmp_path) is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("loss", ["soft-ce", "hard-ce"])
def test_cached_features_equal_online_ones(tmp_path, loss):
    settings = recipe(log_interval=1, loss=loss)
    online = run(tmp_path / "online", settings)
    cached = run(tmp_path / "cached", replace(settings, cache_features=True))
    one, two = (np.array([x["loss"] for x in training_lines(tmp_path / n)]) for n in ("online", "cached"))
    np.testing.assert_allclose(one, two, atol=1e-5)
    assert online.evaluation is not None
    assert cached.evaluation is not None
    assert online.evaluation.loss == pytest.approx(cached.evaluation.loss, abs=1e-4)


def test_frozen_tables_stay_and_mask_parameters_train(tmp_path):
    run(tmp_path, recipe(train_embeddings=False, train_lm_head=False))
    state = load_file(tmp_path / "checkpoint/model.safetensors")
    target = tiny_target().model
    assert torch.equal(state["embed_tokens.weight"], target.embed_tokens.weight)
    assert torch.equal(state["lm_head.weight"], target.lm_head.weight)
    assert not torch.equal(state["mask_embedding"], target.embed_tokens.weight[MASK])


def test_trained_tables_and_mask_hidden_change(tmp_path):
    run(tmp_path / "short", recipe(max_steps=1, holdout=0))
    run(tmp_path / "long", recipe(max_steps=6, holdout=0))
    short, long = (load_file(tmp_path / n / "checkpoint/model.safetensors") for n in ("short", "long"))
    for name in ("embed_tokens.weight", "lm_head.weight", "mask_hidden", "mask_embedding", "fc.weight", "norm.weight"):
        assert not torch.equal(short[name], long[name]), name


def test_shapes_are_static(tmp_path, monkeypatch):
    shapes = set()
    original = Objective.__call__

    def patched(self, batch, **how):
        features = batch.features
        tensors = (batch.input_ids_P, batch.rows.anchor_R, features.tap_P, features.stream.ids_S)
        shapes.add(tuple(tuple(t.shape) for t in tensors))
        return original(self, batch, **how)

    monkeypatch.setattr(Objective, "__call__", patched)
    run(tmp_path, recipe(holdout=0))
    assert len(shapes) == 1


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    settings = recipe(max_steps=3, log_interval=1, holdout=0)
    run(tmp_path / "eager", settings)
    run(tmp_path / "compiled", replace(settings, compile=True))
    eager, compiled = ([x["loss"] for x in training_lines(tmp_path / n)] for n in ("eager", "compiled"))
    np.testing.assert_allclose(eager, compiled, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_bfloat16_and_draft_vocabulary(tmp_path, draft_vocab_size):
    target = tiny_target()
    target.model.to(torch.bfloat16)
    config = recipe(dtype="bfloat16", draft_vocab_size=draft_vocab_size, train_embeddings=False)
    result = trainer_module.train_head(target, documents(10), "data", tmp_path, config, Console(quiet=True))
    state = load_file(tmp_path / "checkpoint/model.safetensors")
    assert state["fc.weight"].dtype == torch.float32, "masters"
    assert state["embed_tokens.weight"].dtype == torch.bfloat16, "frozen: cast once"
    assert result.evaluation is not None
    assert np.isfinite(result.evaluation.loss)


def test_nan_is_reported_with_its_step_and_not_saved(tmp_path, monkeypatch):
    original = Trainer._step

    def patched(self, batch, seconds):
        if self.state.step == 2:
            with torch.no_grad():
                self.drafter.fc.weight[0, 0] = torch.nan
        original(self, batch, seconds)

    monkeypatch.setattr(Trainer, "_step", patched)
    with pytest.raises(PeagleError, match="at step 3"):
        run(tmp_path, recipe(save_interval=2, log_interval=4, holdout=0))
    saved = load_file(tmp_path / "checkpoint/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())


def test_time_budget_ends_the_run_and_the_schedule(tmp_path):
    result = run(tmp_path, recipe(max_steps=100_000, max_seconds=1.0, log_interval=1, holdout=0))
    assert 1 < result.state.step < 100_000
    assert training_lines(tmp_path)[-1]["learning_rate_factor"] < 0.2


def test_schedule_follows_whichever_is_further():
    config = recipe(warmup_steps=10, max_seconds=100.0)
    assert schedule_factor(0, 110, 0.0, config) == pytest.approx(0.1)
    assert schedule_factor(60, 110, 0.0, config) == pytest.approx(0.5)
    assert schedule_factor(20, 110, 50.0, config) == pytest.approx(0.5)
    assert schedule_factor(20, 110, 200.0, config) == pytest.approx(0.0)


@pytest.mark.parametrize("change", [{"muon_lr": 1e-4}, {"seed": 1}, {"max_steps": 7}])
def test_other_recipe_is_refused_by_name(tmp_path, change):
    run(tmp_path, recipe())
    with pytest.raises(PeagleError, match=next(iter(change))):
        run(tmp_path, recipe(**change))
    with pytest.raises(PeagleError, match="data_hash"):
        run(tmp_path, recipe(), data_hash="other")


def test_damaged_checkpoint_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, recipe())
    weights = tmp_path / "checkpoint/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(PeagleError, match="damaged"):
        run(tmp_path, recipe())


def test_checkpoint_survives_a_kill_between_the_renames(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, recipe())
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    assert run(tmp_path, recipe()).state.step == 6


def test_unwritable_output_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PeagleError, match="cannot write"):
        train("no-such-model", tmp_path / "no-data", tmp_path / "file" / "out", recipe(), Console(quiet=True))


def test_empty_data_directory(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(PeagleError, match="data"):
        train("no-such-model", tmp_path / "data", tmp_path / "out", recipe(), Console(quiet=True))


def test_one_depth_trains_without_mask_rows(tmp_path):
    result = run(tmp_path, recipe(num_depths=1))
    assert result.evaluation is not None
    assert 1.0 <= result.evaluation.acceptance_length <= 2.0


def test_exact_epochs(tmp_path):
    data = documents(12)
    config = recipe(max_steps=None, epochs=2.0, holdout=0)
    trainer = Trainer(
        tiny_target(), split_corpus(data, config), tmp_path, config, make_recipe(config, "tiny", ""), RunState(),
        Console(quiet=True),
    )  # fmt: skip
    assert trainer.planned % 2 == 0
    result = run(tmp_path, config, data)
    assert result.state.step == trainer.planned
    assert abs(result.state.positions - 2 * sum(len(d.input_ids) - 2 for d in data)) <= 64
