"""Ends connections that never come to a request: uvicorn itself waits for a head without end, or takes one."""

import logging
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10


def http_protocol() -> Any:
    """What reads HTTP for uvicorn: h11, or where it is installed the quicker httptools, with a limit: what of a request
    is no body (head, trailers, sizes of chunks) may be no longer than this, or than the body."""
    if find_spec("httptools") is None:
        return "h11"
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        _excess = 0  # bytes of a request so far, less twice its body

        def data_received(self, data: bytes) -> None:
            self._excess += len(data)
            super().data_received(data)
            if self._excess > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes beside its body.")

        def on_body(self, body: bytes) -> None:
            self._excess -= 2 * len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._excess = 0
            super().on_message_complete()

    return Bounded


class SlowHeads:
    """Looks at uvicorn's connections now and then. One that has had `seconds` for the head of a request, since it was
    made or since a head began after its last answer, is closed, however busily it sends; one that then does not take
    what is still to be sent is dropped after as long again. Left alone are whoever waits for an answer or reads a
    stream, and who is silent between requests: uvicorn itself looks after those."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._idle: dict[Any, tuple[Any, float]] = {}  # connections between requests: their last one, since when

    def sweep(self, connections: Iterable[Any]) -> None:
        """Close what has taken too long."""
        now, idle = self._clock(), {}
        for connection in list(connections):
            last = connection.cycle  # the request whose head came last, and its answer
            is_silent = connection.timeout_keep_alive_task is not None  # since its last answer
            if is_silent or (last is not None and not last.response_complete):
                continue
            known, since = self._idle.get(connection, (last, now))
            since = since if known is last else now
            idle[connection] = last, since
            if now - since > 2 * self._seconds:
                connection.transport.abort()
            elif now - since > self._seconds:
                _log.debug("closing a connection that sent no request for %g s", self._seconds)
                connection.transport.close()
        self._idle = idle
