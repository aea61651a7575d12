"""The table of the P-EAGLE announcement on this machine: gpt-oss-20b's sizes, SYNTHETIC acceptance.

Weights are random, and how many drafts are kept is drawn by chance with the announced acceptance lengths, so what is
compared is the price of drafting and verifying, not a head. Where the announcement gives no length, it is derived
(`length_of`) and marked. The lengths drawn vary as little as their mean allows, as vLLM's synthetic mode has it. Load:
a closed loop of random prompts. Decoding without drafts is the same on every prompt set, so it is measured once per
concurrency and repeat.

Hardware: one GPU. What is most worth knowing, c = 1 and 64, comes first, and --seconds ends it where it is. --resume
goes on.

    python -m benchmarks.announcement --out benchmarks/results/announcement-gpt-oss-20b-h200.json --seconds 540
    python -m benchmarks.announcement --shape tiny --device cpu --concurrency 1 2 --repeats 1 --out FILE  # a try
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path

from rich.console import Console

from benchmarks.common import command, run_script
from benchmarks.engine_speed import dummy_drafter, dummy_target
from benchmarks.speed_shapes import PROMPT_TOKENS, SHAPES, random_prompts
from peagle.bench.announcement import ANNOUNCED
from peagle.bench.closed_loop import Run
from peagle.bench.sweep import Sweep, check_out
from peagle.bench.sweep_plan import Setup, setups_of
from peagle.bench.sweep_settings import METHODS, PLAIN, SweepConfig
from peagle.bench.sweep_source import EngineSource
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.errors import PeagleError
from peagle.kernels.synthetic_acceptance import synthetic_profile

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (3, 5, 7)
DEPTH = max(DRAFTS)
_ORDER = (1, 64, 8, 16, 32, 2, 4)  # what the announcement gives figures of first


@dataclass(slots=True)
class _OnePlain:
    """Engines whose run without drafts counts for all prompt sets: nothing about it depends on them."""

    engines: EngineSource
    _plain: dict[int, Run] = field(default_factory=dict)  # concurrency -> its newest run

    def warm_up(self, setups: Sequence[Setup]) -> Iterator[str]:
        yield from self.engines.warm_up(setups)

    def run(self, dataset: str, setup: Setup, concurrency: int) -> Run:
        if setup.method != PLAIN:
            return self.engines.run(dataset, setup, concurrency)
        if dataset == next(iter(ANNOUNCED)) or concurrency not in self._plain:
            self._plain[concurrency] = self.engines.run(dataset, setup, concurrency)
        return self._plain[concurrency]


def length_of(dataset: str, method: str, num_drafts: int) -> float:
    """The announced acceptance length, or, where it is not given, the one that follows from what is given: ASSUMED.

    A head keeps draft i with a chance that falls by the same factor from draft to draft. HumanEval gives the lengths of
    two K, hence each method's factor; the other sets give that of K = 7, hence their first chance.
    """
    lengths = ANNOUNCED[dataset].acceptance_length
    if (method, num_drafts) in lengths:
        return lengths[method, num_drafts]
    known = ANNOUNCED["humaneval"].acceptance_length
    longest = known[method, DEPTH]
    # The faster chances fall, the more of a given length comes from the first drafts.
    factor = _bisect(lambda f: _length(_rates(longest, f), 3) <= known[method, 3], 0.85, 1.0)
    return _length(_rates(lengths[method, DEPTH], factor), num_drafts)


def _length(rates: Sequence[float], num_drafts: int) -> float:
    """1 + the shares of rounds that keep draft 1, 2, ..."""
    return 1.0 + sum(accumulate(rates[:num_drafts], mul))


def _rates(length: float, factor: float) -> tuple[float, ...]:
    """Chances a, a f, a f f, ..., at most 1, whose acceptance length is the given one."""

    def chances(first: float) -> tuple[float, ...]:
        return tuple(min(first * factor**draft, 1.0) for draft in range(DEPTH))

    return chances(_bisect(lambda first: _length(chances(first), DEPTH) >= length, 0.0, 1.0))


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number in the range from which on `holds` does."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def rates_of(dataset: str, setup: Setup, depth: int = DEPTH) -> tuple[float, ...]:
    """Conditional rates of `depth` drafts with the acceptance length of a prompt set, a method and a K."""
    rates = synthetic_profile(length_of(dataset, setup.method, setup.num_drafts), setup.num_drafts)
    return rates + (0.0,) * (depth - len(rates))


def main(arguments: Sequence[str] | None = None) -> None:
    args, begin = _arguments(arguments), time.perf_counter()
    check_out(args.out, resume=args.resume)
    if args.shape not in SHAPES:
        raise PeagleError(f"shape {args.shape} is not known: choose among {', '.join(SHAPES)}")
    config = SweepConfig(
        methods=tuple(args.methods),
        k=tuple(args.k),
        concurrency=tuple(args.concurrency),
        num_prompts=max(args.prompts_per_client * max(args.concurrency), args.min_prompts),
        prompts_per_client=args.prompts_per_client,
        min_prompts=args.min_prompts,
        max_tokens=args.output_tokens,
        ignore_eos=True,
        repeats=args.repeats,
        seconds=args.seconds,
        prompt_graphs=not args.no_prompt_graphs,
        dtype=args.dtype,
        device=args.device,
    )
    device = resolve_engine_device(args.device)
    target = dummy_target(args.shape, resolve_dtype(args.dtype, device), device)
    drafters = {method: dummy_drafter(target, method) for method in args.methods if method != PLAIN}
    prompts = random_prompts(target.spec.vocab_size, config.num_prompts)
    sets = dict.fromkeys(ANNOUNCED, prompts)
    engines = EngineSource(
        target, drafters, sets, config, plain=PLAIN in args.methods, pack=False, rates=rates_of
    )  # fmt: skip
    lengths = {
        name: {s.label: round(length_of(name, s.method, s.num_drafts), 3) for s in setups_of(list(drafters), args.k)}
        for name in sets
    }
    setting = {
        "command": command(),
        "target": f"{args.shape}, random weights",
        "acceptance": "SYNTHETIC: drawn by chance with the lengths below, as the announcement has them or derived",
        "acceptance_lengths": lengths,
        "datasets": {name: {"prompts": f"random, {PROMPT_TOKENS} tokens"} for name in sets},
    }
    sweep = Sweep(
        _OnePlain(engines), config, args.out, setting, Console(stderr=True), begin=begin, resume=args.resume,
        synthetic=True,
    )  # fmt: skip
    sweep.measure(list(sets), setups_of(args.methods, args.k))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="gpt-oss-20b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--k", nargs="+", type=int, choices=range(1, max(DRAFTS) + 1), default=list(DRAFTS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(_ORDER), help=f"of {CONCURRENCY} or others")
    parser.add_argument("--prompts-per-client", type=int, default=2)
    parser.add_argument("--min-prompts", type=int, default=8, help="of a cell; 8 or more have intervals")
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="begin no run that would not end within this time")
    parser.add_argument("--no-prompt-graphs", action="store_true", help="passes over prompts kernel by kernel")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script(main)
