"""The answers to one HTTP request: submitted together, read as they grow, aborted when nobody waits for them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive

from peagle.engine.request import Request, RequestOutput
from peagle.server.engine_thread import Delta, EngineThread
from peagle.server.errors import ApiError, ClientGone


class Answers:
    """Iterate once, for what has come since the last time: a delta of each answer that has news, with its index. Who
    is slower than the engine so gets fewer and longer ones.

    All requests are submitted when it is made, or none. A watcher waits for the client to go away; it aborts what is
    unfinished, and the iteration ends with `ClientGone`. After `seconds` what is unfinished is cut. `close` must be
    called at the end.
    """

    def __init__(
        self, engine: EngineThread, requests: Sequence[Request], name: str, receive: Receive, seconds: float | None
    ) -> None:
        """`name` is what the engine's log calls them."""
        self._engine, self.requests = engine, requests
        self._open = dict(enumerate(requests))
        self._arrived: dict[int, list[Delta]] = {}
        self._client_gone, self._news = False, asyncio.Event()
        self._submit(name)
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self._cut)
        self._watcher = asyncio.create_task(self._watch(receive))

    def _submit(self, name: str) -> None:
        outbox = self._engine.outbox(asyncio.get_running_loop())
        for index, request in self._open.items():
            line = name if len(self._open) == 1 else f"{name}-{index}"

            def on_delta(delta: Delta, index: int = index) -> None:
                outbox.put(lambda: self._arrive(index, delta))

            try:
                self._engine.submit(request, on_delta, request_id=line)
            except Exception:
                self._cut()
                raise

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cut()
        self._client_gone = True
        self._news.set()

    def _arrive(self, index: int, delta: Delta) -> None:
        self._arrived.setdefault(index, []).append(delta)
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        while self._open:
            await self._news.wait()
            if self._client_gone:
                raise ClientGone
            self._news.clear()
            arrived, self._arrived = self._arrived, {}
            news = [(index, Delta.joined(deltas)) for index, deltas in arrived.items()]
            ended = {index: delta.output for index, delta in news if delta.output is not None}
            if self._engine.failure is not None and any(output.finish_reason == "abort" for output in ended.values()):
                raise ApiError(500, "the engine has failed: the server's log says why", code="engine_failed")
            for index in ended:
                del self._open[index]
            yield news

    async def outputs(self) -> list[RequestOutput]:
        """All answers, once they are complete; a 503 if they were cut before the first token."""
        finished: dict[int, RequestOutput] = {}
        try:
            async for news in self:
                finished |= {index: delta.output for index, delta in news if delta.output is not None}
        finally:
            self.close()
        if all(output.finish_reason == "abort" and not output.token_ids for output in finished.values()):
            message = "the time for the request was over before it began: try again when there is less load"
            raise ApiError(503, message, code="timeout", headers={"Retry-After": "5"})
        return [finished[index] for index in range(len(self.requests))]

    def _cut(self) -> None:
        """End what is unfinished: the engine answers with what there is, finish reason "abort"."""
        for request in self._open.values():
            self._engine.abort(request)

    def close(self) -> None:
        """Abort what is unfinished and stop watching; safe to call again."""
        self._cut()
        self._open.clear()
        self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
