"""Two GPUs by NCCL: the gradients of one, for whole and for sharded parameters, and whole training runs."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from peagle.training.distributed import SINGLE
from peagle.training.trainer import train_head
from tests.training import test_distributed as on_cpu
from tests.training.ranks import on_two_ranks
from tests.training.tiny_run import documents, recipe, tiny_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


# AdamW: Muon's products run in bfloat16 on a GPU, where a last bit of the gradient shows.
def test_gradients_of_replicas():
    on_two_ranks(on_cpu.check_replicated, "adamw", "cuda", device="cuda")


def test_gradients_of_shards():
    on_two_ranks(on_cpu.check_sharded, ("adamw",), "cuda", device="cuda")


def losses(out):
    records = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def train_on(ranks, out, parallel, accumulate):
    target = tiny_target()
    target.model.to(ranks.own_device(torch.device("cuda", 0)))
    config = recipe(
        device="cuda", attention="reference", log_interval=1, parallel=parallel, accumulate=accumulate, ema_decay=0.9
    )
    train_head(target, documents(10), "data", out, config, Console(quiet=True), ranks)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_runs(tmp_path, parallel):
    train_on(SINGLE, tmp_path / "one", "ddp", 2)
    on_two_ranks(train_on, tmp_path / "two", parallel, 1, device="cuda")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0.02)
    assert (tmp_path / "two" / "head" / "config.json").is_file()
