"""Tensors of a head: parameters of the drafter <-> names and shapes in vLLM's plain file layout.

The module keeps q/k/v and gate/up merged; files keep them apart. Layer 0 is `fusion` here and `midlayer` in files,
the other layers start at `layers.0` here and at `layers.1` in files (training reference 15.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.drafters.p_eagle import PEagleDrafter, drafter_for
from peagle.drafters.vocab import membership, target_ids
from peagle.errors import PeagleError
from peagle.models.layers import MergedLinear
from peagle.models.weights import MERGED_PARTS

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MASK_EMBEDDING, MASK_HIDDEN = "mask_embedding", "mask_hidden"
SCALE_SUFFIX = "_scale"

_IGNORED = ("t2d", "rotary_emb.inv_freq")  # derived data other tools leave in their files


@dataclass(frozen=True, slots=True)
class Piece:
    """One file tensor: the whole of a parameter, or some rows of a merged one."""

    file_name: str
    shape: tuple[int, ...]


def meta_drafter(config: DrafterConfig) -> Eagle3Drafter:
    """A drafter without storage: its names and shapes, and the shell that loading fills."""
    with torch.device("meta"):
        return drafter_for(config)


def pieces(drafter: Eagle3Drafter) -> dict[str, list[Piece]]:
    """Parameter name -> the file tensors it consists of, in order. Mask parameters are not included."""
    table: dict[str, list[Piece]] = {}
    for name, parameter in drafter.named_parameters():
        if name in (MASK_EMBEDDING, MASK_HIDDEN):
            continue
        owner, _, leaf = name.rpartition(".")
        module, file_owner = drafter.get_submodule(owner), _file_module(owner)
        if isinstance(module, MergedLinear):
            prefix, _, merged = file_owner.rpartition(".")
            table[name] = [
                Piece(f"{prefix}.{part}.{leaf}", (rows, *parameter.shape[1:]))
                for part, rows in zip(MERGED_PARTS[merged], module.splits, strict=True)
            ]
        else:
            table[name] = [Piece(f"{file_owner}.{leaf}", tuple(parameter.shape))]
    return table


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the full layout and its shape. `d2t` and `t2d` may be absent when the vocabularies are equal."""
    shapes = {p.file_name: p.shape for parts in pieces(meta_drafter(config)).values() for p in parts}
    if config.parallel:
        shapes[MASK_HIDDEN] = (1, 1, config.feature_size)
    shapes["d2t"], shapes["t2d"] = (config.draft_vocab_size,), (config.vocab_size,)
    return shapes


