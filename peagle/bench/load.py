"""Put prompts on a server: when each is sent, how many at once, and how a run is stopped half way."""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from peagle.bench.client import Answer, ask
from peagle.bench.sets import LoadPrompt
from peagle.bench.settings import BenchServeConfig
from peagle.bench.signals import ENDING, ignore_signals
from peagle.errors import PeagleError

if TYPE_CHECKING:
    import aiohttp

_OWN_FIELDS = ("stream", "stream_options", "model", "messages", "prompt")


@dataclass(slots=True)
class Load:
    """What happened to the prompts: the answers in the order of the prompts, those never sent left out.

    `stopped_by` is the signal that ended the run early, `seconds` the time from its start to its end.
    """

    answers: list[Answer] = field(default_factory=list)
    asked: int = 0
    seconds: float = 0.0
    peak: int = 0
    stopped_by: signal.Signals | None = None


class Watcher(Protocol):
    """Who shows how far a load is."""

    def __call__(self, answer: Answer) -> object:
        """Take an answer that ended."""

    async def watch(self, answers: Sequence[Answer]) -> None:
        """Look at all answers, those to come too, until cancelled."""


def request_body(config: BenchServeConfig, model: str, prompt: LoadPrompt, number: int) -> dict[str, Any]:
    """The JSON of request `number`."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if prompt.token_ids:
        body["prompt"] = list(prompt.token_ids)
    elif config.path.endswith("/chat/completions"):
        body["messages"] = list(prompt.messages)
    else:
        body["prompt"] = "\n\n".join(message["content"] for message in prompt.messages)
    body |= {"max_tokens": prompt.output_len, "temperature": config.temperature}
    body |= {name: value for name in ("top_p", "top_k", "min_p") if (value := getattr(config, name)) is not None}
    if config.ignore_eos:
        body["ignore_eos"] = True
    if config.request_seeds:
        body["seed"] = config.seed + number
    return body | extra_fields(config)


def extra_fields(config: BenchServeConfig) -> dict[str, Any]:
    """The fields of `extra_body`. Raises PeagleError."""
    if config.extra_body is None:
        return {}
    try:
        fields = json.loads(config.extra_body)
    except ValueError as error:
        raise PeagleError(f"extra_body is not valid JSON ({error}): give an object in quotes") from None
    if not isinstance(fields, dict):
        raise PeagleError(f"extra_body is a JSON {type(fields).__name__}: it must be an object")
    taken = [name for name in _OWN_FIELDS if name in fields]
    if taken:
        raise PeagleError(f"extra_body holds {taken[0]!r}: that field is the benchmark's own, leave it out")
    return fields


def send_times(config: BenchServeConfig, count: int) -> list[float]:
    """Seconds after the start at which requests are due: gamma-distributed gaps, for burstiness 1 a Poisson process."""
    import numpy as np

    if config.request_rate == float("inf"):
        return [0.0] * count
    shape = config.burstiness
    gaps = np.random.default_rng(config.seed).gamma(shape, 1 / (config.request_rate * shape), size=count)
    return list(itertools.accumulate((float(gap) for gap in gaps[1:]), initial=0.0))[:count]


async def run_load(
    session: "aiohttp.ClientSession",
    config: BenchServeConfig,
    model: str,
    prompts: Sequence[LoadPrompt],
    watcher: Watcher | None = None,
) -> Load:
    """Send every prompt and wait for all answers, or for SIGINT or SIGTERM, after which both do nothing any more."""
    load = Load(asked=len(prompts))
    answers = [Answer(id=prompt.id, category=prompt.category) for prompt in prompts]
    free = asyncio.Semaphore(config.max_concurrency or max(1, len(prompts)))
    url = config.server + config.path
    running = 0

    async def send(number: int, due: float) -> None:
        nonlocal running
        await asyncio.sleep(due - time.perf_counter())
        async with free:
            running += 1
            load.peak = max(load.peak, running)
            try:
                body = request_body(config, model, prompts[number], number)
                await ask(session, url, body, answers[number], config.timeout)
                if watcher is not None:
                    watcher(answers[number])
            finally:
                running -= 1

    start = time.perf_counter()
    tasks = [asyncio.ensure_future(send(n, start + due)) for n, due in enumerate(send_times(config, len(prompts)))]
    with _stopping(tasks, load), _watched(watcher, answers):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    load.seconds = time.perf_counter() - start
    for result in results:
        if isinstance(result, Exception):  # a cancellation is none; anything else is a bug
            raise result
    load.answers = [answer for answer in answers if answer.start]
    return load


@contextmanager
def _watched(watcher: Watcher | None, answers: Sequence[Answer]) -> Iterator[None]:
    if watcher is None:
        yield
        return
    task = asyncio.ensure_future(watcher.watch(answers))
    try:
        yield
    finally:
        task.cancel()


@contextmanager
def _stopping(tasks: Sequence["asyncio.Future[None]"], load: Load) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM cancel the tasks. Both do nothing after it: whoever called has to write first."""
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        load.stopped_by = number
        for task in tasks:
            task.cancel()
        release()
        ignore_signals()

    def release() -> None:
        for number in ENDING:
            loop.remove_signal_handler(number)

    try:
        for number in ENDING:
            loop.add_signal_handler(number, stop, number)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        yield
        return
    try:
        yield
    finally:
        if load.stopped_by is None:
            release()
