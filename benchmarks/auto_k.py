"""K chosen by the engine against every fixed K and against no speculation, for heads that are good, poor and useless.

Random weights of the shapes named; a head is a chance by which each draft is kept once those before it were
(benchmarks/speed_shapes.py), the same for every K. What is timed is a whole batch of requests, prompts and the last
stragglers included, by the engine's own code that chooses K, from costs it measured at its start. "auto, first batch"
begins with nothing known of the head; "auto" is the batch after it. "none" is an engine without a head; either has a
process of its own, as a server has. All of them take turns, repeat by repeat. Hardware: one GPU.

    python -m benchmarks.auto_k --out benchmarks/results/auto-k-h200.json
    python -m benchmarks.auto_k --device cpu --out /tmp/smoke.json      # does the script itself work? a tiny shape
"""

import argparse
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, amount, check_out, command, count, run_script, say_progress
from benchmarks.engine_process import OwnProcess
from benchmarks.engine_speed import decode_params, dummy_drafter, dummy_target, engine_config
from benchmarks.speed_shapes import (
    CONCURRENCY,
    P_EAGLE,
    PLAIN,
    PROMPT_TOKENS,
    SHAPES,
    SYNTHETIC,
    geometric_rate,
    random_prompts,
)
from peagle.bench.report import write_result
from peagle.bench.stepping import Decoding
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.engine.costs import measure_costs
from peagle.engine.engine import LLM
from peagle.engine.speculation import CostTable, FixedK, KChooser, draft_counts
from peagle.errors import PeagleError

AUTO, FIRST = "auto", "auto, first batch"
_MOST = 7


