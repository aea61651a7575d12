"""Two training logs become one table and one figure."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import train_curve
from peagle.errors import PeagleError


def write_run(folder: Path, speed: float, *lengths: float, served: bool = True) -> Path:
    """A log that reports every 10 steps of 1,000 positions and evaluates with the given results."""
    folder.mkdir()
    lines = []
    for number, length in enumerate(lengths, 1):
        step = 10 * number
        report = {"step": step, "positions": 1000 * step, "seconds": 1000 * step / speed, "depth_accuracy": [0.5]}
        lines += [report, {"step": step, "held_out": {"acceptance_length": length + 0.1}}]
        if served:
            lines.append({"step": step, "served": {"acceptance_length": length}})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_same_positions_and_same_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    slow = write_run(tmp_path / "slow", 100, 1.5, 1.8, 2.0)
    fast = write_run(tmp_path / "fast", 200, 1.4, 1.7, 1.9)
    out = tmp_path / "train-curve-x.json"
    monkeypatch.setattr(
        sys, "argv", ["train_curve.py", f"EAGLE-3={slow}", str(fast), "--positions", "2e4", "--seconds", "100", "150",
                      "1", "--out", str(out)],
    )  # fmt: skip
    train_curve.main()
    rows = json.loads(out.read_text())["results"]["rows"]
    assert [(r["run"], r["budget"], r["acceptance_length"], r["step"]) for r in rows] == [
        ("EAGLE-3", "20,000 positions", 1.8, 20),
        ("EAGLE-3", "100 seconds", 1.5, 10),
        ("EAGLE-3", "150 seconds", 1.5, 10),
        ("fast", "20,000 positions", 1.7, 20),
        ("fast", "100 seconds", 1.7, 20),
        ("fast", "150 seconds", 1.9, 30),
    ]
    printed = capsys.readouterr().out
    assert "EAGLE-3 was not decoded within 1 seconds" in printed
    assert "| fast | 150 seconds | **1.90** | 2.00 | 30,000 | 150 | 30 |" in printed
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_without_budgets_runs_are_compared_where_the_shorter_one_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one, two = write_run(tmp_path / "one", 100, 1.5, 1.8, 2.0), write_run(tmp_path / "two", 100, 1.4, 1.7)
    out = tmp_path / "train-curve.json"
    monkeypatch.setattr(sys, "argv", ["train_curve.py", str(one), str(two / "train.jsonl"), "--out", str(out)])
    train_curve.main()
    rows = json.loads(out.read_text())["results"]["rows"]
    assert [(r["run"], r["step"]) for r in rows] == [("one", 20), ("one", 20), ("two", 20), ("two", 20)]


def test_a_log_without_decoding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "run", 100, 1.5, served=False)
    monkeypatch.setattr(sys, "argv", ["train_curve.py", str(run)])
    with pytest.raises(PeagleError, match="serve_tokens"):
        train_curve.main()
