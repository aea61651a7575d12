"""The table of the engine's targets: what was measured for each, and whether it was met, all from result files.

A figure is judged as the files have it, before it is rounded for the table, which has as many decimals as it takes for
a miss to read as one. Figures that have no bound stand beside those that do and are not judged.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from benchmarks.engine_tables import engines_of, over
from benchmarks.speed_shapes import (
    EAGLE3,
    OUTPUT_TOKENS,
    P_EAGLE,
    P_EAGLE_32K,
    PROMPT_TOKENS,
    Setup,
    drafter_config,
    hf_config,
)
from peagle.bench.markdown import Json, markdown_table
from peagle.bench.roofline import step_cost
from peagle.bench.sweep_tables import fastest_row
from peagle.models.spec import spec_from_hf

_MORE_RUNS = MappingProxyType(
    {
        "over-vllm-first-h200": "first",
        "over-vllm-again-h200": "second",
        "over-vllm-third-h200": "third",
        "over-vllm-fourth-h200": "fourth",
        "over-vllm-sixth-h200": "sixth",
    }
)

Read = Callable[[str], Json | None]  # the result of a name; None: not there

_SHAPES = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-1.5b", "qwen3-8b")
_REAL_HEADS = MappingProxyType(
    {
        "SmolLM2-135M, shipped head": "sweep-smollm2-135m-shipped-h200",
        "SmolLM2-135M, head of the sweep": "sweep-smollm2-135m-h200",
        "Qwen2.5-Coder-0.5B, head of the sweep": "sweep-qwen2.5-coder-0.5b-h200",
    }
)
_OVER_VLLM = MappingProxyType({"smollm2-135m": {1: 5.0, 8: 3.0, 64: 1.5}, "qwen3-8b": {1: 1.2, 8: 1.2, 64: 1.1}})
_MOST_DECIMALS = 6
_BANDWIDTH, _FLOPS = 4800e9, 989e12  # of an H200: bytes/s, and bfloat16 additions and multiplications a second


@dataclass(frozen=True, slots=True)
class Figure:
    """One value and its bound. Value None: not measured; bound None: shown, not judged.

    Of a ratio of two steps' times `floors` is that of their floors, calculated, shown beside it and not judged.
    """

    label: str
    value: float | None
    bound: float | None = None
    is_most: bool = False  # the bound is the most it may be, not the least
    unit: str = ""
    floors: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the value, not rounded, is within its bound."""
        return "–" if self.value is None else "yes" if self._within(self.value) else "**no**"

    @property
    def shown(self) -> str:
        """The value with two decimals, or with as many more as it takes to fall on the same side of its bound."""
        beside = "" if self.floors is None else f" (floors: {self.floors:.2f})"
        if self.value is None:
            return f"not measured{beside}"
        decimals = 2
        while decimals < _MOST_DECIMALS and self._within(round(self.value, decimals)) != self._within(self.value):
            decimals += 1
        return f"{self.value:.{decimals}f}{self.unit}{beside}"

    def _within(self, value: float) -> bool:
        if self.bound is None:
            return True
        return value <= self.bound if self.is_most else value >= self.bound


@dataclass(frozen=True, slots=True)
class Target:
    """A line of the table: a target, of what, the figures for it and the result they come from."""

    target: str
    of: str
    name: str
    figures: Sequence[Figure]

    def cells(self, result: Json | None) -> tuple[str, ...]:
        """The line; `result` is the file's."""
        link = f"[{self.name.removesuffix('-h200')}](benchmarks/results/{self.name}.json)"
        where = link + (" (partial)" if result and result["settings"].get("partial") else "")
        if not self.figures:
            return self.target, self.of, "not measured", "–", where
        measured = ", ".join(f"{figure.label}: {figure.shown}" for figure in self.figures)
        return self.target, self.of, measured, self._verdict(), where

    def _verdict(self) -> str:
        """One word where all figures agree; otherwise one for each."""
        judged = [figure for figure in self.figures if figure.bound is not None]
        if len(words := {figure.verdict for figure in judged}) == 1:
            return words.pop()
        return ", ".join(f"{figure.label}: {figure.verdict}" for figure in judged) or "–"


def targets(read: Read) -> str:
    """The table; results that are not there are said to be not measured."""
    lines = [target.cells(read(target.name)) for target in _targets(read)]
    return markdown_table(("target", "of", "measured", "met", "where"), lines)


