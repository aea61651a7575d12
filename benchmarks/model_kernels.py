"""What the operations of a decoder layer cost at decode sizes: Triton, torch, and the time their bytes take.

Norms, rotation, gate and paged attention of one layer, for B requests of 1 + K or 2 K rows each. Each form is captured
in a CUDA graph of many calls and replayed, so launches from the host do not count. The floor is what must be read and
written once, at the memory bandwidth given with --bandwidth, or what must be multiplied, at --tflops, if that is more.
Successive calls of attention take turns at up to eight
caches, and those of linear layers at as many weights, so that small ones do not stay in L2; the other operations'
inputs do, as in a step. Hardware: one GPU.

Linear layers with their norm, gate or sum, and the rotation that writes keys and values, run for --linear-rows rows:
as one launch ("triton"; ", ring": in its form for large layers on Hopper), and as cuBLAS and one Triton kernel for each
other operation ("torch"). Attention of whole
prompts runs for --prefill-rows rows: over paged keys ("triton"), and torch's own over dense ones ("torch").

A mixture of experts runs for --expert-rows rows with routing by chance, router not included, with matrices and with
MXFP4 unpacked in the kernel; its floor is that of the experts that any row chose. On a GPU it has no form in torch:
that waits for the host. The file is written after each group of rows, marked partial until the last.

    python -m benchmarks.model_kernels --out benchmarks/results/model-kernels-h200.json
    python -m benchmarks.model_kernels --device cpu --out FILE      # does the script run: torch forms, tiny sizes
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import RESULTS, amount, captured, check_gpu, check_out, command, count, run_script, say_progress
from peagle.bench.report import write_result
from peagle.kernels.fused_linear import linear_add, norm_gated_linear, norm_linear
from peagle.kernels.kv_write import kv_write
from peagle.kernels.moe import ExpertWeights, moe
from peagle.kernels.norm_qkv_rope import NormedLinear, norm_qkv_rope
from peagle.kernels.packed_experts import PACKED_BYTES, PackedMatrix
from peagle.kernels.paged_attention import paged_attention, plan_attention
from peagle.kernels.paged_decode import CacheView, plan_decode
from peagle.kernels.rms_norm import add_rms_norm, rms_norm
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.rope_write import rope_write
from peagle.kernels.stream_linear import gated_stream_linear, linear_parts, stream_linear
from peagle.kernels.stream_ring import prefers_ring
from peagle.kernels.swiglu import silu_mul
from peagle.models.layers import RopeSpec, rope_inverse_frequencies
from peagle.models.moe import PackedExperts

_BLOCK_SIZE = 16
_CALLS = 50  # of one graph
_MAX_TWIN_BYTES = 8 << 30  # of the keys and values that torch gathers


@dataclass(frozen=True)
class Shape:
    """One layer's sizes. `normed`: each query and key head has a norm. `experts`: all, and those a row takes."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    normed: bool
    experts: tuple[int, int] | None = None

    @property
    def attention(self) -> tuple[int, int, int]:
        """Query heads, key heads, head size."""
        return self.heads, self.kv_heads, self.head_dim


