"""Runs of a sweep over HTTP: a running server per way to decode, under the load of `peagle bench serve`."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

from peagle.acceptance import AcceptanceStats
from peagle.bench.client import Answer as ClientAnswer
from peagle.bench.client import open_session
from peagle.bench.closed_loop import Answer, Run
from peagle.bench.counters import Counters
from peagle.bench.load import Load, run_load
from peagle.bench.server_info import ServerInfo, read_counters, read_server
from peagle.bench.sets import LoadPrompt
from peagle.bench.settings import BenchServeConfig
from peagle.bench.signals import ended_by, signals_put_back
from peagle.bench.sweep_plan import Setup
from peagle.bench.sweep_settings import METHODS, PLAIN, SweepConfig
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import PeagleError
from peagle.prompt_file import PromptRow

_WARM_UP_TOKENS = 12
_FORM = "write METHOD:K=URL, such as p-eagle:7=http://localhost:8000, or none=URL"


class ServerSource:
    """Servers that are up, one for each setup: K is what a server was started with."""

    def __init__(
        self, model: str, servers: Mapping[Setup, str], rows: Mapping[str, Sequence[PromptRow]], config: SweepConfig
    ) -> None:
        """`model` is the name to ask for. Raises PeagleError for a server that does not answer or lacks the model."""
        if find_spec("aiohttp") is None:
            raise PeagleError("a sweep over HTTP needs aiohttp: pip install 'peagle[bench]'")
        self._rows, self._config = rows, config
        self._servers = {setup: _load_config(model, url, config) for setup, url in servers.items()}
        self.infos: dict[Setup, ServerInfo] = {}
        for setup, server in self._servers.items():
            self.infos[setup] = asyncio.run(_info(server))

    def warm_up(self, setups: Sequence[Setup]) -> Iterator[str]:
        first = next(iter(self._rows))
        for setup in setups:
            yield setup.label
            most = max(self._config.concurrency)
            with signals_put_back():
                asyncio.run(self._load(setup, self._prompts(first, most, _WARM_UP_TOKENS), most))

    def run(self, dataset: str, setup: Setup, concurrency: int) -> Run:
        prompts = self._prompts(dataset, self._config.prompts_of(concurrency), self._config.max_tokens)
        with signals_put_back():
            load, counted = asyncio.run(self._load(setup, prompts, concurrency))
        return to_run(load, counted, len(self._rows[dataset]), setup, concurrency)

    def _prompts(self, dataset: str, count: int, tokens: int) -> list[LoadPrompt]:
        rows = self._rows[dataset]
        chosen = [rows[index % len(rows)] for index in range(count)]
        return [LoadPrompt(id=row.id, output_len=tokens, messages=row.messages) for row in chosen]

    async def _load(
        self, setup: Setup, prompts: Sequence[LoadPrompt], concurrency: int
    ) -> tuple[Load, AcceptanceStats | None]:
        """The load, and what the server's counters say it did meanwhile, if it has some."""
        server = self._servers[setup]
        config = replace(server, max_concurrency=concurrency)
        async with open_session(server.key) as session:
            # As many questions at once as there will be requests: connections are then there before the clock runs.
            before = (await asyncio.gather(*(read_counters(session, server) for _ in range(concurrency))))[0]
            load = await run_load(session, config, self.infos[setup].model, prompts)
            after = await read_counters(session, server)
        if load.stopped_by is not None:
            raise ended_by(load.stopped_by)
        failed = [answer for answer in load.answers if answer.failure is not None]
        if len(failed) == len(load.answers):  # a server that is gone, not a run to keep
            why = f"{failed[0].failure}: {failed[0].detail}"
            raise PeagleError(f"{setup.label}: all {len(failed)} requests failed ({why})")
        return load, _between(before, after)


def parse_servers(texts: Sequence[str]) -> dict[Setup, str]:
    """Setup -> URL from METHOD:K=URL. Raises PeagleError."""
    servers: dict[Setup, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        method, colon, drafts = name.partition(":")
        k = int(drafts) if drafts.isdecimal() and len(drafts) < 4 else -1
        right = not colon if method == PLAIN else 1 <= k <= MAX_SPECULATIVE_TOKENS
        if not equals or method not in METHODS or not right or not url.startswith(("http://", "https://")):
            raise PeagleError(f"--base-url is {text!r}: {_FORM}")
        setup = Setup(method, 0 if method == PLAIN else k)
        if setup in servers:
            raise PeagleError(f"--base-url names {setup.label} twice: give each once")
        servers[setup] = url
    return servers


def to_run(
    load: Load, counted: AcceptanceStats | None, prompts: int, setup: Setup, concurrency: int
) -> Run:  # fmt: skip
    """A load as a run. Raises PeagleError where the server drafted otherwise than it was said to.

    Acceptance is that of each request where the server says it, else that of its counters.
    """
    whole = [(index, answer) for index, answer in enumerate(load.answers) if answer.whole]
    failures = (f"{answer.failure}: {answer.detail}" for answer in load.answers if answer.failure is not None)
    own = [answer.stats for _, answer in whole if answer.stats is not None]
    stats = AcceptanceStats()
    if own and len(own) == len(whole):
        for each in own:
            stats.add(each)
    elif counted is not None:
        stats = counted
    if stats.num_rounds and len(stats.accepted_per_position) != setup.num_drafts:
        raise PeagleError(
            f"the server of {setup.label} drafts {len(stats.accepted_per_position)} tokens: correct --base-url, or "
            "start it with that K"
        )
    return Run(
        concurrency=concurrency,
        seconds=load.seconds,
        answers=tuple(_answer(index % prompts, answer) for index, answer in whole),
        rounds=stats.num_rounds,
        accepted=stats.num_accepted_tokens,
        accepted_per_position=tuple(stats.accepted_per_position),
        failed=load.asked - len(whole),
        failure=next(failures, None),
    )


def _answer(prompt: int, answer: ClientAnswer) -> Answer:
    stats = answer.stats or AcceptanceStats()
    return Answer(prompt, answer.tokens, answer.e2e, stats.num_rounds, stats.num_accepted_tokens)


def _between(before: Counters | None, after: Counters | None) -> AcceptanceStats | None:
    if before is None or after is None or after.rounds < before.rounds:
        return None
    stats = after.since(before)
    return stats if stats.num_rounds else None


def _load_config(model: str, url: str, config: SweepConfig) -> BenchServeConfig:
    return BenchServeConfig(
        base_url=url,
        model=model,
        seed=config.seed,
        temperature=config.temperature,
        ignore_eos=config.ignore_eos,
        request_seeds=config.temperature > 0,
    )


async def _info(server: BenchServeConfig) -> ServerInfo:
    async with open_session(server.key) as session:
        return await read_server(session, server)
