"""`peagle serve`: from a command line to a server that listens, and from a signal to its end."""

import asyncio
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any

from peagle.config import ServeConfig
from peagle.errors import PeagleError, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.engine.engine import LLM

_log = logging.getLogger(__name__)

API_KEY_VARIABLE = "PEAGLE_API_KEY"
_CUT_SECONDS = 10  # to send the last chunks of requests that were cut when draining
_LAST_SECONDS = 3  # the same, after a second signal
_IDLE_SECONDS = 75  # of a connection between requests: longer than clients and proxies keep theirs, up to 60 by default


def serve(load: Callable[[], "LLM"], model: str, config: ServeConfig, console: "Console") -> None:
    """Load, warm up, listen; on SIGTERM or Ctrl-C let running requests finish, then return.

    What can be wrong about port and certificate is found before the model is loaded. A key that is not in the config is
    taken from the environment, where the process list does not show it.
    """
    _check_installed()
    config = replace(config, api_key=config.api_key or os.environ.get(API_KEY_VARIABLE) or None)
    from peagle.server.app import make_app
    from peagle.server.engine_thread import EngineThread
    from peagle.server.metrics import Metrics
    from peagle.server.structured import trials_of

    _check_certificate(config)
    _log_to_stderr(config.log_level)
    if config.trust_remote_code:
        message = "--trust-remote-code has no effect: code that comes with a model is never run"
        console.print(message, style="yellow", soft_wrap=True)
    with bind(config.host, config.port) as sock, ExitStack() as ends:
        console.print(f"loading {model}", highlight=False, soft_wrap=True)
        began = time.perf_counter()
        llm = load()
        console.print(f"loaded in {time.perf_counter() - began:.1f} s, {_sizes(llm)}", highlight=False, soft_wrap=True)
        name = config.served_model_name or llm.target.name
        metrics = Metrics(name)
        end_trials = ends.enter_context(trials_of(llm))
        engine = EngineThread(llm, max_waiting=config.max_waiting, observer=metrics, warm_up=config.warm_up)
        ends.callback(engine.stop, 0.0)
        engine.start()
        while not engine.is_ready:
            if engine.failure is not None:
                raise PeagleError(f"the engine failed in its first steps: {one_line(engine.failure)}")
            time.sleep(0.05)
        gc.freeze()  # to walk what was loaded, again and again, halts engine and connections for 0.2 s and more
        ends.callback(gc.unfreeze)  # or libraries report at the end that nobody took their objects away
        listen(sock)
        _announce(sock, name, config, console)
        run_server(make_app(engine, llm, config, metrics), engine, config, sock, end_trials)
    if engine.failure is not None:
        sys.exit(1)  # its traceback is in the log; who watches over the process starts it again
    console.print("stopped")


def run_server(
    app: Any, engine: Any, config: ServeConfig, sock: socket.socket, on_shutdown: Callable[[], None] = lambda: None
) -> None:
    """Serve on a listening socket until a signal; the engine is stopped when this returns. `on_shutdown` is called
    first: what only begins a request is of no use any more."""
    import uvicorn

    from peagle.server.slow_heads import SlowHeads, http_protocol

    slow_heads = SlowHeads(config.receive_timeout)

    class Server(uvicorn.Server):
        """Ends when the engine fails, and drains the engine while connections wait for their last chunks. A second
        signal, whichever, ends the waiting. Connections that never come to a request are ended on the way."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                self.force_exit = True
            super().handle_exit(sig, frame)

        async def on_tick(self, counter: int) -> bool:
            slow_heads.sweep(self.server_state.connections)
            return await super().on_tick(counter) or engine.failure is not None

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            _log.info("shutting down: no more requests; running ones get up to %g s", config.drain_seconds)
            on_shutdown()
            stopping = asyncio.create_task(asyncio.to_thread(engine.stop, config.drain_seconds))
            await super().shutdown(sockets)
            if self.force_exit:
                _log.info("a second signal: cutting what is still running")
                await asyncio.to_thread(engine.stop, 0.0)
                if self.server_state.tasks:  # they send their last chunks
                    await asyncio.wait(self.server_state.tasks, timeout=_LAST_SECONDS)
            await stopping

    settings = uvicorn.Config(
        app,
        http=http_protocol(),
        lifespan="off",
        log_config=None,
        access_log=False,  # the engine logs a line per request
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds) + _CUT_SECONDS,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    with _signals_survived():
        Server(settings).run(sockets=[sock])


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the address; PeagleError where that is not possible."""
    try:
        first, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise PeagleError(f"host {host!r} is not known ({one_line(error)}): give an address of this machine") from None
    family, kind, _, _, address = first
    with socket.socket(family, kind) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with _explained(host, port):
            sock.bind(address)
        yield sock


def listen(sock: socket.socket) -> None:
    """Take connections from now on."""
    host, port = sock.getsockname()[:2]
    with _explained(host, port):
        sock.listen(2048)


@contextmanager
def _explained(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why, remedy = one_line(error), "choose another with --host or --port"
        if error.errno == errno.EADDRINUSE:
            why, remedy = "another program listens there", "end it, or choose another with --port"
        elif error.errno == errno.EACCES:
            why, remedy = "no permission", "choose a port above 1023 with --port"
        raise PeagleError(f"cannot listen at port {port} of {host} ({why}): {remedy}") from None


@contextmanager
def _signals_survived() -> Iterator[None]:
    """uvicorn drains on a signal and raises it again when it is done; by then nothing is left to be interrupted."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_installed() -> None:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            raise PeagleError(f"the server needs {package}: pip install 'peagle[server]'")


def _check_certificate(config: ServeConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: "")
    except (OSError, ValueError) as error:
        files = config.ssl_certfile + (f" with {config.ssl_keyfile}" if config.ssl_keyfile else "")
        raise PeagleError(
            f"{files} cannot be used ({one_line(error)}): give a certificate and its key, PEM, without a password"
        ) from None


def _log_to_stderr(level: str) -> None:
    """Our own log from a level on, that of others from WARNING on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("peagle").setLevel(level.upper())


def _sizes(llm: "LLM") -> str:
    tokens = llm.core.scheduler.pool.num_blocks * llm.core.scheduler.pool.block_size
    drafts = f"{llm.num_speculative_tokens} drafts a round" if llm.num_speculative_tokens else "no drafts"
    return f"on {llm.core.device}: context {llm.max_model_len} tokens, KV cache {tokens} tokens, {drafts}"


def _announce(sock: socket.socket, name: str, config: ServeConfig, console: "Console") -> None:
    host, port = sock.getsockname()[:2]
    scheme, shown = "https" if config.ssl_certfile else "http", f"[{host}]" if ":" in host else host
    console.print(f"listening at {scheme}://{shown}:{port}/v1, model {name}", highlight=False, soft_wrap=True)
    if config.page:
        console.print(f"to chat in a browser, open {scheme}://{shown}:{port}/", highlight=False, soft_wrap=True)
    if config.api_key is None and not ip_address(host.split("%")[0]).is_loopback:
        console.print("without --api-key, everyone who can reach this address is served", style="yellow")
