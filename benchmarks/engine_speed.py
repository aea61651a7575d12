"""Time of a speculative step and tokens per second: shapes x methods x K x requests at once.

With random weights and acceptance by chance (benchmarks/speed_shapes.py says which), so that no trained head is needed
and vLLM can be given the very same (benchmarks/peer_vllm.py). 128 tokens in, 512 out, greedy, end tokens ignored; timed
are the steps in which all requests decode. The engines of a group take turns, repeat by repeat; on a GPU each has a
process of its own, as a server has. After the first repeat some steps are profiled: how long the GPU was busy, how many
kernels and launches. Every figure is written as soon as it is there, the most important groups first: stopped early, by
--seconds or by hand, the file holds what was measured, marked partial. Hardware: one GPU.

    python -m benchmarks.engine_speed --out benchmarks/results/engine-speed-h200.json
    python -m benchmarks.engine_speed --shapes qwen3-8b --methods p-eagle none --k 7 --seconds 120 --out FILE
    python -m benchmarks.engine_speed --device cpu --out FILE       # does the script itself work? a tiny shape

Trained heads on real prompts are for `peagle bench sweep`.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import command, run_script
from benchmarks.engine_process import Measured, Models, OwnEngine
from benchmarks.speed_shapes import (
    CONCURRENCY,
    EAGLE3,
    METHODS,
    OUTPUT_TOKENS,
    P_EAGLE,
    PLAIN,
    PROMPT_TOKENS,
    REAL_SHAPES,
    SHAPES,
    SYNTHETIC,
    EngineSpeedRow,
    Setup,
    drafter_config,
    geometric_rate,
    hf_config,
    plan,
    random_prompts,
)
from peagle.bench.profile import Profile
from peagle.bench.report import write_result
from peagle.bench.roofline import copy_bandwidth, step_cost
from peagle.bench.stepping import Decoding, Window, decode_window, profile_steps
from peagle.config import EngineConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.p_eagle import drafter_for
from peagle.drafters.vocab import offsets
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.layers import RMSNorm
from peagle.models.target import Target, load_target
from peagle.sampling import SamplingParams

_WARM_UP_TOKENS = 128  # of the answers before anything is timed: graphs are captured, the allocator has filled
_BLOCK_SIZE = 16

Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Engine:
    """One engine and what was measured of it, by concurrency."""

    setup: Setup
    measured: Measured
    windows: dict[int, list[Window]] = field(default_factory=dict)
    profiles: dict[int, tuple[Profile, Window]] = field(default_factory=dict)  # and steps just before, not profiled


class WarmEngine:
    """An engine of this process, which has decoded as many requests at once as it will be asked for."""

    def __init__(self, args: argparse.Namespace, setup: Setup, target: Target, drafter: Eagle3Drafter | None) -> None:
        self._models = Models(target.spec, drafter.config if drafter else None)
        self._args, self._drafts = args, setup.num_drafts
        longest = max(args.output_tokens, self._profiled_tokens)
        tokens = longest + 2 * setup.num_drafts + 1
        config = engine_config(args, target, tokens, kernels=args.kernels, draft_lm_head=setup.draft_lm_head)
        rates = (geometric_rate(setup.acceptance_length, setup.num_drafts),) * setup.num_drafts if drafter else None
        self._llm = LLM.from_parts(target, drafter, setup.num_drafts, config, pack=False, synthetic_rates=rates)
        self._prompts = random_prompts(target.spec.vocab_size, max(args.concurrency))
        for concurrency in args.concurrency:
            decode_window(self._llm, self._prompts[:concurrency], decode_params(_WARM_UP_TOKENS))

    @property
    def _profiled_tokens(self) -> int:
        return 2 * _WARM_UP_TOKENS + (2 * self._args.profile_steps + 4) * (self._drafts + 1)

    def models(self) -> Models:
        """As in `Measured`."""
        return self._models

    def window(self, concurrency: int) -> Window:
        """As in `Measured`."""
        return decode_window(self._llm, self._prompts[:concurrency], decode_params(self._args.output_tokens))

    def profile(self, concurrency: int) -> tuple[Profile, Window]:
        """As in `Measured`."""
        batch = Decoding(self._llm, self._prompts[:concurrency], decode_params(self._profiled_tokens))
        batch.settle()
        window = batch.advance(self._args.profile_steps)
        profile = profile_steps(batch, self._args.profile_steps)
        batch.drain()
        return profile, window


def own_engine(args: argparse.Namespace, setup: Setup) -> WarmEngine:
    """The engine of a setup with models of its own, for a process of its own."""
    device = resolve_engine_device(args.device)
    target = dummy_target(setup.shape, resolve_dtype(args.dtype, device), device)
    return WarmEngine(args, setup, target, None if setup.method == PLAIN else dummy_drafter(target, setup.method))


class Session:
    """All measurements of a run: the clock, the rows so far and the file they go to."""

    def __init__(self, args: argparse.Namespace, total: int) -> None:
        """`total` is how many measurements there will be."""
        self.args, self.device = args, resolve_engine_device(args.device)
        self.dtype = resolve_dtype(args.dtype, self.device)
        self.bandwidth = 1e9 * args.bandwidth if args.bandwidth else copy_bandwidth(self.device)
        self.rows: dict[tuple[Setup, int], EngineSpeedRow] = {}
        self._total, self._done = total, 0
        self._begin, self._first = time.perf_counter(), 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time that was given is used up."""
        return self.args.seconds is not None and time.perf_counter() - self._begin > self.args.seconds

    def measured(self, engine: Engine, concurrency: int) -> None:
        """Write the rows anew with those of an engine at one concurrency, and say how far things are."""
        row = _row(engine, concurrency, self.bandwidth, self.dtype)
        self.rows[engine.setup, concurrency] = row
        self._done += 1
        self._write()
        now = time.perf_counter()
        self._first = self._first or now  # what came before it, loading and warming up, comes once a group
        spent = now - self._begin
        left = (now - self._first) / max(self._done - 1, 1) * (self._total - self._done)
        busy = "" if row.gpu_busy_ms is None else f", GPU busy {row.gpu_busy_ms:.3f} ms"
        print(
            f"[{self._done}/{self._total}, {spent:.0f} s, about {left:.0f} s left] {engine.setup.label} "
            f"c={concurrency}: {row.ms_per_step:.3f} ms a step, {row.tokens_per_second:,.0f} tok/s{busy}",
            file=sys.stderr,
            flush=True,
        )

    def _write(self) -> None:
        args = self.args
        settings = {
            "command": command(),
            "acceptance": SYNTHETIC,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": args.output_tokens,
            "prompts": "random",
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": args.kernels,
            "device": str(self.device),
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 1),
            "processes": 1 if args.one_process else "one of each engine",
            "bandwidth_is": "given" if args.bandwidth else "that of a copy, reads and writes together",
            "partial": self._done < self._total,
            "definition": "tokens per second = acceptance length x requests / time of a step, prefill left out",
        }
        write_result(args.out, args.out.stem, settings, {"rows": list(self.rows.values())})


