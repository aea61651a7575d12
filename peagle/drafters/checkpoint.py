"""Loading, saving and exporting heads.

Three ways to store a head, all read by `load_drafter`:
full     vLLM's plain layout; self-contained, loads in vLLM unchanged.
compact  embedding and output rows equal to the target's are left out (`peagle_shared_with_target`) and a P-EAGLE head's
         trained mask row is stored by itself (`mask_embedding`); needs its own target to load.
int8     compact, with the matrices of the layers in 8 bits (`NAME` int8 and `NAME_scale` per row).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafters import layout, storage
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.drafters.head_config import config_from_dict, config_to_dict
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.drafters.quantize import quantize_rows
from peagle.drafters.vocab import target_ids
from peagle.errors import PeagleError, one_line
from peagle.models.decoder import TargetModel
from peagle.models.hub import HUB_ID, expand_home, is_local_path
from peagle.models.layers import Rope
from peagle.models.spec import ModelSpec
from peagle.models.weights import open_safetensors, weight_files

BASE_MODEL_KEY = "base_model"
SHARED_KEY = "peagle_shared_with_target"
TARGET_HASH_KEY = "peagle_target_embedding_sha256"
PROVENANCE_KEY = "peagle_provenance"


@dataclass(frozen=True, slots=True)
class _Tables:
    """The target's rows a head may share: embedding [V, H] and the output rows of the draft vocabulary [Vd, H]."""

    embed_VH: Tensor
    head_VH: Tensor


def load_drafter(
    path: Path | str,
    target: TargetModel | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trainable: bool = False,
    target_name: str = "the given target",
) -> Eagle3Drafter:
    """The head at `path` (directory or Hub id) in eval mode, frozen unless `trainable`: a `PEagleDrafter` if it is one.

    `target` supplies the rows a head does not store; a frozen head shares their storage where dtype and device agree.
    Raises PeagleError for every unusable head, such as one that does not fit the target.
    """
    path = resolve_head(path)
    where = f"head {path}"
    raw = storage.read_config(path)
    spec = None if target is None else target.spec
    config = config_from_dict(raw, target_layers=spec.num_layers if spec else None, where=where)
    if spec is not None:
        check_compatible(config, spec, where=where)
    if raw.get(SHARED_KEY) and target is not None:
        _check_target_hash(raw, target, target_name, where)
    tensors = storage.dequantized(storage.read_stored(path), where)
    borrowed = _borrow(tensors, config, target, raw, where)
    state = layout.to_state({**tensors, **borrowed}, config, where)
    for name, tensor in state.items():
        # The training copy of a borrowed table must not be the target's own memory.
        copy = trainable and name in borrowed
        state[name] = tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=copy)
    drafter = layout.meta_drafter(config)
    drafter.load_state_dict(state, assign=True)
    drafter.rope = Rope(config.rope).to(device)  # derived, not in the file, and still on the meta device
    return drafter.requires_grad_(trainable).eval()


