"""Attention of whole prompts with what stands before it: the engine's two forms, and other kernels that torch has.

--rows rows of one prompt, and of eight of different lengths, at the sizes of a layer. The engine's forms begin at the
merged projections and leave keys and values in the cache:

    triton      `rope_write`, then tiles over the paged cache
    library     `rope_qkv` in place, `kv_write`, then `whole_attention` (cuDNN's, of one prompt)

"gpu_ms" is the time of all of it, of a CUDA graph of many calls; "host_ms" what it takes to issue it without a graph,
as passes over long prompts are. `LEAST_ROWS` of `peagle/kernels/whole_attention.py` is from where on the library's is
the lower one. "mean_row": rows of the prompt that the mean row belongs to.

Attention alone, q, k and v at hand ("alone" in front): both of these, torch's public `varlen_attn` (FlashAttention over
ragged rows), its `scaled_dot_product_attention` for each prompt, by its own choice, with FlashAttention and with cuDNN,
and cuDNN's over ragged rows, told a power of two as the most rows and as the number of prompts. "fresh_ms": what the
first call takes, host and device, with a row more in each prompt than before, where cuDNN may make a plan anew; median
of three. "error": against "alone triton", relative. What would be called for each prompt is run for one. A form that
cannot run is left out, with the reason on stdout.

No kernel of torch 2.11 attends over pages of 16 keys (2.13's `varlen_attn` takes pages, of multiples of 256): decoding
is not compared. Hardware: one GPU.

    python -m benchmarks.prompt_attention --out benchmarks/results/prompt-attention-h200.json
    python -m benchmarks.prompt_attention --device cpu --out FILE      # does the script run: tiny sizes, twins
"""

import argparse
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import RESULTS, captured, check_out, command, count, run_script
from benchmarks.model_kernels import SHAPES, Shape
from peagle.bench.report import write_result
from peagle.errors import PeagleError
from peagle.kernels.kv_write import kv_write
from peagle.kernels.paged_attention import paged_attention, plan_attention
from peagle.kernels.paged_decode import CacheView
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.rope_write import rope_write
from peagle.kernels.whole_attention import LEAST_ROWS, takes_whole, whole_attention
from peagle.models.layers import RopeSpec, rope_inverse_frequencies

_BLOCK_SIZE = 16
_BUDGET_MS = 10.0  # of the device, for a replay
_MOST_CALLS = 50  # of one graph
_REPEATS = 5
_FRESH_ROWS = 2048  # where first calls are timed

