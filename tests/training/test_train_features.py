"""Training from extracted features, and for a target through transformers: the same loop, the same guarantees."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from peagle.config import ExtractConfig
from peagle.errors import PeagleError
from peagle.training import corpus as corpus_module
from peagle.training import extract as extract_module
from peagle.training import trainer as trainer_module
from peagle.training.dataset import Document, data_hash
from peagle.training.extract import extract
from peagle.training.hf_target import TargetSizes
from peagle.training.trainer import train_head
from tests.training.test_hf_target import adapter
from tests.training.tiny_run import documents, recipe, tiny_target

MANIFEST = {"complete": True, "settings": {"model": "tiny"}}
QUIET = Console(quiet=True)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A tiny target and data of which some are too long for a pack, extracted to `features`."""
    torch.set_num_threads(1)
    data = [*documents(10), Document("long", np.arange(3, 60, dtype=np.int32).repeat(2)[:90], np.arange(90) > 4)]
    target = tiny_target()
    target.path = tmp_path
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr(corpus_module, "load_documents", lambda folder: (data, MANIFEST))
    for module in (corpus_module, extract_module):
        monkeypatch.setattr(module, "resolve_model", lambda model: tmp_path)
    monkeypatch.setattr(extract_module, "load_training_target", lambda *args, **kwargs: target)
    monkeypatch.setattr(extract_module, "target_sizes", lambda path: TargetSizes(32, 4, 64, 128))

    def make(dtype="float32", device="cpu"):
        config = ExtractConfig(tap_ids=(1, 2, 3), dtype=dtype, device=device, shard_gib=40_000 / 2**30)
        assert extract("tiny", tmp_path / "data", tmp_path / "features", config, QUIET).shards > 1

    def run(out, **changes):
        settings = recipe(serve_tokens=0, **changes)
        return train_head(target, data, data_hash(MANIFEST), tmp_path / out, settings, QUIET)

    return SimpleNamespace(make=make, run=run, features=str(tmp_path / "features"), path=tmp_path, target=target)


def logged(folder: Path, key: str = "loss"):
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def weights(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "checkpoint" / "model.safetensors")


def test_extracted_features_train_as_cached_ones_do(world):
    world.make()
    stored = world.run("stored", features=world.features)
    cached = world.run("cached", cache_features=True)
    assert logged(world.path / "stored") == pytest.approx(logged(world.path / "cached"), rel=1e-4)
    assert stored.evaluation.loss == pytest.approx(cached.evaluation.loss, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_extracted_features_train_on_a_gpu(world):
    world.target.model.to("cuda", torch.bfloat16)
    world.make("bfloat16", "cuda")
    settings = {"device": "cuda", "attention": "reference"}
    stored = world.run("stored", features=world.features, **settings)
    cached = world.run("cached", cache_features=True, **settings)
    assert logged(world.path / "stored") == pytest.approx(logged(world.path / "cached"), rel=2e-2)
    assert stored.evaluation.loss == pytest.approx(cached.evaluation.loss, rel=2e-2)


def test_a_run_on_extracted_features_resumes_bit_equal(world, monkeypatch):
    world.make()
    world.run("straight", features=world.features)
    with monkeypatch.context() as patch:
        original = trainer_module.Trainer._step

        def stop(self, data, seconds):
            if self.state.step == 3:
                raise RuntimeError("killed")
            original(self, data, seconds)

        patch.setattr(trainer_module.Trainer, "_step", stop)
        with pytest.raises(RuntimeError, match="killed"):
            world.run("broken", features=world.features, save_interval=2)
    world.run("broken", features=world.features, save_interval=2)
    left, right = weights(world.path / "straight"), weights(world.path / "broken")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_features_of_other_taps_are_refused_before_the_first_step(world):
    world.make()
    with pytest.raises(PeagleError, match=r"holds features with tap_ids \[1, 2, 3\], this run has \[1, 3\]"):
        world.run("other", features=world.features, tap_ids=(1, 3))


def test_a_missing_store_is_found_before_the_target_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "load_documents", None)
    settings = recipe(features=str(tmp_path / "none"))
    with pytest.raises(PeagleError, match=r"has no features\.json"):
        trainer_module.train("tiny", tmp_path / "data", tmp_path / "out", settings, QUIET)


@pytest.mark.parametrize("cache", [False, True])
def test_a_head_for_a_target_through_transformers(tmp_path, cache):
    model = adapter("gpt_neox")
    target = replace(tiny_target(), spec=model.spec, model=model, native=False)
    settings = recipe(max_steps=30, cache_features=cache, tap_ids=(1, 2, 4), muon_lr=0.02)
    result = train_head(target, documents(4), "data", tmp_path, replace(settings, holdout=1), QUIET)
    losses = logged(tmp_path)
    assert losses[30] < losses[2]
    assert result.evaluation is not None
    config = json.loads((result.head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["hidden_size"] == 32
