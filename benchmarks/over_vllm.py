"""This engine over vLLM: the best engine of either side at every shape and concurrency that both were measured at.

From result files of `engine_speed` and `peer_vllm`, best of one run on one machine; nothing is measured here. The
file's machine and versions are those of the first of ours, but for the commit: all that measured a row of ours.

    python -m benchmarks.over_vllm --ours benchmarks/results/engine-speed-*-h200.json \\
        --theirs benchmarks/results/peer-vllm-h200.json --out benchmarks/results/over-vllm-h200.json
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import command, run_script
from benchmarks.speed_shapes import SYNTHETIC
from peagle.bench.report import Json, check_result_path, read_result, write_result
from peagle.errors import PeagleError


@dataclass(frozen=True, kw_only=True, slots=True)
class OverRow:
    """Tokens per second of the best engine of either side, and ours over theirs."""

    shape: str
    concurrency: int
    ours: str
    ours_tokens_per_second: float
    theirs: str
    theirs_tokens_per_second: float
    ratio: float


def compare(ours: Sequence[Json], theirs: Sequence[Json]) -> list[OverRow]:
    """A row for every shape and concurrency of both."""
    best, other = _best(ours), _best(theirs)
    return [
        OverRow(
            shape=shape,
            concurrency=concurrency,
            ours=_name(row),
            ours_tokens_per_second=row["tokens_per_second"],
            theirs=_name(other[shape, concurrency]),
            theirs_tokens_per_second=other[shape, concurrency]["tokens_per_second"],
            ratio=round(row["tokens_per_second"] / other[shape, concurrency]["tokens_per_second"], 3),
        )
        for (shape, concurrency), row in best.items()
        if (shape, concurrency) in other
    ]


def _best(rows: Sequence[Json]) -> dict[tuple[str, int], Json]:
    """The fastest engine of each shape and concurrency, at the acceptance assumed for its method."""
    best: dict[tuple[str, int], Json] = {}
    for row in rows:
        key = row["shape"], row["concurrency"]
        if (
            row["acceptance"] == "assumed"
            and row["tokens_per_second"] > best.get(key, {"tokens_per_second": 0.0})["tokens_per_second"]
        ):
            best[key] = row
    return best


def _name(row: Json) -> str:
    return row["method"] + (f" K={row['num_speculative_tokens']}" if row["num_speculative_tokens"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=Path, nargs="+", required=True)
    parser.add_argument("--theirs", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    check_result_path(args.out)
    files: dict[Path, dict[str, Any]] = {path: read_result(path) for path in (*args.ours, *args.theirs)}
    others = [path for path, file in files.items() if any("acceptance" not in row for row in file["results"]["rows"])]
    if others:
        raise PeagleError(f"{others[0]} is no result of engine_speed.py or peer_vllm.py: give one")
    rows = compare(
        *([row for path in side for row in files[path]["results"]["rows"]] for side in (args.ours, args.theirs))
    )
    if not rows:
        raise PeagleError("no shape is in both --ours and --theirs at the same concurrency: nothing to compare")
    first = files[args.ours[0]]
    commits = dict.fromkeys(str(files[path]["versions"].get("commit")) for path in args.ours)
    where = {"machine": first["machine"], "versions": {**first["versions"], "commit": ", ".join(commits)}}
    settings = {
        "command": command(),
        "acceptance": SYNTHETIC,
        "measured": {path.name: document["created"] for path, document in files.items()},
        "partial": any(document["settings"].get("partial") for document in files.values()),
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows}, where)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    run_script(main)
