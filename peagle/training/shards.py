"""The prepared data set on disk: parquet shards and the manifest that says which of them are whole.

A shard counts only once the manifest lists it, and the manifest is written after the shard; both appear by a rename. A
crash at any moment therefore leaves either a finished shard or nothing. docs/data.md describes the format for users.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from peagle import __version__
from peagle.errors import PeagleError
from peagle.files import write_atomic
from peagle.training.conversations import Conversation, RenderedDocument

MANIFEST_NAME = "manifest.json"
FORMAT = 1
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("license", pa.string()),
        ("category", pa.string()),
        ("temperature", pa.float64()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRow:
    """One row of a shard: a document, and the conversation and temperature it came from."""

    conversation: Conversation
    temperature: float
    document: RenderedDocument


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What the manifest says of one finished shard. `skipped` counts prompts or later turns left out, by reason."""

    index: int
    file: str
    documents: int
    tokens: int
    supervised_tokens: int
    splits: int
    skipped: dict[str, int]
    finish_reasons: dict[str, int]
    documents_per_source: dict[str, int]


@dataclass(kw_only=True, slots=True)
class Manifest:
    """The state of a data set. Two runs may share a folder only if their `settings` are equal."""

    settings: dict[str, Any]
    prompt_files: list[dict[str, Any]]
    sources: dict[str, dict[str, Any]]
    num_shards: int
    shards: list[ShardRecord] = field(default_factory=list)

    @property
    def totals(self) -> dict[str, Any]:
        """Counts summed over the finished shards."""
        shards = self.shards
        return {
            "documents": sum(shard.documents for shard in shards),
            "tokens": sum(shard.tokens for shard in shards),
            "supervised_tokens": sum(shard.supervised_tokens for shard in shards),
            "splits": sum(shard.splits for shard in shards),
            "skipped": _sum_counts([shard.skipped for shard in shards]),
            "finish_reasons": _sum_counts([shard.finish_reasons for shard in shards]),
            "documents_per_source": _sum_counts([shard.documents_per_source for shard in shards]),
        }

    def to_json(self) -> str:
        """The text of manifest.json; the same for the same data, whenever and in however many runs it was made."""
        values = {
            "format": FORMAT,
            "peagle_version": __version__,
            "complete": len(self.shards) == self.num_shards,
            "settings": self.settings,
            "prompt_files": self.prompt_files,
            "sources": self.sources,
            "totals": self.totals,
            "num_shards": self.num_shards,
            "shards": [asdict(shard) for shard in sorted(self.shards, key=lambda shard: shard.index)],
        }
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _sum_counts(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.parquet"


def write_shard(
    folder: Path, index: int, rows: Sequence[ShardRow], *, splits: int, skipped: dict[str, int]
) -> ShardRecord:
    """Write one shard and return its record for the manifest. Raises PeagleError when the disk does not take it."""
    # Into memory first: the file is then written by one call whose failure says what the operating system said.
    buffer = pa.BufferOutputStream()
    pq.write_table(_table(rows), buffer, compression="zstd", write_page_checksum=True)
    name = shard_name(index)
    write_atomic(folder / name, memoryview(buffer.getvalue()))
    return ShardRecord(
        index=index,
        file=name,
        documents=len(rows),
        tokens=sum(len(row.document.token_ids) for row in rows),
        supervised_tokens=sum(sum(row.document.loss_mask) for row in rows),
        splits=splits,
        skipped=dict(sorted(skipped.items())),
        finish_reasons=dict(sorted(Counter(row.document.finish_reason for row in rows).items())),
        documents_per_source=dict(sorted(Counter(row.conversation.source for row in rows).items())),
    )


def _table(rows: Sequence[ShardRow]) -> pa.Table:
    columns = {
        "id": [row.conversation.id for row in rows],
        "source": [row.conversation.source for row in rows],
        "license": [row.conversation.license for row in rows],
        "category": [row.conversation.category for row in rows],
        "temperature": [row.temperature for row in rows],
        "input_ids": [row.document.token_ids for row in rows],
        "loss_mask": [row.document.loss_mask for row in rows],
        "finish_reason": [row.document.finish_reason for row in rows],
    }
    return pa.table(columns, schema=SCHEMA)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest in one step."""
    write_atomic(folder / MANIFEST_NAME, manifest.to_json().encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared data set. Raises PeagleError when there is none or it cannot be understood."""
    path = folder / MANIFEST_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PeagleError(f"{folder} has no {MANIFEST_NAME}: give a folder that `peagle prepare --out` wrote") from None
    except OSError as error:
        raise PeagleError(f"cannot read {path} ({error.strerror}): check the folder") from None
    except ValueError as error:
        raise PeagleError(f"{path} is not valid JSON ({error}): delete {folder} and prepare the data again") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT or not isinstance(values.get("shards"), list):
        raise PeagleError(f"{path} is not a manifest of format {FORMAT}: prepare the data again with this version")
    return values


def shard_records(manifest: dict[str, Any], path: Path) -> list[ShardRecord]:
    """The shard records of a manifest that was read; `path` is for the error message."""
    try:
        records = [ShardRecord(**shard) for shard in manifest["shards"]]
        if not all(isinstance(shard.file, str) and isinstance(shard.documents, int) for shard in records):
            raise TypeError
        return records
    except TypeError:
        raise PeagleError(f"{path} has a shard record of another form: prepare the data again") from None
