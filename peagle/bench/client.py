"""One streamed request as a client sees it: when its tokens came, how many there were, and how it ended.

It costs little CPU a chunk, so that at many streams it measures the server and not itself;
`benchmarks/client_overhead.py` says how well that works.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from peagle.acceptance import AcceptanceStats
from peagle.errors import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

# Parts of a chat delta that hold tokens; the second and third are two names of a model's reasoning.
_TEXT_PARTS = ("content", "reasoning_content", "reasoning", "tool_calls")
_HEADERS = MappingProxyType({"Content-Type": "application/json"})
_KEEP_ALIVE = 4.0  # seconds; below the 5 after which usual servers close, so that none is closed under a request
_LONGEST_LINE = 1 << 24  # bytes; a server that sends more without a line end is no server of events
_LARGEST_COUNT = 1 << 24  # tokens; no answer has more, and memory is taken for each


@dataclass(slots=True)
class Answer:
    """What became of a request. Times are seconds of `time.perf_counter`, kinds of failure are few and fixed.

    `chunks` are the arrivals of chunks with text, `silent_end` that of a last one without. `failure` is None for an
    answer that is whole, and for one that was stopped from here.
    """

    id: str
    category: str = ""
    start: float = 0.0
    chunks: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    silent_end: float | None = None
    failure: str | None = None
    detail: str = ""
    stopped: bool = False
    stats: AcceptanceStats | None = None

    @property
    def whole(self) -> bool:
        """Whether the request is done and nothing went wrong."""
        return self.failure is None and not self.stopped

    @property
    def tokens(self) -> int:
        """Tokens of the answer: what the server says, or else the chunks."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def arrivals(self) -> list[float]:
        """When tokens came: with the chunks, and with a silent end if one may be in it, as the end of an answer is."""
        if self.silent_end is None or self.tokens <= len(self.chunks):
            return self.chunks
        return [*self.chunks, self.silent_end]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.start

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one token."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


def _stamp_sending() -> "aiohttp.TraceConfig":
    """Lets a request's clock start when its body is written, not when this process began to prepare it: of many
    requests that begin at once, the last is written a good while after that."""
    import aiohttp

    async def on_sent(_session: Any, context: Any, _params: Any) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.start = time.perf_counter()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(on_sent)
    return trace


@asynccontextmanager
async def open_session(key: str | None) -> "AsyncIterator[aiohttp.ClientSession]":
    """Connections to one server, as many as requests need; with a key, each request carries it."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=headers, trace_configs=[_stamp_sending()]
    ) as session:
        yield session


async def ask(
    session: "aiohttp.ClientSession", url: str, body: Mapping[str, Any], answer: Answer, timeout: float | None
) -> None:
    """Send one request and fill `answer`; nothing is raised but a cancellation, and that is noted too."""
    import aiohttp

    data = json.dumps(body).encode()
    answer.start = time.perf_counter()
    try:
        async with (
            asyncio.timeout(timeout),
            session.post(url, data=data, headers=_HEADERS, trace_request_ctx=answer, allow_redirects=False) as response,
        ):
            if response.status == 200:
                await _read_events(response, answer)
            else:
                answer.failure = f"HTTP {response.status}"
                said, moved = error_message(await response.text(errors="replace")), response.headers.get("Location")
                answer.detail = said if moved is None else f"moved to {moved}: give that server with --base-url"
    except asyncio.CancelledError:
        answer.stopped = True
        raise
    except TimeoutError:
        answer.failure, answer.detail = "timeout", f"no whole answer in {timeout:g} s" if timeout else ""
    except aiohttp.ClientConnectorError as error:
        answer.failure, answer.detail = "no connection", one_line(error)
    except (aiohttp.ClientError, OSError) as error:
        answer.failure, answer.detail = "disconnect", one_line(error)
    except _BadStreamError as error:
        answer.failure, answer.detail = "unreadable answer", one_line(error)


class _BadStreamError(Exception):
    """The server sent what is no event stream of this API."""


async def _read_events(response: "aiohttp.ClientResponse", answer: Answer) -> None:
    """Read a stream to its end. One clock reading and as little work as possible for each piece that arrives."""
    rest, done = b"", False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                done = _take_event(line[5:].strip(), now, answer) or done
        if len(rest) > _LONGEST_LINE:
            raise _BadStreamError(f"a line of more than {_LONGEST_LINE} bytes")
    if answer.failure is not None:
        return
    if not done and answer.finish_reason is None:
        kind = response.content_type
        if not answer.chunks and kind != "text/event-stream":
            raise _BadStreamError(f"a body of type {kind}, not an event stream")
        answer.failure, answer.detail = "disconnect", "the stream ended before the answer did"
    elif not answer.arrivals:
        answer.failure, answer.detail = "empty answer", "no chunk held a token"
    elif answer.finish_reason == "abort":
        answer.failure, answer.detail = "aborted", "the server cut the answer short"


def _take_event(data: bytes, now: float, answer: Answer) -> bool:
    """Note what one event says; whether it is the last."""
    if data == b"[DONE]":
        return True
    try:
        event = json.loads(data)
        error, choices, usage = event.get("error"), event.get("choices"), event.get("usage")
        if error:
            answer.failure, answer.detail = "error in the stream", error_message(data.decode(errors="replace"))
            return True
        if choices:
            _take_choice(choices[0], now, answer)
        if usage:
            answer.output_tokens = _count(usage["completion_tokens"])
            answer.prompt_tokens = _count(usage.get("prompt_tokens", 0))
        if (counts := event.get("peagle")) is not None and "rounds" in counts:  # a trace alone has none
            answer.stats = AcceptanceStats(
                num_rounds=_count(counts["rounds"]),
                num_draft_tokens=_count(counts["draft_tokens"]),
                num_accepted_tokens=_count(counts["accepted_tokens"]),
                accepted_per_position=[_count(n) for n in counts["accepted_per_position"]],
            )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise _BadStreamError(f"an event that cannot be read: {data[:100].decode(errors='replace')}") from None
    return False


def _take_choice(choice: Mapping[str, Any], now: float, answer: Answer) -> None:
    delta = choice.get("delta")
    said = choice.get("text") if delta is None else next((delta[part] for part in _TEXT_PARTS if delta.get(part)), None)
    if said:
        answer.text.append(said if isinstance(said, str) else json.dumps(said))
        answer.chunks.append(now)
    if (reason := choice.get("finish_reason")) is not None:
        answer.finish_reason = reason
        answer.silent_end = None if said else now


def _count(value: Any) -> int:
    """A number of tokens or rounds as a server says it. Raises ValueError for what is none."""
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError
    return value


def error_message(text: str) -> str:
    """What the body of an error says, on one short line that a terminal can show."""
    try:
        error = json.loads(text)
        error = error.get("error", error) if isinstance(error, dict) else error
        message = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError):
        message = text
    return "".join(c if c.isprintable() else " " for c in " ".join(str(message).split())[:200])
