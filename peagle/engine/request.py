"""One request's life: prompt, emitted tokens, when it stops, and what its rounds accepted."""

import time
from dataclasses import dataclass, field
from typing import Any

from peagle.acceptance import AcceptanceStats
from peagle.engine.outputs import Logprobs, ShownRound, StepOutput
from peagle.engine.text import MeasuredStream, TextStream
from peagle.kernels.logprobs import RowLogprobs
from peagle.sampling import SamplingParams
from peagle.structured.matcher import Matcher


@dataclass(slots=True)
class RequestOutput:
    """A finished request. `seconds` runs from its first scheduled step to its last; `rounds` holds (first emitted
    index, accepted drafts) of every verification round, in order.

    What follows `seconds` is there for requests that ask for it: `trace`, the rounds of `show_drafts`; `logprobs`, one
    for each of `token_ids`; `prompt_logprobs`, whose item i belongs to prompt token i + 1; `text_ends`, how much of the
    text there is after each token, with `logprobs` too.
    """

    prompt: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" | "length" | "abort"
    stats: AcceptanceStats
    rounds: list[tuple[int, int]]
    seconds: float
    stop_reason: int | str | None = None  # the stop string, or the token of `stop_token_ids`, that ended it
    trace: list[ShownRound] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    text_ends: list[int] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine. `stream` exists only when someone reads the text before the end.

    Two requests are never equal. The scheduler owns `slot` and `blocks`, the engine counts what it launches and reads.
    """

    index: int
    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int  # the smaller of params.max_tokens and what the context length leaves
    stream: TextStream | None = None
    matcher: Matcher | None = None  # of the grammar that the output follows; it has seen `output_ids`
    arrival: int = -1  # -1: not queued yet
    slot: int = -1  # -1: none
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens in the cache: launched ones during prefill, then those confirmed
    num_cached: int = 0  # of the prompt, found in the prefix cache when the request first got a slot
    num_prefill: int = 0  # tokens that prefill computes since the request last got its slot
    num_registered: int = 0  # blocks that later requests can find
    in_flight: int = 0  # launched emissions whose result is unread: final chunks and decode steps
    rows_in_flight: int = 0  # how far `num_computed` may be behind the device: the rows of unread decode steps
    cacheable: bool = True  # False once the drafter was left out of a step: its part of the cache has holes
    output_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(init=False)  # prompt_ids + output_ids
    finish_reason: str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # what the next step verifies, if it shows them or has a grammar
    trace: list[ShownRound] = field(default_factory=list)
    logprobs: Logprobs | None = field(init=False)  # of `output_ids`
    prompt_logprobs: Logprobs | None = field(init=False)  # of the prompt's second token and those after it
    started: float = 0.0
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.token_ids = self.prompt_ids + self.output_ids
        counts = self.params.logprobs, self.params.prompt_logprobs
        self.logprobs, self.prompt_logprobs = (None if count is None else Logprobs(count) for count in counts)

    @property
    def in_prefill(self) -> bool:
        """Whether tokens are still to be computed before the next can be emitted."""
        return self.num_computed < self.num_prefill

    def emit(self, token_ids: list[int]) -> int:
        """Append one round's tokens up to the first that ends the request; returns how many were kept."""
        if self.max_tokens == 0:
            self.finish_reason = "length"
            return 0
        for kept, token_id in enumerate(token_ids, start=1):
            self.output_ids.append(token_id)
            self.token_ids.append(token_id)
            if token_id in self.stop_ids or (self.stream is not None and self.stream.push(token_id)):
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return kept
        return len(token_ids)

    def record_round(self, first_index: int, accepted: int, drafted: int) -> None:
        """Count one verification round whose tokens begin at output index `first_index`."""
        self.stats.record(accepted, drafted)
        self.rounds.append((first_index, accepted))

    def show(self, out: StepOutput, line: int, first_index: int, num_drafts: int | None) -> None:
        """Keep what a pass shows this request, whose line it is, once its tokens are emitted, the first at
        `first_index`. It verified `num_drafts` tokens of `drafts`; None: it ended the prompt."""
        kept, width = len(self.output_ids) - first_index, out.tokens_BW.shape[1] - 1
        if self.logprobs is not None and out.logprobs is not None:
            self.logprobs.extend(*(rows[line * width : line * width + kept].numpy() for rows in out.logprobs))
        if (self.params.show_drafts or self.matcher is not None) and out.drafts_BK is not None:
            if num_drafts and self.params.show_drafts:
                accepted = int(out.tokens_BW[line, -1])
                token = self.output_ids[first_index + accepted] if kept > accepted else None
                self.trace.append(ShownRound(first_index, self.drafts[:num_drafts], min(accepted, kept), token))
            self.drafts = out.drafts_BK[line].tolist()

    def num_scored(self, first: int, rows: int) -> int:
        """After how many rows of a prefill chunk, the first ones, a prompt token's log-probability is asked for."""
        return 0 if self.prompt_logprobs is None else max(min(first + rows, len(self.prompt_ids) - 1) - first, 0)

    def score_prompt(self, first: int, rows: RowLogprobs) -> None:
        """Take the log-probabilities after prompt row `first` and those behind it, unless they are known: a prompt is
        computed again after preemption."""
        if self.prompt_logprobs is not None:
            known = len(self.prompt_logprobs) - first
            self.prompt_logprobs.extend(*(part[known:].numpy() for part in rows))

    @property
    def text_ends(self) -> list[int]:
        """How much text there was after each output token, for a request with `logprobs`."""
        return self.stream.ends if isinstance(self.stream, MeasuredStream) else []

    def output(self, tokenizer: Any) -> RequestOutput:
        """The finished request as the caller sees it."""
        stream = self.stream or TextStream(tokenizer, ())
        text = stream.finish(self.output_ids)
        if stream.stopped and self.finish_reason == "length":
            self.finish_reason = "stop"  # as where a limit falls on the token that completes a stop string
        stop_reason: int | str | None = stream.stop_string
        if stop_reason is None and self.finish_reason == "stop" and self.output_ids[-1] in self.params.stop_token_ids:
            stop_reason = self.output_ids[-1]
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            text=text,
            token_ids=self.output_ids,
            finish_reason=self.finish_reason or "abort",
            stats=self.stats,
            rounds=self.rounds,
            stop_reason=stop_reason,
            seconds=(self.ended or time.perf_counter()) - self.started if self.started else 0.0,
            trace=self.trace,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            text_ends=self.text_ends,
        )
