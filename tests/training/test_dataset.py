"""Loading refuses whatever is not a whole data set with a mask that can be right."""

import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from peagle.errors import PeagleError
from peagle.training.conversations import Conversation, RenderedDocument
from peagle.training.dataset import Document, draft_token_counts, load_documents
from peagle.training.shards import Manifest, ShardRow, read_manifest, write_manifest, write_shard
from peagle.training.show import print_document

STEPS = (({"role": "user", "content": "x"},),)


def row(name, token_ids, mask):
    document = RenderedDocument(token_ids=token_ids, loss_mask=[bool(m) for m in mask], finish_reason="stop")
    return ShardRow(conversation=Conversation(id=name, steps=STEPS, source="s"), temperature=0.7, document=document)


def write(folder, *shards):
    folder.mkdir(exist_ok=True)
    manifest = Manifest(settings={}, prompt_files=[], sources={}, num_shards=len(shards))
    for index, rows in enumerate(shards):
        manifest.shards.append(write_shard(folder, index, rows, splits=0, skipped={}))
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def folder(tmp_path):
    shards = [[row("a", [5, 6, 7], [0, 1, 1]), row("b", [8], [0])], [row("c", [5, 9], [0, 1])]]
    return write(tmp_path / "data", *shards)


def test_round_trip(folder):
    documents, manifest = load_documents(folder)
    assert [d.id for d in documents] == ["a", "b", "c"]
    assert [d.input_ids.tolist() for d in documents] == [[5, 6, 7], [8], [5, 9]]
    assert [d.loss_mask.tolist() for d in documents] == [[False, True, True], [False], [False, True]]
    assert documents[0].input_ids.dtype == np.int32
    assert documents[0].loss_mask.dtype == np.bool_
    assert manifest["complete"] is True
    assert manifest["totals"]["tokens"] == 6
    assert manifest["totals"]["supervised_tokens"] == 3
    assert manifest["totals"]["documents_per_source"] == {"s": 3}
    assert pq.read_table(folder / "shard-00000.parquet").column("temperature").to_pylist() == [0.7, 0.7]
    assert not list(folder.glob(".*"))


def test_draft_token_counts(folder):
    documents, _ = load_documents(folder)
    assert draft_token_counts(documents, 10).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0, 1]
    with pytest.raises(PeagleError, match="from 5 to 9, the target has 9 tokens"):
        draft_token_counts(documents, 9)


def test_no_manifest(tmp_path):
    with pytest.raises(PeagleError, match=r"has no manifest\.json"):
        load_documents(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99, "shards": []}', '{"format": 1}'])
def test_bad_manifest(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(PeagleError, match=r"manifest\.json is not"):
        load_documents(folder)


def test_missing_shard(folder):
    (folder / "shard-00001.parquet").unlink()
    with pytest.raises(PeagleError, match=r"shard-00001\.parquet is missing"):
        load_documents(folder)


@pytest.mark.parametrize("change", [{"file": 3}, {"documents": "2"}, {"surprise": 1}])
def test_shard_records_of_another_form(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= change
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PeagleError, match=r"manifest\.json has a shard record of another form"):
        load_documents(folder)


@pytest.mark.parametrize("ids", [["a", None], [1, 2]])
def test_every_document_has_a_text_for_id(folder, ids):
    path = folder / "shard-00000.parquet"
    table = pq.read_table(path)
    column = pa.array((ids * len(table))[: len(table)])
    pq.write_table(table.set_column(0, "id", column), path)
    with pytest.raises(PeagleError, match=r"is damaged \(its ids are (string|int64), . of them null: every document"):
        load_documents(folder)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other"])
def test_damaged_shard(folder, damage):
    path = folder / "shard-00000.parquet"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        # The first page lies behind the magic and its small header: any byte of it is guarded by its checksum.
        data[60] ^= 0xFF
    other = (folder / "shard-00001.parquet").read_bytes()
    path.write_bytes({"truncate": data[:-20], "flip": data, "empty": b"", "other": other}[damage])
    with pytest.raises(PeagleError, match=r"shard-00000\.parquet is damaged \(.*\): delete it") as caught:
        load_documents(folder)
    assert "\n" not in str(caught.value)


def test_masks_that_cannot_be_right(tmp_path):
    with pytest.raises(PeagleError, match="none of 2 tokens is supervised"):
        load_documents(write(tmp_path / "none", [row("a", [1, 2], [0, 0])]))
    with pytest.raises(PeagleError, match="all 2 tokens are supervised"):
        load_documents(write(tmp_path / "all", [row("a", [1, 2], [1, 1])]))
    with pytest.raises(PeagleError, match="holds no documents"):
        load_documents(write(tmp_path / "empty", []))


def test_manifest_is_plain_json_in_shard_order(tmp_path):
    manifest = Manifest(settings={"seed": 0}, prompt_files=[], sources={}, num_shards=3)
    for index in (1, 0):
        manifest.shards.append(write_shard(tmp_path, index, [row("a", [1, 2], [0, 1])], splits=1, skipped={"x": 2}))
    write_manifest(tmp_path, manifest)
    values = read_manifest(tmp_path)
    assert [shard["index"] for shard in values["shards"]] == [0, 1]
    assert values["complete"] is False
    assert values["totals"]["skipped"] == {"x": 4}
    assert values["totals"]["splits"] == 2
    assert json.loads(manifest.to_json()) == values


def test_many_documents_load_fast(tmp_path):
    rows = [row(f"d{index}", [1, 2, 3, 4] * 10, [0, 1, 1, 1] * 10) for index in range(5000)]
    write(tmp_path / "many", rows, rows)
    started = time.perf_counter()
    documents, _ = load_documents(tmp_path / "many")
    assert len(documents) == 10_000
    assert time.perf_counter() - started < 3.0  # about 0.05 s; a loop over tokens would take longer


class Words:
    """Stands in for a tokenizer: token i is the text <i>."""

    def decode(self, ids, skip_special_tokens):
        return "".join(f"<{i}>" for i in ids)


def test_print_document_marks_supervised_text(capsys):
    document = Document("doc", np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 0, 1], dtype=bool))
    print_document(Console(color_system=None, width=200), Words(), document, max_tokens=5)
    shown = capsys.readouterr().out
    assert "doc: 3 of 6 tokens are supervised" in shown
    assert "<0><1>⟦<2><3>⟧<4> ... (1 more tokens)" in shown
    print_document(Console(force_terminal=True, color_system="standard", width=200), Words(), document)
    assert "\x1b[1;32m<2><3>\x1b[0m" in capsys.readouterr().out
