"""The training log becomes a picture."""

import json
from pathlib import Path

import pytest

from peagle.errors import PeagleError
from peagle.training.plots import plot_training


def test_log_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [{"step": s, "positions": s * 8192, "depth_accuracy": [0.5, 0.25]} for s in (10, 20)]
    rows.append({"step": 20, "held_out": {"acceptance_length": 1.7}})
    log = tmp_path / "train.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_training(log, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_empty_log_is_an_error(tmp_path: Path):
    pytest.importorskip("matplotlib")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(PeagleError, match="nothing to draw"):
        plot_training(tmp_path / "train.jsonl", tmp_path / "training.png")