class Counted(KChooser):
    """The engine's chooser, and how often it chose what."""

    def __init__(self, costs: CostTable) -> None:
        super().__init__(costs)
        self.chosen: list[int] = []

    def choose(self, num_running: int, fresh: bool = True) -> int:
        self.chosen.append(super().choose(num_running, fresh))
        return self.chosen[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoRow:
    """One way to choose K. `acceptance_length` is the head's at K = 7; `times_plain` is tokens a second over that of
    the engine without a head in the same repeat, median of the repeats; `mean_drafts` the mean K over the steps."""

    shape: str
    acceptance_length: float
    concurrency: int
    policy: str
    tokens_per_second: float
    times_plain: float
    times_plain_lowest: float
    mean_drafts: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch."""

    tokens_per_second: float
    mean_drafts: float


Key = tuple[str, float, int, str]  # shape, head, concurrency, policy


class Bench:
    """All batches of a run, and the file they go to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, resolve_engine_device(args.device)
        self.found: dict[Key, list[Timed]] = {}
        self.costs: dict[str, dict[str, float]] = {}
        self._begun, self._done, self._partial = time.perf_counter(), 0, True

    def run(self) -> None:
        """Every shape, each until its time is up."""
        args, count = self.args, self.args.repeats * len(self.args.shapes)
        for shape in args.shapes:
            with closing(Shape(args, shape)) as one:
                self._measure(shape, one, count)

    def _measure(self, name: str, shape: "Shape", count: int) -> None:
        args, begun = self.args, time.perf_counter()
        self.costs[name] = {f"{n} requests, K={k}": round(1e3 * s, 4) for (n, k), s in shape.costs.items()}
        print(f"[{self._spent:.0f} s] {name}: costs measured in {shape.seconds:.1f} s", file=sys.stderr, flush=True)
        for repeat in range(args.repeats):
            for head in args.heads:
                for concurrency in args.concurrency:
                    for policy, timed in shape.batches(head, concurrency).items():
                        self.found.setdefault((name, head, concurrency, policy), []).append(timed)
            self._done += 1
            is_over = args.seconds is not None and time.perf_counter() - begun > args.seconds
            self._partial = name != args.shapes[-1] or not (is_over or repeat + 1 == args.repeats)
            self.write()
            say_progress(self._done, count, self._begun, f"{name}: repeat {repeat + 1} of {args.repeats}")
            if is_over:
                break

    @property
    def _spent(self) -> float:
        return time.perf_counter() - self._begun

    def write(self) -> None:
        """The file anew."""
        settings = {
            "command": command(),
            "acceptance": SYNTHETIC,
            "dtype": self.args.dtype,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": self.args.output_tokens,
            "num_drafts": "at most 7",
            "costs_ms": self.costs,
            "partial": self._partial,
        }
        write_result(self.args.out, self.args.out.stem, settings, {"rows": self.rows()})

    def rows(self) -> list[AutoRow]:
        """What was found so far."""
        rows = []
        for (shape, head, concurrency, policy), batches in self.found.items():
            plain = self.found[shape, head, concurrency, PLAIN]
            times = [one.tokens_per_second / other.tokens_per_second for one, other in zip(batches, plain, strict=True)]
            rows.append(
                AutoRow(
                    shape=shape,
                    acceptance_length=head,
                    concurrency=concurrency,
                    policy=policy,
                    tokens_per_second=round(median(batch.tokens_per_second for batch in batches), 1),
                    times_plain=round(median(times), 4),
                    times_plain_lowest=round(min(times), 4),
                    mean_drafts=round(median(batch.mean_drafts for batch in batches), 2),
                    repeats=len(batches),
                )
            )
        return rows


class Shape:
    """A shape's two engines, with a head and without, each in its process until `close`, and the costs of steps."""

    def __init__(self, args: argparse.Namespace, shape: str) -> None:
        with ExitStack() as started:
            self._plain = started.enter_context(closing(OwnProcess(f"{shape}, plain", Batches, args, shape, False)))
            self._plain.ready()  # first: it must not run while the other measures its costs
            self._headed = started.enter_context(closing(OwnProcess(f"{shape}, head", Batches, args, shape, True)))
            self.costs, self.seconds = self._headed.ready().call("costs")
            self.close = started.pop_all().close

    def batches(self, head: float, concurrency: int) -> dict[str, Timed]:
        """A batch of each policy, by a head of this acceptance length at K = 7."""
        timed = {PLAIN: self._plain.call("fixed", 0, 1.0, concurrency)}
        for k in draft_counts(_MOST)[1:]:
            timed[f"K={k}"] = self._headed.call("fixed", k, head, concurrency)
        for name in (FIRST, AUTO):
            timed[name] = self._headed.call("chosen", head, concurrency, name == FIRST)
        return timed


class Batches:
    """An engine with a head or without, everything captured, that answers batches of requests."""

    def __init__(self, args: argparse.Namespace, shape: str, has_head: bool) -> None:
        self._tokens, device = args.output_tokens, resolve_engine_device(args.device)
        target = dummy_target(shape, resolve_dtype(args.dtype, device), device)
        most = _MOST if has_head else 0
        config = engine_config(args, target, self._tokens + 2 * _MOST + 1)
        self._prompts = random_prompts(target.spec.vocab_size, max(args.concurrency))
        drafter, rates = (dummy_drafter(target, P_EAGLE), (0.5,) * most) if has_head else (None, None)
        self._llm = LLM.from_parts(target, drafter, most, config, pack=False, synthetic_rates=rates)
        begun = time.perf_counter()
        self._costs = measure_costs(self._llm.core, draft_counts(most)) if has_head else {}
        self._seconds = time.perf_counter() - begun
        self._chooser: Counted | None = None
        for _ in chain(self._llm.core.warm_up(draft_counts(most)), self._llm.core.warm_up_prompts()):
            pass  # what is captured in a timed batch would count
        for concurrency in args.concurrency:
            for k in draft_counts(most):
                self.fixed(k, 3.4, concurrency)

    def costs(self) -> tuple[CostTable, float]:
        """What steps cost, and how long it took to know."""
        return self._costs, self._seconds

    def fixed(self, num_drafts: int, head: float, concurrency: int) -> Timed:
        """A batch with the same K in every step."""
        self._llm.core.policy = FixedK(num_drafts)
        return Timed(self._batch(head, concurrency), num_drafts)

    def chosen(self, head: float, concurrency: int, is_first: bool) -> Timed:
        """A batch whose K is chosen: by what is known of the head, or `is_first`, by one that knows nothing yet."""
        if is_first or self._chooser is None:
            self._chooser = Counted(self._costs)
        self._llm.core.policy = self._chooser
        self._chooser.chosen.clear()
        speed = self._batch(head, concurrency)
        return Timed(speed, sum(self._chooser.chosen) / len(self._chooser.chosen))

    def _batch(self, head: float, concurrency: int) -> float:
        """Tokens a second of so many requests, from the first prompt to the last token."""
        if self._llm.core.synthetic is not None:
            self._llm.core.synthetic.change((geometric_rate(head, _MOST),) * _MOST)
        begun = time.perf_counter()
        Decoding(self._llm, self._prompts[:concurrency], decode_params(self._tokens)).drain()
        return concurrency * self._tokens / (time.perf_counter() - begun)


def main() -> None:
    args = _arguments()
    Bench(args).run()
    print(f"wrote {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "auto-k-h200.json")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--heads", nargs="+", type=amount, default=[3.4, 1.6, 1.02], help="acceptance lengths at K = 7")
    parser.add_argument("--concurrency", nargs="+", type=count)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--output-tokens", type=count)
    parser.add_argument("--seconds", type=amount, help="for each shape: no further repeat after so long")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    cpu = resolve_engine_device(args.device).type == "cpu"
    check_out(args.out, cpu=cpu)
    outside = [length for length in args.heads if not 1 <= length <= 1 + _MOST]
    if outside:
        raise PeagleError(f"--heads has {outside[0]:g}: with {_MOST} drafts a round, lengths are in 1 .. {1 + _MOST}")
    args.shapes = args.shapes or (["tiny"] if cpu else ["smollm2-135m", "qwen2.5-coder-0.5b"])
    args.concurrency = args.concurrency or ([1, 2] if cpu else list(CONCURRENCY))
    args.output_tokens = args.output_tokens or (64 if cpu else 512)
    return args


if __name__ == "__main__":
    run_script(main)
