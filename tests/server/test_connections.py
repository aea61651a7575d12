"""Attacks below HTTP's surface: clients that are slow, leave, lie about lengths or speak something else.

After each batch nothing is left of them: no task, no thread, no request, no block.
"""

import asyncio
import json
import sys
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from peagle.config import ServeConfig
from peagle.server.app import make_app
from peagle.server.slow_heads import MAX_HEAD_BYTES, SlowHeads, http_protocol
from tests.server.serving import chat_llm, started

BODY = json.dumps({"prompt": "hello", "max_tokens": 90, "ignore_eos": True}).encode()
STREAM = json.dumps({"prompt": "hello", "max_tokens": 90, "ignore_eos": True, "stream": True, "n": 3}).encode()


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    shown = [f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *lines]
    return ("\r\n".join(shown) + "\r\n\r\n").encode()


def whole(body: bytes = BODY) -> bytes:
    return head(f"Content-Length: {len(body)}") + body


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return head("Transfer-Encoding: chunked") + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


async def say(port: int, *parts: bytes, pause: float = 0.0, answer: bool = True, leave: float | None = None) -> bytes:
    """Send the parts one after the other; what comes back until the server closes, or until we `leave`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        if leave is not None:
            await asyncio.sleep(leave)
            return b""
        if not answer:
            writer.write_eof()
        async with asyncio.timeout(20):
            return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


CLOSE = "Connection: close"
ATTACKS = {
    "a chunked upload": ([chunked(BODY, 7).replace(b"Host", b"Connection: close\r\nHost")], {}, b"200"),
    "a byte at a time": ([bytes([b]) for b in head(CLOSE, f"Content-Length: {len(BODY)}") + BODY], {}, b"200"),
    "half a head": ([head()[:40]], {"answer": False}, None),
    "half a body, then silence": ([head(CLOSE, "Content-Length: 900") + BODY], {}, b"408"),
    "half a body, then gone": ([head("Content-Length: 900") + BODY], {"leave": 0.05}, None),
    "a chunk that is never finished": ([head("Transfer-Encoding: chunked") + b"fff\r\nabc"], {"leave": 0.05}, None),
    "sizes that are none": ([head("Transfer-Encoding: chunked") + b"zz\r\nabc\r\n"], {"answer": False}, b"400"),
    "a negative length": ([head("Content-Length: -5") + BODY], {"answer": False}, b"400"),
    "two lengths": ([head("Content-Length: 5", "Content-Length: 500") + BODY], {"answer": False}, b"400"),
    "a length and chunks": ([head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n"], {}, b"400"),
    "a length beyond all limits": ([head(CLOSE, f"Content-Length: {10**12}")], {}, b"413"),
    "gone before the answer": ([whole()], {"leave": 0.0}, None),
    "gone while it streams": ([whole(STREAM)], {"leave": 0.02}, None),
    "never reads": ([whole(STREAM)], {"leave": 0.5}, None),
    "two at once": ([whole() + whole().replace(b"Host", b"Connection: close\r\nHost")], {}, b"200"),
    "a rest after the body": ([head("Content-Length: 20") + BODY], {"answer": False}, b"400"),
    "a head of a megabyte": ([head("X: " + "x" * 2**20)], {"answer": False}, None),  # the answer may be lost
    "asks for leave first": ([head(CLOSE, "Expect: 100-continue", f"Content-Length: {len(BODY)}"), BODY], {}, b"200"),
    "another protocol": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200], {"answer": False}, b"400"),
    "an upgrade": ([head(CLOSE, "Upgrade: websocket", "Content-Length: 2") + b"{}"], {}, b"400"),
    "nothing": ([], {"answer": False}, None),
}


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_what_connections_do_leaves_nothing_behind(http):
    llm, config = chat_llm(), ServeConfig(receive_timeout=1.0)
    with started(llm, config) as engine:
        asyncio.run(_attack(make_app(engine, llm, config), engine, protocol(http)))
        assert engine.failure is None
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


def protocol(http):
    if http == "h11":
        return http
    pytest.importorskip("httptools")
    return http_protocol()


async def _attack(app, engine, http):
    settings = uvicorn.Config(
        app, port=0, http=http, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=1
    )
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    await say(port, whole(), leave=0.5)
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    for _ in range(2):  # the second batch meets whatever the first one broke
        answers = await asyncio.gather(*(say(port, *parts, **how) for parts, how, _ in ATTACKS.values()))
        for (name, (_, _, status)), answer in zip(ATTACKS.items(), answers, strict=True):
            if status is not None:
                assert b"HTTP/1.1 " + status in answer, (name, answer[:300])
            assert b"HTTP/1.1 5" not in answer, (name, answer[:300])
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > tasks or engine.snapshot().num_running or server.server_state.connections:
                await asyncio.sleep(0.02)
        assert not engine._live
        assert engine.snapshot().kv_usage == 0
        assert threading.active_count() <= threads
    good = await say(port, whole().replace(b"Host", b"Connection: close\r\nHost"))
    assert b"200 OK" in good
    server.should_exit = True
    await serving


class Line:
    """A connection as uvicorn has them, and what became of it."""

    def __init__(self) -> None:
        self.cycle, self.ends, self.timeout_keep_alive_task = None, [], None
        close, abort = (lambda: self.ends.append("closed")), (lambda: self.ends.append("cut"))
        self.transport = SimpleNamespace(close=close, abort=abort)

    def ask(self) -> None:
        self.timeout_keep_alive_task = None
        self.cycle = SimpleNamespace(response_complete=False)

    def answer(self) -> None:
        self.cycle.response_complete = True
        self.timeout_keep_alive_task = "uvicorn's"

    def begin(self) -> None:
        """The first bytes of a head."""
        self.timeout_keep_alive_task = None


def test_who_never_comes_to_a_request_is_cut():
    silent, busy, fresh = Line(), Line(), Line()
    clock, lines = [0.0], {silent, busy}
    heads = SlowHeads(10.0, clock=lambda: clock[0])

    def look(*times: float) -> None:
        for clock[0] in times:
            heads.sweep(lines)

    busy.ask()
    look(0, 5, 10, 12)
    assert silent.ends == ["closed"]
    lines.discard(silent)
    look(*range(15, 100, 3))  # an answer may take as long as it likes
    assert not busy.ends
    busy.answer()
    lines.add(fresh)
    look(100, 108, 111)  # whoever is silent between requests is uvicorn's
    assert (busy.ends, fresh.ends) == ([], ["closed"])
    busy.begin()
    look(112, 121)
    assert fresh.ends[-1] == "cut"
    lines.discard(fresh)
    busy.ask()
    busy.answer()  # between two looks
    busy.begin()
    look(121.5, 130)
    assert not busy.ends
    look(132)
    assert busy.ends == ["closed"]
    lines.clear()
    look(143)
    assert not heads._idle


async def _answer_to(*parts: bytes) -> bytes:
    """What httptools' connections with a limit answer, in front of an application that reads the body."""

    async def app(scope, receive, send):
        size = 0
        while (message := await receive())["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size})

    settings = uvicorn.Config(app, port=0, http=http_protocol(), log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    answer = await say(server.servers[0].sockets[0].getsockname()[1], *parts)
    server.should_exit = True
    await serving
    return answer


FILLER = b"x" * 2 * MAX_HEAD_BYTES
ENDLESS = {
    "a header": [b"GET / HTTP/1.1\r\nX: ", FILLER, FILLER],
    "headers": [b"GET / HTTP/1.1\r\n", *[b"A: b\r\n" * 4000] * 8],
    "an address": [b"GET /", FILLER, FILLER],
    "trailers": [head("Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n", *[b"A: b\r\n" * 4000] * 8],
    "the size of a chunk": [head("Transfer-Encoding: chunked") + b"1;", FILLER, FILLER],
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_no_body_has_an_end(what):
    pytest.importorskip("httptools")
    answer = asyncio.run(_answer_to(*ENDLESS[what]))
    assert answer.startswith(b"HTTP/1.1 400 ") or not answer  # the rest that was sent may take the answer with it


@pytest.mark.parametrize("size", [7, 1000, 2**16])
def test_bodies_have_no_such_limit(size):
    pytest.importorskip("httptools")
    body = b"y" * 8 * MAX_HEAD_BYTES
    close = b"Connection: close\r\nHost"
    plain = head(f"Content-Length: {len(body)}").replace(b"Host", close) + body
    for sent in (chunked(body, size).replace(b"Host", close), plain):
        assert asyncio.run(_answer_to(sent)).endswith(b"\r\n%d\r\n0\r\n\r\n" % len(body))


def test_without_httptools_it_is_h11(monkeypatch):
    monkeypatch.setitem(sys.modules, "httptools", None)
    assert http_protocol() == "h11"
