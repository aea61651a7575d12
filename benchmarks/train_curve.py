"""Training runs side by side: served acceptance length over the positions and the seconds they took.

Reads the train.jsonl of finished or running trainings (for example a P-EAGLE head and an EAGLE-3 head on the same data)
and writes a figure, a result file and its table. Needs matplotlib for the figure, no hardware.

    python -m benchmarks.train_curve "P-EAGLE=runs/p-eagle" "EAGLE-3=runs/eagle3" \
        --positions 5e6 20e6 --seconds 100 600 --out benchmarks/results/train-curve-mine.json
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import RESULTS, command, run_script
from benchmarks.tables import render_block
from peagle.bench.report import read_result, write_result
from peagle.errors import PeagleError
from peagle.training.plots import EvaluationPoint, read_log


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRow:
    """The last evaluation of a training run within a budget of positions or seconds (result names `train-curve*`).

    `acceptance_length` is that of decoding held-out prompts; the implied one comes from the held-out text's chains.
    """

    run: str
    budget: str
    step: int
    positions: int
    seconds: float
    acceptance_length: float
    implied_acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """A training and its evaluations that decoded the held-out prompts."""

    name: str
    points: list[EvaluationPoint]


def main() -> None:
    args = _arguments()
    runs = [_read(text) for text in args.runs]
    # Without given budgets: where the shorter run ends, the last point at which both can be compared.
    positions = args.positions or [min(run.points[-1].positions for run in runs)]
    seconds = args.seconds or [min(run.points[-1].seconds for run in runs)]
    rows = [row for run in runs for row in _rows(run, positions, seconds)]
    curves = {run.name: [_as_json(point) for point in run.points] for run in runs}
    settings = {"command": command(), "runs": [run.name for run in runs]}
    write_result(args.out, args.out.stem, settings, {"rows": rows, "curves": curves})
    print(render_block(args.out.stem, read_result(args.out)))
    if find_spec("matplotlib") is None:
        print("no figure: it needs matplotlib")
        return
    figure = args.out.with_suffix(".png")
    draw(runs, figure)
    print(f"wrote {args.out} and {figure}")


def at_budget(run: Run, axis: str, budget: float) -> EvaluationPoint | None:
    """The last evaluation within a budget of "positions" or "seconds"; None when there was none by then."""
    within = [point for point in run.points if getattr(point, axis) <= budget * 1.001]
    return within[-1] if within else None


def draw(runs: Sequence[Run], out: Path) -> None:
    """One line per run, over positions on the left and over seconds on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, (axis, unit, scale) in zip(
        figure.subplots(1, 2, sharey=True), (("positions", "millions", 1e6), ("seconds", "s", 1.0)), strict=True
    ):
        for run in runs:
            x = [getattr(point, axis) / scale for point in run.points]
            axes.plot(x, [point.served for point in run.points], marker="o", markersize=4, label=run.name)
        axes.set(xlabel=f"{axis} ({unit})", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_ylabel("acceptance length, decoded")
    figure.savefig(out, dpi=110)


def _rows(run: Run, positions: Sequence[float], seconds: Sequence[float]) -> list[CurveRow]:
    rows = []
    for axis, budgets in (("positions", positions), ("seconds", seconds)):
        for budget in budgets:
            point = at_budget(run, axis, budget)
            if point is None or point.served is None:
                print(f"{run.name} was not decoded within {budget:g} {axis}")
                continue
            rows.append(
                CurveRow(
                    run=run.name,
                    budget=f"{budget:,.0f} {axis}",
                    step=point.step,
                    positions=round(point.positions),
                    seconds=round(point.seconds, 1),
                    acceptance_length=round(point.served, 4),
                    implied_acceptance_length=None if point.implied is None else round(point.implied, 4),
                )
            )
    return rows


def _read(text: str) -> Run:
    """NAME=FOLDER or a folder (or a log file itself)."""
    name, separator, path = text.rpartition("=")
    log = Path(path) / "train.jsonl" if Path(path).is_dir() else Path(path)
    points = [point for point in read_log(log).evaluations if point.served is not None]
    if not points:
        raise PeagleError(f"{log} holds no evaluation that decoded prompts: train with serve_tokens above 0")
    return Run(name if separator else log.parent.name, points)


def _as_json(point: EvaluationPoint) -> dict[str, float | None]:
    return {
        "step": point.step,
        "positions": point.positions,
        "seconds": round(point.seconds, 2),
        "served": point.served,
        "implied": point.implied,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="[NAME=]FOLDER", help="output folder of a training")
    parser.add_argument("--positions", nargs="+", type=float, help="compare at these numbers of positions")
    parser.add_argument("--seconds", nargs="+", type=float, help="compare at these seconds of training")
    parser.add_argument("--out", type=Path, default=RESULTS / "train-curve.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
