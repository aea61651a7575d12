"""Decoding held-out prompts while training runs: it measures what serving would, and leaves no trace in the run."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from peagle.config import EngineConfig, TrainConfig
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.init import new_drafter
from peagle.drafters.inspect import inspect_head
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from peagle.models.target import Target
from peagle.sampling import SamplingParams
from peagle.training import trainer as trainer_module
from peagle.training.served import held_out_prompts, read_best, serve
from peagle.training.trainer import Trainer, TrainResult, train_head
from tests.engine.tiny import random_prompts, tiny_spec, tiny_tokenizer
from tests.helpers import random_weights
from tests.training.tiny_drafter import Document
from tests.training.tiny_run import documents, recipe, tiny_target

PROMPTS = random_prompts(5)


def make_target(dtype: torch.dtype = torch.float32) -> Target:
    spec = tiny_spec()
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, 0)
    return Target("tiny", Path("tiny"), spec, model.to(dtype), tiny_tokenizer())


def make_drafter(target: Target, *, parallel: bool = True) -> Eagle3Drafter:
    """Float32 masters in training mode, the first drafts mostly right: the head starts as the target's last layers."""
    return new_drafter(
        target.model.float(), num_layers=2, tap_ids=(1, 2, 4), mask_token_id=95 if parallel else None,
        seed=1, target_init=True,
    )  # fmt: skip


@pytest.mark.parametrize("parallel", [True, False])
def test_equals_the_engine_and_leaves_no_trace(parallel: bool):
    target = make_target()
    drafter = make_drafter(target, parallel=parallel)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy((drafter.state_dict(), target.model.state_dict(), [p.grad for p in drafter.parameters()]))
    kinds = [[type(m) for m in module.modules()] for module in (drafter, target.model)]
    random = torch.get_rng_state()
    served = serve(target, drafter, PROMPTS, 3, 20)
    assert torch.equal(torch.get_rng_state(), random)
    after = (drafter.state_dict(), target.model.state_dict(), [p.grad for p in drafter.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert kinds == [[type(m) for m in module.modules()] for module in (drafter, target.model)]
    assert drafter.training
    assert all(p.requires_grad and not p.is_inference() for p in drafter.parameters())

    llm = LLM.from_parts(
        copy.deepcopy(target), copy.deepcopy(drafter).eval().requires_grad_(False), 3, EngineConfig(max_num_seqs=1)
    )
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0))
    accepted, rounds = (sum(getattr(o.stats, name) for o in outputs) for name in ("num_accepted_tokens", "num_rounds"))
    assert (served.prompts, served.tokens) == (5, sum(len(o.token_ids) for o in outputs))
    assert (served.rounds, served.num_speculative_tokens) == (rounds, 3)
    assert served.acceptance_length == 1 + accepted / rounds > 1.1
    assert sum(served.accepted_share_per_position) == pytest.approx(served.acceptance_length - 1)


def test_masters_are_served_in_the_precision_of_the_target():
    target = make_target(torch.bfloat16)
    drafter = make_drafter(make_target())
    rounded = copy.deepcopy(drafter).bfloat16()
    served, expected = (serve(target, head, PROMPTS, 3, 20) for head in (drafter, rounded))
    assert served.accepted_share_per_position == expected.accepted_share_per_position
    assert drafter.fc.weight.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parallel", [True, False])
def test_on_a_gpu_all_memory_comes_back(parallel: bool):
    target = make_target()
    drafter = make_drafter(target, parallel=parallel)
    expected = serve(target, drafter, PROMPTS, 3, 20)
    target.model.to("cuda")
    drafter.to("cuda")
    serve(target, drafter, PROMPTS[:1], 3, 2)  # workspaces of libraries stay
    held, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    served = serve(target, drafter, PROMPTS, 3, 20)
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert served.acceptance_length == pytest.approx(expected.acceptance_length, abs=0.2)  # near-ties may fall


def test_prompts_end_where_supervision_begins():
    def document(length: int, first: int, seed: int) -> Document:
        tokens = np.random.default_rng(seed).integers(2, 90, length).astype(np.int32)
        return Document(tokens, np.arange(length) >= first)

    held_out = [document(12, 5, 0), document(9, 5, 0), document(12, 0, 1), document(40, 30, 2), document(7, 3, 3)]
    prompts = held_out_prompts(held_out, max_tokens=10, context=32)
    assert prompts == [held_out[0].input_ids[:5].tolist(), held_out[4].input_ids[:3].tolist()]
    assert held_out_prompts(held_out, max_tokens=10, context=32, most=1) == prompts[:1]
    assert held_out_prompts([document(8, 8, 4)], max_tokens=1, context=32) == []


