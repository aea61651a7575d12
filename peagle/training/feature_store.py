"""Target features on disk: the shards that `peagle extract` writes, and the manifest that says which are whole.

A store is a folder of safetensors shards and a manifest. Each shard holds whole documents in the order of the data
set, end to end: `taps` [tokens, C] and `hidden` [tokens, H] of every token but a document's last, which is only ever a
label. As with prepared data, a shard counts once the manifest lists it, and both appear by a rename.

Shape suffixes: D documents of the data set, T tokens of a shard, C concatenated taps, H target hidden size.
"""

import errno
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import PeagleError
from peagle.training.batches import has_rows
from peagle.training.dataset import Document
from peagle.training.shards import write_atomic, write_error

STORE_MANIFEST = "features.json"
FORMAT = 1
WEIGHTS_KEY = "target_weights_fingerprint"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureShard:
    """What the manifest says of one finished shard: documents `first_document` and following of the data set."""

    index: int
    file: str
    first_document: int
    tokens: list[int]  # of each document; 0 where none of its positions is supervised
    bytes: int  # of the file

    @property
    def documents(self) -> tuple[int, int]:
        """The range [first, stop) of documents."""
        return self.first_document, self.first_document + len(self.tokens)


@dataclass(kw_only=True, slots=True)
class FeatureManifest:
    """The state of a store. Two runs may share a folder only if their `settings` are equal."""

    settings: dict[str, Any]
    num_shards: int
    shards: list[FeatureShard] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every shard is finished."""
        return len(self.shards) == self.num_shards

    def to_json(self) -> str:
        """The text of the manifest."""
        values = {"format": FORMAT, "complete": self.complete, **asdict(self)}
        values["shards"].sort(key=lambda shard: shard["index"])
        return json.dumps(values, indent=2) + "\n"


def plan_shards(tokens_D: NDArray[np.int64], bytes_per_token: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Ranges [first, stop) of documents, one per shard: as many as fit `shard_bytes`, and at least one."""
    ranges: list[tuple[int, int]] = []
    first, size = 0, 0
    for number, tokens in enumerate(tokens_D.tolist()):
        if size and tokens and size + tokens * bytes_per_token > shard_bytes:
            ranges.append((first, number))
            first, size = number, 0
        size += tokens * bytes_per_token
    return [*ranges, (first, len(tokens_D))] if size else ranges


def write_feature_shard(
    folder: Path, index: int, first_document: int, tokens: list[int], taps_TC: Tensor, hidden_TH: Tensor
) -> FeatureShard:
    """Write one shard, of documents with so many `tokens`, and return its record.

    Raises PeagleError when the disk does not take it.
    """
    name = f"features-{index:05d}.safetensors"
    path = folder / name
    temporary = folder / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file({"taps": taps_TC, "hidden": hidden_TH}, temporary)
        temporary.chmod(mode)  # safetensors makes a file for its owner alone
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise write_error(path, _as_os_error(error)) from error
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise
    size = path.stat().st_size
    return FeatureShard(index=index, file=name, first_document=first_document, tokens=tokens, bytes=size)


def _as_os_error(error: SafetensorError) -> OSError:
    """The operating system's error behind one of safetensors, which gives its number in the text alone."""
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number))


def write_store_manifest(folder: Path, manifest: FeatureManifest) -> None:
    """Replace the manifest in one step."""
    write_atomic(folder / STORE_MANIFEST, manifest.to_json().encode())


def read_store_manifest(folder: Path) -> FeatureManifest:
    """The manifest of a store. Raises PeagleError when there is none or it cannot be understood."""
    path = folder / STORE_MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        values.pop("complete")
        shards = [FeatureShard(**shard) for shard in values.pop("shards")]
        return FeatureManifest(shards=shards, **values)
    except FileNotFoundError:
        raise PeagleError(
            f"{folder} has no {STORE_MANIFEST}: give a folder that `peagle extract --out` wrote"
        ) from None
    except OSError as error:
        raise PeagleError(f"cannot read {path} ({error.strerror}): check the folder") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = " ".join(str(error).split())[:100]
        raise PeagleError(f"{path} is not a manifest of format {FORMAT} ({why}): extract the features again") from None


def check_settings(folder: Path, earlier: Mapping[str, Any], present: Mapping[str, Any], remedy: str) -> None:
    """PeagleError naming the first setting in which a store differs from what this run needs."""
    for name, value in present.items():
        if earlier.get(name) != value:
            raise PeagleError(
                f"{folder} holds features with {name} {earlier.get(name)!r}, this run has {value!r}: {remedy}"
            )


def finished_shards(folder: Path, manifest: FeatureManifest, ranges: Sequence[tuple[int, int]]) -> list[FeatureShard]:
    """The shards of an earlier run that can be kept: listed, of the range planned now, and there in full size."""
    kept = []
    for record in manifest.shards:
        path = folder / record.file
        fits = record.index < len(ranges) and ranges[record.index] == record.documents
        if fits and path.is_file() and path.stat().st_size == record.bytes:
            kept.append(record)
    return kept


def stored_tokens(documents: Sequence[Document]) -> NDArray[np.int64]:
    """Tokens stored of each document: all but the last, none where no position is supervised."""
    return np.array([len(d.input_ids) - 1 if has_rows(d) else 0 for d in documents], np.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which a precision is asked for."""
    return str(dtype).removeprefix("torch.")
