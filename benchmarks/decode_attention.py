"""How decoding attention is best launched: keys a turn, warps, stages, tiles and splits, against what the engine takes.

For each number of requests and rows every variant runs inside a CUDA graph over caches that the L2 does not hold. The
file has what is taken today, marked so, and the fastest others. Kernels are compiled by all cores first. What follows
from it is decided by hand: `tile_form` in peagle/kernels/paged_decode.py and `_launch_sizes` beside the kernel.
Hardware: one GPU.

    python -m benchmarks.decode_attention --shapes qwen3-8b --requests 8 64 --rows 4 8 --out FILE
"""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks import model_kernels
from benchmarks.common import RESULTS, check_gpu, check_out, command, count, run_script, say_progress
from peagle.bench.report import write_result
from peagle.kernels import paged_decode
from peagle.kernels.paged_decode import FINE_KEYS, TileForm, power_of_two, tile_form

_BANDWIDTH = 4.8e9  # bytes a millisecond
_MOST_KEPT = 8  # variants of a case in the file
_KEYS_STAGES = ((32, 5), (32, 7), (64, 3), (64, 5), (128, 3))
_WARPS_REGISTERS = ((4, None), (4, 128), (8, None))


class Case(NamedTuple):
    """What is attended to."""

    shape: str
    requests: int
    rows: int
    keys: int


class Variant(NamedTuple):
    """How: keys a turn of the loop, warps, pipeline stages, the most registers of a thread, pairs of a tile, programs
    that share a tile's keys, whether warps have their own keys."""

    turn_keys: int
    warps: int
    stages: int
    registers: int | None
    tile: int
    splits: int
    own: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeAttentionRow:
    """One way to launch one case; `taken` is the engine's, whose sizes are not given. `floor_us` is reading keys and
    values at 4,800 GB/s."""

    shape: str
    requests: int
    rows: int
    keys: int
    taken: bool
    microseconds: float
    floor_us: float
    turn_keys: int | None = None
    warps: int | None = None
    stages: int | None = None
    registers: int | None = None
    tile: int | None = None
    splits: int | None = None
    own: bool | None = None


def main() -> None:
    args = _arguments()
    cases = [Case(*case) for case in product(args.shapes, args.requests, args.rows, args.keys)]
    work = [(case, variant) for case in cases for variant in (None, *variants(case))]
    print(f"compiling {len(work)} kernels", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        runs = [*pool.map(partial(_microseconds, replays=1), *zip(*work, strict=True))]
    work = [one for one, ran in zip(work, runs, strict=True) if ran is not None]  # else it takes too much memory
    rows: list[DecodeAttentionRow] = []
    begun = time.perf_counter()
    for done, (case, variant) in enumerate(work, 1):
        if (spent := _microseconds(case, variant, args.repeats)) is not None:
            rows.append(_row(case, variant, spent))
        if done % 20 == 0 or done == len(work):
            say_progress(done, len(work), begun, f"{case.requests} requests of {case.shape}")
            settings = {"command": command(), "dtype": "bfloat16", "partial": done < len(work)}
            write_result(args.out, args.out.stem, settings, {"rows": [r for c in cases for r in fastest(rows, c)]})
    print(f"wrote {args.out}")


def variants(case: Case) -> Iterator[Variant]:
    """Those worth a try: a tile holds a request's pairs or half of them, and splits do not fill the GPU many times."""
    heads, kv_heads, head_dim = model_kernels.SHAPES[case.shape].attention
    highest = max(16, min(power_of_two(case.rows * heads // kv_heads), 64))
    for tile in sorted({highest, max(16, highest // 2)}):
        tiles = case.requests * kv_heads * -(-case.rows * heads // (kv_heads * tile))
        for splits in (splits for splits in (1, 2, 4, 8) if splits == 1 or 132 <= tiles * splits <= 1056):
            if tile == 16:
                yield Variant(FINE_KEYS, 4, 1, None, tile, splits, own=True)
            for (keys, stages), (warps, registers) in product(_KEYS_STAGES, _WARPS_REGISTERS):
                if stages // 2 * keys * head_dim * 4 <= 200 << 10:  # in flight
                    yield Variant(keys, warps, stages, registers, tile, splits)


def fastest(rows: list[DecodeAttentionRow], case: Case) -> list[DecodeAttentionRow]:
    """What the engine takes in a case, then the best others."""
    own = [row for row in rows if (row.shape, row.requests, row.rows, row.keys) == case]
    others = sorted((row for row in own if not row.taken), key=lambda row: row.microseconds)
    return [row for row in own if row.taken] + others[:_MOST_KEPT]


def _row(case: Case, variant: Variant | None, microseconds: float) -> DecodeAttentionRow:
    _, kv_heads, head_dim = model_kernels.SHAPES[case.shape].attention
    floor = 1e3 * 4 * case.requests * case.keys * kv_heads * head_dim / _BANDWIDTH
    sizes = variant._asdict() if variant else {}
    return DecodeAttentionRow(
        **case._asdict(), **sizes, taken=variant is None, microseconds=round(microseconds, 2), floor_us=round(floor, 2)
    )


def _microseconds(case: Case, variant: Variant | None, replays: int) -> float | None:
    """Of one call; None for a variant that the GPU has no room for."""
    from triton.runtime.errors import OutOfResources

    from peagle.kernels import paged_decode_triton

    args = argparse.Namespace(
        device="cuda", dtype="bfloat16", max_model_len=case.keys + 128, repeats=replays,
        splits=variant and variant.splits,
    )  # fmt: skip

    def form(*sizes: int) -> TileForm:
        return tile_form(*sizes) if variant is None else TileForm(variant.tile, variant.own, 8, few=False)

    def launch(*plan: Any) -> tuple[int, int, int, int | None]:
        return launch_sizes(*plan) if variant is None else variant[:4]

    launch_sizes = paged_decode_triton._launch_sizes
    with patch.object(paged_decode, "tile_form", form), patch.object(paged_decode_triton, "_launch_sizes", launch):
        work = model_kernels._attention(
            args, model_kernels.SHAPES[case.shape], case.requests, case.rows, case.keys, "triton"
        )
        try:
            return 1e3 * model_kernels._milliseconds(args, work)
        except OutOfResources:
            return None
        finally:
            torch.cuda.empty_cache()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode-attention-sizes-h200.json")
    parser.add_argument("--shapes", nargs="+", choices=list(model_kernels.SHAPES), default=["qwen3-8b"])
    parser.add_argument("--requests", nargs="+", type=count, default=[8, 64])
    parser.add_argument("--rows", nargs="+", type=count, default=[4, 8], help="of a request: 1 + K")
    parser.add_argument("--keys", nargs="+", type=count, default=[400])
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--jobs", type=count, default=12, help="processes that compile")
    args = parser.parse_args()
    check_out(args.out, cpu=False)
    check_gpu("what is timed is Triton's form")
    return args


if __name__ == "__main__":
    run_script(main)