def test_best_is_read_from_the_head(tmp_path: Path):
    assert read_best(tmp_path) == 1.0
    (tmp_path / "best").mkdir()
    for text, expected in (
        ("{", 1.0),
        ('{"peagle_provenance": {"served": null}}', 1.0),
        (json.dumps({"peagle_provenance": {"served": {"acceptance_length": 2.5}}}), 2.5),
    ):
        (tmp_path / "best" / "config.json").write_text(text)
        assert read_best(tmp_path) == expected


def train_tiny(out: Path, *, serve_tokens: int = 12, **changes: object) -> TrainResult:
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    config = recipe(max_steps=24, save_interval=6, log_interval=4, holdout=4, serve_tokens=serve_tokens, **changes)
    torch.set_num_threads(1)
    return train_head(target, documents(12), "data", out, config, Console(quiet=True))


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def served_lengths(out: Path) -> dict[int, float]:
    return {line["step"]: line["served"]["acceptance_length"] for line in log_of(out) if "served" in line}


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_training_is_the_same_with_and_without_and_the_best_head_is_kept(tmp_path: Path, method: str):
    with_it, without = tmp_path / "with", tmp_path / "without"
    train_tiny(with_it, method=method)
    train_tiny(without, method=method, serve_tokens=0)
    assert not (without / "best").exists()
    one, two = (load_file(out / "checkpoint/model.safetensors") for out in (with_it, without))
    assert all(torch.equal(one[name], two[name]) for name in two)
    losses, expected = ([(r["step"], r["loss"]) for r in log_of(out) if "loss" in r] for out in (with_it, without))
    assert losses == expected
    lengths = served_lengths(with_it)
    assert list(lengths) == [6, 12, 18, 24]
    report = inspect_head(with_it / "best")
    assert not report.problems
    assert report.provenance["served"]["acceptance_length"] == pytest.approx(max(lengths.values()), abs=1e-6)
    assert report.provenance["steps"] == max(lengths, key=lengths.__getitem__)
    assert read_best(with_it) > 1.0


def test_a_head_with_a_sliding_window_is_trained_served_and_saved(tmp_path: Path):
    train_tiny(tmp_path, sliding_window=8, sliding_layers=(1,))
    assert list(served_lengths(tmp_path)) == [6, 12, 18, 24]
    report = inspect_head(tmp_path / "head")
    assert not report.problems
    assert report.config is not None
    assert report.config.windows == (None, 8)
    assert any("last 8 positions in layers 1, full in the others" in line for line in report.lines())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sliding_window": 8}, "must be above 8"),
        ({"sliding_window": 9, "serve_k": 10}, "must be above 10"),
        ({"sliding_layers": (0,)}, "sliding_layers needs sliding_window"),
        ({"sliding_window": 16, "sliding_layers": (4,)}, "0 to 3"),
        ({"serve_k": 17}, "1 .. 16"),
        ({"serve_tokens": -1}, "at least 0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, named: str):
    with pytest.raises(PeagleError, match=named):
        TrainConfig(**settings)


def test_the_best_head_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_tiny(tmp_path / "straight")
    step = Trainer._step

    def killed(self, *arguments):
        step(self, *arguments)
        if self.state.step == 15:
            raise OSError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed)
        with pytest.raises(OSError, match="plug"):
            train_tiny(tmp_path / "resumed")
    assert list(served_lengths(tmp_path / "resumed")) == [6, 12]
    kept = read_best(tmp_path / "resumed")
    train_tiny(tmp_path / "resumed")
    assert served_lengths(tmp_path / "resumed") == served_lengths(tmp_path / "straight")
    assert read_best(tmp_path / "resumed") == read_best(tmp_path / "straight") >= kept > 1.0


def test_a_full_disk_keeps_the_old_best_and_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    export = Trainer._export

    def fail(self, name, *arguments):
        if name == "best" and self.state.step > 6:
            raise PeagleError("disk full")
        export(self, name, *arguments)

    monkeypatch.setattr(Trainer, "_export", fail)
    assert train_tiny(tmp_path).state.finished
    assert inspect_head(tmp_path / "best").provenance["steps"] == 6
    assert len(served_lengths(tmp_path)) == 4


def test_too_little_memory_is_a_note_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_arguments):
        raise PeagleError("no memory")

    monkeypatch.setattr(trainer_module, "serve", fail)
    assert train_tiny(tmp_path).state.finished
    assert served_lengths(tmp_path) == {}
    assert inspect_head(tmp_path / "head").provenance["served"] is None
