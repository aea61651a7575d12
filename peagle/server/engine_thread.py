"""The engine in a thread of its own: any thread submits and aborts requests, their news come back as deltas.

One thread owns the `LLM`'s core and everything in it. Others leave calls in an inbox, which it empties between two
steps; without work it sleeps until something comes. `stream` is the same for an asyncio program.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch

from peagle.engine.engine import LLM
from peagle.engine.outputs import Logprobs, ScoredToken, ShownRound, scored_tokens
from peagle.engine.request import Request, RequestOutput
from peagle.engine.text import MeasuredStream
from peagle.engine.warm_up import WarmUp
from peagle.errors import PeagleError, one_line
from peagle.sampling import SamplingParams
from peagle.server.activity import ActivityLog, Finished, Snapshot

if TYPE_CHECKING:
    from peagle.server.metrics import Metrics

_log = logging.getLogger(__name__)

_STEP_SECONDS = 30.0  # what `stop` allows for the step that is under way
_RATE_WINDOW = 32  # finished requests by which `Overloaded` judges the pace
_LONGEST_RETRY = 60.0


@dataclass(frozen=True, slots=True)
class Delta:
    """One step's news of a request. The fields after `output` are for requests that ask for what is in them."""

    text: str  # new text that is safe to show: whole characters, no part of a stop string
    token_ids: list[int]
    output: RequestOutput | None  # set on the last delta
    trace: Sequence[ShownRound] = ()  # new rounds, of `show_drafts`
    scored: Sequence[ScoredToken] = ()  # of `logprobs`: the tokens whose text is shown by now, and was not before
    prompt_logprobs: Logprobs | None = None  # on the first delta

    @classmethod
    def joined(cls, deltas: "Sequence[Delta]") -> "Delta":
        """Consecutive news of a request, one or more, as one."""
        if len(deltas) == 1:
            return deltas[0]
        each = zip(*((delta.token_ids, delta.trace, delta.scored) for delta in deltas), strict=True)
        token_ids, trace, scored = (list(chain(*parts)) for parts in each)
        text = "".join(delta.text for delta in deltas)
        return cls(text, token_ids, deltas[-1].output, trace, scored, deltas[0].prompt_logprobs)


OnDelta = Callable[[Delta], None]


class Overloaded(PeagleError):
    """Too many requests wait: try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(PeagleError):
    """The engine takes no more requests: it is shutting down, or has failed."""


@dataclass(slots=True)
class _Live:
    """An unfinished request, and how much of it has been told."""

    request: Request
    on_delta: OnDelta
    request_id: str
    submitted: float
    first_token: float | None = None
    last_token: float | None = None
    num_sent: int = 0  # tokens
    num_rounds: int = 0
    num_drafted: int = 0
    num_shown: int = 0  # rounds of its trace
    num_scored: int = 0  # tokens whose log-probabilities were told
    prompt_told: bool = False

    def asked(self) -> dict[str, Any]:
        """What a delta tells besides tokens, to those who ask; call it once the delta's text is taken."""
        request, news = self.request, dict[str, Any]()
        if request.params.show_drafts:
            news["trace"] = request.trace[self.num_shown :]
            self.num_shown = len(request.trace)
        if request.logprobs is not None and isinstance(request.stream, MeasuredStream):
            stop = request.stream.num_shown if request.finish_reason is None else len(request.output_ids)
            ends = request.stream.ends
            news["scored"] = scored_tokens(request.output_ids, request.logprobs, ends, self.num_scored, stop)
            self.num_scored = stop
        if not self.prompt_told:
            news["prompt_logprobs"], self.prompt_told = request.prompt_logprobs, True
        return news

    def finished(self, now: float) -> Finished:
        """The request as log and metrics see it."""
        request, at = self.request, self.submitted
        return Finished(
            request_id=self.request_id or str(request.arrival),
            num_prompt=len(request.prompt_ids),
            num_output=len(request.output_ids),
            max_output=request.max_tokens,
            finish_reason=request.finish_reason or "abort",
            queued=request.started - at if request.started else None,
            first_token=None if self.first_token is None else self.first_token - at,
            last_token=None if self.last_token is None else self.last_token - at,
            total=now - at,
            acceptance_length=request.stats.acceptance_length,
        )


