"""Identical output whatever the engine does around a request: drafts, CUDA graphs, prefix cache, chunks, preemption.

Every setting runs the same prompts as a reference that does none of it. Rounding may tell them apart, for the sum in a
matmul depends on how many rows share it; so each first difference is judged: one pass over the tokens before it, apart
from any engine, says how far the two tokens were from each other. `explained` means less than the numerical noise, and
that is measured too: by how much the lead of the best token over the next one differs when the same rows are computed
in other numbers.

The file is written after every setting, marked partial until the last. Hardware: one CUDA GPU. On the CPU, without
graphs and with nothing in flight:

    python -m benchmarks.lossless_gpu
    python -m benchmarks.lossless_gpu --dtype float32 --out benchmarks/results/lossless-gpu-smollm2-135m-float32.json
    python -m benchmarks.lossless_gpu --device cpu --prompts 4 --tokens 16

With `--kernels invariant` every engine, the reference too, runs the form that promises the same bits.
"""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import HEAD, MODEL, RESULTS, Conversation, command, count, first_turns, run_script, say_progress
from benchmarks.tables import render_block
from peagle.bench.lossless import Judge, common_length
from peagle.bench.report import check_result_path, read_result, write_result
from peagle.config import EngineConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.models.target import Target, load_target
from peagle.sampling import SamplingParams

MAX_MODEL_LEN = 1024
LOSSLESS_PROMPTS = 50  # of 64: those of `benchmarks.lossless`; the rest share a long beginning

