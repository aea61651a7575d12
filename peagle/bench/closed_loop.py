"""Answer prompts with a fixed number of requests in flight, and count what each took: one run of a sweep."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from peagle.acceptance import AcceptanceStats
from peagle.engine.core import EngineCore
from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. `prompt` is the prompt's place in its dataset, `seconds` run from when it was sent to its
    last token, its prompt's share included."""

    prompt: int
    tokens: int
    seconds: float
    rounds: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All prompts of a cell answered once. `seconds` run from the first request to the last token.

    `rounds` and `accepted` drafts are those of all answers; a server may not know them of each. `steps` and
    `decode_ms`, the median of steps in which every request decoded and none was in its prompt, are known inside the
    engine only. `failed` requests have no answer; `failure` is that of the first. `commit` is that of the code,
    where somebody said it.
    """

    concurrency: int
    seconds: float
    answers: tuple[Answer, ...]
    rounds: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    steps: int | None = None
    decode_ms: float | None = None
    failed: int = 0
    failure: str | None = None
    commit: str | None = None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the whole run: prompts and the last, half-empty part included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be: where its prompt stands in its dataset, the prompt's tokens, and the seed of its draws."""

    prompt: int
    token_ids: Sequence[int]
    seed: int


def answer_all(
    llm: LLM, jobs: Sequence[Job], params: SamplingParams, concurrency: int, clock: Clock = time.perf_counter
) -> Run:
    """Answer every job once, `concurrency` at any time until the last have begun: as one ends, the next is sent.

    A Ctrl-C frees the requests.
    """
    if llm.core.has_work:
        raise PeagleError("the engine is busy: wait for its requests before it is measured")
    if not 1 <= concurrency <= llm.core.max_num_seqs:
        raise PeagleError(f"concurrency is {concurrency}: this engine runs 1 to {llm.core.max_num_seqs} requests")
    loop = _Loop(llm, jobs, params, concurrency, clock)
    try:
        return loop.run()
    finally:
        llm.core.abort_all()


class _Loop:
    """The requests of one run."""

    def __init__(self, llm: LLM, jobs: Sequence[Job], params: SamplingParams, concurrency: int, clock: Clock) -> None:
        self._llm, self._core, self._clock = llm, llm.core, clock
        self._concurrency = concurrency
        self._requests = self._make(jobs, params)
        self._sent: dict[Request, tuple[int, float]] = {}  # what is in flight: its prompt, and since when
        self._answers: list[Answer] = []
        self._stats = AcceptanceStats()
        self._steps, self._decode_seconds = 0, list[float]()

    def run(self) -> Run:
        begin = self._clock()
        self._send(begin)
        was_decoding, before = False, begin
        while self._sent:
            is_decoding = _all_decode(self._core, self._concurrency)
            advanced = self._core.step()
            now = self._clock()
            self._steps += bool(advanced)
            if is_decoding and was_decoding:  # the host reads a step late: the one before must have been such, too
                self._decode_seconds.append(now - before)
            was_decoding, before = is_decoding, now
            for request in advanced:
                if request.finish_reason is not None:
                    self._finish(request, now)
            self._send(now)
        return Run(
            concurrency=self._concurrency,
            seconds=before - begin,
            answers=tuple(self._answers),
            rounds=self._stats.num_rounds,
            accepted=self._stats.num_accepted_tokens,
            accepted_per_position=tuple(self._stats.accepted_per_position),
            steps=self._steps,
            decode_ms=1e3 * median(self._decode_seconds) if self._decode_seconds else None,
        )

    def _make(self, jobs: Sequence[Job], params: SamplingParams) -> Iterator[tuple[int, Request]]:
        """Every request in turn, made only when it is sent."""
        for index, job in enumerate(jobs):
            yield job.prompt, self._llm.make_request(job.token_ids, replace(params, seed=job.seed), index=index)

    def _send(self, now: float) -> None:
        """Send requests until as many as there should be are in flight, or none is left."""
        while len(self._sent) < self._concurrency and (following := next(self._requests, None)) is not None:
            prompt, request = following
            self._core.add(request)
            self._sent[request] = prompt, now

    def _finish(self, request: Request, now: float) -> None:
        prompt, since = self._sent.pop(request)
        stats = request.stats
        self._stats.add(stats)
        tokens, seconds = len(request.output_ids), now - since
        self._answers.append(Answer(prompt, tokens, seconds, stats.num_rounds, stats.num_accepted_tokens))


def _all_decode(core: EngineCore, concurrency: int) -> bool:
    """Whether the next step decodes for so many requests and computes no prompt."""
    running = core.scheduler.running
    full = len(running) == concurrency and not core.scheduler.waiting
    return full and not any(request.in_prefill for request in running)
