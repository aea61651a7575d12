"""`peagle bench serve`: check the server, put the load on it, report, save."""

import asyncio
import gc
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.client import Answer, open_session
from peagle.bench.counters import DEFINITION, Counters, acceptance
from peagle.bench.latency import DEFINITIONS, gaps, summarise
from peagle.bench.load import Load, extra_fields, run_load
from peagle.bench.load_progress import LoadProgress
from peagle.bench.report import check_result_path, command_line, provenance, write_result
from peagle.bench.server_info import ServerInfo, check_fits, read_counters, read_server
from peagle.bench.sets import PromptSet, load_prompts
from peagle.bench.settings import WITHOUT_EFFECT, BenchServeConfig
from peagle.bench.signals import ended_by, ignore_signals, signals_put_back
from peagle.errors import PeagleError
from peagle.files import sha256_of
from peagle.meter import say
from peagle.waiting import said_if_slow

if TYPE_CHECKING:
    import aiohttp
    from rich.console import Console

FAILED_STATUS = 1  # some requests failed; the figures are those of the others


@dataclass(frozen=True, slots=True)
class Measured:
    """A load and what was read around it; `where` is this machine, asked for before the load."""

    load: Load
    prompts: PromptSet
    server: ServerInfo
    before: Counters | None
    after: Counters | None
    where: Mapping[str, Any]

    def results(self, config: BenchServeConfig) -> dict[str, Any]:
        """The part of a result file that was measured."""
        answers = self.load.answers
        row = {
            "model": self.server.model,
            "dataset": config.dataset_name,
            "partial": self.load.stopped_by is not None,
            **summarise(self.load, config),
            "acceptance": acceptance(answers, self.before, self.after),
        }
        requests = [_request_row(answer, config.save_detailed) for answer in answers]
        return {"rows": [row], "requests": requests}


def run_bench_serve(config: BenchServeConfig, console: "Console | None" = None) -> int:
    """Measure, save the result if asked to or if the run was cut short, report. The exit status of the command.

    Raises PeagleError for what is wrong before the load begins.
    """
    from rich.console import Console

    from peagle.bench.serve_view import print_report

    console = console or Console(stderr=True)
    asked = config.save_result or config.save_detailed or config.result_filename is not None
    if asked:
        folder, name = Path(config.result_dir or "."), config.result_filename
        check_result_path(folder / (name or "serve.json"), console if name else None)
    measured = measure(config, console)
    stopped = measured.load.stopped_by
    path = _result_path(config, measured) if asked or stopped is not None else None
    with signals_put_back():
        ignore_signals()
        results = measured.results(config)
        if path is not None and stopped is not None and path.exists() and not results["rows"][0]["completed"]:
            say(console, f"no request has ended: {path} stays as it was")
            path = None
        try:
            if path is not None:
                _save(path, config, measured, results)
        finally:  # what cannot be written can still be read
            print_report(Console(), results["rows"][0], config)
        if path is not None:
            say(console, f"{'partial results' if stopped else 'results'}: {path}")
    if stopped is not None:
        return 128 + stopped
    return 0 if results["rows"][0]["failed"] == 0 else FAILED_STATUS


def measure(config: BenchServeConfig, console: "Console") -> Measured:
    """Put the load on the server. Raises PeagleError before it begins, never in the middle."""
    if find_spec("aiohttp") is None:
        raise PeagleError("the load generator needs aiohttp: pip install 'peagle[bench]'")
    extra_fields(config)
    prompts = load_prompts(config)
    if prompts.prompts and prompts.prompts[0].token_ids and config.path.endswith("/chat/completions"):
        raise PeagleError("random tokens are no conversation: leave --backend out, or give openai")
    idle = [f"--{name.replace('_', '-')}" for name in WITHOUT_EFFECT if getattr(config, name)]
    if idle:
        console.print(f"note: without effect here: {', '.join(idle)}", highlight=False)
    for warning in prompts.warnings:
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)
    with signals_put_back():
        return asyncio.run(_measure(config, prompts, console))