class EngineThread:
    """Runs an `LLM` for many threads at once. Once it is started, nobody else may use the `LLM`'s core."""

    def __init__(
        self, llm: LLM, *, max_waiting: int = 256, observer: "Metrics | None" = None, warm_up: str = "all"
    ) -> None:
        """`max_waiting`: the most requests that wait for a slot; more are refused. `observer` gets all numbers.
        `warm_up` is the kinds of steps that `WarmUp` captures."""
        self.llm, self._core = llm, llm.core
        self._warm_up = WarmUp(llm, self.make_request, warm_up)
        self._max_waiting, self._observer = max_waiting, observer
        self._thread = threading.Thread(target=self._main, name="peagle-engine", daemon=True)
        self._failure: BaseException | None = None
        self._ready = threading.Event()

        self._news = threading.Condition()  # guards the next seven, and is notified when one changes what to do
        self._inbox: deque[Callable[[], None]] = deque()
        self._num_submitted = 0  # of those in the inbox
        self._queue_formed = False  # whether the last step left requests without a slot
        self._deadline: float | None = None  # set once draining
        self._closed = False  # the thread empties its inbox no more
        self._snapshot = Snapshot()
        self._outboxes: dict[asyncio.AbstractEventLoop, Outbox] = {}

        # Of the engine thread alone:
        self._calls: deque[Callable[[], None]] = deque()  # taken from the inbox
        self._untold: deque[tuple[_Live, Delta]] = deque()  # news that nobody has heard
        self._live: dict[Request, _Live] = {}
        self._rounds_by_accepted = [0] * (llm.num_speculative_tokens + 1)
        self._prompt_tokens = self._generated = self._drafted = 0
        self._finish_times: deque[float] = deque(maxlen=_RATE_WINDOW)
        self._activity = ActivityLog()

        self._making = threading.Lock()
        if observer is not None:
            observer.watch(self.snapshot, llm.core.scheduler.pool)

    def start(self) -> None:
        """Begin: warm up, then serve. Returns at once; requests may be submitted before `is_ready`."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether a request submitted now would be answered: warmed up, alive and not shutting down."""
        alive = self._thread.is_alive() and self._failure is None
        return alive and self._ready.is_set() and self._deadline is None

    @property
    def failure(self) -> BaseException | None:
        """What killed the engine; None while all is well."""
        return self._failure

    def snapshot(self) -> Snapshot:
        """What the engine is doing now."""
        with self._news:
            return replace(self._snapshot, num_waiting=self._snapshot.num_waiting + self._num_submitted)

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        marks: Mapping[int, str] | None = None,
    ) -> Request:
        """A checked request for `submit`; raises PeagleError as `LLM.make_request` does. Takes time: keep it off an
        event loop."""
        with self._making:  # the first request with penalties makes room for all of them
            return self.llm.make_request(prompt, params, index=index, streamed=True, marks=marks)

    def submit(self, request: Request, on_delta: OnDelta, *, request_id: str = "") -> None:
        """Queue a request; from any thread. `on_delta` runs on the engine thread and must be quick.

        It gets every token once, and `output` exactly once, with the last. Raises Overloaded or Draining, and then the
        request was not taken. `request_id` names it in the log.
        """
        live = _Live(request, on_delta, request_id, time.perf_counter())
        with self._news:
            self._check_open()
            self._check_room()
            self._num_submitted += 1
            self._inbox.append(partial(self._add, live))
            self._news.notify_all()

    def abort(self, request: Request) -> None:
        """End a request within a step; from any thread. It gets its last delta, unless it has had it already."""
        with self._news:
            if not self._closed:
                self._inbox.append(partial(self._abort, request))
                self._news.notify_all()

    def stop(self, timeout: float) -> None:
        """Take no more requests, let those there are finish for `timeout` seconds, cut the rest, end the thread.

        A second call can shorten the first one's time.
        """
        deadline = time.perf_counter() + timeout
        with self._news:
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            self._news.notify_all()
        if self._thread.ident is None:  # never started
            self._close()
            return
        self._thread.join(timeout + _STEP_SECONDS)
        if self._thread.is_alive():
            _log.error("the engine did not stop within %.0f s: a step hangs", timeout + _STEP_SECONDS)

    def outbox(self, loop: asyncio.AbstractEventLoop) -> "Outbox":
        """By which an `on_delta` reaches an event loop."""
        with self._news:
            if loop not in self._outboxes:
                self._outboxes = {other: box for other, box in self._outboxes.items() if not other.is_closed()}
                self._outboxes[loop] = Outbox(loop)
            return self._outboxes[loop]

    # What other threads run.

    def _check_open(self) -> None:
        if self._failure is not None:
            raise Draining(f"the engine has failed ({one_line(self._failure)}): restart the server")
        if self._closed or self._deadline is not None:
            raise Draining("the server is shutting down: send the request to another one, or later")

    def _check_room(self) -> None:
        """Raise Overloaded if one more would wait longer than for the next step, and enough wait already."""
        waiting = self._snapshot.num_waiting + self._num_submitted
        free = 0 if self._queue_formed else self._core.max_num_seqs - self._snapshot.num_running
        if waiting < self._max_waiting + free:
            return
        now = time.perf_counter()
        times = [at for at in list(self._finish_times) if at > now - _LONGEST_RETRY]  # an idle hour is no slow pace
        pace = (now - times[0]) / len(times) if times else 0.0
        raise Overloaded(
            f"all slots are taken and as many requests wait as may, {self._max_waiting}: try again later",
            float(math.ceil(min(max(waiting * pace, 1.0), _LONGEST_RETRY))),
        )

    # What the engine thread runs.

    def _main(self) -> None:
        try:
            if self._core.device.type == "cuda":
                torch.cuda.set_device(self._core.device)  # holds per thread
            began = time.perf_counter()
            self._warm_up.run(lambda: self._deadline is not None)
            _log.info("the engine is ready, after a warm-up of %.1f s", time.perf_counter() - began)
            self._ready.set()
            while self._take_calls():
                if self._core.has_work:
                    self._step()
        except BaseException as error:
            _log.exception("the engine failed: no request can be served any more")
            self._failure = error
        self._close()

    def _take_calls(self) -> bool:
        """Wait until there is something to do and run what the inbox holds; False when it is time to end."""
        with self._news:
            while not (self._inbox or self._core.has_work or self._deadline is not None):
                self._news.wait()
            self._calls, self._inbox = self._inbox, deque()
            deadline = self._deadline
        while self._calls:
            self._calls.popleft()()
        return deadline is None or (self._core.has_work and time.perf_counter() < deadline)

    def _step(self) -> None:
        """One step of the engine. All counts are up to date before anyone hears of it."""
        advanced, num_before = self._core.step(), self._prompt_tokens + self._generated
        now, gaps = time.perf_counter(), []
        for request in advanced:
            live = self._live.get(request)
            if live is None or (len(request.output_ids) == live.num_sent and request.finish_reason is None):
                continue  # of two passes that were read at once, the first has told it all
            if live.last_token is not None:
                gaps.append(now - live.last_token)
            self._untold.append((live, self._advance(live, now)))
        if self._observer is not None:
            self._observer.record_step(gaps, self._prompt_tokens + self._generated - num_before)
        self._publish(after_step=True)
        self._activity.step(now, self._snapshot)
        self._tell()

    def _advance(self, live: _Live, now: float) -> Delta:
        """Count a request's new tokens and make them a delta."""
        request = live.request
        new_ids = request.output_ids[live.num_sent :]
        if live.first_token is None:
            live.first_token = now
            self._prompt_tokens += len(request.prompt_ids)
            if self._observer is not None:
                self._observer.record_first_token(now - live.submitted)
        live.last_token = now
        self._generated += len(new_ids)
        self._count_rounds(live)
        if request.finish_reason is not None:
            return self._last_delta(live, now)
        live.num_sent += len(new_ids)
        text = request.stream.take() if request.stream is not None else ""
        return Delta(text, new_ids, None, **live.asked())

    def _count_rounds(self, live: _Live) -> None:
        for _, accepted in live.request.rounds[live.num_rounds :]:
            self._rounds_by_accepted[accepted] += 1
        live.num_rounds = len(live.request.rounds)
        self._drafted += live.request.stats.num_draft_tokens - live.num_drafted
        live.num_drafted = live.request.stats.num_draft_tokens

    def _last_delta(self, live: _Live, now: float) -> Delta:
        """Take leave of a request that has ended: what is left of it, and its line in the books."""
        request = live.request
        output = request.output(self.llm.tokenizer)
        text = request.stream.take(final=True) if request.stream is not None else output.text
        del self._live[request]
        self._finish_times.append(now)
        finished = live.finished(now)
        finished.log()
        if self._observer is not None:
            self._observer.record_finished(finished)
        return Delta(text, output.token_ids[live.num_sent :], output, **live.asked())

    def _add(self, live: _Live) -> None:
        self._live[live.request] = live
        self._core.add(live.request)
        self._publish(num_added=1)

    def _abort(self, request: Request) -> None:
        live = self._live.get(request)
        if live is None:
            return  # it has had its last delta
        self._core.abort(request)
        delta = self._last_delta(live, time.perf_counter())
        self._publish()
        self._deliver(live, delta)

    def _tell(self) -> None:
        while self._untold:
            self._deliver(*self._untold.popleft())

    def _deliver(self, live: _Live, delta: Delta) -> None:
        """Call back; a callback that fails costs its own request, nobody else's."""
        try:
            live.on_delta(delta)
        except Exception:
            _log.exception("request %s: its callback failed, it is aborted", live.request_id or live.request.arrival)
            if delta.output is None:
                self._abort(live.request)

    def _publish(self, *, num_added: int = 0, after_step: bool = False) -> None:
        """Show others the state of now. `num_added` requests have left the inbox for the scheduler."""
        scheduler, kept = self._core.scheduler, self._rounds_by_accepted
        at_least = list(accumulate(reversed(kept)))[::-1]  # rounds that accepted 0, 1, 2, ... drafts or more
        snapshot = Snapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            tokens_generated=self._generated,
            rounds=at_least[0],
            drafted=self._drafted,
            accepted=sum(at_least[1:]),
            accepted_per_position=tuple(at_least[1:]),
        )
        with self._news:
            self._snapshot = snapshot
            self._num_submitted -= num_added
            if after_step or not snapshot.num_waiting:
                self._queue_formed = snapshot.num_waiting > 0

    def _close(self) -> None:
        """The end: nothing is taken in any more, and whoever is left gets a last delta."""
        with self._news:
            self._closed = True
            self._calls += self._inbox
            self._inbox.clear()
        while self._untold:
            with _logged("a callback failed while the engine ended"):
                self._tell()
        while self._calls:
            with _logged("a call failed while the engine ended"):
                self._calls.popleft()()
        with _logged("requests could not be taken out of the engine"):
            self._core.abort_all()
        for live in list(self._live.values()):
            live.request.finish_reason = live.request.finish_reason or "abort"  # where the engine failed half-way
            with _logged("a request could not be ended"):
                self._deliver(live, self._last_delta(live, time.perf_counter()))
        self._publish()


