"""The training log becomes a picture."""

import json
from pathlib import Path

import pytest

from peagle.errors import PeagleError
from peagle.training.plots import EvaluationPoint, plot_training, read_log


def write_log(path: Path, *more: dict) -> Path:
    rows = [
        {"step": s, "positions": s * 8192, "seconds": s / 2, "depth_accuracy": [0.5, 0.25]} for s in (10, 20)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *more)))
    return path


HELD_OUT = {"step": 20, "held_out": {"acceptance_length": 1.7}}
SERVED = {"step": 20, "served": {"acceptance_length": 1.6}}


@pytest.mark.parametrize("more", [(), (HELD_OUT,), (HELD_OUT, SERVED)])
def test_log_is_drawn(tmp_path: Path, more: tuple[dict, ...]):
    pytest.importorskip("matplotlib")
    plot_training(write_log(tmp_path / "train.jsonl", *more), tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_evaluations_are_joined_and_placed_between_reports(tmp_path: Path):
    log = write_log(tmp_path / "train.jsonl", HELD_OUT, SERVED, {"step": 15, "held_out": {"acceptance_length": 1.4}})
    between, at_report = read_log(log).evaluations
    assert at_report == EvaluationPoint(step=20, positions=20 * 8192, seconds=10.0, implied=1.7, served=1.6)
    assert between == EvaluationPoint(step=15, positions=15 * 8192, seconds=7.5, implied=1.4, served=None)


def test_logs_without_a_report_are_an_error(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(PeagleError, match="nothing to draw"):
        read_log(tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(PeagleError, match="cannot be read"):
        read_log(tmp_path / "train.jsonl")
    with pytest.raises(PeagleError, match="cannot be read"):
        read_log(tmp_path / "none.jsonl")
