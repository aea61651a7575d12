"""Plots of a sweep, each as PNG and SVG: speed-up by K and concurrency, its curve, acceptance per position."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.bench.sweep_rows import SweepRow
from peagle.bench.sweep_settings import METHODS, PLAIN
from peagle.errors import PeagleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = ("acceptance", "heat-map", "speed-up")
_COLORS = ("tab:blue", "tab:orange")  # of the methods that draft
_SIDE = 3.4  # inches of one picture
_DPI = 85  # three prompt sets make pictures of some 100 KB


def plot_sweep(rows: Sequence[SweepRow], out: Path, note: str = "") -> list[Path]:
    """Draw what the rows hold beside the result `out`; the files. `note` stands in every picture.

    Raises PeagleError without matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise PeagleError("no plots without matplotlib: pip install 'peagle[plots]'")
    drafting = [row for row in rows if row.method != PLAIN]
    if not drafting:
        return []
    figures = {"acceptance": _acceptance(drafting)}
    if any(row.speedup_over_none is not None for row in drafting):
        figures |= {"heat-map": _heat_maps(drafting), "speed-up": _curves(drafting)}
    from matplotlib import rc_context

    paths = []
    for name, figure in figures.items():
        if note:
            figure.supxlabel(note, fontsize="small")
        for suffix in ("png", "svg"):
            path = out.with_name(f"{out.stem}-{name}.{suffix}")
            try:
                with rc_context({"svg.fonttype": "none"}):  # letters as text are smaller
                    figure.savefig(path, dpi=_DPI)
            except OSError as error:
                raise PeagleError(f"cannot write the plot {path}: {error.strerror}; choose another folder") from None
            paths.append(path)
    return paths


def _heat_maps(rows: Sequence[SweepRow]) -> "Figure":
    """Speed-up over decoding without drafts, K x concurrency: a row of pictures per set, a picture per method."""
    datasets, methods = _names(rows)
    figure, axes = _grid(len(datasets), len(methods), width=1.5)
    gains = [row.speedup_over_none for row in rows if row.speedup_over_none is not None]
    reach = max(max(gains) - 1, 1 - min(gains), 0.05)
    for line, dataset in enumerate(datasets):
        for column, method in enumerate(methods):
            own = [row for row in rows if (row.dataset, row.method) == (dataset, method)]
            _heat_map(axes[line][column], own, reach)
            axes[line][column].set_title(f"{dataset}, {method}")
    figure.suptitle("times the tokens per second without drafts")
    return figure


def _heat_map(axes: "Axes", rows: Sequence[SweepRow], reach: float) -> None:
    at_once = sorted({row.concurrency for row in rows})
    drafts = sorted({row.num_speculative_tokens for row in rows})
    grid = [[float("nan")] * len(at_once) for _ in drafts]
    for row in rows:
        if row.speedup_over_none is not None:
            y, x = drafts.index(row.num_speculative_tokens), at_once.index(row.concurrency)
            grid[y][x] = row.speedup_over_none
            axes.text(x, y, f"{row.speedup_over_none:.2f}", ha="center", va="center", fontsize="small")
    axes.imshow(grid, cmap="RdYlGn", vmin=1 - reach, vmax=1 + reach, aspect="auto", origin="lower", alpha=0.75)
    axes.set_xticks(range(len(at_once)), [str(c) for c in at_once])
    axes.set_yticks(range(len(drafts)), [str(k) for k in drafts])
    axes.set(xlabel="requests in flight", ylabel="K")


def _curves(rows: Sequence[SweepRow]) -> "Figure":
    """Each method at its best K, over concurrency, with the 95 % interval."""
    datasets, methods = _names(rows)
    figure, axes = _grid(1, len(datasets))
    for axis, dataset in zip(axes[0], datasets, strict=True):
        for method, color in zip(methods, _COLORS, strict=False):
            _curve(axis, [row for row in rows if (row.dataset, row.method) == (dataset, method)], method, color)
        axis.axhline(1.0, color="0.5", linewidth=1)
        axis.set_xscale("log", base=2)
        at_once = sorted({row.concurrency for row in rows})
        axis.set_xticks(at_once, [str(c) for c in at_once])
        axis.set(title=dataset, xlabel="requests in flight", ylabel="times without drafts")
        axis.margins(x=0.1)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    return figure


