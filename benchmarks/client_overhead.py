"""What the load generator adds to what it measures: its figures against a server that knows when it sent what.

A server of its own process streams tokens at fixed times to 64 requests at once (`benchmarks.fake_server`). Its record
of what it handed to the system, and when, is the truth; `peagle bench serve` and, where it is installed, guidellm, an
independent client, measure the same server. Hardware: any with 2 cores; a minute.

    python -m benchmarks.client_overhead
    python -m benchmarks.client_overhead --guidellm other-venv/bin/guidellm
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from benchmarks.common import RESULTS, ROOT, command, run_script
from benchmarks.fake_server import MODEL, Schedule
from peagle.bench.report import write_result
from peagle.bench.serve import measure
from peagle.bench.settings import BenchServeConfig

CONCURRENCY = 64
Client = Callable[[str, int, int], "Figures"]  # of a server, requests and the tokens of each


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over requests, in ms."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadRow:
    """One client at one rate (result names `client-overhead*`). Shares are client / server - 1."""

    client: str
    interval_ms: float
    tokens_per_chunk: int
    concurrency: int
    requests: int
    tokens_per_request: int
    chunks_per_second: float
    planned: Figures
    sent: Figures
    measured: Figures
    tpot_added: float
    e2e_added: float
    ttft_added_ms: float
    client_cpu_share: float | None


def main() -> None:
    args = _arguments()
    schedules = [Schedule(interval_ms=interval, tokens_per_chunk=tokens) for interval, tokens in args.rates]
    clients: dict[str, Client] = {"peagle bench serve": _ours}
    if args.guidellm is not None:
        clients["guidellm"] = partial(_guidellm, args.guidellm)
    rows: list[OverheadRow] = []
    for schedule in schedules:
        tokens = max(32, round(1000 * args.seconds / schedule.interval_ms))
        for client, run in clients.items():
            rows.append(_best([_row(client, schedule, args.requests, tokens, run) for _ in range(args.repeats)]))
            print(_line(rows[-1]), flush=True)
    settings = {
        "command": command(),
        "definition": "added = mean of the client / mean of the server's record - 1; the server's clock starts when a "
        "request's body is there, the client's when it is sent",
        "repeats": args.repeats,
        "chosen": "of the repeats the one in which the server kept its plan best",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


def _best(rows: Sequence[OverheadRow]) -> OverheadRow:
    """The repeat in which the server kept its plan best: what else ran on the machine disturbed it least. The client's
    own figures do not choose."""
    return min(rows, key=lambda row: abs(row.sent.e2e_ms / row.planned.e2e_ms - 1))


def _line(row: OverheadRow) -> str:
    return (
        f"{row.client}: {row.interval_ms:g} ms x {row.tokens_per_chunk}, {row.chunks_per_second:,.0f} chunks/s: "
        f"TPOT {100 * row.tpot_added:+.2f} %, E2E {100 * row.e2e_added:+.2f} %, TTFT {row.ttft_added_ms:+.1f} ms"
    )


def _row(client: str, schedule: Schedule, requests: int, tokens: int, run: Client) -> OverheadRow:
    with _server(schedule) as url:
        before = _cpu_seconds()
        measured = run(url, requests, tokens)
        cpu = _cpu_seconds() - before
        record = [sent for sent in json.load(urllib.request.urlopen(f"{url}/record")) if sent[2] == tokens]
    sent = _mean([_figures(received, chunks, tokens) for received, chunks, _ in record[-requests:]])
    seconds = max(chunks[-1] for _, chunks, _ in record) - min(received for received, _, _ in record)
    first, last = schedule.first_ms, schedule.first_ms + (tokens - 1) * schedule.interval_ms
    return OverheadRow(
        client=client,
        interval_ms=schedule.interval_ms,
        tokens_per_chunk=schedule.tokens_per_chunk,
        concurrency=CONCURRENCY,
        requests=requests,
        tokens_per_request=tokens,
        chunks_per_second=sum(len(chunks) for _, chunks, _ in record) / seconds,
        planned=Figures(first, (last - first) / (tokens - 1), last),
        sent=sent,
        measured=measured,
        tpot_added=measured.tpot_ms / sent.tpot_ms - 1,
        e2e_added=measured.e2e_ms / sent.e2e_ms - 1,
        ttft_added_ms=measured.ttft_ms - sent.ttft_ms,
        client_cpu_share=cpu / seconds if run is _ours else None,  # the other one imports for seconds
    )


def _figures(received: float, chunks: Sequence[float], tokens: int) -> Figures:
    first, last = 1000 * (chunks[0] - received), 1000 * (chunks[-1] - received)
    return Figures(first, (last - first) / (tokens - 1), last)


def _mean(figures: Sequence[Figures]) -> Figures:
    names = ("ttft_ms", "tpot_ms", "e2e_ms")
    return Figures(*(statistics.mean(getattr(one, name) for one in figures) for name in names))


def _ours(url: str, requests: int, tokens: int) -> Figures:
    config = BenchServeConfig(
        base_url=url, dataset_name="gsm8k", num_prompts=requests, max_concurrency=CONCURRENCY, output_len=tokens
    )
    row = measure(config, Console(stderr=True)).results(config)["rows"][0]
    if row["completed"] != requests:
        raise RuntimeError(f"{row['failures']}")
    latency = row["latency_ms"]
    return Figures(latency["ttft"]["mean"], latency["tpot"]["mean"], latency["e2el"]["mean"])


def _guidellm(program: Path, url: str, requests: int, tokens: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        rows = [{"prompt": f"Question {number}", "output_tokens_count": tokens} for number in range(requests)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = [
            program, "run", "--backend", f"kind=openai_http,target={url},model={MODEL}",
            "--profile", f"kind=concurrent,streams={CONCURRENCY}",
            "--constraint", f"kind=max_requests,count={requests}",
            "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={out}", "--disable-console",
        ]  # fmt: skip
        subprocess.run([str(part) for part in arguments], check=True, capture_output=True)
        found = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    ttft, tpot, seconds = (found[name]["successful"]["mean"] for name in names)
    return Figures(ttft, tpot, 1000 * seconds)


@contextmanager
def _server(schedule: Schedule) -> Iterator[str]:
    flags = ("--first-ms", schedule.first_ms, "--interval-ms", schedule.interval_ms)
    command = [sys.executable, "-m", "benchmarks.fake_server", *flags, "--tokens-per-chunk", schedule.tokens_per_chunk]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield f"http://127.0.0.1:{int(cast(IO[str], process.stdout).readline())}"
    finally:
        process.terminate()
        process.wait()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rate(text: str) -> tuple[float, int]:
    interval, _, tokens = text.partition("x")
    return float(interval), int(tokens or 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", type=_rate, default=[(20.0, 1), (5.0, 1), (5.0, 3), (1.6, 1)],
        help="ms between tokens, and after an x the tokens of a chunk",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=2 * CONCURRENCY)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one answer")
    parser.add_argument("--repeats", type=int, default=3, help="of which the one counts that was disturbed least")
    parser.add_argument("--guidellm", type=Path, help="the program guidellm, for a second opinion")
    parser.add_argument("--out", type=Path, default=RESULTS / "client-overhead.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