def save_drafter(
    drafter: Eagle3Drafter,
    path: Path | str,
    *,
    compact: bool,
    base_model: str,
    extra: Mapping[str, Any],
    target: TargetModel | None = None,
    int8_layers: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head directory atomically. `extra` is provenance: any JSON values, kept under `peagle_provenance`.

    `compact` needs `target` and leaves out what equals the target's tables in `dtype`; `int8_layers` needs `compact`.
    Raises PeagleError for NaN or infinite weights, for an unwritable `path`, and when `path` holds something else.
    """
    path = expand_home(path, f"head {path}")
    where = f"head {path}"
    if compact and target is None:
        raise PeagleError(f"{where}: a compact head is stored relative to its target: name the target, or save it full")
    if int8_layers and not compact:
        raise PeagleError(f"{where}: 8-bit layers exist in the compact layout only: save it compact, or without 8 bits")
    tensors = layout.to_plain(drafter, dtype)
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise PeagleError(f"{where}: {broken[0]} holds NaN or infinite values, not saved: lower the learning rate")
    raw = {**config_to_dict(drafter.config), "torch_dtype": str(dtype).removeprefix("torch.")}
    raw |= {BASE_MODEL_KEY: base_model, PROVENANCE_KEY: dict(extra)}
    if target is not None:
        raw[TARGET_HASH_KEY] = embedding_sha256(target)
    if compact and target is not None:
        raw[SHARED_KEY] = _drop_shared(tensors, drafter, target, dtype)
    if int8_layers:
        _quantize_layers(tensors)
    storage.write_head(path, raw, tensors)


def export_head(head_dir: Path | str, target: TargetModel | None, out_dir: Path | str) -> None:
    """Write the head at `head_dir` as a full, self-contained head in vLLM's plain layout, bfloat16."""
    path = resolve_head(head_dir)
    raw = storage.read_config(path)
    drafter = load_drafter(path, target, dtype=torch.float32, device=torch.device("cpu"))
    provenance = raw.get(PROVENANCE_KEY)
    save_drafter(
        drafter,
        out_dir,
        compact=False,
        base_model=str(raw.get(BASE_MODEL_KEY, "unknown")),
        extra=provenance if isinstance(provenance, Mapping) else {},
        target=target,
    )


def check_compatible(config: DrafterConfig, spec: ModelSpec, *, where: str = "the head") -> None:
    """Raise PeagleError unless a head of this config can read this target's taps and write its tokens."""
    remedy = "use the target it was made for, or train a head for this one"
    for what, fits, has in (
        ("hidden size", config.target_hidden_size, spec.hidden_size),
        ("vocabulary size", config.vocab_size, spec.vocab_size),
    ):
        if fits != has:
            raise PeagleError(f"{where} fits targets of {what} {fits}, this target has {has}: {remedy}")
    outside = [tap for tap in config.tap_ids if not 0 <= tap <= spec.num_layers]
    if outside:
        raise PeagleError(
            f"{where} taps layer {outside[0]} (taps {list(config.tap_ids)}), this target has ids 0 to "
            f"{spec.num_layers}: {remedy}"
        )
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < spec.vocab_size:
        raise PeagleError(
            f"{where} has mask token {config.mask_token_id}, expected an id below the vocabulary size "
            f"{spec.vocab_size}: correct mask_token_id in config.json"
        )


def local_head(path_or_hub_id: Path | str) -> Path | None:
    """A local head directory; None for what may be a Hub id, which is not asked. Raises PeagleError for neither."""
    path = expand_home(path_or_hub_id, f"head {path_or_hub_id}")
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if path.exists():
        raise PeagleError(f"head {name} is a file: expected the directory that holds config.json and model.safetensors")
    if is_local_path(name) or not HUB_ID.fullmatch(name):
        raise PeagleError(f"head {name} does not exist: expected a directory or a Hub id like org/name; check the path")
    return None


def peek_head(path_or_hub_id: Path | str, spec: ModelSpec) -> DrafterConfig | None:
    """What a local head says of itself, before any weight is read; None for a Hub id, which is not asked.

    Raises PeagleError for a head that does not fit the target and for files that were cut off.
    """
    path = local_head(path_or_hub_id)
    if path is None:
        return None
    where = f"head {path}"
    config = config_from_dict(storage.read_config(path), target_layers=spec.num_layers, where=where)
    check_compatible(config, spec, where=where)
    for file in weight_files(path):
        with open_safetensors(file):  # which compares its length with its header
            pass
    return config


def resolve_head(path_or_hub_id: Path | str) -> Path:
    """A local head directory, or the snapshot of a Hub id such as `org/name`. Raises PeagleError."""
    path = local_head(path_or_hub_id)
    if path is not None:
        return path
    name = str(path_or_hub_id)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except LocalEntryNotFoundError as error:
        raise PeagleError(
            f"head {name} is neither a local directory nor in the local Hub cache, and the Hub cannot be reached: "
            "check the path, or go online once"
        ) from error
    except Exception as error:  # its kinds differ between hub versions: network, access, unknown id, full disk
        raise PeagleError(
            f"head {name} is no local directory and could not be fetched from the Hub ({one_line(error)}): "
            "check the name"
        ) from error


def embedding_sha256(target: TargetModel) -> str:
    """Identity of a target: SHA-256 of its embedding table in bfloat16, whatever dtype it is loaded in."""
    table_VH = target.embed_tokens.weight.detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(table_VH.view(torch.uint8).numpy().data).hexdigest()


def _tables(target: TargetModel, d2t: Tensor) -> _Tables:
    head_VH = target.lm_head.weight.detach()
    ids = target_ids(d2t)
    whole = ids.numel() == head_VH.shape[0] and not bool(d2t.any())
    return _Tables(target.embed_tokens.weight.detach(), head_VH if whole else head_VH[ids.to(head_VH.device)])


def _borrow(
    tensors: Mapping[str, Tensor], config: DrafterConfig, target: TargetModel | None, raw: Mapping[str, Any], where: str
) -> dict[str, Tensor]:
    """The target's tables for those the head does not store. Raises PeagleError when there is no target to ask."""
    missing = [name for name in (layout.EMBED, layout.LM_HEAD) if name not in tensors]
    if not missing:
        return {}
    if target is None:
        raise PeagleError(
            f"{where} does not store {' and '.join(missing)}, which it shares with its target "
            f"{raw.get(BASE_MODEL_KEY, '(unnamed)')}: name that target, or use a head written by `peagle export`"
        )
    tables = _tables(target, layout.read_d2t(tensors, config, where))
    found = {layout.EMBED: tables.embed_VH, layout.LM_HEAD: tables.head_VH}
    return {name: found[name] for name in missing}


def _check_target_hash(raw: Mapping[str, Any], target: TargetModel, target_name: str, where: str) -> None:
    expected, found = raw.get(TARGET_HASH_KEY), embedding_sha256(target)
    if expected != found:
        base = raw.get(BASE_MODEL_KEY, "an unnamed target")
        raise PeagleError(
            f"{where} shares the tables of {base} (embedding sha256 {str(expected)[:12]}), not those of {target_name} "
            f"({found[:12]}): use {base}, or export the head with it first and use the exported one"
        )


def _drop_shared(
    tensors: dict[str, Tensor], drafter: Eagle3Drafter, target: TargetModel, dtype: torch.dtype
) -> list[str]:
    """Remove the tables that equal the target's, store a mask row by itself, and name what was removed."""
    tables = _tables(target, drafter.d2t)
    embed_VH = tables.embed_VH.to("cpu", dtype, copy=True)
    if isinstance(drafter, PEagleDrafter):
        mask_id = drafter.mask_token_id
        tensors[layout.MASK_EMBEDDING] = tensors[layout.EMBED][mask_id].clone()
        if embed_VH.shape == tensors[layout.EMBED].shape:
            embed_VH[mask_id] = tensors[layout.MASK_EMBEDDING]  # the one row that may differ
    shared = []
    for name, table_VH in ((layout.EMBED, embed_VH), (layout.LM_HEAD, tables.head_VH.to("cpu", dtype))):
        if torch.equal(tensors[name], table_VH):
            del tensors[name]
            shared.append(name)
    if not bool(tensors["d2t"].any()) and bool(tensors["t2d"].all()):
        del tensors["d2t"], tensors["t2d"]  # the draft vocabulary is the target's
    return shared


def _quantize_layers(tensors: dict[str, Tensor]) -> None:
    """Replace the matrices of the layers by int8 and scales. fc, norms, biases and tables keep their precision."""
    for name in [n for n in tensors if n.startswith(("midlayer.", "layers."))]:
        if tensors[name].ndim == 2:
            tensors[name], tensors[name + layout.SCALE_SUFFIX] = quantize_rows(tensors[name])
