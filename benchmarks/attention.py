"""What the trainer's attention costs on P-EAGLE rows: the Triton kernel, its torch twin and FlexAttention.

One document of n positions, every position supervised, K = 8 and r = 0.8: n depth-0 rows (one call) and about 3.2 n
mask rows (another). FlexAttention takes all rows in one call with a block mask made from the same relation; making the
mask is not counted. FLOPs are those of the pairs that may attend, 4 D per pair and query head forward and 2.5 times
that backward. Hardware: one GPU; about 45 s on an H200, most of it compiling (FlexAttention compiles once a length).

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json
    python -m benchmarks.attention --sweep      # tiles of the three kernels, best first; writes nothing
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import RESULTS, check_gpu, command, run_script
from peagle.bench.report import write_result
from peagle.kernels.range_attention import KeyRanges, range_attention
from peagle.training.rows import ROW_BLOCK, sample_rows

_DEPTHS, _KEEP_RATIO = 8, 0.8
_MAX_TWIN_BYTES = 4 << 30  # of the scores that the twin holds on a GPU; it needs a few times as much
_SWEEP = {  # rows, keys, warps, stages
    "forward": ((128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4),
                (128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2), (128, 32, 4, 4)),
    "backward_q": ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 2), (128, 32, 8, 3),
                   (128, 128, 8, 2), (64, 128, 4, 2), (64, 32, 4, 3)),
    "backward_kv": ((64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3), (32, 64, 4, 3),
                    (32, 128, 4, 2), (128, 64, 4, 2), (128, 128, 8, 2)),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "smollm2": Shape("SmolLM2-135M", 9, 3, 64),
    "gpt-oss": Shape("gpt-oss-20b", 64, 8, 64),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRow:
    """One backend on one document. `passes` is "forward" or "forward+backward"; FLOPs of real pairs only."""

    shape: str
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    rows: int
    pairs: int
    backend: str
    passes: str
    ms: float
    tflop: float
    tflop_per_s: float
    share_of_peak: float


class Document:
    """The rows of one document: P depth-0 rows, then M mask rows sorted by (anchor, depth), a multiple of 128."""

    def __init__(self, positions: int, shape: Shape, device: str) -> None:
        rng = np.random.default_rng(0)
        anchor, depth = sample_rows(
            np.ones(positions, np.bool_), np.zeros(positions, np.int64),
            num_depths=_DEPTHS, keep_ratio=_KEEP_RATIO, min_keep=0.0, rng=rng,
        )  # fmt: skip
        order = np.lexsort((depth, anchor))[: len(anchor) // ROW_BLOCK * ROW_BLOCK]
        mask_anchor, mask_depth = (torch.from_numpy(x[order]).int().to(device) for x in (anchor, depth))
        self.shape, self.positions, self.rows = shape, positions, positions + len(order)
        causal, row = (torch.arange(n, dtype=torch.int32, device=device) for n in (positions, len(order)))
        self.anchor_R, self.depth_R = torch.cat((causal, mask_anchor)), torch.cat((causal * 0, mask_depth))
        self.depth0 = KeyRanges(causal * 0, causal + 1)
        self.context = KeyRanges(mask_anchor * 0, mask_anchor + 1)
        self.chain = KeyRanges(row - mask_depth + 1, row + 1)
        self.pairs = int((self.anchor_R + 1 + self.depth_R).sum(dtype=torch.int64))
        torch.manual_seed(0)
        width = shape.heads + 2 * shape.kv_heads
        wide = torch.randn(self.rows, width, shape.head_dim, device=device, dtype=torch.bfloat16)
        self.qkv = tuple(x.requires_grad_() for x in wide.split((shape.heads, shape.kv_heads, shape.kv_heads), 1))
        self.dout_RND = torch.randn(self.rows, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """q, k, v of the depth-0 rows and of the mask rows, each a leaf."""
        P = self.positions
        return (
            [x.detach()[:P].requires_grad_() for x in self.qkv],
            [x.detach()[P:].requires_grad_() for x in self.qkv],
        )


def main() -> None:
    args = _arguments()
    if args.sweep:
        for name in args.shapes:
            _sweep(args, Document(args.sweep_positions, SHAPES[name], args.device))
        return
    rows: list[AttentionRow] = []
    for name in args.shapes:
        for positions in args.positions:
            document = Document(positions, SHAPES[name], args.device)
            for backend in args.backends:
                rows += _measure(args, document, backend)
    settings = {
        "command": command(),
        "dtype": "bfloat16",
        "depths": _DEPTHS,
        "keep_ratio": _KEEP_RATIO,
        "peak_tflop_per_s": args.peak,
        "seconds_per_measurement": args.seconds,
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _measure(args: argparse.Namespace, document: Document, backend: str) -> list[AttentionRow]:
    """Forward, and forward with backward; nothing where the backend cannot take the size."""
    shape, positions = document.shape, document.positions
    if backend == "flex":
        if positions not in args.flex_positions:
            return []
        attend = _flex(document)
    else:
        twin_bytes = 4 * shape.heads * (document.rows - positions) * document.rows
        if backend == "torch" and twin_bytes > _MAX_TWIN_BYTES:
            return []
        attend = _ranges(document, backend)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        outputs, leaves, gradients = attend()
        torch.autograd.grad(outputs, leaves, gradients)

    found = []
    forward_tflop = 4e-12 * shape.head_dim * shape.heads * document.pairs
    for passes, work, tflop in (
        ("forward", forward, forward_tflop),
        ("forward+backward", both, 3.5 * forward_tflop),
    ):
        ms = _milliseconds(args, work)
        found.append(
            AttentionRow(
                shape=shape.name,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                positions=positions,
                rows=document.rows,
                pairs=document.pairs,
                backend=backend,
                passes=passes,
                ms=round(ms, 4),
                tflop=round(tflop, 4),
                tflop_per_s=round(tflop / ms * 1e3, 1),
                share_of_peak=round(tflop / ms * 1e3 / args.peak, 4),
            )
        )
        speed = f"{found[-1].tflop_per_s} TFLOP/s, {found[-1].share_of_peak:.1%} of peak"
        print(f"{shape.name} n={positions:,} {backend} {passes}: {ms:.3f} ms, {speed}", flush=True)
    return found


Attend = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]]  # outputs, leaves, output gradients


def _ranges(document: Document, backend: str) -> Attend:
    (q0, k0, v0), (q, k, v) = document.parts()
    gradients = document.dout_RND.split((document.positions, document.rows - document.positions))

    def attend() -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        depth0 = range_attention(q0, k0, v0, document.depth0, backend=backend)
        masked = range_attention(q, k0, v0, document.context, k, v, document.chain, backend=backend)
        return (depth0, masked), (q0, k0, v0, q, k, v), gradients

    return attend


def _flex(document: Document) -> Attend:
    anchor_R, depth_R, size = document.anchor_R, document.depth_R, document.rows

    def may_attend(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (depth_R[key] == 0) & (anchor_R[key] <= anchor_R[query])
        return context | ((anchor_R[key] == anchor_R[query]) & (depth_R[key] <= depth_R[query]))

    torch._dynamo.reset()
    builder: Any = torch.compile(create_block_mask, dynamic=False)
    mask = builder(may_attend, None, None, size, size, device=anchor_R.device)
    kernel: Any = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None] for x in document.qkv)
    gradient = document.dout_RND.transpose(0, 1)[None]

    def attend() -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        return (kernel(q, k, v, block_mask=mask, enable_gqa=True),), document.qkv, (gradient,)

    return attend


def _sweep(args: argparse.Namespace, document: Document) -> None:
    """Time the three kernels alone on the mask rows, context part of dK/dV, for every tile that fits."""
    from peagle.kernels import range_attention_backward_triton as back
    from peagle.kernels import range_attention_triton as front

    (_, k0, v0), (q, k, v) = ([x.detach() for x in part] for part in document.parts())
    context = (k0, v0, document.context.lo_R, document.context.hi_R)
    chain = (k, v, document.chain.lo_R, document.chain.hi_R)
    dout = document.dout_RND[document.positions :]
    out, lse = front.forward(q, context, chain)
    _dq, stats = back.backward_q(dout, out, lse, q, context, chain)
    calls: dict[str, Callable[[Any], object]] = {
        "forward": lambda sizes: front.forward(q, context, chain, sizes),
        "backward_q": lambda sizes: back.backward_q(dout, out, lse, q, context, chain, sizes),
        "backward_kv": lambda sizes: back.backward_kv(dout, stats, q, context, sizes),
    }
    for kernel, call in calls.items():
        times: dict[tuple[int, int, int, int], float] = {}
        for tile in _SWEEP[kernel]:
            try:
                times[tile] = _milliseconds(args, partial(call, front.LaunchSizes(*tile)))
            except Exception as error:  # a tile that does not fit the chip is no result
                print(f"{kernel} {tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
        print(f"{document.shape.name} n={document.positions:,} {kernel} (rows, keys, warps, stages):")
        for tile, ms in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {tile}: {ms:.3f} ms", flush=True)


def _milliseconds(args: argparse.Namespace, work: Callable[[], object]) -> float:
    """Median of three runs of as many calls as fit the time, waiting only at a run's end; first calls not counted."""
    work()
    once = _seconds(args.device, work, 2)
    calls = max(1, min(100, int(args.seconds / 3 / once)))
    return 1e3 * float(np.median([_seconds(args.device, work, calls) for _ in range(3)]))


def _seconds(device: str, work: Callable[[], object], calls: int) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "attention-h200.json")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--positions", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--backends", nargs="+", default=["triton", "torch", "flex"])
    parser.add_argument("--flex-positions", nargs="+", type=int, default=[8192], help="lengths FlexAttention runs at")
    parser.add_argument("--seconds", type=float, default=0.3, help="time of one measurement")
    parser.add_argument("--peak", type=float, default=989.0, help="dense bf16 TFLOP/s of the GPU")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sweep", action="store_true", help="try tiles instead, to tune launch_sizes")
    parser.add_argument("--sweep-positions", type=int, default=8192)
    args = parser.parse_args()
    if args.device == "cuda":
        check_gpu("run on one, or try the script itself with --device cpu --backends torch")
    return args


if __name__ == "__main__":
    run_script(main)
