"""Fill a model from safetensors files with Hugging Face names, tensor by tensor.

Parameters are allocated once, in their final dtype and place. Each stored tensor is then copied straight into the part
of the parameter that holds it, so loading needs the memory of one model plus one tensor, whatever the file's dtype.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from peagle.errors import PeagleError, one_line
from peagle.kernels.packed_experts import MOST_SCALE, pack
from peagle.models.decoder import TargetModel
from peagle.models.layers import MergedLinear, RMSNorm
from peagle.models.moe import PackedExperts
from peagle.models.mxfp4 import BLOCK, BLOCKS, SCALES, dequantize
from peagle.models.spec import ModelSpec

_log = logging.getLogger(__name__)

# The Hugging Face projections stored in one of our merged ones, in the order of MergedLinear.splits.
MERGED_PARTS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def empty_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """A frozen model in eval mode whose parameters are allocated but hold arbitrary values."""
    with torch.device("meta"):
        model = TargetModel(spec)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


def load_model(path: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """The model of a Hugging Face style directory, frozen and in eval mode. Raises PeagleError for bad files."""
    files = weight_files(path)
    model = empty_model(spec, dtype=dtype, device=device)
    load_weights(model, files)
    return model


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: the single one, or all shards that the index names."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        raise PeagleError(
            f"{path} has no weights: expected {SINGLE_FILE} or {INDEX_FILE} with its shards; download the model again, "
            "in safetensors format"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise PeagleError(f"{index} is not a weight index ({error}): expected JSON with a weight_map") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise PeagleError(
            f"{path} lacks {len(absent)} of the {len(names)} shards named in {INDEX_FILE} ({_first(absent)}): "
            "download the model again"
        )
    return [path / name for name in names]


def load_weights(model: TargetModel, files: Sequence[Path]) -> None:
    """Copy every tensor of `files` into `model`. Tensors it has no use for are refused inside layers, else ignored."""
    views = {_hf_name(name): view for name, view in parameter_parts(model).items()}
    experts = {_hf_name(name): part for name, part in model.named_modules() if isinstance(part, PackedExperts)}
    four_bits: dict[str, Tensor | PackedExperts] = {**views, **experts}  # what may come as MXFP4
    missing, halves = set(four_bits), dict[str, Tensor]()
    for number, file in enumerate(files, 1):
        if len(files) > 1:
            _log.info("loading weights, file %d of %d", number, len(files))
        with open_safetensors(file) as stored:
            for name in stored.keys():  # noqa: SIM118  # a safetensors handle is not iterable
                if name in views:
                    _copy(name, stored.get_tensor(name), views[name], file)
                    missing.discard(name)
                elif (packed := name.removesuffix(BLOCKS).removesuffix(SCALES)) != name and packed in four_bits:
                    halves[name] = stored.get_tensor(name)
                    if {packed + BLOCKS, packed + SCALES} <= set(halves):
                        parts = halves.pop(packed + BLOCKS), halves.pop(packed + SCALES)
                        _copy_mxfp4(packed, *parts, four_bits[packed], file)
                        missing.discard(packed)
                elif name.startswith("model.layers.") and not name.endswith("rotary_emb.inv_freq"):
                    raise PeagleError(
                        f"{file} holds {name}, which the model described by config.json does not have: "
                        "the two files do not belong together; download the model again"
                    )
    if missing:
        in_order = [name for name in four_bits if name in missing]
        raise PeagleError(
            f"{files[0].parent} lacks {len(missing)} of the {len(four_bits)} tensors that config.json calls for "
            f"({_first(in_order)}): download the model again"
        )


def parameter_parts(module: nn.Module) -> dict[str, Tensor]:
    """Unmerged name -> the tensor, or the rows of a merged one, that holds it. Shared parameters appear once.

    The values are views: writing to them writes to the parameter.
    """
    parts: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if not isinstance(owner, MergedLinear):
            parts[name] = parameter.detach()
            continue
        parent, _, merged_name = owner_name.rpartition(".")
        rows = parameter.detach().split(owner.splits)
        for part_name, view in zip(MERGED_PARTS[merged_name], rows, strict=True):
            parts[f"{parent}.{part_name}.{leaf}"] = view
    return parts


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """A safetensors handle; a missing, truncated or corrupt file raises PeagleError, also while reading from it."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError, ValueError) as error:
        raise PeagleError(
            f"{file} cannot be read as safetensors ({one_line(error)}): it may be truncated; download it again"
        ) from error


@torch.no_grad()
def dummy_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> TargetModel:
    """A frozen model with random weights, drawn on `device`, for benchmarks: no file is read.

    Matrices have a standard deviation of fan_in ** -0.5, embeddings and norms of 1, biases are 0: activations keep the
    size they have in a trained model, so what depends on values (rounding, routing, overflow) behaves.
    """
    model = empty_model(spec, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    tied = spec.tie_word_embeddings
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.draw(module.inputs**-0.5, generator)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.fill_(1.0 if isinstance(module, RMSNorm) else 0.0)
            elif isinstance(module, nn.Embedding):
                parameter.normal_(generator=generator)
            elif not (tied and module is model.lm_head):
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return model


def _hf_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _copy(name: str, source: Tensor, target: Tensor, file: Path) -> None:
    if source.shape != target.shape:
        raise PeagleError(
            f"{file} holds {name} of shape {list(source.shape)}: expected {list(target.shape)} from config.json; "
            "the two files do not belong together"
        )
    if source.dtype not in FLOAT_DTYPES:
        raise PeagleError(
            f"{file} holds {name} as {source.dtype}: expected bfloat16, float16 or float32; use the unquantized model"
        )
    target.copy_(source)


def _copy_mxfp4(name: str, blocks: Tensor, scales: Tensor, target: Tensor | PackedExperts, file: Path) -> None:
    """Unpack or repack one expert after another, on the target's device; in files outputs come before inputs."""
    experts, inputs, outputs = target.shape if isinstance(target, Tensor) else target.matrix.shape
    shape = (experts, outputs, inputs // BLOCK)
    if tuple(blocks.shape) != (*shape, BLOCK // 2) or tuple(scales.shape) != shape or inputs % BLOCK:
        raise PeagleError(
            f"{file} holds {name}{BLOCKS} of shape {list(blocks.shape)} and {SCALES} of {list(scales.shape)}: expected "
            f"{[*shape, BLOCK // 2]} and {list(shape)} from config.json; the two files do not belong together"
        )
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise PeagleError(
            f"{file} holds {name} as {blocks.dtype} and {scales.dtype}: MXFP4 is uint8; download it again"
        )
    if isinstance(target, PackedExperts) and (most := int(scales.max())) > MOST_SCALE:
        raise PeagleError(
            f"{file} holds {name} with a scale of 2^{most - 127}: packed experts have at most 2^{MOST_SCALE - 127}; "
            "unpack them with --unpack-experts"
        )
    device = target.device if isinstance(target, Tensor) else target.words.device
    for expert, (own_OBI, scale_OB) in enumerate(zip(blocks.to(device), scales.to(device))):
        if isinstance(target, Tensor):
            target[expert].copy_(dequantize(own_OBI, scale_OB, target.dtype).T)
        else:
            words_GOW, scales_GO = pack(own_OBI, scale_OB)
            target.words[expert].copy_(words_GOW)
            target.scales[expert].copy_(scales_GO)


def _first(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
