"""Reading, writing and damaging head files in tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.p_eagle import PEagleDrafter
from tests.helpers import causal_attend


def logits(drafter: Eagle3Drafter, rows: int = 9) -> Tensor:
    """Draft logits of a few real rows, followed by mask rows if the head has any, float32 [R, Vd]."""
    generator = torch.Generator().manual_seed(3)
    dtype = drafter.fc.weight.dtype
    ids = torch.randint(drafter.config.vocab_size, (rows,), generator=generator)
    taps_RC = torch.randn(rows, drafter.config.feature_size, generator=generator).to(dtype)
    with torch.no_grad():
        embeds, features = drafter.embed_tokens(ids), drafter.combine(taps_RC)
        if isinstance(drafter, PEagleDrafter):
            embeds = torch.cat((embeds, drafter.mask_embedding.expand(3, -1)))
            features = torch.cat((features, drafter.mask_feature().expand(3, -1)))
        hidden = drafter(embeds, features, torch.arange(len(embeds)), causal_attend([len(embeds)]))
        return drafter.logits(hidden).float()


def edit_config(head: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = head / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def edit_tensors(head: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = head / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def read_json(head: Path) -> dict[str, Any]:
    return json.loads((head / "config.json").read_text())


def read_tensors(head: Path) -> dict[str, Tensor]:
    return load_file(head / "model.safetensors")