class Outbox:
    """Calls on their way to one event loop. Those of one step wake it once, not each for itself: waking takes a system
    call, which the engine would pay for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def put(self, call: Callable[[], None]) -> None:
        """Have the loop make a call; for the engine thread. RuntimeError once the loop is closed."""
        self._calls.append(call)
        if not self._woken:  # else `_flush` is still to begin, and will find the call
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:
                self._woken = False
                raise

    def _flush(self) -> None:
        self._woken = False
        while self._calls:
            with _logged("a delta could not be handed over"):
                self._calls.popleft()()


async def stream(engine: EngineThread, request: Request, *, request_id: str = "") -> AsyncIterator[Delta]:
    """Submit a request and yield its deltas. A consumer that goes away, cancelled or by `aclose`, aborts it.

    Raises Overloaded or Draining before the first delta.
    """
    queue: asyncio.Queue[Delta] = asyncio.Queue()
    outbox = engine.outbox(asyncio.get_running_loop())
    engine.submit(request, lambda delta: outbox.put(partial(queue.put_nowait, delta)), request_id=request_id)
    is_last = False
    try:
        while not is_last:
            delta = await queue.get()
            is_last = delta.output is not None
            yield delta
    finally:
        if not is_last:
            engine.abort(request)


@contextmanager
def _logged(problem: str) -> Iterator[None]:
    """Go on after an exception, with a word about it."""
    try:
        yield
    except Exception:
        _log.exception(problem)