def _targets(read: Read) -> Iterator[Target]:
    for target, figures in (
        ("GPU busy at c = 1: at least 95 %", _busy),
        ("drafting with K = 7 over K = 1, c = 1: at most 1.3x", _drafting),
        ("P-EAGLE over EAGLE-3 at equal acceptance, K = 7: at least 1.3x, 1.05x at c = 1, 64", _over_eagle3),
    ):
        for shape in _SHAPES:
            name = f"engine-speed-{shape}-h200"
            yield Target(target, shape, name, figures(_rows(read, name), shape))
            if figures is _over_eagle3 and (alike := _over_eagle3(_rows(read, name), shape, P_EAGLE_32K)):
                yield Target(target, f"{shape}, both drafting from 32,000 tokens", name, alike)
    for head, name in _REAL_HEADS.items():
        yield Target("over no drafts with real heads, c = 1: at least 2x", head, name, _over_none(_rows(read, name)))
    for shape, bounds in _OVER_VLLM.items():
        least = ", ".join(f"{bound:g}x" for bound in bounds.values())
        target = f"over vLLM's best in one run: at least {least} at c = {', '.join(map(str, bounds))}"
        yield Target(target, shape, "over-vllm-h200", _over_vllm(_rows(read, "over-vllm-h200"), shape))
        for name, which in _MORE_RUNS.items():
            if again := _over_vllm(_rows(read, name), shape):
                yield Target(target, f"{shape}, {which} run", name, again)
    rows, target = _rows(read, "auto-k-h200"), "auto K over no drafts, worst head and batch: at least 0.97x"
    for shape in dict.fromkeys(row["shape"] for row in rows) or ("–",):
        yield Target(target, shape, "auto-k-h200", _auto_k(rows, shape))


def _rows(read: Read, name: str) -> Sequence[Json]:
    result = read(name)
    return result["results"]["rows"] if result else ()


def _busy(rows: Sequence[Json], shape: str) -> list[Figure]:
    of = engines_of(shape, rows)
    shares = [r["gpu_busy_share"] for (_, _, c), r in of.items() if c == 1 and r["gpu_busy_share"] is not None]
    return [Figure(f"lowest of {len(shares)} engines", 100 * min(shares), 95.0, unit=" %")] if shares else []


def _drafting(rows: Sequence[Json], shape: str) -> list[Figure]:
    times = over(engines_of(shape, rows), ("p-eagle", 7), ("p-eagle", 1), "drafting_ms")
    return [Figure(f"c = {c}", value, 1.3 if c == 1 else None, is_most=True) for c, value in times]


def _over_eagle3(rows: Sequence[Json], shape: str, method: str = P_EAGLE) -> list[Figure]:
    times = dict(over(engines_of(shape, rows), (EAGLE3, 7), (method, 7), "ms_per_step"))
    if not times:
        return []
    bounds = {1: 1.3, 64: 1.05}
    return [
        Figure(f"c = {c}", times.get(c), bound, floors=_floor_ms(shape, EAGLE3, c) / _floor_ms(shape, method, c))
        for c, bound in bounds.items()
    ]


def _floor_ms(shape: str, method: str, requests: int) -> float:
    """Of a step with K = 7, acceptance as P-EAGLE's, in the middle of the answers: reading or computing on an H200."""
    spec = spec_from_hf(hf_config(shape))
    cost = step_cost(
        spec,
        drafter_config(spec, method),
        7,
        requests=requests,
        context=PROMPT_TOKENS + OUTPUT_TOKENS / 2,
        dtype=torch.bfloat16,
        acceptance_length=Setup(shape, P_EAGLE, 7).acceptance_length,
    )
    return cost.floor_ms(_BANDWIDTH, _FLOPS)


def _over_none(rows: Sequence[Json]) -> list[Figure]:
    figures = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        best = fastest_row([row for row in rows if row["dataset"] == dataset], "p-eagle", 1)
        if best is not None and best["speedup_over_none"] is not None:
            figures.append(Figure(dataset, best["speedup_over_none"], 2.0))
    return figures


def _over_vllm(rows: Sequence[Json], shape: str) -> list[Figure]:
    own = [row for row in rows if row["shape"] == shape]
    ratios = {row["concurrency"]: row["ours_tokens_per_second"] / row["theirs_tokens_per_second"] for row in own}
    return [Figure(f"c = {c}", ratios.get(c), bound) for c, bound in _OVER_VLLM[shape].items()] if own else []


def _auto_k(rows: Sequence[Json], shape: str) -> list[Figure]:
    own = [row for row in rows if row["shape"] == shape and row["policy"].startswith("auto")]
    at_once = sorted({row["concurrency"] for row in own})
    worst = {c: min(row["times_plain"] for row in own if row["concurrency"] == c) for c in at_once}
    return [Figure(f"c = {c}", value, 0.97) for c, value in worst.items()]