def main() -> None:
    args = _arguments()
    _measure_shapes(args)
    print(f"wrote {args.out}")


def _measure_shapes(args: argparse.Namespace) -> None:
    groups = plan(args.shapes, args.methods, args.k, equal=not args.no_equal)
    if not groups:
        raise PeagleError(f"nothing to measure: K of random drafters is 1, 3, 5 or 7, not {args.k}")
    session = Session(args, sum(map(len, groups)) * len(args.concurrency) * (args.repeats + 1))
    for setups in groups:
        if session.is_over:
            break
        with _engines(args, session, setups) as engines:
            _take_turns(session, engines)


@contextmanager
def _engines(args: argparse.Namespace, session: "Session", setups: Sequence[Setup]) -> Iterator[list[Engine]]:
    """The engines of a group, warm; their memory is free afterwards."""
    if args.one_process:
        target = dummy_target(setups[0].shape, session.dtype, session.device)
        drafters = {s.method: dummy_drafter(target, s.method) for s in setups if s.method != PLAIN}
        yield [Engine(s, WarmEngine(args, s, target, drafters.get(s.method))) for s in setups]
        del target, drafters
        free()
        return
    processes = [OwnEngine(own_engine, args, setup) for setup in setups]
    try:
        yield [Engine(setup, process.ready()) for setup, process in zip(setups, processes, strict=True)]
    finally:
        for process in processes:
            process.close()


def _take_turns(session: Session, engines: Sequence[Engine]) -> None:
    """Repeat by repeat every engine at every concurrency; after the first repeat profile each."""
    args = session.args
    turns = [(engine, concurrency) for concurrency in args.concurrency for engine in engines]
    for repeat in range(args.repeats):
        for engine, concurrency in turns:
            if session.is_over:
                return
            engine.windows.setdefault(concurrency, []).append(engine.measured.window(concurrency))
            session.measured(engine, concurrency)
        for engine, concurrency in turns if repeat == 0 else ():
            if session.is_over:
                return
            engine.profiles[concurrency] = engine.measured.profile(concurrency)
            session.measured(engine, concurrency)


