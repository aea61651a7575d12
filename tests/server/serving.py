"""A real server on a free port of this machine, over the tiny engine."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.server.app import make_app
from peagle.server.engine_thread import EngineThread
from peagle.server.metrics import Metrics
from peagle.server.run import bind, listen
from tests.engine.tiny import tiny_llm

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }}{% endfor %}A"
)


@dataclass(frozen=True)
class Served:
    url: str
    llm: LLM
    engine: EngineThread


def chat_llm(**engine) -> LLM:
    llm = tiny_llm(**engine)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def wait_for(condition, seconds: float = 20.0) -> None:
    """Wait until `condition()` holds."""
    until = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < until, "it never came true"
        time.sleep(0.005)


@contextmanager
def started(llm: LLM, config: ServeConfig, metrics: Metrics | None = None) -> Iterator[EngineThread]:
    """An engine that is ready."""
    engine = EngineThread(llm, max_waiting=config.max_waiting, observer=metrics)
    engine.start()
    try:
        wait_for(lambda: engine.is_ready)
        yield engine
    finally:
        engine.stop(0.0)


@contextmanager
def serving(llm: LLM, config: ServeConfig | None = None) -> Iterator[Served]:
    config = config or ServeConfig()
    metrics = Metrics("tiny")
    with started(llm, config, metrics) as engine, bind("127.0.0.1", 0) as sock:
        listen(sock)
        app = make_app(engine, llm, config, metrics)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", llm, engine)
        finally:
            server.should_exit = True
            thread.join()