Form = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One form over prompts of so many rows in all. What does not apply is None."""

    shape: str
    form: str
    prompts: int
    rows: int
    mean_row: int  # rows of the prompt that the mean row belongs to
    gpu_ms: float
    host_ms: float | None
    fresh_ms: float | None
    error: float | None
    tflops: float


class Prompts:
    """Rows of some prompts in one layer, and every way to attend."""

    def __init__(self, shape: Shape, lengths: np.ndarray, device: str, dtype: torch.dtype) -> None:
        self.shape, self.lengths, rows = shape, lengths, int(lengths.sum())
        heads, kv_heads, dim = self.sizes = shape.attention
        blocks = -(-lengths // _BLOCK_SIZE)
        tables = np.zeros((len(lengths), int(blocks.max())), dtype=np.int64)
        slots, ids = [], np.random.default_rng(0).permutation(int(blocks.sum()))
        for line, size, length in zip(tables, blocks, lengths, strict=True):
            line[:size], ids = ids[:size], ids[size:]
            slots.append((line[:size, None] * _BLOCK_SIZE + np.arange(_BLOCK_SIZE)).ravel()[:length])
        self.slots = torch.from_numpy(np.concatenate(slots)).to(device)
        self.limit = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)
        self.backend = "triton" if device == "cuda" else "torch"
        self.plan = plan_attention(
            lengths, lengths, tables, _BLOCK_SIZE,
            heads_per_kv=heads // kv_heads, head_dim=dim, device=torch.device(device), backend=self.backend,
        )  # fmt: skip
        self.keys, self.values = torch.zeros(
            2, kv_heads, int(blocks.sum()) * _BLOCK_SIZE + 1, dim, device=device, dtype=dtype
        )
        # A capture that failed leaves torch's own generator unusable.
        self.qkv_RA = torch.randn(
            rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype, generator=torch.Generator(device)
        )
        self.q, self.k, self.v = self.qkv_RA.clone().unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e6, head_dim=dim)).to(device)
        self.tables = rope_tables(self.limit, inv_freq, dtype, backend="torch")
        ones = torch.ones(dim, device=device, dtype=dtype)
        self.norms = HeadNorms(ones, ones, 1e-6) if shape.normed else None
        self.start = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device)
        padded = np.full(1 << (len(lengths) - 1).bit_length(), rows)
        padded[: len(lengths)] = np.cumsum(lengths)
        self.padded_start = torch.from_numpy(np.concatenate(([0], padded)).astype(np.int32)).to(device)
        self.most = int(lengths.max())
        self.padded_most = 1 << (self.most - 1).bit_length()

    def forms(self) -> dict[str, Form]:
        """Each form by name; the engine's begin at the projections and are measured on the host as well."""
        sdpa = {"": None, " flash": SDPBackend.FLASH_ATTENTION, " cudnn": SDPBackend.CUDNN_ATTENTION}
        return {
            "triton": self._triton,
            "library": self._library,
            "alone triton": self._read,
            "alone library": lambda: whole_attention(self.q, self.k, self.v),
            "alone varlen_attn": self._varlen,
            **{f"alone sdpa{name}": partial(self._sdpa, backend) for name, backend in sdpa.items()},
            "alone cudnn ragged": self._cudnn_ragged,
        }

    def write(self) -> None:
        """Put the keys and values at hand into the cache, for "alone triton"."""
        kv_write(self.keys, self.values, self.slots, self.k, self.v)

    def _read(self, q: Tensor | None = None) -> Tensor:
        return paged_attention(self.q if q is None else q, CacheView(self.keys, self.values, self.limit), self.plan)

    def _triton(self) -> Tensor:
        cache = self.keys, self.values, self.slots
        return self._read(
            rope_write(self.qkv_RA, *self.tables, self.sizes[0], *cache, self.norms, backend=self.backend)
        )

    def _library(self) -> Tensor:
        q, k, v = rope_qkv(self.qkv_RA, *self.tables, *self.sizes[:2], self.norms, backend=self.backend)
        kv_write(self.keys, self.values, self.slots, k, v, backend=self.backend)
        return whole_attention(q, k, v)

    def _varlen(self) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on

        names = inspect.signature(varlen_attn).parameters
        more: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
        more |= {"enable_gqa": True} if "enable_gqa" in names else {}
        attend: Any = varlen_attn
        return attend(self.q, self.k, self.v, self.start, self.start, self.most, self.most, **more)

    def _sdpa(self, backend: SDPBackend | None) -> Tensor:
        parts = zip(*(x.split(self.lengths.tolist()) for x in (self.q, self.k, self.v)), strict=True)
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        with nullcontext() if backend is None else sdpa_kernel(backend):
            outs = [attend(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1) for part in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _cudnn_ragged(self) -> Tensor:
        start, most = self.padded_start, self.padded_most
        return torch.ops.aten._cudnn_attention_forward(
            self.q, self.k, self.v, None, start, start, most, most, False, 0.0, True, False
        )[0]


def main() -> None:
    args = _arguments()
    found: list[PromptRow] = []
    cases = [(SHAPES[name], rows, prompts) for name in args.shapes for rows in args.rows for prompts in (1, 8)]
    for done, case in enumerate(cases, start=1):
        with torch.inference_mode():
            found += _measure(args, *case)
        _write(args, found, partial=done < len(cases))
    print(f"wrote {args.out}")


def _write(args: argparse.Namespace, rows: list[PromptRow], *, partial: bool) -> None:
    settings = {
        "command": command(),
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
        "block_size": _BLOCK_SIZE,
        "least_rows": LEAST_ROWS,
        "repeats": _REPEATS,
        "partial": partial,
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})


