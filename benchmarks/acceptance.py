"""Acceptance of heads on prompt sets, measured by the engine that serves them: P-EAGLE and EAGLE-3 heads alike.

MT-Bench (80 first turns), HumanEval (164), GSM8K (1,319) and MBPP (500), or any prompts file. All prompts of all sets
run as one batch. Hardware: any; one K over 4 x 80 prompts takes seconds on a large GPU. On 2 CPU cores use --limit 10
--sets mt_bench --max-num-seqs 16.

For one head, with intervals and its card, see `peagle eval`, which counts with the same code.

    python -m benchmarks.acceptance --out benchmarks/results/acceptance-smollm2-135m.json
    python -m benchmarks.acceptance --model org/model --head runs/a/head --head runs/b/head \
        --sets mt_bench humaneval gsm8k mbpp --limit 80 --temperature 0 --out acceptance-mine.json
"""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import HEAD, MODEL, RESULTS, SUITES, Conversation, command, first_turns, run_script
from peagle.bench.acceptance import SuiteAcceptance, SuiteAnswers, Suites
from peagle.bench.report import write_result
from peagle.config import EngineConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.models.target import Target, load_target

_MOST_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceRow:
    """Acceptance of one prompt suite at one K and temperature (result names `acceptance-*`).

    The shares are unconditional: rounds in which position j was accepted / rounds. `..._without_loops` leaves out the
    rounds inside text that repeats itself, which any drafter guesses right. `head` is named where there are several.
    """

    suite: str
    num_speculative_tokens: int
    temperature: float
    acceptance_length: float
    acceptance_length_without_loops: float
    accepted_share_per_position: Sequence[float]
    accepted_share_per_position_without_loops: Sequence[float]
    looping_token_share: float
    prompts: int
    rounds: int
    tokens: int
    head: str | None = None


def main() -> None:
    args = _arguments()
    device = resolve_engine_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    target = load_target(args.model, dtype=dtype, device=device)
    suites = {Path(name).stem: first_turns(name, args.limit) for name in args.sets}
    # All before the first engine: on a CPU it packs the target's tables, which heads may want to share.
    heads = {
        _label(path): load_drafter(path, target.model, dtype=dtype, device=device, target_name=target.name)
        for path in args.head
    }
    rows = [
        row
        for name, drafter in heads.items()
        for k in args.k
        for row in _measure(args, target, drafter, k, suites, name if len(heads) > 1 else None)
    ]
    settings = {
        "command": command(),
        "target": target.name + (" (Q4_1 weights, dequantised)" if args.model == MODEL else ""),
        "head": ", ".join(heads),
        "dtype": args.dtype,
        "device": args.device,
        "max_tokens": args.max_tokens,
        "batch": args.max_num_seqs,
        "definition": "acceptance length = 1 + accepted drafts / rounds",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _measure(
    args: argparse.Namespace,
    target: Target,
    drafter: Eagle3Drafter,
    k: int,
    suites: dict[str, list[Conversation]],
    head: str | None,
) -> Iterator[AcceptanceRow]:
    """One head at one K: a row per temperature and suite."""
    # As many requests at once as there are, unless memory holds fewer: the engine then lets the others wait.
    at_once = min(args.max_num_seqs, sum(map(len, suites.values())))
    config = EngineConfig(max_num_seqs=at_once, max_model_len=min(2048, target.spec.max_position_embeddings))
    llm = LLM.from_parts(target, drafter, k, config)
    for temperature in args.temperature:
        start = time.perf_counter()
        results = measure_acceptance(llm, suites, max_tokens=args.max_tokens, temperature=temperature)
        seconds = time.perf_counter() - start
        for suite, result in results.items():
            row = acceptance_row(result, suite, k, temperature, head)
            print(
                f"{'' if head is None else head + ' '}{suite} K={k} T={temperature:g}: AL {row.acceptance_length:.3f}, "
                f"without looping text {row.acceptance_length_without_loops:.3f}, "
                f"per position {row.accepted_share_per_position}",
                flush=True,
            )
            yield row
        print(f"{at_once} requests at a time, {seconds:.1f} s for all sets", flush=True)
    del llm
    gc.collect()  # the next engine sizes its cache by the memory that is free
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_acceptance(llm: LLM, suites: Suites, *, max_tokens: int, temperature: float) -> dict[str, SuiteAcceptance]:
    """Answer the conversations of all suites as one batch with drafts on, and count per suite what was accepted."""
    answers = SuiteAnswers(suites)
    answers.run(llm, max_tokens=max_tokens, temperature=temperature)
    return answers.acceptance(llm.num_speculative_tokens)


def acceptance_row(
    result: SuiteAcceptance, suite: str, num_drafts: int, temperature: float, head: str | None = None
) -> AcceptanceRow:
    """A suite as one row; `head` names the head where a file holds several."""
    return AcceptanceRow(
        head=head,
        suite=suite,
        num_speculative_tokens=num_drafts,
        temperature=temperature,
        acceptance_length=round(result.every.acceptance_length, 4),
        acceptance_length_without_loops=round(result.fresh.acceptance_length, 4),
        accepted_share_per_position=[round(s, 4) for s in result.every.acceptance_per_position],
        accepted_share_per_position_without_loops=[round(s, 4) for s in result.fresh.acceptance_per_position],
        looping_token_share=round(result.looping_tokens / max(result.tokens, 1), 4),
        prompts=result.prompts,
        rounds=result.every.num_rounds,
        tokens=result.tokens,
    )


def _label(head: Path) -> str:
    """Name of a head's folder; with its parent's for the folders of a training run, which are all called alike."""
    head = head.resolve()
    return f"{head.parent.name}/{head.name}" if head.name in ("head", "best") else head.name


def _set_name(text: str) -> str:
    """A prompt set's name (mt-bench and mt_bench are the same), or the path of a prompts file."""
    name = text.replace("-", "_")
    if name in SUITES or Path(text).is_file():
        return name if name in SUITES else text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a file nor one of {', '.join(SUITES)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", type=Path, action="append", help="a head's folder; repeat for several heads")
    parser.add_argument("--sets", "--suite", nargs="+", type=_set_name, default=["mt_bench", "humaneval"])
    parser.add_argument("--k", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="prompts per set, from the top")
    parser.add_argument("--max-num-seqs", type=int, default=_MOST_AT_ONCE)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "acceptance-smollm2-135m.json")
    args = parser.parse_args()
    args.head = args.head or [HEAD]
    return args


if __name__ == "__main__":
    run_script(main)
