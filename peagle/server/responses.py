"""From answers to bodies: whole, or as server-sent events. What chat and completions differ in is their `Form`."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from peagle.acceptance import AcceptanceStats
from peagle.engine.outputs import Logprobs, ScoredToken, scored_tokens
from peagle.engine.request import Request, RequestOutput
from peagle.server.answers import Answers
from peagle.server.engine_thread import Delta
from peagle.server.errors import ClientGone, api_error
from peagle.server.harmony import Harmony
from peagle.server.logprobs import Echo, TokenNames
from peagle.server.trace import Trace

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Form:
    """How one endpoint writes an answer: the `writer` of each choice, its tokens' `logprobs`, what its first chunk says
    before there is text, and the format of the text if it has marks."""

    prefix: str  # of ids
    whole_kind: str
    chunk_kind: str
    writer: "Callable[[], Writer]"
    logprobs: Callable[[TokenNames, Sequence[ScoredToken]], dict[str, Any]]
    opening: Mapping[str, Any] | None = None
    harmony: Harmony | None = None


class Writer(Protocol):
    """Writes the text of one choice, whole or piece by piece."""

    def whole(self, text: str) -> dict[str, Any]:
        """The part of a choice that holds all of it."""

    def piece(self, text: str, *, final: bool = False) -> dict[str, Any]:
        """The part of a chunk's choice that holds more of it; with nothing to say yet, an empty one."""

    def reason(self, finish_reason: str) -> str:
        """What a client reads as the reason of the end."""


class TextWriter:
    """A choice that is its text."""

    def whole(self, text: str) -> dict[str, Any]:
        """See `Writer`."""
        return {"text": text}

    def piece(self, text: str, *, final: bool = False) -> dict[str, Any]:  # noqa: ARG002
        """See `Writer`."""
        return {"text": text}

    def reason(self, finish_reason: str) -> str:
        """See `Writer`."""
        return finish_reason