SHAPES = {
    "tiny": Shape("tiny", 64, 96, 4, 2, 16, True, (4, 2)),
    "smollm2": Shape("SmolLM2-135M", 576, 1536, 9, 3, 64, False),
    "qwen2.5-0.5b": Shape("Qwen2.5-0.5B", 896, 4864, 14, 2, 64, False),
    "qwen2.5-1.5b": Shape("Qwen2.5-Coder-1.5B", 1536, 8960, 12, 2, 128, False),
    "qwen3-8b": Shape("Qwen3-8B", 4096, 12288, 32, 8, 128, True),
    "gpt-oss": Shape("gpt-oss-20b", 2880, 2880, 64, 8, 64, False, (32, 4)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One operation in one form. `floor_ms`: bytes over bandwidth, or multiplications over their peak if that is more.

    `keys` and `splits` are of attention only."""

    shape: str
    operation: str
    backend: str
    requests: int
    rows: int  # of one request
    keys: int
    splits: int
    ms: float
    megabytes: float
    gflop: float
    floor_ms: float
    times_floor: float


@dataclass(frozen=True)
class Work:
    """An operation ready to run. `call` takes the number of the copy of its inputs to use."""

    operation: str
    call: Callable[[int], object]
    copies: int
    bytes_moved: int
    keys: int = 0
    splits: int = 0
    flops: int = 0


# (arguments, shape, requests, rows of a request, backend)
Works = Callable[[argparse.Namespace, Shape, int, int, str], Iterator[Work]]


def main() -> None:
    args = _arguments()
    each_request = [(requests, rows, _works) for requests in args.requests for rows in args.rows]
    alone = [
        (1, rows, works)
        for counts, works in (
            (args.linear_rows, _linear_works), (args.prefill_rows, _prefill_works), (args.expert_rows, _expert_works)
        )
        for rows in counts
    ]  # fmt: skip
    groups = [(SHAPES[name], *group) for name in args.shapes for group in (*each_request, *alone)]
    found: list[KernelRow] = []
    begun = time.perf_counter()
    for done, (shape, requests, rows, works) in enumerate(groups, start=1):
        for backend in args.backends:
            found += _measure(args, shape, requests, rows, backend, works)
        _write(args, found, partial=done < len(groups))
        say_progress(done, len(groups), begun)
    print(f"wrote {args.out}")


def _write(args: argparse.Namespace, rows: list[KernelRow], *, partial: bool) -> None:
    settings = {
        "command": command(),
        "dtype": args.dtype,
        "bandwidth_gb_per_s": args.bandwidth,
        "block_size": _BLOCK_SIZE,
        "tflops": args.tflops,
        "calls_per_graph": _CALLS,
        "partial": partial,
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})


def _measure(
    args: argparse.Namespace, shape: Shape, requests: int, rows: int, backend: str, works: Works
) -> Iterator[KernelRow]:
    with torch.inference_mode():
        for work in works(args, shape, requests, rows, backend):
            ms = _milliseconds(args, work)
            floor_ms = max(work.bytes_moved / args.bandwidth / 1e6, work.flops / args.tflops / 1e9)
            yield KernelRow(
                shape=shape.name,
                operation=work.operation,
                backend=backend,
                requests=requests,
                rows=rows,
                keys=work.keys,
                splits=work.splits,
                ms=round(ms, 5),
                megabytes=round(work.bytes_moved / 1e6, 4),
                gflop=round(work.flops / 1e9, 4),
                floor_ms=round(floor_ms, 5),
                times_floor=round(ms / floor_ms, 2),
            )
            keys = f" keys={work.keys:,} splits={work.splits}" if work.keys else ""
            print(
                f"{shape.name} B={requests} R={rows}{keys} {work.operation} {backend}: {ms * 1e3:.2f} us, "
                f"floor {floor_ms * 1e3:.2f} us",
                flush=True,
            )


def _works(args: argparse.Namespace, shape: Shape, requests: int, rows: int, backend: str) -> Iterator[Work]:
    yield from _small_works(args, shape, requests * rows, backend)
    for keys in args.keys:
        gathered = 4 * requests * keys * shape.kv_heads * shape.head_dim
        if backend == "triton" or gathered <= _MAX_TWIN_BYTES:
            yield _attention(args, shape, requests, rows, keys, backend)


def _small_works(args: argparse.Namespace, shape: Shape, total: int, backend: str) -> Iterator[Work]:
    """Norms, rotation and gate of `total` rows. Rotating in place again and again keeps the numbers finite."""
    device, dtype = args.device, getattr(torch, args.dtype)
    size = dtype.itemsize
    x, residual = torch.randn(2, total, shape.hidden, device=device, dtype=dtype)
    weight = torch.ones(shape.hidden, device=device, dtype=dtype)
    narrow = total * shape.hidden * size
    yield Work("rms_norm", lambda _: rms_norm(x, weight, 1e-6, backend=backend), 1, 2 * narrow)
    yield Work("add_rms_norm", lambda _: add_rms_norm(x, residual, weight, 1e-6, backend=backend), 1, 4 * narrow)
    gate_up = torch.randn(total, 2 * shape.intermediate, device=device, dtype=dtype)
    yield Work("silu_mul", lambda _: silu_mul(gate_up, backend=backend), 1, 3 * total * shape.intermediate * size)
    positions = torch.arange(total, device=device)
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e6, head_dim=shape.head_dim)).to(device)
    tables = 2 * total * shape.head_dim * size
    yield Work("rope_tables", lambda _: rope_tables(positions, inv_freq, dtype, backend=backend), 1, tables)
    cos, sin = rope_tables(positions, inv_freq, dtype, backend="torch")
    qkv = torch.randn(total, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=device, dtype=dtype)
    ones = torch.ones(shape.head_dim, device=device, dtype=dtype)
    norms = HeadNorms(ones, ones, 1e-6) if shape.normed else None
    rotated = 2 * total * (shape.heads + shape.kv_heads) * shape.head_dim * size
    yield Work(
        "rope_qkv",
        lambda _: rope_qkv(qkv, cos, sin, shape.heads, shape.kv_heads, norms, backend=backend),
        1,
        rotated + tables,
    )


def _linear_works(args: argparse.Namespace, shape: Shape, requests: int, rows: int, backend: str) -> Iterator[Work]:
    """The projections of a layer with what stands around them, and the rotation between them."""
    heads_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    total, dtype, fused = requests * rows, getattr(torch, args.dtype), backend == "triton"

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=args.device, dtype=dtype)

    def linear(name: str, inputs: int, outputs: int, call: Callable[[Tensor, Tensor], Tensor], extra: int = 0) -> Work:
        copies = max(1, min(_CALLS, (200 << 20) // (inputs * outputs * dtype.itemsize))) if args.device != "cpu" else 1
        x, weights = random(total, inputs), random(copies, outputs, inputs) * inputs**-0.5
        moved = (outputs * inputs + total * (inputs + extra)) * dtype.itemsize
        flops = 2 * total * inputs * outputs
        if "stream" in name or "parts" in name:
            name += ", ring" * prefers_ring(x, weights[0], gated="gated" in name, parts="parts" in name)
        return Work(f"{name} {inputs}->{outputs}", lambda copy: call(x, weights[copy]), copies, moved, flops=flops)

    norm, residual = torch.ones(shape.hidden, device=args.device, dtype=dtype), random(total, shape.hidden)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        if fused:
            return norm_linear(x, norm, 1e-6, weight, backend=backend)
        return F.linear(rms_norm(x, norm, 1e-6), weight)

    def added(x: Tensor, weight: Tensor) -> Tensor:
        return linear_add(x, weight, None, residual, backend=backend)

    def parts_added(x: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(linear_parts(x, weight, backend=backend), residual, norm, 1e-6, backend=backend)[0]

    qkv_size = heads_size + 2 * kv_size
    yield linear("norm_linear", shape.hidden, qkv_size, normed, qkv_size)
    yield linear("stream_linear", shape.hidden, qkv_size, lambda x, w: stream_linear(x, w, backend=backend), qkv_size)
    write, qkv_RA = _Rotation(shape, total, residual, fused), random(total, qkv_size)
    rotated = (2 * qkv_RA.numel() + write.cos.numel() + write.sin.numel()) * dtype.itemsize
    yield Work("rope_write", lambda _: write.call(qkv_RA), 1, rotated)

    def normed_and_written(x: Tensor, weight: Tensor) -> Tensor:
        if fused and not shape.normed:
            qkv = NormedLinear(norm, 1e-6, weight, None)
            return norm_qkv_rope(x, qkv, write.cos, write.sin, shape.heads, *write.cache, backend="triton")
        return write.call(normed(x, weight))

    yield linear("norm_qkv_rope", shape.hidden, qkv_size, normed_and_written, qkv_size)
    gated = linear(
        "gated_stream_linear", shape.hidden, 2 * shape.intermediate,
        lambda x, w: gated_stream_linear(x, w, backend=backend), shape.intermediate,
    )  # fmt: skip
    yield gated
    yield linear(
        "norm_gated_linear", shape.hidden, 2 * shape.intermediate,
        lambda x, w: norm_gated_linear(x, norm, 1e-6, w, backend=backend), shape.intermediate,
    )  # fmt: skip
    for inputs in (heads_size, shape.intermediate):
        yield linear("linear_add", inputs, shape.hidden, added, 2 * shape.hidden)
        yield linear("linear_parts + add_rms_norm", inputs, shape.hidden, parts_added, 3 * shape.hidden)


def _expert_works(args: argparse.Namespace, shape: Shape, requests: int, rows: int, backend: str) -> Iterator[Work]:
    """A mixture of experts behind its router, with matrices and with MXFP4. Calls take turns at eight routings: the
    experts of one may stay in L2."""
    if shape.experts is None or (backend == "torch" and args.device != "cpu"):
        return
    total, (experts, top_k), dtype = requests * rows, shape.experts, getattr(torch, args.dtype)
    hidden, features = shape.hidden, shape.intermediate

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.empty(sizes, device=args.device, dtype=dtype).normal_(std=scale)

    def packed(inputs: int, outputs: int) -> PackedMatrix:
        part = PackedExperts(experts, inputs, outputs).to(args.device)
        part.draw(inputs**-0.5, torch.Generator(args.device))
        return part.matrix

    biases = random(experts, 2 * features), random(experts, hidden)
    copies = 1 if args.device == "cpu" else 8
    x, logits = random(total, hidden), random(copies, total, experts)
    touched = sum(len(one.topk(top_k).indices.unique()) for one in logits) / copies
    up = random(experts, hidden, 2 * features, scale=hidden**-0.5)
    down = random(experts, features, hidden, scale=features**-0.5)
    for kind, size, weights in (
        ("matrices", dtype.itemsize, ExpertWeights(up, biases[0], down, biases[1])),
        (
            "MXFP4",
            PACKED_BYTES,
            ExpertWeights(packed(hidden, 2 * features), biases[0], packed(features, hidden), biases[1]),
        ),
    ):
        moved = touched * 3 * hidden * features * size + 2 * total * hidden * dtype.itemsize
        yield Work(
            f"moe {experts}x{top_k} {kind}, {touched:.1f} touched",
            partial(_route, x, logits, weights, top_k, backend),
            copies,
            int(moved),
            flops=6 * total * top_k * hidden * features,
        )


def _route(
    x: Tensor, logits: Tensor, weights: ExpertWeights, top_k: int, backend: str, copy: int
) -> Tensor:  # fmt: skip
    return moe(x, logits[copy], weights, top_k=top_k, alpha=1.702, limit=7.0, backend=backend)


class _Rotation:
    """Rotation and write to a cache of as many slots as rows, in one launch or two."""

    def __init__(self, shape: Shape, rows: int, like: Tensor, fused: bool) -> None:
        inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e6, head_dim=shape.head_dim)).to(like.device)
        self._shape, self._fused = shape, fused
        self.cos, self.sin = rope_tables(torch.arange(rows, device=like.device), inv_freq, like.dtype, backend="torch")
        keys, values = like.new_zeros(2, shape.kv_heads, rows + 1, shape.head_dim)
        self.cache = keys, values, torch.arange(rows, device=like.device)
        ones = like.new_ones(shape.head_dim)
        self._norms = HeadNorms(ones, ones, 1e-6) if shape.normed else None

    def call(self, qkv_RA: Tensor) -> Tensor:
        """The rotated queries."""
        shape, (keys, values, slots) = self._shape, self.cache
        if self._fused:
            return rope_write(
                qkv_RA, self.cos, self.sin, shape.heads, keys, values, slots, self._norms, backend="triton"
            )  # fmt: skip
        q, k, v = rope_qkv(qkv_RA, self.cos, self.sin, shape.heads, shape.kv_heads, self._norms)
        kv_write(keys, values, slots, k, v)
        return q


def _prefill_works(
    args: argparse.Namespace, shape: Shape, requests: int, rows: int, backend: str
) -> Iterator[Work]:  # fmt: skip
    """One prompt of `rows` tokens attending to itself."""
    device, dtype, (heads, kv_heads, dim) = args.device, getattr(torch, args.dtype), shape.attention
    blocks = -(-rows // _BLOCK_SIZE)
    q = torch.randn(rows, heads, dim, device=device, dtype=dtype)
    keys, values = torch.randn(2, kv_heads, blocks * _BLOCK_SIZE, dim, device=device, dtype=dtype)
    limit = torch.arange(rows, device=device)
    plan = plan_attention(
        np.array([rows]), np.array([rows]), np.arange(blocks)[None], _BLOCK_SIZE, heads_per_kv=heads // kv_heads,
        head_dim=dim, device=torch.device(device), backend=backend,
    )  # fmt: skip

    def call(_copy: int) -> Tensor:
        if backend == "triton":
            return paged_attention(q, CacheView(keys, values, limit), plan)
        k, v = keys[None, :, :rows], values[None, :, :rows]
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True)

    moved = 2 * rows * (heads + kv_heads) * dim * dtype.itemsize
    yield Work("prefill attention", call, 1, moved, rows, 1, flops=2 * heads * dim * rows * (rows + 1) * requests)


def _attention(
    args: argparse.Namespace, shape: Shape, requests: int, rows: int, keys: int, backend: str
) -> Work:  # fmt: skip
    """Rows at the end of `keys` keys each; caches as many as the L2 cache does not hold, up to eight."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    blocks = -(-keys // _BLOCK_SIZE)
    slots = requests * blocks * _BLOCK_SIZE + 1
    read = 2 * requests * keys * shape.kv_heads * shape.head_dim * dtype.itemsize
    copies = max(1, min(8, (200 << 20) // read)) if device.type == "cuda" else 1
    caches = torch.randn(copies, 2, shape.kv_heads, slots, shape.head_dim, device=device, dtype=dtype)
    tables = torch.randperm(requests * blocks, device=device, dtype=torch.int32).view(requests, blocks)
    width = -(-args.max_model_len // _BLOCK_SIZE)
    tables = torch.nn.functional.pad(tables, (0, max(width - blocks, 0) if backend == "triton" else 0))
    limit = torch.arange(keys - rows, keys, device=device).clamp(min=0).repeat(requests)
    q = torch.randn(requests * rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
    plan = plan_decode(
        rows, tables, _BLOCK_SIZE, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        backend=backend, splits=args.splits,
    )  # fmt: skip

    def call(copy: int) -> Tensor:
        return paged_attention(q[:, : shape.heads], CacheView(caches[copy, 0], caches[copy, 1], limit), plan)

    moved = read + 2 * requests * rows * shape.heads * shape.head_dim * dtype.itemsize
    return Work("attention", call, copies, moved, keys, plan.splits)


def _milliseconds(args: argparse.Namespace, work: Work) -> float:
    """Median over replays of the mean time of a call."""
    if args.device == "cpu":
        return 1e3 * min(_seconds(lambda: work.call(0)) for _ in range(3))
    graph = captured(lambda i: work.call(i % work.copies), _CALLS)
    graph.replay()
    times = []
    for _ in range(args.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / _CALLS)
    return float(np.median(times))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "model-kernels-h200.json")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--requests", nargs="*", type=count)
    parser.add_argument("--rows", nargs="*", type=count, help="rows of one request: 1, 1 + K, 2 K")
    parser.add_argument("--linear-rows", nargs="*", type=count, help="rows of the linear layers, of all requests")
    parser.add_argument("--prefill-rows", nargs="*", type=count, help="tokens of one prompt")
    parser.add_argument("--expert-rows", nargs="*", type=count, help="rows of a mixture of experts, of all requests")
    parser.add_argument("--keys", nargs="*", type=count)
    parser.add_argument("--backends", nargs="+", choices=["triton", "torch"])
    parser.add_argument(
        "--splits", type=count, help="programs that share a tile's keys; default: as the engine chooses"
    )
    parser.add_argument("--max-model-len", type=count, default=8192, help="width of the block tables")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--bandwidth", type=amount, default=4800.0, help="of the GPU's memory, GB/s")
    parser.add_argument("--tflops", type=amount, default=989.0, help="of the GPU's matmuls in bfloat16")
    parser.add_argument("--repeats", type=count, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    cpu = args.device == "cpu"
    if not cpu:
        check_gpu("run on one, or try the script itself with --device cpu")
    check_out(args.out, cpu=cpu)
    args.shapes = args.shapes or (["tiny"] if cpu else [name for name in SHAPES if name != "tiny"])
    defaults = {
        "requests": ([2], [1, 8, 64]),
        "rows": ([3], [1, 8, 14]),
        "linear_rows": ([3], [1, 8, 14, 64]),
        "prefill_rows": ([9], [512, 2048]),
        "expert_rows": ([3], [1, 8, 32, 64, 256, 512, 4096]),
        "keys": ([40], [512, 4096]),
    }
    for name, (small, whole) in defaults.items():
        if getattr(args, name) is None:  # an empty list leaves the group out
            setattr(args, name, small if cpu else whole)
    args.backends = args.backends or (["torch"] if cpu else ["triton", "torch"])
    return args


if __name__ == "__main__":
    run_script(main)
