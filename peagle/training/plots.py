"""The training log as a picture: acceptance lengths and accuracy per depth over the positions seen."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from peagle.errors import PeagleError, one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPoint:
    """Acceptance lengths after a step: implied by the chains of the held-out text, and of real decoding."""

    step: int
    positions: float
    seconds: float
    implied: float | None
    served: float | None


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """The parts of a train.jsonl: reports of training steps as they stand, and evaluations by step."""

    reports: list[dict[str, Any]]
    evaluations: list[EvaluationPoint]


def read_log(log: Path) -> TrainingLog:
    """Read OUT/train.jsonl. Raises PeagleError when it cannot be read or holds no report yet."""
    try:
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise PeagleError(f"{log} cannot be read ({one_line(error)}): give the log of a run") from None
    reports = [row for row in rows if "depth_accuracy" in row]
    if not reports:
        raise PeagleError(f"{log} holds no report yet: nothing to draw")
    implied, served = (
        {row["step"]: float(row[key]["acceptance_length"]) for row in rows if key in row}
        for key in ("held_out", "served")
    )
    steps = sorted(implied.keys() | served.keys())
    # An evaluation need not fall on a report.
    positions, seconds = (np.interp(steps, *_columns(reports, name)) for name in ("positions", "seconds"))
    points = [
        EvaluationPoint(step=s, positions=float(p), seconds=float(t), implied=implied.get(s), served=served.get(s))
        for s, p, t in zip(steps, positions, seconds, strict=True)
    ]
    return TrainingLog(reports, points)


def plot_training(log: Path, out: Path) -> None:
    """Draw OUT/train.jsonl into a PNG or SVG. Raises PeagleError without matplotlib or without a report to draw."""
    if find_spec("matplotlib") is None:
        raise PeagleError("drawing the training curve needs matplotlib: pip install 'peagle[plots]'")
    from matplotlib.figure import Figure

    training = read_log(log)
    reports = training.reports
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label, color in (("implied", "held-out text", "0.5"), ("served", "decoded", "black")):
        drawn = [(p.positions / 1e6, getattr(p, name)) for p in training.evaluations if getattr(p, name) is not None]
        if drawn:
            left.plot(*zip(*drawn, strict=True), marker="o", markersize=4, color=color, label=label)
    left.set(title="acceptance length", xlabel="positions (millions)")
    if training.evaluations:
        left.legend(fontsize="small")
        left.set(xlim=(0, None), ylim=(1, None))
    x = [r["positions"] / 1e6 for r in reports]
    for depth in range(len(reports[-1]["depth_accuracy"])):
        right.plot(x, [r["depth_accuracy"][depth] for r in reports], label=f"{depth}", linewidth=1.2)
    right.set(title="accuracy per depth, training batches", xlabel="positions (millions)", ylim=(0, 1))
    right.legend(title="depth", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def _columns(reports: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps, and a running total at each of them; both begin at 0."""
    return [0, *(r["step"] for r in reports)], [0.0, *(float(r.get(name, 0.0)) for r in reports)]