def _curve(axis: "Axes", rows: Sequence[SweepRow], method: str, color: str) -> None:
    best: dict[int, tuple[float, float, float, int]] = {}
    for row in rows:
        gain = row.speedup_over_none
        if gain is not None and gain > best.get(row.concurrency, (0.0,))[0]:
            reach = row.speedup_over_none_interval or (gain, gain)
            best[row.concurrency] = (
                gain,
                max(gain - reach[0], 0.0),
                max(reach[1] - gain, 0.0),
                row.num_speculative_tokens,
            )
    if not best:
        return
    at_once = sorted(best)
    gains, below, above, drafts = zip(*(best[c] for c in at_once), strict=True)
    axis.errorbar(at_once, gains, yerr=(below, above), marker="o", capsize=3, color=color, label=f"{method}, best K")
    for c, gain, k in zip(at_once, gains, drafts, strict=True):
        axis.annotate(f"K={k}", (c, gain), textcoords="offset points", xytext=(3, 5), fontsize="x-small", color=color)


def _acceptance(rows: Sequence[SweepRow]) -> "Figure":
    """Left acceptance length over K, right the acceptance of each position of the largest K, by set."""
    datasets, methods = _names(rows)
    figure, axes = _grid(len(datasets), 2)
    for (left, right), dataset in zip(axes, datasets, strict=True):
        for method, color in zip(methods, _COLORS, strict=False):
            own = _largest_runs([row for row in rows if (row.dataset, row.method) == (dataset, method)])
            if own:
                _acceptance_lines(left, right, own, method, color)
        left.set(title=f"{dataset}: acceptance length", xlabel="K")
        left.set_xticks(sorted({row.num_speculative_tokens for row in rows}))
        right.set(title="accepted, per position", xlabel="position of the draft", ylim=(0, 1.02))
        right.set_xticks(range(1, max(row.num_speculative_tokens for row in rows) + 1))
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small")
    return figure


def _acceptance_lines(left: "Axes", right: "Axes", rows: Sequence[SweepRow], method: str, color: str) -> None:
    drafts = [row.num_speculative_tokens for row in rows]
    lengths = [math.nan if row.acceptance_length is None else row.acceptance_length for row in rows]
    ranges = [row.acceptance_length_interval or [length] * 2 for row, length in zip(rows, lengths, strict=True)]
    low, high = zip(*ranges, strict=True)
    reach = (
        [max(length - end, 0.0) for length, end in zip(lengths, low, strict=True)],
        [max(end - length, 0.0) for length, end in zip(lengths, high, strict=True)],
    )
    left.errorbar(drafts, lengths, yerr=reach, marker="o", capsize=3, color=color, label=method)
    shares = list(rows[-1].accepted_share_per_position)
    before = [1.0, *shares]
    given = [share / earlier if earlier else 0.0 for share, earlier in zip(shares, before, strict=False)]
    positions = range(1, len(shares) + 1)
    right.plot(positions, shares, marker="o", color=color, label=f"{method}, of all rounds")
    right.plot(positions, given, marker="x", linestyle=":", color=color, label=f"{method}, once those before were")


def _largest_runs(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """For every K, in order, the row with the most rounds behind it: acceptance hardly depends on concurrency."""
    largest: dict[int, SweepRow] = {}
    for row in rows:
        other = largest.get(row.num_speculative_tokens)
        if other is None or row.tokens > other.tokens:
            largest[row.num_speculative_tokens] = row
    return [largest[k] for k in sorted(largest)]


def _names(rows: Sequence[SweepRow]) -> tuple[list[str], list[str]]:
    """Prompt sets and methods, in order."""
    methods = {row.method for row in rows}
    return list(dict.fromkeys(row.dataset for row in rows)), [method for method in METHODS if method in methods]


def _grid(lines: int, columns: int, width: float = 1.3) -> tuple["Figure", list[list["Axes"]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * _SIDE * columns, _SIDE * lines + 0.4), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False).tolist()
