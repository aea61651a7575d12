"""A random target of toy size and runs that take seconds."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console

from peagle.config import TrainConfig
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from peagle.models.target import Target
from peagle.training.dataset import Document
from peagle.training.trainer import TrainResult, train_head

VOCAB = 64
MASK = 63
SPEC = ModelSpec(
    family="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope=RopeSpec(theta=10000.0, head_dim=8), max_position_embeddings=128,
    qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=True, bos_token_id=None, eos_token_ids=(2,),
)  # fmt: skip


def tiny_target() -> Target:
    """Random weights; a wide output matrix makes the distributions peaked enough to be learned."""
    torch.manual_seed(0)
    model = TargetModel(SPEC)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    tokenizer = SimpleNamespace(
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
        unk_token_id=None,
        chat_template=None,
        added_tokens_decoder={},
    )
    tokenizer_length = type("Tokenizer", (SimpleNamespace,), {"__len__": lambda self: 60})
    return Target(
        name="tiny", path=Path("tiny"), spec=SPEC, model=model.requires_grad_(False).eval(),
        tokenizer=tokenizer_length(**vars(tokenizer)),
    )  # fmt: skip


def documents(count: int, *, prompts: int | None = None, seed: int = 0) -> list[Document]:
    """`count` documents of 12 to 24 random tokens below 60, the first five of each a prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(12, 25))
        mask = np.arange(length) >= 5
        made.append(Document(f"prompt-{number % (prompts or count)}", rng.integers(3, 60, length, np.int32), mask))
    return made


def recipe(**changes: object) -> TrainConfig:
    """A 2-layer head on packs of 64 positions; `changes` override."""
    settings: dict[str, object] = {
        "num_layers": 2, "num_depths": 4, "tap_ids": (1, 2, 3), "mask_token_id": MASK, "batch_positions": 64,
        "loss_chunk": 64, "warmup_steps": 2, "max_steps": 6, "device": "cpu", "log_interval": 2, "save_interval": 1000,
        "holdout": 2, "serve_tokens": 0,
    }  # fmt: skip
    return TrainConfig(**{**settings, **changes})  # type: ignore[arg-type]  # mixed value types


def run(
    out: Path,
    config: TrainConfig,
    data: list[Document] | None = None,
    data_hash: str = "data",
    target: Target | None = None,
) -> TrainResult:
    """Train quietly on `data` (ten documents by default)."""
    torch.set_num_threads(1)
    return train_head(target or tiny_target(), data or documents(10), data_hash, out, config, Console(quiet=True))
