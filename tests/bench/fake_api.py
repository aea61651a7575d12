"""An OpenAI-compatible server in a thread, which does to each request what its prompt says."""

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

TOKENS = ["one ", "two ", "three ", "four "]


@dataclass
class FakeApi:
    """What it says of itself, and what it got."""

    url: str = ""
    models: tuple = ("tiny",)
    key: str | None = None
    per_chunk: int = 1
    metrics: bool = True
    bodies: list = field(default_factory=list)
    running: int = 0
    peak: int = 0
    rounds: int = 100
    max_model_len: int | None = None
    fails_after: int | None = None  # so many requests
    stalled: str | None = None  # a path that never answers
    waiting: int = 0  # how many ask for it

    async def handle(self, request):
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        if request.path == self.stalled:
            self.waiting += 1
            await asyncio.sleep(30)
        if request.path == "/v1/models":
            length = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
            return web.json_response({"data": [{"id": name, **length} for name in self.models]})
        if request.path == "/version":
            return web.json_response({"version": "1.2.3"})
        if request.path == "/metrics":
            return web.Response(text=self.counters() if self.metrics else "other 1\n")
        if request.path in ("/v1/chat/completions", "/v1/completions"):
            return await self.answer(request)
        return web.Response(status=404)

    def counters(self):
        """Four rounds more after every answer: of their drafts 1, 2 and 3, three, two and one were accepted."""
        n = self.rounds
        lines = [
            f'vllm:spec_decode_num_drafts_total{{model_name="tiny"}} {n}.0',
            'vllm:spec_decode_num_drafts_created{model_name="tiny"} 1.7e+09',
            f'vllm:spec_decode_num_draft_tokens_total{{model_name="tiny"}} {3 * n}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{model_name="tiny"}} {6 * n // 4}.0',
        ]
        for position, accepted in enumerate((3, 2, 1)):
            name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="tiny",position="{position}"}}'
            lines.append(f"{name} {accepted * n // 4}.0")
        return "\n".join(lines) + "\n"

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self.stream(request, prompt, "messages" in body)
        finally:
            self.running -= 1
            self.rounds += 4

    async def stream(self, request, prompt, chat):
        if isinstance(prompt, str) and prompt.startswith("status "):
            status = int(prompt.split()[1])
            moved = {"Location": f"{self.url}/v1/completions"} if 300 <= status < 400 else {}
            return web.json_response({"error": {"message": "as you wish"}}, status=status, headers=moved)
        if prompt == "html":
            return web.Response(text="<html>", content_type="text/html")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def choice(text, reason=None):
            part = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **part, "finish_reason": reason}]}

        if prompt != "empty":
            if chat:
                await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for start in range(0, len(TOKENS), self.per_chunk):
                await asyncio.sleep(30 if prompt == "hang" and start else 0.01)
                await send(choice("".join(TOKENS[start : start + self.per_chunk])))
                if prompt == "disconnect":
                    request.transport.close()
                    return response
                if prompt == "error":
                    await send({"error": {"message": "the engine fell over"}})
                    return response
                if str(prompt).startswith("event "):
                    await response.write(b"data: " + prompt[6:].encode() + b"\n\n")
                if prompt == "garbage":
                    await response.write(b"data: {not json\n\n")
                    return response
            if prompt == "cut":
                return response
            await send(choice("", "abort" if prompt == "abort" else "length"))
            if prompt != "no usage":
                await send({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(TOKENS)}})
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def fake_api(**settings):
    """A running server."""
    api = FakeApi(**settings)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def run():
        stop.append(asyncio.Event())
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", api.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        api.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop[0].wait()
        await runner.cleanup()

    stop = []
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(stop[0].set)
        thread.join()
        loop.close()
