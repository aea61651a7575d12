"""A server under load for minutes: every answer must equal its reference, and nothing may pile up.

Clients send requests whose answers were computed before, each alone. Some leave in the middle, some send rubbish. In
the end nothing may be held: no request, no block of the KV cache, no connection, no memory that grew. The server runs
in float32, where no answer depends on the batch that it is computed in. On a CPU its cache must be small: memory is
taken when a block is first used, and that would look like a leak.

Hardware: 2 cores, SmolLM2 with its head, 20 minutes and about one more for the references; on a GPU, 5 minutes.

    python -m benchmarks.soak --jobs 20 --max-tokens 32 --max-model-len 512 -- --max-num-seqs 4
    python -m benchmarks.soak --minutes 5 --concurrency 256 --model org/model --head my-head -- --max-num-seqs 256
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from benchmarks.common import MODEL, RESULTS, amount, command, count, run_script
from benchmarks.soak_requests import (
    COMPLETIONS,
    Answer,
    Job,
    Unexpected,
    check_refusal,
    differences,
    make_jobs,
    read_stream,
    read_whole,
    rubbish,
)
from benchmarks.soak_server import Held, Server, Watch, end, new_log, slope, started
from peagle.bench.report import check_result_path, provenance, write_result
from peagle.errors import PeagleError, one_line
from peagle.exits import INTERRUPTED_STATUS

_LEAVE, _RUBBISH = 0.10, 0.05  # of the clients
_HANGS = 180.0  # seconds without a byte
_LONGEST_LINE = 1 << 22  # bytes of an event
_FLAT_SHARE, _FLAT_MIB = 0.02, 24.0  # what memory may grow by over the later half
_SPARE_FILES = 4  # open ones, more than before
_MOST_PROBLEMS = 40  # kept word for word


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRow:
    """A server under load for minutes (result names `soak-*`). Pairs are before and after, both at rest.

    `different` counts requests whose answer was not that of the reference, `lost_or_doubled` those among them that run
    on alike after a gap or a repetition. `answers_ended` is the server's count, `answers_accounted` whether it fits the
    clients'. Slopes are over the later half.
    """

    concurrency: int
    minutes: float
    requests: int
    streamed: int
    answers: int
    tokens: int
    left: int
    rubbish: int
    refused: int
    different: int
    lost_or_doubled: int
    failed: int
    answers_ended: int
    answers_accounted: bool
    kv_usage_after: float
    idle_after: bool
    preemptions: int
    rss_mib: tuple[float, float] | None
    rss_mib_per_minute: float | None
    gpu_mib: tuple[float, float] | None
    gpu_mib_per_minute: float | None
    open_files: tuple[int, int] | None
    threads: tuple[int, int] | None
    exit_status: int | None
    passed: bool


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    completed: int = 0  # requests
    streamed: int = 0
    answers: int = 0
    tokens: int = 0
    left: int = 0  # requests whose client went away
    left_begun: int = 0  # answers of those that had begun
    left_unknown: int = 0  # answers of those that may have ended, or never begun
    rubbish: int = 0
    refused: int = 0  # for want of room
    different: int = 0
    shifted: int = 0  # tokens lost or doubled
    failed: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Keep a problem, if there are not too many already."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)


class Load:
    """The clients. `ends` can be moved forward to end early.

    They use aiohttp: with httpx, whose request costs milliseconds, they and not the server would be the limit. Rubbish
    is little, and httpx sends it as it is.
    """

    def __init__(self, server: Server, jobs: Sequence[tuple[Job, Answer]], model: str, seed: int) -> None:
        self._jobs, self._url, self._model, self._seed = jobs, server.url, model, seed
        self._rubbish = rubbish()
        self.tally, self.ends, self.was_interrupted = Tally(), 0.0, False

    async def run(self, concurrency: int, seconds: float) -> None:
        """Have so many clients ask for so long, each one request after the other."""
        self.ends = time.perf_counter() + seconds
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._end_early)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_HANGS),
            read_bufsize=_LONGEST_LINE,
        )
        limits = httpx.Limits(max_connections=None)
        async with session, httpx.AsyncClient(base_url=self._url, timeout=_HANGS, limits=limits) as raw:
            showing = asyncio.create_task(self._show(seconds))
            await asyncio.gather(*(self._client(session, raw, number) for number in range(concurrency)))
            showing.cancel()

    def _end_early(self) -> None:
        self.ends, self.was_interrupted = 0.0, True

    async def _client(self, client: aiohttp.ClientSession, raw: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        while time.perf_counter() < self.ends:
            job, wanted = rng.choice(self._jobs)
            chance = rng.random()
            try:
                if chance < _RUBBISH:
                    await self._send_rubbish(raw, rng)
                elif chance < _RUBBISH + _LEAVE:
                    await self._leave(client, rng, job)
                else:
                    await self._complete(client, rng, job, wanted)
            except (aiohttp.ClientError, httpx.HTTPError, Unexpected, OSError, KeyError, ValueError) as error:
                self.tally.failed += 1
                self.tally.note(f"{job.path}: {type(error).__name__} {error}")

    async def _complete(self, client: aiohttp.ClientSession, rng: random.Random, job: Job, wanted: Answer) -> None:
        streamed = rng.random() < 0.5
        body = {**job.body, "model": self._model, "stream": streamed}
        if streamed and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        async with client.post(self._url + job.path, json=body) as response:
            if await self._is_refused(response):
                return
            if streamed:
                got = await read_stream(_lines(response), job.choices)
            else:
                got = read_whole(await response.json())
        tally = self.tally
        tally.completed += 1
        tally.streamed += streamed
        tally.answers += job.choices
        tally.tokens += wanted.tokens or 0
        found = differences(got, wanted)
        tally.shifted += any(text.startswith("shifted") for text in found)
        tally.different += bool(found)
        for text in found:
            tally.note(f"{job.path} {'streamed' if streamed else 'whole'}, {job.body}: {text}")

    async def _is_refused(self, response: aiohttp.ClientResponse) -> bool:
        if response.status == 200:
            return False
        text = await response.text(errors="replace")
        if response.status != 429:
            raise Unexpected(f"status {response.status}: {text[:200]}")
        self.tally.refused += 1
        await asyncio.sleep(float(response.headers["retry-after"]))
        return True

    async def _leave(self, client: aiohttp.ClientSession, rng: random.Random, job: Job) -> None:
        """Go away in the middle of a stream, or while waiting for a whole answer."""
        tally, body = self.tally, {**job.body, "max_tokens": 400, "ignore_eos": True, "model": self._model}
        body.pop("stop", None)
        if rng.random() < 0.3:
            asking = asyncio.create_task(_ask(client, self._url + job.path, body))
            await asyncio.wait([asking], timeout=rng.random())
            asking.cancel()
            tally.left += 1
            tally.left_unknown += job.choices
            return
        async with client.post(self._url + job.path, json={**body, "stream": True}) as response:
            if await self._is_refused(response):
                return
            keep = rng.randint(1, 40)
            async for line in _lines(response):
                keep -= bool(line)
                if keep == 0:
                    break
            response.close()
        tally.left += 1
        tally.left_begun += job.choices

    async def _send_rubbish(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        self.tally.rubbish += 1
        if rng.random() < 0.2:
            await self._break_off(rng)
            return
        method, path, headers, content = rng.choice(self._rubbish)
        problem = check_refusal(await client.request(method, path, headers=headers, content=content))
        if problem is not None:
            self.tally.failed += 1
            self.tally.note(f"{method} {path} {content[:60]!r}: {problem}")

    async def _break_off(self, rng: random.Random) -> None:
        """Begin a request and close the connection before it is whole."""
        parts = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        size = rng.choice(["Content-Length: 1000", "Transfer-Encoding: chunked", "Content-Length: x", "X"])
        begun = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{size}\r\n\r\n5\r\n{{"
        writer.write(begun[: rng.randint(1, len(begun))].encode())
        await writer.drain()
        writer.close()
        del reader

    async def _show(self, seconds: float) -> None:
        """Progress on stderr: a bar in a terminal, else a line each minute."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task, began = progress.add_task("soak", total=seconds), time.perf_counter()
            for tick in range(sys.maxsize):
                spent, tally = time.perf_counter() - began, self.tally
                text = f"{tally.completed} answered, {tally.different} different, {tally.failed} failed"
                progress.update(task, completed=spent, description=text)
                if not console.is_terminal and tick % 60 == 59:
                    console.print(f"{spent / 60:.0f} of {seconds / 60:g} min: {text}", highlight=False)
                await asyncio.sleep(1)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        yield line.decode().rstrip("\r\n")


