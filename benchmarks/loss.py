"""What the head's loss costs: its kernel against the memory it must move, and one slab of rows against its matmuls.

One slab is three matmuls over rows x vocabulary (logits, gradient of the rows, gradient of the head), the target's
logits once for its targets, and the kernel between them. Hardware: one GPU; about 20 s on an H200.

    python -m benchmarks.loss --out benchmarks/results/loss-h200.json
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import command, run_script
from peagle.bench.report import write_result
from peagle.kernels.draft_loss import LossMix, SoftLabels, draft_loss, row_summary
from peagle.training.batches import map_tensors
from peagle.training.head_loss import HeadLoss, plan_loss_rows

_FLOAT_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """`draft_loss` alone. The floor is one reading and one writing of the logits and one reading of the targets'."""

    vocab: int
    rows: int
    targets: int
    tv_weight: float
    backend: str
    ms: float
    floor_ms: float
    share_of_bandwidth: float  # floor_ms / ms
    row_summary_ms: float  # of the targets' logits


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabRow:
    """`HeadLoss` on one slab, gradients included. The floor is its multiplications at the peak rate."""

    vocab: int
    hidden: int
    rows: int
    targets: int
    backend: str
    ms: float
    tflop: float
    tflop_per_s: float
    floor_ms: float
    share_of_peak: float
    peak_gib: float  # allocated above what was there before the call


def main() -> None:
    args = _arguments()
    kernels: list[KernelRow] = []
    slabs: list[SlabRow] = []
    torch.manual_seed(0)
    for vocab, hidden in args.shapes:
        for backend in ("auto", "torch"):
            for tv_weight in (0.0, 0.9) if vocab == args.shapes[0][0] else (0.0,):
                kernels.append(_kernel(args, vocab, tv_weight, backend))
            slabs.append(_slab(args, vocab, hidden, backend))
    settings = {
        "command": command(),
        "dtype": "bfloat16",
        "bandwidth_tb_per_s": args.bandwidth,
        "peak_tflop_per_s": args.peak,
        "repeats": args.repeats,
    }
    write_result(args.out, args.out.stem, settings, {"kernels": kernels, "slabs": slabs})
    print(f"wrote {args.out}")


def _kernel(args: argparse.Namespace, vocab: int, tv_weight: float, backend: str) -> KernelRow:
    rows, targets, device = args.rows, args.rows // args.rows_per_target, args.device
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16)
    target = torch.randn(targets, vocab, device=device, dtype=torch.bfloat16)
    index = torch.arange(rows, device=device) // args.rows_per_target
    scale, mix = torch.ones(rows, device=device), LossMix(tv_weight)
    labels = SoftLabels(target, row_summary(target, backend=backend).lse_T, index.clamp(max=targets - 1))
    ms = _milliseconds(args, lambda: draft_loss(logits, scale, labels, mix, backend=backend))
    summary_ms = _milliseconds(args, lambda: row_summary(target, backend=backend))
    floor_ms = (2 * rows + targets) * vocab * _FLOAT_BYTES / (args.bandwidth * 1e9)
    row = KernelRow(
        vocab=vocab,
        rows=rows,
        targets=targets,
        tv_weight=tv_weight,
        backend=backend,
        ms=round(ms, 3),
        floor_ms=round(floor_ms, 3),
        share_of_bandwidth=round(floor_ms / ms, 3),
        row_summary_ms=round(summary_ms, 3),
    )
    print(f"kernel {vocab:,} w={tv_weight} {backend}: {row.ms} ms, floor {row.floor_ms} ms")
    return row


def _slab(args: argparse.Namespace, vocab: int, hidden: int, backend: str) -> SlabRow:
    rows, targets, device = args.rows, args.rows // args.rows_per_target, args.device
    head, target_head = (0.02 * torch.randn(2, vocab, hidden, device=device)).bfloat16()
    states = torch.randn(rows, hidden, device=device).bfloat16()
    target_states = torch.randn(targets, hidden, device=device).bfloat16()
    index = np.minimum(np.arange(rows) // args.rows_per_target, targets - 1)
    plan = plan_loss_rows(np.arange(rows), index, np.ones(rows, np.float32), rows)
    plan = map_tensors(plan, lambda tensor: tensor.to(device))
    head_grad = torch.zeros(vocab, hidden, device=device)
    loss = HeadLoss(head, head_grad, target_head, None, backend=backend)
    labels = torch.zeros(targets, dtype=torch.int64, device=device)
    before = _start_counting(device)
    ms = _milliseconds(args, lambda: loss(states, target_states, labels, plan, want_grad=True))
    tflop = 2e-12 * (3 * rows + targets) * vocab * hidden
    row = SlabRow(
        vocab=vocab,
        hidden=hidden,
        rows=rows,
        targets=targets,
        backend=backend,
        ms=round(ms, 3),
        tflop=round(tflop, 4),
        tflop_per_s=round(tflop / ms * 1e3, 1),
        floor_ms=round(tflop / args.peak * 1e3, 3),
        share_of_peak=round(tflop / ms * 1e3 / args.peak, 3),
        peak_gib=round((_peak(device) - before) / 2**30, 3),
    )
    print(f"slab {vocab:,} x {hidden:,} {backend}: {row.ms} ms, {row.tflop_per_s} TFLOP/s, {row.peak_gib} GiB")
    return row


def _milliseconds(args: argparse.Namespace, work: Callable[[], object]) -> float:
    """Median over repeats, each waited for; the first call, which compiles, is not counted."""
    seconds = []
    for _ in range(args.repeats + 1):
        _wait(args.device)
        start = time.perf_counter()
        work()
        _wait(args.device)
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds[1:]))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _start_counting(device: str) -> int:
    """Bytes allocated now, from where the peak is counted anew; 0 on the CPU."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _shape(text: str) -> tuple[int, int]:
    vocab, hidden = text.split("x")
    return int(vocab), int(hidden)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    shapes = [(49_152, 576), (151_936, 896), (201_088, 2880)]
    parser.add_argument("--shapes", type=_shape, nargs="+", default=shapes, help="VOCABxHIDDEN ...")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rows-per-target", type=int, default=4, help="K = 8 and r = 0.8 give 4.2")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the GPU's memory, TB/s (H200: 4.8)")
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of the GPU (H200: 989)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
