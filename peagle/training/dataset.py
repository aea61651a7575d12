"""Reading a prepared data set: whole shards through arrow into numpy, no Python per token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from peagle.errors import PeagleError
from peagle.training.shards import MANIFEST_NAME, read_manifest, shard_records

DOCUMENTS_PER_COUNT = 4096  # bounds the copy that counting makes


@dataclass(frozen=True, slots=True)
class Document:
    """One training document of L tokens: `input_ids` int32 [L], `loss_mask` bool [L], True on the target's own tokens.

    Documents of one prompt (several temperatures, or parts of a split dialogue) share its `id`.
    """

    id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


def load_documents(folder: Path) -> tuple[list[Document], dict[str, Any]]:
    """All documents of a prepared data set in order, and its manifest.

    The data set may be unfinished (see `manifest["complete"]`): its finished shards are whole. Raises PeagleError when
    a shard is missing or damaged, and when the loss mask as a whole cannot be right.
    """
    manifest = read_manifest(folder)
    documents: list[Document] = []
    for record in shard_records(manifest, folder / MANIFEST_NAME):
        path = folder / record.file
        shard = read_shard(path)
        if len(shard) != record.documents:
            raise _damaged(path, f"it holds {len(shard)} documents, the manifest says {record.documents}")
        documents.extend(shard)
    _check_mask(documents, folder)
    return documents, manifest


def read_shard(path: Path) -> list[Document]:
    """The documents of one shard. Raises PeagleError when the file is missing or damaged."""
    try:
        table = pq.read_table(path, columns=["id", "input_ids", "loss_mask"], page_checksum_verification=True)
    except FileNotFoundError:
        raise PeagleError(
            f"{path} is missing although the manifest lists it: run the same `peagle prepare` again to make it anew"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, str(error)) from error
    if table.column_names != ["id", "input_ids", "loss_mask"]:
        raise _damaged(path, f"it has columns {table.column_names}, expected id, input_ids and loss_mask")
    names = table.column("id")
    if names.null_count or not (pa.types.is_string(names.type) or pa.types.is_large_string(names.type)):
        raise _damaged(path, f"its ids are {names.type}, {names.null_count} of them null: every document needs a text")
    ids, id_starts = _flat_lists(table.column("input_ids"), pa.int32(), path)
    mask, mask_starts = _flat_lists(table.column("loss_mask"), pa.bool_(), path)
    if not np.array_equal(id_starts, mask_starts):
        raise _damaged(path, "input_ids and loss_mask differ in length")
    spans = zip(names.to_pylist(), id_starts[:-1].tolist(), id_starts[1:].tolist(), strict=True)
    return [Document(name, ids[start:end], mask[start:end]) for name, start, end in spans]


def _flat_lists(
    column: pa.ChunkedArray, item: pa.DataType, path: Path
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """(values of all rows one after the other, row boundaries [rows + 1]) of a list column."""
    if not pa.types.is_list(column.type) or column.type.value_type != item:
        raise _damaged(path, f"a column is {column.type}, expected list<{item}>")
    lengths = column.combine_chunks().value_lengths()
    values = [chunk.flatten() for chunk in column.chunks]
    if lengths.null_count or any(chunk.null_count for chunk in values):
        raise _damaged(path, "it holds nulls")
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths.to_numpy(), out=starts[1:])
    flat = pa.chunked_array(values, type=item).to_numpy()
    return flat, starts


def _damaged(path: Path, reason: str) -> PeagleError:
    line = " ".join(reason.split())[:200]
    return PeagleError(f"{path} is damaged ({line}): delete it and run the same `peagle prepare` again")


def _check_mask(documents: Sequence[Document], folder: Path) -> None:
    """A mask that is empty or full over a whole data set is a mistake that training would not show."""
    if not documents:
        raise PeagleError(f"{folder} holds no documents: give `peagle prepare` more prompts or let it finish a shard")
    supervised = sum(int(document.loss_mask.sum()) for document in documents)
    tokens = sum(len(document.loss_mask) for document in documents)
    if supervised == 0:
        raise PeagleError(
            f"{folder}: none of {tokens} tokens is supervised, there is nothing to learn: prepare it again"
        )
    if supervised == tokens:
        raise PeagleError(f"{folder}: all {tokens} tokens are supervised, prompts must not be: prepare it again")


def data_hash(manifest: Mapping[str, Any]) -> str:
    """Identity of a data set: SHA-256 of its manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def draft_token_counts(documents: Sequence[Document], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each of the target's `vocab_size` tokens is supervised, int64 [V]. A draft vocabulary is chosen by it.

    Raises PeagleError when a token id lies outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(documents), DOCUMENTS_PER_COUNT):
        part = documents[start : start + DOCUMENTS_PER_COUNT]
        ids = np.concatenate([document.input_ids for document in part])
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise PeagleError(
                f"the data hold token ids from {int(ids.min())} to {int(ids.max())}, the target has {vocab_size} "
                "tokens: train for the target that the data were prepared with"
            )
        mask = np.concatenate([document.loss_mask for document in part])
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return counts