def _lengths(rows: int, prompts: int) -> np.ndarray:
    """So many rows over prompts of different lengths, none twice as long as another and half as long again."""
    ends = np.cumsum(np.linspace(0.6, 1.4, prompts))
    return np.diff(np.rint(ends / ends[-1] * rows).astype(np.int64), prepend=0)


def _measure(args: argparse.Namespace, shape: Shape, rows: int, prompts: int) -> Iterator[PromptRow]:
    lengths = _lengths(rows, prompts)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    one = Prompts(shape, lengths, args.device, dtype)
    one.write()
    expected = one.forms()["alone triton"]().double()
    flops = 2 * shape.heads * shape.head_dim * int((lengths * (lengths + 1)).sum())
    for name, form in one.forms().items():
        if _is_left_out(args, name, prompts):
            continue
        one.write()  # the engine's forms left others in the cache
        try:
            out, alone = form(), name.startswith("alone")
            gpu_ms = _gpu_ms(args.device, form)
            fresh = _fresh_ms(args.device, shape, lengths, dtype, name) if alone and rows == _FRESH_ROWS else None
        except Exception as error:  # a kernel that this torch does not have, or that does not take these heads
            print(f"{shape.name} {prompts} x {rows} {name}: {type(error).__name__} {str(error)[:150]}", flush=True)
            continue
        yield PromptRow(
            shape=shape.name,
            form=name,
            prompts=prompts,
            rows=rows,
            mean_row=round(int(lengths @ lengths) / rows),
            gpu_ms=round(gpu_ms, 5),
            host_ms=None if alone else round(_host_ms(args.device, form), 4),
            fresh_ms=None if fresh is None else round(fresh, 2),
            error=float(f"{float((out.double() - expected).norm() / expected.norm()):.1e}") if alone else None,
            tflops=round(flops / gpu_ms / 1e9, 1),
        )
        print(f"{shape.name} {prompts} prompts, {rows:,} rows, {name}: {gpu_ms * 1e3:.1f} us", flush=True)


def _is_left_out(args: argparse.Namespace, name: str, prompts: int) -> bool:
    """What has no twin on the CPU, and what would make a plan for every prompt, or takes but one."""
    if args.device == "cpu":
        return name not in ("triton", "alone triton", "alone sdpa")
    return prompts > 1 and name in ("library", "alone library", "alone sdpa", "alone sdpa cudnn")


def _gpu_ms(device: str, form: Form) -> float:
    """Median over replays of the mean time of a call; on the CPU, of one call."""
    once = _seconds(device, form)
    if device == "cpu":
        return 1e3 * once
    calls = int(np.clip(_BUDGET_MS / 1e3 / once, 3, _MOST_CALLS))
    graph = captured(lambda _: form(), calls)
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return float(np.median(times))


def _host_ms(device: str, form: Form) -> float:
    """Mean time to issue a call, the device not waited for."""
    _synchronize(device)
    begun = time.perf_counter()
    for _ in range(20):
        form()
    spent = time.perf_counter() - begun
    _synchronize(device)
    return 1e3 * spent / 20


def _fresh_ms(device: str, shape: Shape, lengths: np.ndarray, dtype: torch.dtype, name: str) -> float:
    """Median of the first calls for a row more of each prompt, two more, three more."""
    forms = [Prompts(shape, lengths + more, device, dtype).forms()[name] for more in (1, 2, 3)]
    return 1e3 * float(np.median([_seconds(device, form) for form in forms]))


def _seconds(device: str, form: Form) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    form()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "prompt-attention-h200.json")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=count, help="of all prompts")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    cpu = args.device == "cpu"
    on_gpu = torch.cuda.is_available() and takes_whole(64, torch.bfloat16, torch.device("cuda"))
    if not cpu and not on_gpu:
        raise PeagleError("no CUDA device of Hopper or newer: try the script itself with --device cpu")
    check_out(args.out, cpu=cpu)
    args.shapes = args.shapes or (["tiny"] if cpu else ["smollm2", "qwen2.5-0.5b", "qwen3-8b"])
    args.rows = args.rows or ([40] if cpu else [128, 512, 1024, 2048, 8192])
    return args


if __name__ == "__main__":
    run_script(main)
