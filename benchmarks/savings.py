"""What each saving of the speculative step is worth: the step with all of them, and with each one left out.

A P-EAGLE head with K = 7 on shapes with random weights, acceptance by chance (benchmarks/speed_shapes.py). All engines
of a shape stand side by side and take turns, repeat by repeat; what a saving is worth is the median over the repeats of
the step time without it over that with all, in the same repeat. Greedy, 128 tokens in; timed are the steps in which all
requests decode. The file is written after each repeat. Hardware: one GPU.

    python -m benchmarks.savings --out benchmarks/results/savings-h200.json
    python -m benchmarks.savings --device cpu --out /tmp/smoke.json     # does the script itself work? a tiny shape
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.common import RESULTS, amount, check_out, command, count, run_script, say_progress
from benchmarks.engine_speed import decode_params, dummy_drafter, dummy_target, engine_config, free
from benchmarks.speed_shapes import CONCURRENCY, P_EAGLE, SHAPES, Setup, geometric_rate, random_prompts
from peagle.bench.report import write_result
from peagle.bench.stepping import Window, decode_window
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.draft_pass import DraftSavings
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.kernels.accept import accept
from peagle.kernels.commit import commit
from peagle.kernels.draft_layout import draft_layout
from peagle.kernels.fused_linear import norm_linear
from peagle.kernels.norm_qkv_rope import NormedLinear
from peagle.kernels.rms_norm import rms_norm
from peagle.kernels.rope_write import rope_write
from peagle.kernels.stream_linear import gated_stream_linear
from peagle.kernels.verify_rows import verify_rows
from peagle.models.target import Target

ALL = "nothing"
_K, _WARM_UP_TOKENS = 7, 64
_NOTHING = DraftSavings(last_layer_sampled=False, constant_mask_qkv=False, fc_target_rows=False)


def _in_torch(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, always in its torch form."""

    def call(*args: Any, backend: str = "torch", **settings: Any) -> Any:  # noqa: ARG001
        return operation(*args, backend="torch", **settings)

    return call


def _one_after_another(x: Tensor, qkv: NormedLinear, *rest: Any, backend: str) -> Tensor:
    """`norm_qkv_rope` in two launches."""
    return rope_write(norm_linear(x, *qkv, backend=backend), *rest, backend=backend)


def _gated_after_norm(x: Tensor, norm: Tensor, eps: float, *rest: Any, backend: str) -> Tensor:
    """`norm_gated_linear` in two launches."""
    return gated_stream_linear(rms_norm(x, norm, eps, backend=backend), *rest, backend=backend)


def _never(*_args: Any, **_settings: Any) -> bool:
    return False


@dataclass(frozen=True)
class Variant:
    """What is left out. `replaced`: by name, what other functions stand for while steps are captured."""

    left_out: str
    savings: DraftSavings | None = None
    engine: Mapping[str, bool] = field(default_factory=dict)
    replaced: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


