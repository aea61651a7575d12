"""Identical output with and without speculation: 50 prompts, greedy and at T = 0.8, several K, alone and in batches.

Hardware: any; float32. On 2 CPU cores the whole grid takes about half an hour with --max-tokens 32.

    python -m benchmarks.lossless
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import HEAD, MODEL, RESULTS, command, first_turns, run_script
from peagle.bench.report import write_result
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessRow:
    """How many prompts gave the same tokens with and without drafts (result names `lossless-*`)."""

    num_speculative_tokens: int
    batch_size: int
    temperature: float
    prompts: int
    identical: int


def main() -> None:
    args = _arguments()
    half = args.prompts // 2
    conversations = first_turns("mt_bench", half) + first_turns("humaneval", args.prompts - half)
    plain: dict[float, list[list[int]]] = {}
    rows: list[LosslessRow] = []
    for k in args.k:
        for batch in args.batch:
            llm = LLM(
                args.model,
                speculative_config={"model": str(args.head), "num_speculative_tokens": k},
                dtype="float32",
                device=args.device,
                max_num_seqs=batch,
                max_model_len=1024,
            )
            for temperature in args.temperature:
                params = [
                    SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)
                    for i in range(len(conversations))
                ]
                if temperature not in plain:  # one at a time, one token a step: what everything is compared with
                    plain[temperature] = _plain_alone(args, conversations, params)
                outputs = llm.chat(conversations, params)
                same = sum(o.token_ids == ids for o, ids in zip(outputs, plain[temperature], strict=True))
                rows.append(
                    LosslessRow(
                        num_speculative_tokens=k,
                        batch_size=batch,
                        temperature=temperature,
                        prompts=len(conversations),
                        identical=same,
                    )
                )
                print(f"K={k} batch={batch} T={temperature:g}: {same} of {len(conversations)} identical", flush=True)
    settings = {
        "command": command(),
        "target": f"{args.model} (Q4_1 weights, dequantised)",
        "head": args.head.name,
        "dtype": "float32",
        "device": args.device,
        "max_tokens": args.max_tokens,
        "compared_with": "plain decoding, one request at a time, same seeds",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _plain_alone(
    args: argparse.Namespace, conversations: list[list[dict[str, str]]], params: list[SamplingParams]
) -> list[list[int]]:
    llm = LLM(args.model, dtype="float32", device=args.device, max_num_seqs=1, max_model_len=1024)
    return [output.token_ids for output in llm.chat(conversations, params)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", type=Path, default=HEAD)
    parser.add_argument("--k", nargs="+", type=int, default=[1, 3, 7])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS / "lossless-smollm2-135m.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
