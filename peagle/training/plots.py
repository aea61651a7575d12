"""The training log as a picture: acceptance length and accuracy per depth over the positions seen."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peagle.errors import PeagleError


def plot_training(log: Path, out: Path) -> None:
    """Draw OUT/train.jsonl into a PNG or SVG. Raises PeagleError without matplotlib or without a report to draw."""
    if find_spec("matplotlib") is None:
        raise PeagleError("drawing the training curve needs matplotlib: pip install 'peagle[plots]'")
    from matplotlib.figure import Figure

    reports, held_out = _read(log)
    if not reports:
        raise PeagleError(f"{log} holds no report yet: nothing to draw")
    positions_of = {r["step"]: r["positions"] / 1e6 for r in reports}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(
        [positions_of[h["step"]] for h in held_out],
        [h["held_out"]["acceptance_length"] for h in held_out],
        marker="o",
        color="black",
    )
    left.set(title="acceptance length, held-out text", xlabel="positions (millions)", xlim=(0, None), ylim=(1, None))
    x = [r["positions"] / 1e6 for r in reports]
    for depth in range(len(reports[-1]["depth_accuracy"])):
        right.plot(x, [r["depth_accuracy"][depth] for r in reports], label=f"{depth}", linewidth=1.2)
    right.set(title="accuracy per depth, training batches", xlabel="positions (millions)", ylim=(0, 1))
    right.legend(title="depth", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def _read(log: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(reports of training steps, held-out evaluations of steps that were also reported)."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    reports = [row for row in rows if "depth_accuracy" in row]
    steps = {row["step"] for row in reports}
    return reports, [row for row in rows if "held_out" in row and row["step"] in steps]