async def _measure(config: BenchServeConfig, prompts: PromptSet, console: "Console") -> Measured:
    from rich.console import Console

    count = len(prompts.prompts)
    shown = Console(quiet=True) if config.disable_tqdm else console
    async with open_session(config.key) as session:
        server = await read_server(session, config)
        check_fits(server, config)
        with said_if_slow("looking at this machine"):
            where = provenance()  # not later, where it would stand between a result and its file
        if config.num_warmups:
            warmups = [prompts.prompts[n % count] for n in range(config.num_warmups)]
            with LoadProgress(shown, "warm-up", len(warmups)) as progress:
                warmed = await run_load(session, config, server.model, warmups, progress)
            _check_warm(warmed)
        await _open_connections(session, config, min(count, config.max_concurrency or count))
        before = await read_counters(session, config)
        with LoadProgress(shown, "requests", count) as progress, _no_long_collections():
            load = await run_load(session, config, server.model, prompts.prompts, progress)
            ignore_signals()
        return Measured(load, prompts, server, before, await read_counters(session, config), where)


def _check_warm(load: Load) -> None:
    if load.stopped_by is not None:
        raise ended_by(load.stopped_by)
    failed = next((answer for answer in load.answers if not answer.whole), None)
    if failed is not None:
        raise PeagleError(f"a warm-up request failed ({failed.failure}: {failed.detail}): nothing was measured")


async def _open_connections(session: "aiohttp.ClientSession", config: BenchServeConfig, count: int) -> None:
    """Connect before the clock runs: what many handshakes take is not time to a first token."""
    await asyncio.gather(*(read_counters(session, config) for _ in range(min(count, 512))))


@contextmanager
def _no_long_collections() -> Iterator[None]:
    """Leave what is there already out of garbage collection, which would hold up every stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _request_row(answer: Answer, detailed: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"id": answer.id, "category": answer.category, "finish_reason": answer.finish_reason}
    if not answer.whole:
        end = {"failure": answer.failure, "detail": answer.detail}
        return row | (end if answer.failure is not None else {"failure": None, "unfinished": True})
    tpot = answer.tpot
    row |= {
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.tokens,
        "ttft_ms": 1000 * answer.ttft,
        "tpot_ms": None if tpot is None else 1000 * tpot,
        "e2el_ms": 1000 * answer.e2e,
    }
    if answer.stats is not None:
        row["acceptance"] = asdict(answer.stats)
    if detailed:
        row |= {"text": "".join(answer.text), "chunk_gaps_ms": [1000 * gap for gap in gaps(answer.chunks)]}
    return row


def _result_path(config: BenchServeConfig, measured: Measured) -> Path:
    folder = Path(config.result_dir or ".")
    if config.result_filename:
        return folder / config.result_filename
    model = re.sub(r"[^\w.-]", "-", measured.server.model.rstrip("/").rsplit("/", 1)[-1])[:100]
    return folder / f"serve-{model}-{config.dataset_name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def _save(path: Path, config: BenchServeConfig, measured: Measured, results: dict[str, Any]) -> None:
    given: dict[str, Any] = asdict(config) | {"api_key": None}  # a secret
    given |= {name: value if value != float("inf") else "inf" for name, value in given.items()}  # JSON has no infinity
    dataset, file = measured.prompts, Path(config.dataset_path or "")
    settings = {
        "command": _command(sys.argv),
        **given,
        "base_url": config.base_url and _without_password(config.base_url),
        "url": _without_password(config.server + config.path),
        "prompts": {
            "source": dataset.source, "rows": dataset.rows, "sent": len(dataset.prompts), "sha256": dataset.digest,
            "file_sha256": sha256_of(file) if file.is_file() else None, "warnings": list(dataset.warnings),
        },
        "server": {"version": measured.server.version, "models": measured.server.models},
        "definitions": {**DEFINITIONS, "acceptance": DEFINITION},
        "stopped_by": None if measured.load.stopped_by is None else measured.load.stopped_by.name,
    }  # fmt: skip
    write_result(path, path.stem, settings, results, measured.where)


def _command(arguments: Sequence[str]) -> str:
    """The command line without its key."""
    shown = list(arguments[1:])
    for index, argument in enumerate(shown):
        if argument == "--api-key" and index + 1 < len(shown):
            shown[index + 1] = "..."
        elif argument.startswith("--api-key="):
            shown[index] = "--api-key=..."
    return _without_password(command_line(shown))


def _without_password(text: str) -> str:
    """A text whose URLs name no user."""
    return re.sub(r"(https?://)[^/@\s]*@", r"\1", text)
