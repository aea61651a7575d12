"""Target features that `peagle extract` wrote, as a feature source for training.

Shape suffixes: P packed positions, T tokens read at once, C concatenated taps, H target hidden size.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import PeagleError
from peagle.models.fingerprint import weights_fingerprint
from peagle.models.target import Target
from peagle.training.feature_store import (
    WEIGHTS_KEY,
    FeatureManifest,
    FeatureShard,
    check_settings,
    dtype_name,
    read_store_manifest,
)
from peagle.training.features import FeatureIndex, PackFeatures
from peagle.training.rows import Packed


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
        why = " ".join(str(error).split())[:200]
        return PeagleError(f"{self.path} is missing or damaged ({why}): run the same `peagle extract` again")


def _matrix(entry: Mapping[str, Any], tokens: int, data: int) -> _Matrix:
    """A tensor's place by its header entry; `data` is the first byte behind the header. Raises ValueError."""
    rows, width = entry["shape"]
    if rows != tokens:
        raise ValueError(f"{rows} tokens, the manifest says {tokens}")
    return _Matrix(data + entry["data_offsets"][0], width)


def open_features(
    folder: Path,
    target: Target,
    data: str,
    tap_ids: tuple[int, ...],
    number_D: NDArray[np.int64],
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
