"""A target ready for use: weights, description and tokenizer loaded from whatever MODEL names."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.errors import PeagleError
from peagle.kernels.backend import can_run_triton
from peagle.models.decoder import TargetModel
from peagle.models.hub import resolve_model
from peagle.models.spec import ModelSpec, spec_from_hf
from peagle.models.tokenizer import load_tokenizer, placeholder_tokenizer
from peagle.models.weights import dummy_model, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Target:
    """The model to be served. `name` is fit for a report: an alias, a Hub id, or the last part of a local path.

    `native` is False for a model loaded through transformers, which can be trained for and not be served here.
    """

    name: str
    path: Path
    spec: ModelSpec
    model: TargetModel
    tokenizer: "PreTrainedTokenizerFast"
    native: bool = True


def load_target(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    unpack_experts: bool = False,
    check: Callable[[ModelSpec], object] | None = None,
) -> Target:
    """Resolve MODEL and load it frozen, in eval mode.

    `load_format` "dummy" draws random weights, for benchmarks: MODEL then needs no more than its config.json, and
    without a tokenizer.json gets a placeholder tokenizer. Experts in MXFP4 stay packed where a kernel unpacks them, on
    CUDA, unless `unpack_experts`. `check` is called before the weights are read, and may raise.
    Raises PeagleError for an unknown, unsupported or damaged model.
    """
    dummy = load_format == "dummy"
    path = resolve_model(model, weights=not dummy)
    spec = read_spec(path)
    if check is not None:
        check(spec)
    if spec.moe is not None and (unpack_experts or device.type != "cuda" or not can_run_triton(device)):
        spec = replace(spec, moe=replace(spec.moe, packed=False))
    if dummy:
        has_tokenizer = (path / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(path) if has_tokenizer else placeholder_tokenizer(spec.vocab_size)
        weights = dummy_model(spec, dtype=dtype, device=device)
    else:
        tokenizer = load_tokenizer(path)
        weights = load_model(path, spec, dtype=dtype, device=device)
    return Target(name=display_name(model), path=path, spec=spec, model=weights, tokenizer=tokenizer)


def read_spec(path: Path) -> ModelSpec:
    """The spec of a Hugging Face style directory, without its weights."""
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    return spec_from_hf(config, _read_json(generation) if generation.is_file() else None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PeagleError(
            f"{file} cannot be read ({error}): expected a JSON object; download the model again"
        ) from error
    if not isinstance(value, dict):
        raise PeagleError(f"{file} holds a JSON {type(value).__name__}: expected an object; download the model again")
    return value


def display_name(model: str) -> str:
    """MODEL in a form that is fit for a report."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
