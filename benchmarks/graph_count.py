"""What further CUDA graphs do to one that is there: the time of a graph of small kernels as others join it.

A decode step is one graph, an engine has a graph for every batch size, K and sampling mode, and every shape of a
prompt's pass. From the fourth on that has run, all of them take longer, for as long as the process lives. Each case is
a process of its own: graphs of matmuls or additions that run like steps do, one after the other, and graphs that were
captured and never run. Hardware: one GPU, half a minute.

    python -m benchmarks.graph_count --out benchmarks/results/graph-count-h200.json
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.common import RESULTS, check_gpu, check_out, command, count, run_script
from peagle.bench.report import write_result
from peagle.devices import resolve_engine_device

_CASES = (("matmul", 200, True), ("matmul", 50, True), ("add", 200, True), ("add", 200, False))
_ROWS, _IN, _OUT = 4, 576, 960  # of the matmuls: about what SmolLM2's layers have
_WEIGHTS = 60
_IN_A_ROW = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCountRow:
    """Microseconds of a replay of the first graph of `kernels` kernels: alone, and after each further one of the same
    kind was captured and, where `others_run`, run a few times."""

    kernel: str
    kernels: int
    others_run: bool
    microseconds: list[float]


def main() -> None:
    args = _arguments()
    rows = []
    for kernel, kernels, others_run in _CASES:
        with get_context("spawn").Pool(1) as pool:  # nothing of the case before is left
            times = pool.apply(measure, (kernel, kernels, others_run, args.graphs, args.repeats))
        rows.append(GraphCountRow(kernel=kernel, kernels=kernels, others_run=others_run, microseconds=times))
        print(f"{kernel} x {kernels}, others {'run' if others_run else 'are only captured'}: {times}")
    settings = {"command": command(), "shape": f"[{_ROWS}, {_IN}] x [{_IN}, {_OUT}] in bfloat16, or {_IN} float32"}
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def measure(kernel: str, kernels: int, others_run: bool, graphs: int, repeats: int) -> list[float]:
    """The times of a row."""
    resolve_engine_device("auto")  # sets what an engine sets before CUDA starts
    body, stream = _body(kernel, kernels), torch.cuda.Stream()
    captured = [_capture(body, stream, None)]
    times = [_microseconds(captured[0], repeats)]
    for _ in range(graphs):
        captured.append(_capture(body, stream, captured[0]))
        if others_run:
            _microseconds(captured[-1], 2)
        times.append(_microseconds(captured[0], repeats))
    return times


def _body(kernel: str, kernels: int) -> Callable[[], None]:
    x_I, x_RI = torch.zeros(_IN, device="cuda"), torch.randn(_ROWS, _IN, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(_OUT, _IN, device="cuda", dtype=torch.bfloat16) for _ in range(_WEIGHTS)]

    def body() -> None:
        for i in range(kernels):
            if kernel == "add":
                x_I.add_(1)
            else:
                torch.mm(x_RI, weights[i % _WEIGHTS].t())

    return body


def _capture(
    body: Callable[[], None], stream: torch.cuda.Stream, first: torch.cuda.CUDAGraph | None
) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=None if first is None else first.pool(), stream=stream):
        body()
    return graph


def _microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / _IN_A_ROW)
    return round(1e6 * best, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "graph-count-h200.json")
    parser.add_argument("--graphs", type=count, default=8, help="how many join the first")
    parser.add_argument("--repeats", type=count, default=7)
    args = parser.parse_args()
    check_out(args.out, cpu=False)
    check_gpu("there are no graphs on a CPU")
    return args


if __name__ == "__main__":
    run_script(main)
