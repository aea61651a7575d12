"""Tokens per second with and without P-EAGLE on the CPU: same process, same prompts, alternating which goes first.

Hardware: 2 cores; about ten minutes. Run it on an otherwise idle machine.

    python -m benchmarks.cpu_speed
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import HEAD, MODEL, RESULTS, command, first_turns, run_script
from peagle.acceptance import AcceptanceStats
from peagle.bench.report import write_result
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """Speed with and without drafts on the same prompts in one run (result names `cpu-speed-*`)."""

    num_speculative_tokens: int
    tokens_per_second_plain: float
    tokens_per_second: float
    ratio: float
    acceptance_length: float
    prompts: int
    tokens: int


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    conversations = first_turns("mt_bench", args.limit // 2) + first_turns("humaneval", args.limit - args.limit // 2)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    rows = [_measure(args, k, conversations, params) for k in args.k]
    settings = {
        "command": command(),
        "target": f"{args.model} (Q4_1 weights, dequantised)",
        "head": args.head.name,
        "dtype": args.dtype,
        "threads": args.threads,
        "max_tokens": args.max_tokens,
        "batch": 1,
        "prompts": f"first {args.limit // 2} of MT-Bench, first {args.limit - args.limit // 2} of HumanEval",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _measure(
    args: argparse.Namespace, k: int, conversations: list[list[dict[str, str]]], params: SamplingParams
) -> SpeedRow:
    llm = LLM(
        args.model,
        speculative_config={"model": str(args.head), "num_speculative_tokens": k},
        dtype=args.dtype,
        device="cpu",
        max_num_seqs=1,
        max_model_len=1024,
    )
    llm.chat([conversations[0]], SamplingParams(max_tokens=8, temperature=0.0))  # first-call costs
    seconds = {True: 0.0, False: 0.0}
    stats, tokens = AcceptanceStats(), 0
    for i, conversation in enumerate(conversations):
        outputs: dict[bool, RequestOutput] = {}
        for speculate in (True, False) if i % 2 else (False, True):
            llm.set_speculation(speculate)
            outputs[speculate] = llm.chat([conversation], params)[0]
            seconds[speculate] += outputs[speculate].seconds
        if args.dtype == "float32" and outputs[True].token_ids != outputs[False].token_ids:
            print(f"prompt {i}: outputs differ")
        stats.add(outputs[True].stats)
        tokens += len(outputs[True].token_ids)
    row = SpeedRow(
        num_speculative_tokens=k,
        tokens_per_second_plain=round(tokens / seconds[False], 2),
        tokens_per_second=round(tokens / seconds[True], 2),
        ratio=round(seconds[False] / seconds[True], 3),
        acceptance_length=round(stats.acceptance_length, 4),
        prompts=len(conversations),
        tokens=tokens,
    )
    speeds = f"{row.tokens_per_second_plain} -> {row.tokens_per_second} tok/s"
    print(f"K={k}: {speeds}, x{row.ratio}, AL {row.acceptance_length}")
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--k", nargs="+", type=int, default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--limit", type=int, default=10, help="prompts, half from each suite")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-speed-smollm2-135m.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