PLAIN = {"graphs": False, "enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 32768}
GRAPHS = {"graphs": True}
AHEAD = {"async_scheduling": True}
CACHE = {"enable_prefix_caching": True}
# Rows a step: most prompts are longer. Decoding rows come first, so with drafts there are more of them, or prompts
# would trickle in by 16 tokens a step: that took most of the time and said nothing more.
CHUNKS = {"max_num_batched_tokens": 96}
CHUNKS_BESIDE_3, CHUNKS_BESIDE_7 = {"max_num_batched_tokens": 192}, {"max_num_batched_tokens": 320}
SCARCE = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class Setting:
    """What is switched on. With the prefix cache the prompts run twice, and the second answers count."""

    name: str
    num_drafts: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    caches: Sequence[float] = ()  # KV cache as a share of what all prompts take; the first with which one is preempted
    share: float = 1.0  # of the prompts, the first ones
    needs_cuda: bool = False


REFERENCE = Setting("reference")
SETTINGS = (
    Setting("drafts", 3),
    Setting("drafts", 7),
    Setting("CUDA graphs", changes=GRAPHS, needs_cuda=True),
    Setting("prefix cache", changes=CACHE),
    Setting("prompts in chunks", changes=CHUNKS, share=0.5),
    Setting("preemption", caches=(1.0,), share=0.5),
    Setting("a step ahead", changes=AHEAD, needs_cuda=True),
    Setting("one at a time, graphs", changes={**GRAPHS, "max_num_seqs": 1}, share=0.125),
    Setting("all together", 3, {**GRAPHS, **AHEAD, **CACHE, **CHUNKS_BESIDE_3}, SCARCE, share=0.5),
    Setting("all together", 7, {**GRAPHS, **AHEAD, **CACHE, **CHUNKS_BESIDE_7}, SCARCE, share=0.5),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessSettingRow:
    """One engine setting against plain decoding (result names `lossless-gpu-*`).

    `first_divergence` is the smallest output index at which any two answers part. Two tokens at which they do are a
    `gap` apart; every one below `limit`, the numerical noise in the same units, makes the row `explained`.
    """

    dtype: str
    setting: str
    num_speculative_tokens: int
    temperature: float
    requests: int
    equal: int
    tokens_compared: int
    first_divergence: int | None
    largest_gap: float | None
    limit: float
    explained: bool
    preemptions: int
    cached_tokens: int
    acceptance_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceRow:
    """Where an answer parts from the reference's: both tokens, -1 for none, and how far the worse is from the best."""

    dtype: str
    setting: str
    num_speculative_tokens: int
    temperature: float
    request: int
    index: int
    tokens: Sequence[int]
    gap: float | None
    explained: bool


@dataclass(frozen=True)
class Run:
    """The answers of one setting at one temperature, and what happened on the way."""

    outputs: list[RequestOutput]
    preemptions: int
    cached_tokens: int
    acceptance_length: float


class Lossless:
    """One model in one precision: runs the settings and judges where they part from the reference."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        self._args, self._dtype = args, dtype
        self.device = resolve_engine_device(args.device)
        precision = resolve_dtype(dtype, self.device)
        self._target: Target = load_target(args.model, dtype=precision, device=self.device)
        self.judge = Judge(self._target, self.device)
        model = self._target.model
        self._drafter: Eagle3Drafter = load_drafter(args.head, model, dtype=precision, device=self.device)
        self._conversations = conversations(args.prompts)
        self._prompt_lengths: list[int] = []  # known once the reference has run

    def run(self, setting: Setting) -> list[Run]:
        """The setting's run at each temperature, in one engine."""
        shares = setting.caches or (None,)
        for share in shares:
            llm, runs = self._engine(setting, share), []
            for temperature in self._args.temperature:
                runs.append(self._run(llm, setting, temperature))
                if share != shares[-1] and not runs[-1].preemptions:
                    break  # another size has to be tried: it says so at the first temperature
            else:
                break
        if not self._prompt_lengths:
            self._prompt_lengths = [len(output.prompt_token_ids) for output in runs[0].outputs]
        return runs

    def compare(
        self, setting: Setting, temperature: float, run: Run, reference: Run, noise: float
    ) -> tuple[LosslessSettingRow, list[DivergenceRow]]:
        """How much of a run equals the reference, and every first difference, judged."""
        limit = noise / (temperature or 1.0)
        compared, found = 0, []
        for number, (output, expected) in enumerate(zip(run.outputs, reference.outputs[: len(run.outputs)])):
            index = common_length(output.token_ids, expected.token_ids)
            if output.token_ids == expected.token_ids:
                compared += index
                continue
            compared += index + 1
            tokens = [(o.token_ids[index : index + 1] or [-1])[0] for o in (expected, output)]
            gap = self.judge.gap([*expected.prompt_token_ids, *expected.token_ids[:index]], tokens, temperature, number)
            found.append(
                DivergenceRow(
                    dtype=self._dtype,
                    setting=setting.name,
                    num_speculative_tokens=setting.num_drafts,
                    temperature=temperature,
                    request=number,
                    index=index,
                    tokens=tokens,
                    gap=gap,
                    explained=gap is not None and gap < limit,
                )
            )
        gaps = [d.gap for d in found if d.gap is not None]
        row = LosslessSettingRow(
            dtype=self._dtype,
            setting=setting.name,
            num_speculative_tokens=setting.num_drafts,
            temperature=temperature,
            requests=len(run.outputs),
            equal=len(run.outputs) - len(found),
            tokens_compared=compared,
            first_divergence=min((d.index for d in found), default=None),
            largest_gap=max(gaps, default=None),
            limit=limit,
            explained=all(d.explained for d in found),
            preemptions=run.preemptions,
            cached_tokens=run.cached_tokens,
            acceptance_length=run.acceptance_length,
        )
        return row, found

    @property
    def _block_size(self) -> int:
        return 16 if self.device.type == "cuda" else 4  # a short trial is to fill a few blocks too

    def _engine(self, setting: Setting, share: float | None) -> LLM:
        changes = {"max_num_seqs": 64, **PLAIN, **setting.changes}
        blocks = len(self._conversations) * MAX_MODEL_LEN // self._block_size
        if share is not None:
            blocks = self._scarce_blocks(setting, share)
        config = EngineConfig(
            dtype=self._dtype,
            device=str(self.device),
            max_model_len=min(MAX_MODEL_LEN, blocks * self._block_size),
            block_size=self._block_size,
            num_kv_blocks=blocks,
            kernels=self._args.kernels,
            **changes,
        )
        drafter = self._drafter if setting.num_drafts else None
        return LLM.from_parts(self._target, drafter, setting.num_drafts, config)

    def _scarce_blocks(self, setting: Setting, share: float) -> int:
        """A share of the blocks with which all prompts can begin and answers can hardly grow; enough for any one."""
        reach = 2 * setting.num_drafts + 1
        lengths = self._prompt_lengths[: self._count(setting)]
        begin = sum(1 - (length + reach) // -self._block_size for length in lengths)
        longest = max(lengths) + self._args.tokens + reach
        return max(round(share * begin), -(longest // -self._block_size))

    def _count(self, setting: Setting) -> int:
        return max(round(len(self._conversations) * setting.share), min(4, len(self._conversations)))

    def _run(self, llm: LLM, setting: Setting, temperature: float) -> Run:
        asked = self._conversations[: self._count(setting)]
        params = [
            SamplingParams(max_tokens=self._args.tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(len(asked))
        ]
        preempted, cached = llm.core.scheduler.num_preemptions, 0
        outputs = llm.chat(asked, params)
        if setting.changes.get("enable_prefix_caching"):
            cached = sum(cached_tokens(llm, output.prompt_token_ids) for output in outputs)
            outputs = llm.chat(asked, params)
        preempted = llm.core.scheduler.num_preemptions - preempted
        emitted = sum(len(o.token_ids) - 1 for o in outputs)
        rounds = sum(len(o.rounds) for o in outputs)
        return Run(outputs, preempted, cached, emitted / rounds if rounds else 1.0)


def conversations(count: int) -> list[Conversation]:
    """Prompts of `benchmarks.lossless`, and a few that begin with the same examples; in an order of their own."""
    sharing = min(count, max(2, count * (64 - LOSSLESS_PROMPTS) // 64))
    half = (count - sharing) // 2
    examples = first_turns("gsm8k", 3 + sharing)
    system = "Problems like these come up:\n\n" + "\n\n".join(turns[-1]["content"] for turns in examples[:3])
    asked = [[{"role": "system", "content": system}, *turns] for turns in examples[3:]]
    others = first_turns("mt_bench", half) + first_turns("humaneval", count - sharing - half)
    random.Random(0).shuffle(mixed := [*others, *asked])
    return mixed


def cached_tokens(llm: LLM, token_ids: Sequence[int]) -> int:
    """How much of a prompt the engine would find in its prefix cache."""
    pool = llm.core.scheduler.pool
    pool.release(blocks := pool.match(token_ids))
    return len(blocks) * pool.block_size


def not_exercised(rows: Sequence[LosslessSettingRow]) -> list[str]:
    """The settings that say nothing, for what they switch on did not happen."""
    preempting = {s.name for s in SETTINGS if s.caches}
    caching = {s.name for s in SETTINGS if s.changes.get("enable_prefix_caching")}
    silent = [f"{r.setting} (nobody preempted)" for r in rows if r.setting in preempting and not r.preemptions]
    silent += [f"{r.setting} (nothing cached)" for r in rows if r.setting in caching and not r.cached_tokens]
    return list(dict.fromkeys(silent))


@dataclass
class Results:
    """What was found so far."""

    rows: list[LosslessSettingRow] = field(default_factory=list)
    divergences: list[DivergenceRow] = field(default_factory=list)
    noise: dict[str, dict[str, float]] = field(default_factory=dict)


def chosen(args: argparse.Namespace) -> list[Setting]:
    """The settings asked for that this device has."""
    on_cuda = resolve_engine_device(args.device).type == "cuda"
    return [setting for setting in SETTINGS if setting.name in args.settings and (on_cuda or not setting.needs_cuda)]


def measure(args: argparse.Namespace, dtype: str, results: Results) -> Iterator[str]:
    """Add a row for each setting and temperature, and every divergence; yields what was done each time."""
    bench = Lossless(args, dtype)
    references = bench.run(REFERENCE)
    yield f"{dtype}: reference"
    largest, mean = bench.judge.noise(references[0].outputs)
    results.noise[dtype] = {"largest": largest, "mean": mean}
    yield f"{dtype}: the lead of the best token differs by up to {largest:.3g}, {mean:.3g} on average"
    for setting in chosen(args):
        runs = bench.run(setting)
        for temperature, run, reference in zip(args.temperature, runs, references, strict=True):
            row, found = bench.compare(setting, temperature, run, reference, largest)
            results.rows.append(row)
            results.divergences += found
        yield f"{dtype}: {setting.name}, K={setting.num_drafts}"


def main() -> None:
    args = _arguments()
    begun = last = time.perf_counter()
    results, total = Results(), len(args.dtype) * (2 + len(chosen(args)))
    steps = (said for dtype in args.dtype for said in measure(args, dtype, results))
    for done, said in enumerate(steps, start=1):
        now = time.perf_counter()
        say_progress(done, total, begun, f"{said}: {now - last:.1f} s")
        last = now
        _write(args, results, now - begun, partial=done < total)
    print(render_block("lossless-gpu-", read_result(args.out)))
    print(f"wrote {args.out} after {time.perf_counter() - begun:.0f} s")
    if silent := not_exercised(results.rows):
        raise SystemExit(f"not exercised: {', '.join(silent)}; ask for more --tokens or --prompts")
    if not all(row.explained for row in results.rows):
        raise SystemExit("some answers differ by more than numerical noise")


def _write(args: argparse.Namespace, results: Results, seconds: float, *, partial: bool) -> None:
    settings = {
        "command": command(),
        "target": args.model,
        "head": args.head.name,
        "device": args.device,
        "kernels": args.kernels,
        "prompts": args.prompts,
        "max_tokens": args.tokens,
        "compared_with": "plain decoding, 64 at once, whole prompts, no graphs, no prefix cache, nothing in flight",
        "noise": results.noise,
        "seconds": round(seconds, 1),
        "partial": partial,
    }
    write_result(
        args.out, args.out.stem, settings, {"rows": results.rows, "divergences": results.divergences}
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.8])
    names = list(dict.fromkeys(setting.name for setting in SETTINGS))
    parser.add_argument("--settings", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--prompts", type=count, default=64)
    parser.add_argument("--tokens", type=count, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto", choices=["auto", "invariant"])
    parser.add_argument("--out", type=Path, default=RESULTS / "lossless-gpu-smollm2-135m.json")
    args = parser.parse_args()
    check_result_path(args.out)
    return args


if __name__ == "__main__":
    run_script(main)
