"""Acceptance of a head on MT-Bench (80 first turns) and HumanEval (164), measured by the engine that serves it.

Hardware: any; on one H200 the whole grid takes about two minutes. On 2 CPU cores use --limit 10 --suite mt_bench.

    python -m benchmarks.acceptance --out benchmarks/results/acceptance-smollm2-135m.json
"""

import argparse
from pathlib import Path

from benchmarks.common import HEAD, MODEL, RESULTS, SUITES, command, first_turns
from peagle.bench.acceptance import measure_acceptance
from peagle.bench.report import AcceptanceRow, write_result
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams


def main() -> None:
    args = _arguments()
    rows: list[AcceptanceRow] = []
    for k in args.k:
        llm = LLM(
            args.model,
            speculative_config={"model": str(args.head), "num_speculative_tokens": k},
            dtype=args.dtype,
            device=args.device,
            max_num_seqs=args.max_num_seqs,
            max_model_len=2048,
        )
        for suite in args.suite:
            conversations = first_turns(suite, args.limit)
            for temperature in args.temperature:
                params = [
                    SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)
                    for i in range(len(conversations))
                ]
                row = measure_acceptance(llm, conversations, params).row(suite, k, temperature)
                rows.append(row)
                print(
                    f"{suite} K={k} T={temperature:g}: AL {row.acceptance_length:.3f}, without looping text "
                    f"{row.acceptance_length_without_loops:.3f}, per position {row.accepted_share_per_position}"
                )
    settings = {
        "command": command(),
        "target": f"{llm.target.name} (Q4_1 weights, dequantised)",
        "head": args.head.name,
        "dtype": args.dtype,
        "device": args.device,
        "max_tokens": args.max_tokens,
        "batch": args.max_num_seqs,
        "definition": "acceptance length = 1 + accepted drafts / rounds",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--k", nargs="+", type=int, default=[3, 5, 7])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, help="prompts per suite, from the top")
    parser.add_argument("--max-num-seqs", type=int, default=164)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "acceptance-smollm2-135m.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
