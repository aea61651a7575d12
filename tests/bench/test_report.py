"""Result files hold their provenance, appear whole or not at all, and render to the tables of the README."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.acceptance import AcceptanceRow
from benchmarks.cpu_speed import SpeedRow
from benchmarks.lossless import LosslessRow
from benchmarks.lossless_gpu import LosslessSettingRow
from benchmarks.tables import render_block
from benchmarks.train_curve import CurveRow
from peagle.bench.markdown import markdown_table
from peagle.bench.report import check_result_path, provenance, read_result, write_result
from peagle.errors import PeagleError

ACCEPTANCE = AcceptanceRow(
    suite="mt_bench",
    num_speculative_tokens=3,
    temperature=0.7,
    acceptance_length=2.4449,
    acceptance_length_without_loops=2.1,
    accepted_share_per_position=(0.7, 0.45, 0.25),
    accepted_share_per_position_without_loops=(0.6, 0.3, 0.2),
    looping_token_share=0.25,
    prompts=80,
    rounds=8000,
    tokens=20480,
)
SPEED = SpeedRow(
    num_speculative_tokens=5,
    tokens_per_second_plain=30.0,
    tokens_per_second=45.06,
    ratio=1.502,
    acceptance_length=2.6,
    prompts=10,
    tokens=1280,
)
CURVE = CurveRow(
    run="EAGLE-3",
    budget="100 seconds",
    step=500,
    positions=4_000_000,
    seconds=98.7,
    acceptance_length=2.4,
    implied_acceptance_length=2.513,
)
MEMORY = {
    "partition": "algorithm1",
    "segments": 4,
    "chunk_rows": None,
    "attention": "kernel",
    "compile": False,
    "checkpoint_activations": True,
    "positions": 8192,
    "rows": 34073,
    "out_of_memory": False,
    "peak_gib": 15.0,
    "standing_gib": 10.0,
    "seconds": 0.5,
    "rows_per_second": 68146.0,
    "utilisation": 0.49,
}
TRAINING = {
    "shape": "tiny",
    "method": "p-eagle",
    "positions_per_second": 323680.0,
    "rows_per_second": 1029213.0,
    "utilisation": 0.3057,
    "data_wait_share": 0.033,
}
PEER = {
    "shape": "tiny",
    "positions": 8192,
    "rows": 34073,
    "gradient_checkpointing": False,
    "failure": None,
    "forward_ms": 311.02,
    "backward_ms": 416.56,
    "step_ms": 727.58,
    "rows_per_second": 46830.6,
    "peak_gib": 70.993,
    "resident_gib": 8.366,
}
SETTING = LosslessSettingRow(
    dtype="bfloat16",
    setting="drafts",
    num_speculative_tokens=7,
    temperature=0.8,
    requests=64,
    equal=60,
    tokens_compared=8000,
    first_divergence=17,
    largest_gap=0.0234,
    limit=0.31,
    explained=True,
    preemptions=0,
    cached_tokens=0,
    acceptance_length=2.5,
)
OVERHEAD = {
    "client": "a client", "interval_ms": 5.0, "tokens_per_chunk": 3, "chunks_per_second": 4200.4, "tpot_added": 0.00123,
    "e2e_added": 0.004, "ttft_added_ms": 3.21, "client_cpu_share": 0.125,
}  # fmt: skip
LOSSLESS = LosslessRow(num_speculative_tokens=7, batch_size=8, temperature=0.0, prompts=50, identical=49)


def write_and_read(tmp_path, name, *rows):
    path = tmp_path / "new" / f"{name}.json"
    write_result(path, name, {"command": "python x.py"}, {"rows": rows})
    return read_result(path)


def test_a_result_says_where_it_comes_from(tmp_path):
    result = write_and_read(tmp_path, "acceptance-x", ACCEPTANCE)
    assert list(result) == ["name", "created", "machine", "versions", "settings", "results"]
    assert set(result["machine"]) == {"cpu", "cores", "gpu"}
    assert set(result["versions"]) == {"python", "torch", "transformers", "peagle", "commit"}
    assert result["machine"]["cores"] >= 1
    assert result["versions"] == provenance()["versions"]
    assert result["results"]["rows"][0]["accepted_share_per_position"] == [0.7, 0.45, 0.25]


@pytest.mark.parametrize(
    ("name", "row", "cells"),
    [
        ("acceptance-x", ACCEPTANCE, "| mt_bench | 0.7 | 3 | **2.44** | 2.10 | 0.70 0.45 0.25 | 80 | 20,480 |"),
        (
            "acceptance-x",
            replace(ACCEPTANCE, head="a"),
            "| a | mt_bench | 0.7 | 3 | **2.44** | 2.10 | 0.70 0.45 0.25 | 80 | 20,480 |",
        ),
        ("train-curve-x", CURVE, "| EAGLE-3 | 100 seconds | **2.40** | 2.51 | 4,000,000 | 99 | 500 |"),
        ("cpu-speed-x", SPEED, "| 5 | 30.0 | 45.1 | **1.50x** | 2.60 | 10 | 1,280 |"),
        ("lossless-x", LOSSLESS, "| 0 | 7 | 8 | 49 of 50 |"),
        ("lossless-gpu-x", SETTING, "| drafts | 7 | bfloat16 | 0.8 | **60 of 64** | 8,000 | 0.023 | 0.31 | yes |"),
        (
            "lossless-gpu-x",
            replace(SETTING, num_speculative_tokens=0, equal=64, largest_gap=None),
            "| drafts |  | bfloat16 | 0.8 | **64 of 64** | 8,000 | – | 0.31 | – |",
        ),
        (
            "lossless-gpu-x",
            replace(SETTING, largest_gap=0.5, explained=False),
            "| drafts | 7 | bfloat16 | 0.8 | **60 of 64** | 8,000 | 0.5 | 0.31 | **no** |",
        ),
        ("heads-x", replace(ACCEPTANCE, head="a"), "| a | 3 | 2.44 |"),
        (
            "training-memory-x",
            MEMORY,
            "| algorithm1 (4 segments, checkpointed) | kernel | 8,192 | 34,073 | 5.0 | 0.50 | 68,146 | 49 % |",
        ),
        (
            "training-memory-x",
            {**MEMORY, "out_of_memory": True, "partition": "flat", "checkpoint_activations": False},
            "| flat | kernel | 8,192 | 34,073 | out of memory |  |  |  |",
        ),
        ("training-speed-x", TRAINING, "| tiny | p-eagle | **323,680** | 1,029,213 | 31 % | 3 % |"),
        ("peer-x", PEER, "| tiny | 8,192 | 34,073 | 311 | 417 | 728 | 46,831 | 71.0 | 8.4 |"),
        (
            "peer-x",
            {**PEER, "gradient_checkpointing": True, "failure": "out of memory"},
            "| tiny (checkpointed) | 8,192 | 34,073 | out of memory |  |  |  |  |  |",
        ),
        (
            "client-overhead-x",
            OVERHEAD,
            "| a client | 3 every 15 ms | 4,200 | +0.12 % | +0.40 % | +3.2 ms | 0.12 cores |",
        ),
    ],
)
def test_tables(tmp_path, name, row, cells):
    block = render_block(name, write_and_read(tmp_path, name, row))
    header, ruler, body, *rest = block.splitlines()
    assert body == cells
    assert header.count("|") == ruler.count("|") == body.count("|")
    assert "`python x.py`" in rest[-1]
    assert f"benchmarks/results/{name}.json" in rest[-1]


def test_markdown_table():
    assert markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_a_result_not_there_yet_says_so():
    assert "Not measured yet" in render_block("acceptance-x", None)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(PeagleError, match="no table is known"):
        render_block("other", write_and_read(tmp_path, "other", SPEED))


def test_nothing_half_written_stays(tmp_path):
    path = tmp_path / "acceptance-x.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_result(path, "acceptance-x", {}, {"rows": [object()]})
    assert path.read_text() == "old"
    with pytest.raises(PeagleError, match="cannot write the result"):
        write_result(path / "below-a-file.json", "acceptance-x", {}, {"rows": []})
    assert [entry.name for entry in tmp_path.iterdir()] == ["acceptance-x.json"]


@pytest.mark.parametrize("text", ["{", "{}", json.dumps({"name": "x"})])
def test_files_that_are_no_result(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(PeagleError, match=r"r\.json"):
        read_result(path)


def test_a_result_takes_no_device_s_place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(PeagleError, match="is a device or a pipe"):
            check_result_path(path)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_result_is_written_through_a_link(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "there" / "target.json"
    link.symlink_to(target)
    for command in ("first", "second"):  # at first the link leads nowhere
        check_result_path(link)
        write_result(link, "x", {"command": command}, {"rows": []})
        assert (link.is_symlink(), read_result(target)["settings"]["command"]) == (True, command)
    assert [entry.name for entry in target.parent.iterdir()] == ["target.json"]
