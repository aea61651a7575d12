"""A server that answers as OpenAI's API does, with tokens at fixed times: what a load generator ought to measure.

Token i of a request is due `first_ms + i * interval_ms` after its body has arrived, `tokens_per_chunk` of them at once.
The times at which bytes were handed to the system are kept, for GET /record: the truth that a client is compared with.
Nothing but asyncio, so that the server is not what is measured.

    python -m benchmarks.fake_server --first-ms 50 --interval-ms 20
"""

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

MODEL = "fake"


@dataclass(frozen=True, slots=True)
class Schedule:
    """When tokens are due."""

    first_ms: float = 50.0
    interval_ms: float = 20.0
    tokens_per_chunk: int = 1


@dataclass(slots=True)
class Sent:
    """What was sent for one request: seconds of this machine's clock."""

    received: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0


class FakeServer(asyncio.Protocol):
    """One connection; `record` is shared by all."""

    def __init__(self, schedule: Schedule, record: list[Sent]) -> None:
        self._schedule, self._record = schedule, record
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast(asyncio.Transport, transport)  # a stream's always is one

    def data_received(self, data: bytes) -> None:
        """Take bytes; a request is answered once its body is whole."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].decode("latin-1")
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
            size = int(headers.get("content-length", "0"))
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._answer(head.split(" ", 2), body)

    def _answer(self, request: list[str], body: bytes) -> None:
        method, path = request[0], request[1]
        if method == "POST":
            asked = json.loads(body)
            self._stream(path, asked, Sent(received=time.perf_counter()))
        elif path == "/v1/models":
            self._whole({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "fake"}]})
        elif path == "/record":
            self._whole([[sent.received, sent.chunks, sent.tokens] for sent in self._record])
        else:
            self._whole({} if path == "/health" else {"error": {"message": "not found"}}, path != "/health")

    def _whole(self, value: Any, missing: bool = False) -> None:
        text = json.dumps(value).encode()
        status = "404 Not Found" if missing else "200 OK"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._write(head.encode() + text)

    def _stream(self, path: str, asked: Mapping[str, Any], sent: Sent) -> None:
        chat = path.endswith("chat/completions")
        piece = {"delta": {"content": "token "}} if chat else {"text": "token "}
        common = {"id": "cmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        choice = {"index": 0, **piece, "logprobs": None, "finish_reason": None}
        last = {**common, "choices": [{**choice, "finish_reason": "length"}]}
        self._record.append(sent)
        total = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
        usage = {"prompt_tokens": 8, "completion_tokens": total, "total_tokens": total + 8}
        end = _event(last) + _event({**common, "choices": [], "usage": usage}) + _chunked(b"data: [DONE]\n\n")
        self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._send(sent, total, _event({**common, "choices": [choice]}), end + b"0\r\n\r\n")

    def _send(self, sent: Sent, total: int, chunk: bytes, end: bytes) -> None:
        """Send what is due next, and plan the rest."""
        loop, plan = asyncio.get_running_loop(), self._schedule
        due = sent.received + (plan.first_ms + sent.tokens * plan.interval_ms) / 1000

        def at_last() -> None:
            sent.tokens = min(total, sent.tokens + plan.tokens_per_chunk)
            self._write(chunk if sent.tokens < total else end)
            sent.chunks.append(time.perf_counter())
            if sent.tokens < total and self._transport is not None and not self._transport.is_closing():
                self._send(sent, total, chunk, end)

        # The loop's clock is another than perf_counter on some systems.
        loop.call_at(loop.time() + max(0.0, due - time.perf_counter()), at_last)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _event(value: Mapping[str, Any]) -> bytes:
    return _chunked(b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def run_server(schedule: Schedule, port: int) -> None:
    """Serve until SIGTERM; the port stands on the first line of stdout."""
    record: list[Sent] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeServer(schedule, record), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    serving = asyncio.ensure_future(server.serve_forever())
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(run_server(Schedule(args.first_ms, args.interval_ms, args.tokens_per_chunk), args.port))


if __name__ == "__main__":
    main()
