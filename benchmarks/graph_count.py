"""What makes graphs of small kernels slower for good: the time of one as others join it, or as a second stream works.

A decode step is one graph, an engine has a graph for every batch size, K and sampling mode, and every shape of a
prompt's pass. Once eight kernels have run on a second stream of a process, all its graphs take longer. Captures of
torch run two there, so that its fourth does it, unless they are sent elsewhere ("engine", as `capturing` of
peagle/engine/graphs.py does). Each case is a process of its own. Hardware: one GPU, a minute.

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
from peagle.engine.graphs import capturing

_CASES = (
    ("matmul", 200, "torch"), ("matmul", 50, "torch"), ("add", 200, "torch"),
    ("matmul", 200, "engine"), ("matmul", 50, "engine"), ("add", 200, "engine"),
    ("matmul", 200, "kernel"), ("matmul", 200, "copy"),
)  # fmt: skip
_ROWS, _IN, _OUT = 4, 576, 960  # of the matmuls: about what SmolLM2's layers have
_WEIGHTS = 60
_IN_A_ROW = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCountRow:
    """Microseconds of a replay of the first graph of `kernels` kernels: alone, and after each further `event`.

    "torch", "engine": a graph of the same kind was captured so, and run a few times. "kernel", "copy": one small kernel
    or copy to the host ran on a second stream."""

    kernel: str
    kernels: int
    event: str
    microseconds: list[float]


def main() -> None:
    args = _arguments()
    rows = []
    for case in _CASES:
        with get_context("spawn").Pool(1) as pool:  # nothing of the case before is left
            times = pool.apply(measure, (*case, args.events, args.repeats))
        rows.append(GraphCountRow(kernel=case[0], kernels=case[1], event=case[2], microseconds=times))
        print(f"{case[0]} x {case[1]}, {case[2]}: {times}", flush=True)
        settings = {
            "command": command(),
            "shape": f"[{_ROWS}, {_IN}] x [{_IN}, {_OUT}] in bfloat16, or {_IN} float32",
            "partial": len(rows) < len(_CASES),
        }
        write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def measure(kernel: str, kernels: int, event: str, events: int, repeats: int) -> list[float]:
    """The times of a row."""
    resolve_engine_device("auto")  # sets what an engine sets before CUDA starts
    body, stream = _body(kernel, kernels), torch.cuda.Stream()
    captured = [_capture(body, stream, event)]
    times = [_microseconds(captured[0], repeats)]
    on_host, small = torch.empty(_IN, pin_memory=True), torch.zeros(_IN, device="cuda")
    for _ in range(events):
        if event in ("torch", "engine"):
            captured.append(_capture(body, stream, event))
            _microseconds(captured[-1], 2)
        else:
            with torch.cuda.stream(stream):
                small.add_(1) if event == "kernel" else on_host.copy_(small, non_blocking=True)
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


def _capture(body: Callable[[], None], stream: torch.cuda.Stream, event: str) -> torch.cuda.CUDAGraph:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream) if event == "torch" else capturing(graph, None, stream):
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
    parser.add_argument("--events", type=count, default=10, help="further graphs, kernels or copies")
    parser.add_argument("--repeats", type=count, default=7)
    args = parser.parse_args()
    check_out(args.out, cpu=False)
    check_gpu("there are no graphs on a CPU")
    return args


if __name__ == "__main__":
    run_script(main)
