"""Target features on disk: the shards that `peagle extract` writes, and the manifest that says which are whole.

A store is a folder of safetensors shards and a manifest. Each shard holds whole documents in the order of the data
set, end to end: `taps` [tokens, C] and `hidden` [tokens, H] of every token but a document's last, which is only ever a
label. As with prepared data, a shard counts once the manifest lists it, and both appear by a rename.

Shape suffixes: D documents of the data set, T tokens of a shard, C concatenated taps, H target hidden size.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import PeagleError, one_line
from peagle.files import replacing, save_tensors, write_atomic
from peagle.models.fingerprint import weights_fingerprint
from peagle.models.target import Target
from peagle.training.batches import has_rows
from peagle.training.dataset import Document
from peagle.training.features import FeatureIndex, PackFeatures
from peagle.training.rows import Packed

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

    def __post_init__(self) -> None:
        numbers = (self.index, self.first_document, self.bytes, *self.tokens)
        if not isinstance(self.file, str) or not all(isinstance(number, int) for number in numbers):
            raise TypeError("a shard record of another form")

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
    with replacing(folder / name) as temporary:
        save_tensors(temporary, {"taps": taps_TC, "hidden": hidden_TH})
        size = temporary.stat().st_size
    return FeatureShard(index=index, file=name, first_document=first_document, tokens=tokens, bytes=size)


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
        shards = sorted((FeatureShard(**shard) for shard in values.pop("shards")), key=lambda shard: shard.index)
        if any(one.index == other.index or one.documents[1] > other.first_document for one, other in pairwise(shards)):
            raise ValueError("its shards overlap")
        manifest = FeatureManifest(shards=shards, **values)
        if not isinstance(manifest.settings, dict) or not isinstance(manifest.num_shards, int):
            raise ValueError("settings or num_shards of another form")
        return manifest
    except FileNotFoundError:
        raise PeagleError(
            f"{folder} has no {STORE_MANIFEST}: give a folder that `peagle extract --out` wrote"
        ) from None
    except OSError as error:
        raise PeagleError(f"cannot read {path} ({error.strerror}): check the folder") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PeagleError(
            f"{path} is not a manifest of format {FORMAT} ({one_line(error)}): extract the features again"
        ) from None


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


class ShardedFeatures:
    """Features from files, gathered on the host: `index` reads a pack's rows, `gather` does nothing.

    `index` runs in the thread that prepares batches, so that the GPU waits neither for the disk nor for the copy. Each
    document is two reads into page-locked memory: several times quicker than copying from mapped files, whose pages
    would fault in one by one.
    """

    def __init__(self, folder: Path, manifest: FeatureManifest, number_D: NDArray[np.int64]) -> None:
        """`number_D`: the numbers of a run's documents in the data set.

        Raises PeagleError for an unfinished or damaged store.
        """
        if not manifest.complete:
            raise PeagleError(
                f"{folder} holds {len(manifest.shards)} of {manifest.num_shards} shards: run the same `peagle extract` "
                "again to finish it"
            )
        self.pinned = torch.cuda.is_available()
        records = sorted(manifest.shards, key=lambda shard: shard.index)
        self._shards = [_ShardFile(folder / record.file, record) for record in records]
        self.shard_D = np.repeat(np.arange(len(records)), [len(record.tokens) for record in records])[number_D]
        self.start_D = np.concatenate([np.cumsum([0, *record.tokens[:-1]]) for record in records])[number_D]

    def index(self, packed: Packed, document_D: NDArray[np.int64], /) -> PackFeatures:
        """The pack's own features, zeros on padding. Raises PeagleError when a file cannot be read."""
        positions, shape = len(packed.doc_P), self._shards[0]
        taps_PC = torch.empty((positions, shape.taps.width), dtype=shape.dtype, pin_memory=self.pinned)
        hidden_PH = torch.empty((positions, shape.hidden.width), dtype=shape.dtype, pin_memory=self.pinned)
        lengths = np.bincount(packed.doc_P[packed.doc_P >= 0], minlength=len(document_D)).tolist()
        place = 0
        for number, length in zip(document_D.tolist(), lengths, strict=True):
            rows = slice(place, place + length)
            self._shards[self.shard_D[number]].read(int(self.start_D[number]), taps_PC[rows], hidden_PH[rows])
            place += length
        taps_PC[place:].zero_()
        hidden_PH[place:].zero_()
        return PackFeatures(taps_PC, hidden_PH)

    def gather(self, index: FeatureIndex) -> tuple[Tensor, Tensor]:
        """What `index` made, by now on the device."""
        if not isinstance(index, PackFeatures):
            raise TypeError("an index into other features holds none of these")
        return index.taps_PC, index.hidden_PH


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where a tensor of a safetensors file lies: its first byte, and values per row."""

    offset: int
    width: int


class _ShardFile:
    """One shard, opened for each read: there may be more of them than a process may keep open."""

    def __init__(self, path: Path, record: FeatureShard) -> None:
        """Check the file against its record. Raises PeagleError for one that is missing or damaged."""
        self.path = path
        try:
            if path.stat().st_size != record.bytes:
                raise ValueError(f"{path.stat().st_size} bytes, the manifest says {record.bytes}")
            with safe_open(path, framework="pt") as stored:  # checks that the header describes all of the file
                self.dtype = stored.get_tensor("hidden")[:0].dtype
            with path.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size))
            self.taps, self.hidden = (
                _matrix(header[name], sum(record.tokens), 8 + size) for name in ("taps", "hidden")
            )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise self._damaged(error) from None

    def read(self, start: int, taps_TC: Tensor, hidden_TH: Tensor) -> None:
        """Fill in the taps from token `start` on and the hidden states of the tokens that follow each of them."""
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                for matrix, first, rows in ((self.taps, start, taps_TC), (self.hidden, start + 1, hidden_TH)):
                    buffer = rows.view(torch.uint8).numpy().data.cast("B")
                    offset = matrix.offset + first * matrix.width * rows.element_size()
                    while len(buffer):
                        count = os.preadv(file, [buffer], offset)
                        if count == 0:
                            raise ValueError("it ends early")
                        buffer, offset = buffer[count:], offset + count
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> PeagleError:
        return PeagleError(
            f"{self.path} is missing or damaged ({one_line(error)}): run the same `peagle extract` again"
        )


def _matrix(entry: Mapping[str, Any], tokens: int, data: int) -> _Matrix:
    """A tensor's place by its header entry; `data` is the first byte behind the header. Raises ValueError."""
    rows, width = entry["shape"]
    if rows != tokens:
        raise ValueError(f"{rows} tokens, the manifest says {tokens}")
    return _Matrix(data + entry["data_offsets"][0], width)


def open_features(
    folder: Path, target: Target, data: str, tap_ids: tuple[int, ...], number_D: NDArray[np.int64]
) -> ShardedFeatures:
    """The store at `folder` for a run on the documents with numbers `number_D` of the data set with the hash `data`.

    Raises PeagleError when the store was made for another target, other data, other taps or another precision.
    """
    manifest = read_store_manifest(folder)
    dtype = dtype_name(target.model.embed_tokens.weight.dtype)
    needed = {"data_hash": data, "tap_ids": list(tap_ids), "context": target.spec.max_position_embeddings}
    check_settings(folder, manifest.settings, needed, "extract them again with the same data and taps")
    check_settings(folder, manifest.settings, {"dtype": dtype}, "extract, or train, with the other --dtype")
    if manifest.settings.get(WEIGHTS_KEY) != weights_fingerprint(target.path):
        raise PeagleError(
            f"{folder} holds features of {manifest.settings.get('model')}, whose weights are not those of "
            f"{target.name}: extract them again with {target.name}"
        )
    return ShardedFeatures(folder, manifest, number_D)
