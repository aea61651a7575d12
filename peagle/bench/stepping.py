"""Drive an engine step by step, to time and to profile steps in which all requests decode."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from peagle.bench.profile import STEP, Profile, read_trace, summarise
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams

SETTLED = 17  # tokens of every request before anything is measured: prefill is then over, and its after-effects


@dataclass(frozen=True, slots=True)
class Window:
    """Some steps in which `requests` requests decoded side by side. `context` is their mean length meanwhile."""

    requests: int
    seconds: float
    steps: int
    tokens: int
    context: float

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.seconds / self.steps

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step."""
        return self.tokens / (self.steps * self.requests)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __add__(self, other: Self) -> "Window":
        """Both windows as one, of the same number of requests."""
        steps = self.steps + other.steps
        context = (self.context * self.steps + other.context * other.steps) / steps
        return Window(self.requests, self.seconds + other.seconds, steps, self.tokens + other.tokens, context)


class Decoding:
    """A batch of requests inside an engine, advanced one step at a time."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._core, self._clock = llm.core, clock
        self._prompt_tokens = sum(map(len, prompts))
        self._requests = [llm.make_request(prompt, params) for prompt in prompts]
        for request in self._requests:
            self._core.add(request)
        self._steps = self._tokens = 0
        self.all_decode = True  # no request has finished yet

    def step(self) -> bool:
        """One step of the engine; whether all requests are still decoding after it."""
        if self._core.has_work:
            self._core.step()
        self.all_decode &= all(request.finish_reason is None for request in self._requests)
        tokens = sum(len(request.output_ids) for request in self._requests)
        self._steps += tokens > self._tokens  # a step that only computes prompts emits nothing
        self._tokens = tokens
        return self.all_decode

    def settle(self, tokens: int = SETTLED) -> None:
        """Step until every request has emitted so many tokens."""
        while min(len(request.output_ids) for request in self._requests) < tokens:
            if not self.step():
                raise PeagleError(f"a request ended before all had {tokens} tokens: allow longer answers")

    def advance(self, steps: int) -> Window:
        """Run so many steps, in none of which a request may finish."""
        begin = self._mark()
        for _ in range(steps):
            if not self.step():
                raise PeagleError(f"a request ended within {steps} steps: allow longer answers")
        return self._between(begin, self._mark())

    def until_first_ends(self) -> Window:
        """Run until a request finishes; that step does not count."""
        end = begin = self._mark()
        while self.step():
            end = self._mark()
        if end[1] == begin[1]:
            raise PeagleError("a request ended in the first step that is measured: allow longer answers")
        return self._between(begin, end)

    def drain(self) -> None:
        """Run until all requests have finished."""
        while self._core.has_work:
            self._core.step()

    def _mark(self) -> tuple[float, int, int]:
        return self._clock(), self._steps, self._tokens

    def _between(self, begin: tuple[float, int, int], end: tuple[float, int, int]) -> Window:
        count = len(self._requests)
        context = (self._prompt_tokens + (begin[2] + end[2]) / 2) / count
        return Window(count, end[0] - begin[0], end[1] - begin[1], end[2] - begin[2], context)


def decode_window(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Window:
    """Answer the prompts and time the steps in which all of them decode."""
    batch = Decoding(llm, prompts, params)
    batch.settle()
    window = batch.until_first_ends()
    batch.drain()
    return window


def profile_steps(batch: Decoding, steps: int, trace: Path | None = None) -> Profile:
    """Profile the next steps of a settled batch; `trace` keeps the profiler's Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json" if trace is None else trace
        _record(batch, 1, Path(folder) / "first.json")  # the profiler's own start-up falls into its first use
        _record(batch, steps, path)
        return summarise(read_trace(path))


def _record(batch: Decoding, steps: int, path: Path) -> None:
    """Run the steps under the profiler and write its trace; of some failures to do so it has only a log line."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # that it starts and stops is no news
    cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(STEP):
                batch.step()
        if cuda:
            torch.cuda.synchronize()
    if not batch.all_decode:
        raise PeagleError(f"a request ended within {steps} profiled steps: allow longer answers")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        raise PeagleError(f"cannot write the trace {path}: {error}; choose a folder you may write to") from None