def _row(engine: Engine, concurrency: int, bandwidth: float, dtype: torch.dtype) -> EngineSpeedRow:
    setup, windows = engine.setup, engine.windows[concurrency]
    ms = [window.ms_per_step for window in windows]
    whole, (profile, beside) = _sum(windows), engine.profiles.get(concurrency, (None, None))
    models = engine.measured.models()
    cost = step_cost(
        models.spec,
        models.drafter,
        setup.num_drafts,
        requests=concurrency,
        context=whole.context,
        dtype=dtype,
        int8_head=setup.draft_lm_head == "int8",
    )
    floor_ms = cost.floor_ms(bandwidth)
    on_gpu = profile is not None and profile.on_gpu
    busy_share = min(profile.busy_ms / beside.ms_per_step, 1.0) if profile and beside and on_gpu else None
    return EngineSpeedRow(
        shape=setup.shape,
        method=setup.method,
        num_speculative_tokens=setup.num_drafts,
        concurrency=concurrency,
        acceptance=setup.acceptance,
        acceptance_length=setup.acceptance_length,
        acceptance_length_measured=round(whole.acceptance_length, 4),
        ms_per_step=round(median(ms), 4),
        ms_per_step_lowest=round(min(ms), 4),
        ms_per_step_highest=round(max(ms), 4),
        tokens_per_second=round(1e3 * setup.acceptance_length * concurrency / median(ms), 1),
        repeats=len(ms),
        steps=whole.steps,
        mean_context=round(whole.context, 1),
        gpu_busy_ms=round(profile.busy_ms, 4) if profile and on_gpu else None,
        drafting_ms=round(profile.per_step(profile.drafting_us) / 1e3, 4) if profile and profile.drafting_us else None,
        gpu_busy_share=None if busy_share is None else round(busy_share, 4),
        kernels_per_step=round(profile.per_step(profile.kernels), 1) if profile and on_gpu else None,
        launches_per_step=round(profile.per_step(profile.launches), 1) if profile and on_gpu else None,
        graph_launches_per_step=round(profile.per_step(profile.graph_launches), 2) if profile and on_gpu else None,
        mbytes_per_step=round(cost.num_bytes / 1e6, 3),
        floor_ms=round(floor_ms, 4),
        times_floor=round(median(ms) / floor_ms, 2),
    )


def engine_config(args: argparse.Namespace, target: Target, tokens: int, **changes: Any) -> EngineConfig:
    """What an engine needs for `tokens` tokens after each prompt, at the highest concurrency."""
    length = PROMPT_TOKENS + tokens
    return EngineConfig(
        dtype=args.dtype,
        device=args.device,
        max_model_len=min(-(-length // _BLOCK_SIZE) * _BLOCK_SIZE, target.spec.max_position_embeddings),
        max_num_seqs=max(args.concurrency),
        block_size=_BLOCK_SIZE,
        num_kv_blocks=max(args.concurrency) * (-(-length // _BLOCK_SIZE) + 1),
        enable_prefix_caching=False,
        **changes,
    )


def dummy_target(shape: str, dtype: torch.dtype, device: torch.device) -> Target:
    """A target of that shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(shape)))
        target = load_target(folder, dtype=dtype, device=device, load_format="dummy")
    target.name = shape
    return target


@torch.no_grad()
def dummy_drafter(target: Target, method: str) -> Eagle3Drafter:
    """A random drafter on the target's device. Tables of the target's size are the target's own."""
    weight = target.model.embed_tokens.weight
    config = drafter_config(target.spec, method)
    with torch.device("meta"):
        drafter = drafter_for(config)
    drafter = drafter.to(weight.dtype).to_empty(device=weight.device).eval().requires_grad_(False)
    generator = torch.Generator(weight.device).manual_seed(0)
    for module in drafter.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0, generator=generator)
    size = config.draft_vocab_size
    drafter.d2t.copy_(offsets(torch.arange(size, device=weight.device) * config.vocab_size // size))
    drafter.embed_tokens = target.model.embed_tokens
    if size == config.vocab_size:
        drafter.lm_head = target.model.lm_head
    return drafter


def decode_params(tokens: int) -> SamplingParams:
    """Greedy, always to the full length."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _sum(windows: Sequence[Window]) -> Window:
    total = windows[0]
    for window in windows[1:]:
        total = total + window
    return total


def free() -> None:
    """Give back the memory of engines that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[P_EAGLE, EAGLE3, PLAIN])
    parser.add_argument("--k", nargs="+", type=int, default=[1, 3, 5, 7])
    parser.add_argument("--no-equal", action="store_true", help="leave out EAGLE-3 at P-EAGLE's acceptance lengths")
    parser.add_argument("--concurrency", nargs="+", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, help=f"per request; default {OUTPUT_TOKENS}")
    parser.add_argument("--profile-steps", type=int, default=24)
    parser.add_argument("--seconds", type=float, help="stop the grid after so long")
    parser.add_argument("--bandwidth", type=float, help="of the memory, GB/s (H200: 4800); default: that of a copy")
    parser.add_argument("--one-process", action="store_true", help="all engines in this process; so it is on a CPU")
    parser.add_argument("--kernels", default="auto", choices=["auto", "invariant"], help="as the engine's flag")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    cpu = resolve_engine_device(args.device).type == "cpu"
    args.one_process |= cpu
    args.shapes = args.shapes or (["tiny"] if cpu else list(REAL_SHAPES))
    args.concurrency = args.concurrency or ([1, 2] if cpu else list(CONCURRENCY))
    args.output_tokens = args.output_tokens or (64 if cpu else OUTPUT_TOKENS)
    return args


if __name__ == "__main__":
    run_script(main)