@dataclass(frozen=True, slots=True)
class Reply:
    """One response under way. `choices` is how many there are for each prompt, whose tokens count once; `echoes`, one
    for each answer, come before its text."""

    form: Form
    model: str
    requests: Sequence[Request]
    choices: int
    echoes: Sequence[Echo]
    wants_usage: bool
    names: TokenNames
    number: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """What response and log call it."""
        return f"{self.form.prefix}-{self.number}"

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        texts = [echo.text + output.text for echo, output in zip(self.echoes, outputs, strict=True)]
        writers = [self.form.writer() for _ in outputs]
        parts = [writer.whole(text) for writer, text in zip(writers, texts, strict=True)]
        choices = [
            self._choice(i, parts[i], writers[i].reason(o.finish_reason), self._scored(i, o), o.stop_reason)
            for i, o in enumerate(outputs)
        ]
        usage = self._usage(sum(len(o.token_ids) for o in outputs))
        return {
            **self._head(self.form.whole_kind), "choices": choices, "usage": usage,
            "peagle": speculation([o.stats for o in outputs]),
        }  # fmt: skip

    async def events(self, answers: Answers, traces: Sequence[Trace] = ()) -> AsyncIterator[str]:
        """The chunks of a stream; an error on the way becomes the last one. `traces`, one for each answer, add to every
        chunk where its tokens came from."""
        num_tokens = 0
        writers = [self.form.writer() for _ in self.requests]
        try:
            for index, echo in enumerate(self.echoes):
                if self.form.opening is not None:
                    yield self._chunk(index, self.form.opening, None)
                if echo.text and self.requests[index].prompt_logprobs is None:
                    yield self._chunk(index, writers[index].piece(echo.text), None)
            async for news in answers:
                chunks = []  # sent together: a system call costs more than a chunk
                for index, delta in news:
                    num_tokens += len(delta.token_ids)
                    if delta.prompt_logprobs is not None:
                        # Long to write, as the prompt may be, times its log-probabilities: others are not to wait.
                        chunks.append(await asyncio.to_thread(self._scored_echo, index, delta.prompt_logprobs))
                    chunks.append(self._told(index, delta, writers[index], traces[index] if traces else None))
                if chunk := "".join(chunks):
                    yield chunk
            if self.wants_usage:
                yield _event({**self._head(self.form.chunk_kind), "choices": [], "usage": self._usage(num_tokens)})
        except ClientGone:
            return
        except Exception as error:
            yield _event(api_error(error).body())
        yield DONE

    def _told(self, index: int, delta: Delta, writer: Writer, trace: Trace | None) -> str:
        """The chunk of a delta; nothing where there is nothing to say yet."""
        scored, end = self._behind_echo(index, delta.scored), delta.output
        part = writer.piece(delta.text, final=end is not None)
        about: dict[str, Any] = {} if end is None else speculation([end.stats])
        about |= {} if trace is None else {"tokens": trace.tokens(delta)}
        if not ((delta.text and any(part.values())) or scored or about):
            return ""
        reason, stop = (None, None) if end is None else (writer.reason(end.finish_reason), end.stop_reason)
        return self._chunk(index, part, reason, scored, about and {"peagle": about}, stop)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _scored(self, index: int, output: RequestOutput) -> list[ScoredToken]:
        """All tokens of an answer that asks for log-probabilities, with those of its echo."""
        prompt: list[ScoredToken] = []
        if output.prompt_logprobs is not None:
            prompt = self.echoes[index].scored(output.prompt_token_ids, output.prompt_logprobs)
        if output.logprobs is None:
            return prompt
        scored = scored_tokens(output.token_ids, output.logprobs, output.text_ends)
        return [*prompt, *self._behind_echo(index, scored)]

    def _behind_echo(self, index: int, scored: Sequence[ScoredToken]) -> list[ScoredToken]:
        return [token._replace(offset=len(self.echoes[index].text) + token.offset) for token in scored]

    def _scored_echo(self, index: int, logprobs: Logprobs) -> str:
        echo = self.echoes[index]
        part = self.form.writer().piece(echo.text)
        return self._chunk(index, part, None, echo.scored(self.requests[index].prompt_ids, logprobs))

    def _choice(
        self,
        index: int,
        part: Mapping[str, Any],
        reason: str | None,
        scored: Sequence[ScoredToken] = (),
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        logprobs = self.form.logprobs(self.names, scored) if scored else None
        return {"index": index, **part, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}

    def _chunk(
        self,
        index: int,
        part: Mapping[str, Any],
        reason: str | None,
        scored: Sequence[ScoredToken] = (),
        about: Mapping[str, Any] | None = None,
        stop_reason: int | str | None = None,
    ) -> str:
        usage = {"usage": None} if self.wants_usage else {}  # as OpenAI: every chunk has it, all but the last null
        choices = [self._choice(index, part, reason, scored, stop_reason)]
        return _event({**self._head(self.form.chunk_kind), "choices": choices, **usage, **(about or {})})

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        first = self.requests[:: self.choices]
        prompts = sum(len(request.prompt_ids) for request in first)
        return {
            "prompt_tokens": prompts, "completion_tokens": num_tokens, "total_tokens": prompts + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached for request in first)},
        }  # fmt: skip


class EventStream(StreamingResponse):
    """A stream of events that closes its answers however it ends."""

    def __init__(self, reply: Reply, answers: Answers, traces: Sequence[Trace]) -> None:
        # Proxies that hold back what they could send would undo the streaming.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(reply.events(answers, traces), media_type="text/event-stream", headers=headers)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the stream. The answers notice when the client goes away; nobody else need wait for that."""
        try:
            await self.stream_response(send)
        finally:
            self._answers.close()


def speculation(each: Sequence[AcceptanceStats]) -> dict[str, Any]:
    """What the drafts of some answers brought, for the field `peagle` of a response."""
    stats = AcceptanceStats()
    for one in each:
        stats.add(one)
    return {
        "acceptance_length": round(stats.acceptance_length, 4),
        "rounds": stats.num_rounds,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "accepted_per_position": stats.accepted_per_position,
    }


def _event(body: Mapping[str, Any]) -> str:
    # All ASCII: some clients cut lines at U+2028 and its like.
    return f"data: {json.dumps(body)}\n\n"