def to_plain(drafter: Eagle3Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The full plain layout, on the CPU, never sharing storage with the drafter."""
    config, tensors = drafter.config, dict[str, Tensor]()
    for name, parts in pieces(drafter).items():
        value = drafter.get_parameter(name).detach().to("cpu", dtype)
        for piece, rows in zip(parts, value.split([p.shape[0] for p in parts]), strict=True):
            tensors[piece.file_name] = rows.clone(memory_format=torch.contiguous_format)
    if isinstance(drafter, PEagleDrafter):
        # Readers look the mask slot's embedding up like any other token's.
        tensors[EMBED][drafter.mask_token_id] = drafter.mask_embedding.detach().to("cpu", dtype)
        tensors[MASK_HIDDEN] = drafter.mask_hidden.detach().to("cpu", dtype, copy=True).reshape(1, 1, -1)
    tensors["d2t"] = drafter.d2t.cpu().clone()
    tensors["t2d"] = membership(target_ids(drafter.d2t), config.vocab_size)
    if config.attention_bias:
        # vLLM gives o_proj a bias whenever attention_bias is set and would leave one missing from the file unset.
        for layer in _file_layers(config):
            tensors[f"{layer}.self_attn.o_proj.bias"] = torch.zeros(config.hidden_size, dtype=dtype)
    return tensors


def canonical_name(name: str) -> str:
    """A name found in a published file -> the plain layout's name."""
    if MASK_HIDDEN in name:
        return MASK_HIDDEN
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def to_state(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> dict[str, Tensor]:
    """State dict of the drafter from the full plain layout plus, for P-EAGLE, an optional `mask_embedding` tensor.

    Raises PeagleError naming the first missing, misshapen or unexpected tensor. `where` names the head in errors.
    """
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config, where)
    _refuse_unknown(tensors, config, where)
    state = {
        name: tensors[parts[0].file_name] if len(parts) == 1 else torch.cat([tensors[p.file_name] for p in parts])
        for name, parts in pieces(meta_drafter(config)).items()
    }
    if config.mask_token_id is not None:
        state[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(-1)
        state[MASK_EMBEDDING] = tensors.get(MASK_EMBEDDING, tensors[EMBED][config.mask_token_id].clone())
    state["d2t"] = read_d2t(tensors, config, where)
    return state


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: DrafterConfig, where: str) -> None:
    """Raise PeagleError unless every tensor of the full layout is present in its expected shape."""
    problems = tensor_problems(shapes, config)
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PeagleError(f"{where}: {problems[0]}{more}; `peagle inspect` lists everything wrong with it")


def tensor_problems(shapes: Mapping[str, tuple[int, ...]], config: DrafterConfig) -> list[str]:
    """Missing and misshapen tensors, one line each."""
    problems, full_vocab = [], config.draft_vocab_size == config.vocab_size
    for name, expected in expected_shapes(config).items():
        found = shapes.get(name)
        optional = name == "t2d" or (name == "d2t" and full_vocab)
        if name == MASK_HIDDEN and found is not None:
            found = (1, 1, torch.Size(found).numel())  # files hold [C], [1, C] or [1, 1, C]
        if found is None and not optional:
            problems.append(f"missing tensor {name}, expected shape {list(expected)}")
        elif found is not None and found != expected:
            problems.append(f"{name} has shape {list(shapes[name])}, expected {list(expected)}")
    embedding = shapes.get(MASK_EMBEDDING)
    if embedding is not None and embedding != (config.hidden_size,):
        problems.append(f"{MASK_EMBEDDING} has shape {list(embedding)}, expected {[config.hidden_size]}")
    strays = [name for name in (MASK_HIDDEN, MASK_EMBEDDING) if name in shapes and not config.parallel]
    if strays:
        problems.append(
            f"{strays[0]} belongs to a P-EAGLE head, but config.json describes an EAGLE-3 head, "
            "expected a mask token (ptd_token_id) and parallel_drafting true"
        )
    return problems


def unknown_tensors(tensors: Mapping[str, object], config: DrafterConfig) -> list[str]:
    """Names the config does not account for, other than data known to be harmless."""
    known = {*expected_shapes(config), MASK_EMBEDDING, MASK_HIDDEN}
    return sorted(name for name in tensors if name not in known and not name.endswith(_IGNORED))


def read_d2t(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> Tensor:
    """Offsets as int64 [Vd], zeros when the file has none and needs none. Raises PeagleError for an unusable map."""
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        return torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    found = tuple(tensors["d2t"].shape) if "d2t" in tensors else None
    if found != (config.draft_vocab_size,):
        raise PeagleError(
            f"{where}: {'no d2t' if found is None else f'd2t of shape {list(found)}'}, expected one offset for each of "
            f"the {config.draft_vocab_size} draft tokens; correct draft_vocab_size or copy the head again"
        )
    d2t = tensors["d2t"].to(torch.int64)
    ids = target_ids(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise PeagleError(
            f"{where}: d2t maps to target ids {int(ids.min())}..{int(ids.max())}, expected 0..{config.vocab_size - 1}; "
            "it must hold offsets (target id minus draft id), not target ids"
        )
    return d2t


def _refuse_unknown(tensors: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Raise PeagleError for tensors that would change the result if they were dropped; zero o_proj biases do not."""
    names = unknown_tensors(tensors, config)
    names = [n for n in names if not (n.endswith("o_proj.bias") and not bool(tensors[n].any()))]
    if names:
        raise PeagleError(
            f"{where}: {len(names)} unexpected tensors ({', '.join(names[:3])}), expected {config.num_layers} Llama "
            "layers without q/k norms; correct num_hidden_layers in config.json or use another head"
        )


def _file_module(name: str) -> str:
    if name.startswith("fusion."):
        return "midlayer." + name.removeprefix("fusion.")
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"layers.{int(index) + 1}.{rest}"
    # `input_norm` is what vLLM's eagle3 models call the norm of `norm_before_fc`, too.
    return name


def _file_layers(config: DrafterConfig) -> list[str]:
    return ["midlayer", *(f"layers.{i}" for i in range(1, config.num_layers))]