_TORCH_ENDS = {
    "peagle.engine.batch.verify_rows": _in_torch(verify_rows),
    "peagle.engine.step.accept": _in_torch(accept),
    "peagle.engine.step.commit": _in_torch(commit),
}
VARIANTS = (
    Variant(ALL),
    Variant("last layer on sampled rows only", DraftSavings(last_layer_sampled=False)),
    Variant("constant mask rows", DraftSavings(constant_mask_qkv=False)),
    Variant("fc on target rows only", DraftSavings(fc_target_rows=False)),
    Variant("these three", _NOTHING),
    Variant("CUDA graphs", engine={"graphs": False}),
    Variant("a step ahead of the host", engine={"async_scheduling": False}),
    Variant("fused draft layout", replaced={"peagle.engine.step.draft_layout": _in_torch(draft_layout)}),
    Variant("fused verify rows, accept, commit", replaced=_TORCH_ENDS),
    Variant("streaming linear layers", replaced={"peagle.models.layers.prefers_stream": _never}),
    Variant("ring of weights in them", replaced={"peagle.kernels.stream_ring.has_ring": _never}),
    Variant("fused linear layers", replaced={"peagle.models.layers.prefers_fused": _never}),
    Variant("norm + gate and up as one launch", replaced={"peagle.models.layers.norm_gated_linear": _gated_after_norm}),
    Variant("norm + qkv + RoPE as one launch", replaced={"peagle.engine.kv_cache.norm_qkv_rope": _one_after_another}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingRow:
    """A step without one saving. `times_all`: its time over that of the step with all, median of the repeats."""

    shape: str
    left_out: str
    concurrency: int
    ms_per_step: float
    times_all: float
    times_all_lowest: float
    times_all_highest: float
    repeats: int


Windows = dict[tuple[str, int], list[Window]]  # (what is left out, concurrency) -> one of each repeat


class Bench:
    """The rows of all shapes so far, and the file they go to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, resolve_engine_device(args.device)
        self.rows: dict[str, list[SavingRow]] = {}
        self._begun, self._done, self._partial = time.perf_counter(), 0, True

    def measure(self, shape: str) -> None:
        """All variants of one shape, side by side, until the shape's time is up."""
        begun, found = time.perf_counter(), Windows()
        target = dummy_target(shape, resolve_dtype(self.args.dtype, self.device), self.device)
        drafter = dummy_drafter(target, P_EAGLE)
        llms = {variant.left_out: self._engine(target, drafter, variant) for variant in VARIANTS}
        prompts = random_prompts(target.spec.vocab_size, max(self.args.concurrency))
        for repeat in range(self.args.repeats):
            for concurrency in self.args.concurrency:
                for left_out, llm in llms.items():
                    window = decode_window(llm, prompts[:concurrency], decode_params(self.args.output_tokens))
                    found.setdefault((left_out, concurrency), []).append(window)
            self._done += 1
            is_over = self.args.seconds is not None and time.perf_counter() - begun > self.args.seconds
            self._partial = shape != self.args.shapes[-1] or not (is_over or repeat + 1 == self.args.repeats)
            self.rows[shape] = _rows(shape, found)
            self.write()
            said = f"{shape}: repeat {repeat + 1} of {self.args.repeats}"
            say_progress(self._done, self.args.repeats * len(self.args.shapes), self._begun, said)
            if is_over:
                break
        del llms, target, drafter
        free()

    def write(self) -> None:
        """The file anew, marked partial until the last shape has all its repeats, or its time is up."""
        settings = {
            "command": command(),
            "dtype": self.args.dtype,
            "num_drafts": _K,
            "output_tokens": self.args.output_tokens,
            "partial": self._partial,
        }
        rows = [row for rows in self.rows.values() for row in rows]
        write_result(self.args.out, self.args.out.stem, settings, {"rows": rows})

    def _engine(self, target: Target, drafter: Eagle3Drafter, variant: Variant) -> LLM:
        """The variant's engine, its steps captured at every concurrency."""
        args = self.args
        length = Setup(target.name, P_EAGLE, _K).acceptance_length
        config = engine_config(args, target, args.output_tokens + 2 * _K + 1, **variant.engine)
        rates = (geometric_rate(length, _K),) * _K
        prompts = random_prompts(target.spec.vocab_size, max(args.concurrency))
        with ExitStack() as stack:
            for name, function in variant.replaced.items():
                stack.enter_context(patch(name, function))
            llm = LLM.from_parts(
                target, drafter, _K, config, pack=False, synthetic_rates=rates, savings=variant.savings
            )  # fmt: skip
            for concurrency in args.concurrency:
                decode_window(llm, prompts[:concurrency], decode_params(_WARM_UP_TOKENS))
        spent = time.perf_counter() - self._begun
        print(f"[{spent:.0f} s] {target.name} without {variant.left_out}: ready", file=sys.stderr, flush=True)
        return llm


def _rows(shape: str, found: Windows) -> list[SavingRow]:
    rows = []
    for (left_out, concurrency), windows in found.items():
        whole = found[ALL, concurrency]
        times = [one.ms_per_step / other.ms_per_step for one, other in zip(windows, whole, strict=True)]
        rows.append(
            SavingRow(
                shape=shape,
                left_out=left_out,
                concurrency=concurrency,
                ms_per_step=round(median(window.ms_per_step for window in windows), 4),
                times_all=round(median(times), 4),
                times_all_lowest=round(min(times), 4),
                times_all_highest=round(max(times), 4),
                repeats=len(windows),
            )
        )
    return rows


def main() -> None:
    args = _arguments()
    bench = Bench(args)
    for shape in args.shapes:
        bench.measure(shape)
    print(f"wrote {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "savings-h200.json")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--concurrency", nargs="+", type=count)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--output-tokens", type=count, default=256)
    parser.add_argument("--seconds", type=amount, help="for each shape: no further repeat after so long")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    cpu = resolve_engine_device(args.device).type == "cpu"
    check_out(args.out, cpu=cpu)
    args.shapes = args.shapes or (["tiny"] if cpu else ["smollm2-135m", "qwen2.5-coder-0.5b"])
    args.concurrency = args.concurrency or ([1, 2] if cpu else list(CONCURRENCY))
    return args


if __name__ == "__main__":
    run_script(main)
