"""Files of a head directory: config.json and safetensors, read defensively and replaced as a whole."""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafters.layout import SCALE_SUFFIX, canonical_name
from peagle.drafters.quantize import dequantize_rows
from peagle.errors import PeagleError
from peagle.files import flush, save_tensors
from peagle.models.weights import SINGLE_FILE, open_safetensors, weight_files

CONFIG_FILE = "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config.json of the head directory `path`. Raises PeagleError."""
    file = path / CONFIG_FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PeagleError(f"head {path}: no {CONFIG_FILE}; expected a directory written by `peagle train`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PeagleError(f"head {path}: cannot read {CONFIG_FILE} ({error}); restore the file") from None
    if not isinstance(raw, dict):
        raise PeagleError(f"head {path}: {CONFIG_FILE} holds a {type(raw).__name__}, expected an object")
    return raw


def read_stored(path: Path) -> dict[str, Tensor]:
    """Tensors of all files as stored (int8 and scales apart), under canonical names, on the CPU. Raises PeagleError."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        with open_safetensors(file) as stored:
            for name in stored.keys():  # noqa: SIM118  # a safetensors handle is not iterable
                canonical = canonical_name(name)
                if canonical in tensors:
                    raise PeagleError(
                        f"head {path}: {canonical} is stored twice (again as {name} in {file.name}): "
                        "expected one tensor of that name; remove the stale file"
                    )
                tensors[canonical] = stored.get_tensor(name)
    return tensors


def dequantized(stored: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Merge int8 matrices with their scales. Raises PeagleError for an int8 or 8-bit float matrix without scales."""
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        scaled = name.removesuffix(SCALE_SUFFIX)
        if scaled != name and scaled in stored:
            continue
        if name not in ("d2t", "t2d") and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            scale = stored.get(name + SCALE_SUFFIX)
            if tensor.dtype != torch.int8 or tensor.ndim != 2 or scale is None or scale.shape != tensor.shape[:1]:
                raise PeagleError(
                    f"{where}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')} without usable row "
                    f"scales: expected float16, bfloat16, float32, or int8 with {name}{SCALE_SUFFIX} of one per row"
                )
            tensor = dequantize_rows(tensor, scale)
        plain[name] = tensor
    return plain


def write_head(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head directory in one piece: `path` holds the old head or the new one, never a mixture.

    Files of an earlier head at `path` that are not ours (a model card, logs) are kept. Raises PeagleError when
    `path` is something else than a head, or cannot be written.
    """
    refuse_foreign(path)
    path = path.resolve()  # replace what a link points to, not the link
    fresh = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.new"
    try:
        fresh.mkdir(parents=True)
        save_tensors(fresh / SINGLE_FILE, tensors)
        (fresh / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        flush(fresh / CONFIG_FILE)
        _swap(fresh, path)
    except OSError as error:
        raise PeagleError(f"head {path}: cannot write ({error}); free some space or choose another folder") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refuse_foreign(path: Path) -> None:
    """Raise PeagleError unless `path` is free, an empty directory or an earlier head, which may be replaced."""
    if path.is_dir():
        # A target model's directory holds files of the same two names: only the architecture tells them apart.
        names = str(read_config(path).get("architectures")) if (path / CONFIG_FILE).is_file() else ""
        if "eagle" not in names.lower() and any(path.iterdir()):
            raise PeagleError(f"{path} is a directory that holds no head: it is left as it is, choose another folder")
    elif path.exists() or path.is_symlink():
        raise PeagleError(f"{path} is a file: it is left as it is, choose a folder for the head")


def _swap(fresh: Path, path: Path) -> None:
    """Put `fresh` in the place of `path`, keeping foreign files; undone when the second rename fails.

    Killed between the two renames, it leaves the old head whole beside `path`, as `.NAME.*.old`.
    """
    if not path.exists():
        os.replace(fresh, path)
        return
    old = fresh.with_suffix(".old")
    os.replace(path, old)  # a directory that is not empty cannot be replaced in one rename
    try:
        os.replace(fresh, path)
    except BaseException:
        old.rename(path)
        raise
    for entry in old.iterdir():
        if entry.name != CONFIG_FILE and ".safetensors" not in entry.name:
            entry.rename(path / entry.name)
    shutil.rmtree(old)