async def _ask(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
    """Wait for a whole answer that nobody will look at."""
    async with client.post(url, json=body) as response:
        await response.read()


def main() -> None:
    args = _arguments()
    where = provenance()  # imports torch: not when there is a result to write
    log = new_log()
    own = args.base_url is None
    with started(_server_arguments(args), log) if own else nullcontext(_elsewhere(args.base_url)) as (server, model):
        jobs = make_jobs(args.jobs, args.max_tokens, args.seed)
        print(f"computing {len(jobs)} references, one answer at a time", file=sys.stderr)
        references = [(job, _reference(server, model, job)) for job in jobs]
        before, at_rest = server.wait_idle(), server.held()
        load = Load(server, references, model, args.seed)
        began = time.perf_counter()
        with Watch(server, max(1.0, 60 * args.minutes / 300)) as watch:
            asyncio.run(load.run(args.concurrency, 60 * args.minutes))
        minutes = (time.perf_counter() - began) / 60
        settings = {
            "command": command(), "model": Path(args.model).name if own else model,
            "dtype": args.dtype if own else None,
            "threads": os.environ.get("OMP_NUM_THREADS"), "concurrency": args.concurrency, "minutes": args.minutes,
            "seed": args.seed, "requests": len(jobs), "partial": minutes < 0.98 * args.minutes,
        }  # fmt: skip
        early = {"rows": [], "tally": asdict(load.tally), "problems": load.tally.problems}
        write_result(args.out, args.out.stem, {**settings, "partial": True}, early, where)  # the rest may hang
        after = server.wait_idle()
        time.sleep(1.0)  # for the last connections to be closed
        held = server.held()
        status = end(server)
    row = _row(args, load.tally, minutes, before, after, watch.samples, at_rest, held, status)
    write_result(args.out, args.out.stem, settings, {"rows": [row], "problems": load.tally.problems}, where)
    said = f"{'passed' if row.passed else 'FAILED'}{f', PARTIAL: {minutes:.1f} minutes' if settings['partial'] else ''}"
    print(f"{said}; wrote {args.out}, the server's log is {log if own else 'its own'}")
    sys.exit(1 if not row.passed else INTERRUPTED_STATUS if load.was_interrupted else 0)


def _reference(server: Server, model: str, job: Job) -> Answer:
    """A job's answers, each computed with nothing else running."""
    answers = []
    for alone in job.alone():
        response = httpx.post(f"{server.url}{alone.path}", json={**alone.body, "model": model}, timeout=_HANGS)
        response.raise_for_status()
        answers.append(read_whole(response.json()))
    return Answer(
        [answer.texts[0] for answer in answers],
        [answer.reasons[0] for answer in answers],
        sum(answer.tokens or 0 for answer in answers),
    )


def _row(
    args: argparse.Namespace,
    tally: Tally,
    minutes: float,
    before: dict[str, float],
    after: dict[str, float],
    samples: Sequence[Held],
    at_rest: Held | None,
    held: Held | None,
    status: int | None,
) -> SoakRow:
    rss = slope([(sample.seconds, sample.rss_mib) for sample in samples])
    gpu = slope([(sample.seconds, sample.gpu_mib) for sample in samples if sample.gpu_mib is not None])
    ended = after["vllm:request_success_total"] - before["vllm:request_success_total"]
    sure = tally.answers + tally.left_begun
    idle = all(
        after[f"vllm:{name}"] == 0 for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    accounted = sure <= ended <= sure + tally.left_unknown
    flat = all(
        change is None or change * minutes / 2 <= max(_FLAT_MIB, _FLAT_SHARE * size)
        for change, size in ((rss, held.rss_mib if held else 0.0), (gpu, (held.gpu_mib or 0.0) if held else 0.0))
    )
    both = None if at_rest is None or held is None else (at_rest, held)
    clean = both is None or both[1].files <= both[0].files + _SPARE_FILES
    return SoakRow(
        concurrency=args.concurrency, minutes=round(minutes, 2), requests=tally.completed, streamed=tally.streamed,
        answers=tally.answers, tokens=tally.tokens, left=tally.left, rubbish=tally.rubbish, refused=tally.refused,
        different=tally.different, lost_or_doubled=tally.shifted, failed=tally.failed,
        answers_ended=int(ended), answers_accounted=accounted,
        kv_usage_after=after["vllm:kv_cache_usage_perc"], idle_after=idle,
        preemptions=int(after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"]),
        rss_mib=None if both is None else (round(both[0].rss_mib, 1), round(both[1].rss_mib, 1)),
        rss_mib_per_minute=_rounded(rss),
        gpu_mib=None if both is None else _gpu(*both),
        gpu_mib_per_minute=_rounded(gpu),
        open_files=None if both is None else (both[0].files, both[1].files),
        threads=None if both is None else (both[0].threads, both[1].threads),
        exit_status=status,
        passed=not (tally.different or tally.failed) and idle and accounted and flat and clean and not status,
    )  # fmt: skip


def _gpu(first: Held, last: Held) -> tuple[float, float] | None:
    return None if first.gpu_mib is None or last.gpu_mib is None else (first.gpu_mib, last.gpu_mib)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _elsewhere(url: str) -> tuple[Server, str]:
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, ValueError, TypeError) as error:
        raise PeagleError(f"--base-url {url} names no model ({one_line(error)}): start a server there first") from None
    return Server(url, None, time.perf_counter()), model


def _server_arguments(args: argparse.Namespace) -> list[str]:
    given = {"--head": args.head, "--num-speculative-tokens": args.num_speculative_tokens, "--dtype": args.dtype}
    flags = [text for flag, value in given.items() if value is not None for text in (flag, str(value))]
    return [args.model, *flags, "--max-model-len", str(args.max_model_len), *args.server]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="*", metavar="-- FLAGS", help="further flags of peagle serve")
    parser.add_argument("--minutes", type=amount, default=20)
    parser.add_argument("--concurrency", type=count, default=4)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--head", help="default: the one that ships for the model")
    parser.add_argument("--num-speculative-tokens", help="K, or auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=count, default=1024)
    parser.add_argument("--base-url", help="a server that runs already, instead of one of its own")
    parser.add_argument("--jobs", type=count, default=48, help="different requests")
    parser.add_argument("--max-tokens", type=count, default=64, help="of the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak-smollm2-135m-cpu.json")
    args = parser.parse_args()
    check_result_path(args.out)
    return args


if __name__ == "__main__":
    run_script(main)
