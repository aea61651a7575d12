"""Ends connections that never come to a request: uvicorn itself waits for a head without end."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

_log = logging.getLogger(__name__)


class SlowHeads:
    """Looks at uvicorn's connections now and then. One that has had `seconds` since it was made for the head of a
    request, or `seconds_between` since its last answer, is closed, however busily it sends; one that then does not take
    what is still to be sent is dropped after as long again. Whoever waits for an answer or reads a stream is left
    alone."""

    def __init__(self, seconds: float, seconds_between: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._seconds_between, self._clock = seconds, max(seconds, seconds_between), clock
        self._idle: dict[Any, tuple[Any, float]] = {}  # connections between requests: their last one, since when

    def sweep(self, connections: Iterable[Any]) -> None:
        """Close what has taken too long."""
        now, idle = self._clock(), {}
        for connection in list(connections):
            last = connection.cycle  # the request whose head came last, and its answer
            if last is not None and not last.response_complete:
                continue
            known, since = self._idle.get(connection, (last, now))
            since = since if known is last else now
            idle[connection] = last, since
            limit = self._seconds if last is None else self._seconds_between
            if now - since > 2 * limit:
                connection.transport.abort()
            elif now - since > limit:
                _log.debug("closing a connection that sent no request for %g s", limit)
                connection.transport.close()
        self._idle = idle
