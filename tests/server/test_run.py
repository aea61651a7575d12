"""`peagle serve` as a process: how it begins, and how it ends on a signal under load."""

import gc
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import typer
from rich.console import Console

from peagle.cli import app
from peagle.config import ServeConfig
from peagle.errors import PeagleError
from peagle.server import run
from tests.models.tiny import tiny_gguf
from tests.server.serving import chat_llm
from tests.structured.tiny_json import HANGING, process_group
from tests.test_cli import environment, peagle, write_head


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return tiny_gguf(folder / "tiny.gguf"), write_head(folder / "head"), folder


@contextmanager
def process(tiny, *flags):
    """(process, base URL, lines of its start-up)."""
    model, head, folder = tiny
    command = [sys.executable, "-m", "peagle", "serve", model, "--head", head, "--port", "0", *flags]
    extra = {"PEAGLE_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    with subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environment(**extra)
    ) as running:
        try:
            lines = []
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", lines[-1] if lines else "")):
                lines.append(running.stderr.readline())
                assert lines[-1], lines
            yield running, found[0], lines
        finally:
            running.kill()


def ended(url, streamed, tokens=100):
    """How a request ends: its finish reason, or 503 if it was cut before it began; what is no proper end raises."""
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": streamed}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    if response.status_code == 503:
        assert int(response.headers["retry-after"]) > 0
        return json.loads(lines[0])["error"]["code"] or 503
    if streamed:
        assert lines.pop() == "[DONE]"
    return json.loads(lines[-1])["choices"][0]["finish_reason"]


def count(url):
    """(requests that run or wait, all that were ever taken)."""
    samples = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = re.split("[ {]", line)[0], float(line.rsplit(" ", 1)[1])
            samples[name] = samples.get(name, 0.0) + value
    live = samples["vllm:num_requests_running"] + samples["vllm:num_requests_waiting"]
    return live, live + samples["vllm:request_success_total"]


@contextmanager
def loaded(url, clients):
    """So many requests under way, every second one streamed; all of them have been taken, and not all have ended."""
    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ended, url, index % 2 == 0) for index in range(clients)]
        live, taken = 0, 0
        while taken < clients:
            live, taken = count(url)
        assert live
        yield asked


@pytest.mark.parametrize(
    "drain, number, reasons",
    [("30", signal.SIGTERM, {"length"}), ("0", signal.SIGTERM, {"length", "abort", "timeout"}),
     ("0.2", signal.SIGINT, {"length", "abort", "timeout"})],
)  # fmt: skip
def test_a_signal_under_load(tiny, drain, number, reasons):
    """Every request that was taken ends properly, and nothing new is."""
    with process(tiny, "--drain-seconds", drain, "--max-num-seqs", "2") as (running, url, lines):
        said = [word for line in lines for word in ("loading", "loaded", "listening") if line.startswith(word)]
        assert said == ["loading", "loaded", "listening"]
        assert httpx.get(f"{url}/health").status_code == 200
        with loaded(url, 16) as asked:
            os.kill(running.pid, number)
            time.sleep(0.3)  # it looks for signals ten times a second
            with pytest.raises(httpx.TransportError):
                httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 1})
            how = [future.result() for future in asked]
        assert running.wait(timeout=30) == 0
        rest = running.stderr.read()
    assert set(how) <= reasons
    assert drain == "30" or set(how) > {"length"} or "abort" in how
    assert "Traceback" not in rest
    assert "shutting down" in rest
    assert "stopped" in rest


def test_grammars_end_with_the_server(tiny):
    """One that hangs is answered, and none of the processes is left."""
    pytest.importorskip("xgrammar")
    with process(tiny, "--drain-seconds", "0") as (running, url, _), ThreadPoolExecutor(1) as pool:
        body = {"prompt": [5], "max_tokens": 4, "guided_regex": HANGING}
        (trials,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        assert process_group(int(trials)) == [int(trials)]
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        while len(process_group(int(trials))) < 2:
            assert not asked.done(), asked.result().text
            time.sleep(0.02)
        began = time.perf_counter()
        os.kill(running.pid, signal.SIGTERM)
        answer = asked.result()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "shutting down" in answer.json()["error"]["message"]
        assert running.wait(timeout=30) == 0
        assert time.perf_counter() - began < 8
        assert not process_group(int(trials))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def dripped(url, before=b""):
    """Seconds until the server ends a connection that sends a head byte by byte, after a whole request `before`."""
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=20) as sock:
        sock.sendall(before)
        if before:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        began = time.perf_counter()
        try:
            for byte in itertools.cycle(HEAD[:20] + b"a" * 1000):
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
                sock.setblocking(False)
                with suppress(BlockingIOError):
                    if not sock.recv(1):
                        break
                sock.setblocking(True)
        except ConnectionError:
            pass
        return time.perf_counter() - began


def test_slow_heads_are_cut_and_nobody_else(tiny):
    body = json.dumps({"prompt": [5, 6], "max_tokens": 3}).encode()
    length = f"Content-Length: {len(body)}\r\n".encode()
    with (
        process(tiny, "--receive-timeout", "1") as (_, url, _),
        ThreadPoolExecutor(4) as pool,
        httpx.Client() as client,
    ):
        slow = [pool.submit(dripped, url, before) for before in (b"", HEAD + length + b"\r\n" + body)]
        for _ in range(8):  # one connection, kept alive
            assert client.get(f"{url}/health").status_code == 200
            assert ended(url, True) == "length"
            time.sleep(0.3)
        assert all(0.9 < future.result() < 4 for future in slow)


def test_a_second_signal_cuts_at_once(tiny):
    with process(tiny, "--drain-seconds", "60", "--max-num-seqs", "1") as (running, url, _), loaded(url, 40) as asked:
        os.kill(running.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert running.poll() is None
        os.kill(running.pid, signal.SIGTERM)
        began = time.perf_counter()
        how = [future.result() for future in asked]
        assert running.wait(timeout=30) == 0
        assert time.perf_counter() - began < 10
        assert "Traceback" not in running.stderr.read()
    assert "abort" in how
    assert set(how) <= {"length", "abort", "timeout"}


def test_head_and_a_key_from_the_environment(tiny, monkeypatch):
    monkeypatch.setenv(run.API_KEY_VARIABLE, "from-outside")
    with process(tiny) as (_, url, _), httpx.Client(base_url=url) as client:
        assert client.get("/v1/models").status_code == client.head("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer from-outside"
        for path in ("/health", "/v1/models", "/metrics", "/version"):  # one connection: no body is left over in it
            head, got = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers.get("content-type") == got.headers.get("content-type")
        assert client.head("/").status_code == 200
        assert client.head("/v1/completions").status_code == 405


def test_a_connection_may_rest(tiny):
    """Clients and proxies keep theirs for 5 seconds or 60: a server that closes first loses them a request."""
    with process(tiny) as (_, url, _):
        connection = HTTPConnection(url.removeprefix("http://"))
        connection.connect()
        connection.auto_open = 0  # no second connection in place of one that was closed
        for rest in (5.5, 0):
            connection.request("GET", "/version")
            assert connection.getresponse().read()
            time.sleep(rest)
        connection.close()


def test_a_port_in_use_is_said_before_loading():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = peagle("serve", "no-such-model", "--port", port)
    assert ran.returncode == 2
    assert f"port {port} of 127.0.0.1 (another program listens there)" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_an_address_of_others():
    with pytest.raises(PeagleError, match=r"cannot listen at port 80 of 192\.0\.2\.1"), run.bind("192.0.2.1", 80):
        pass
    with pytest.raises(PeagleError, match="is not known"), run.bind("no.such.host.invalid", 80):
        pass


def test_a_certificate_that_is_none(tmp_path):
    (tmp_path / "cert.pem").write_text("rubbish")
    ran = peagle("serve", "no-such-model", "--ssl-certfile", tmp_path / "cert.pem")
    assert ran.returncode == 2
    assert "give a certificate and its key" in ran.stderr


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(PeagleError, match=r"pip install 'peagle\[server\]'"):
        run.serve(lambda: None, "model", ServeConfig(), None)


def test_what_was_loaded_is_no_garbage_to_look_through(monkeypatch):
    """Each full collection would walk it, and halt the engine and every connection meanwhile."""
    frozen = []
    monkeypatch.setattr(run, "run_server", lambda *_: frozen.append(gc.get_freeze_count()))
    before = gc.get_freeze_count()
    try:
        run.serve(chat_llm, "tiny", ServeConfig(port=0), Console(stderr=True))
        assert gc.get_freeze_count() == 0  # libraries complain at the end about objects that nobody takes away
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 100_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000}, {"port": -1}, {"max_waiting": 0}, {"request_timeout": 0.0}, {"receive_timeout": 0.0},
        {"drain_seconds": -1.0},
        {"api_key": ""}, {"host": ""}, {"ssl_keyfile": "key.pem"},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(PeagleError, match=next(iter(wrong))):
        ServeConfig(**wrong)


VLLMS = {
    "method": "eagle3", "model": "amazon/gpt-oss-20b-p-eagle", "num_speculative_tokens": 5, "parallel_drafting": True,
}  # fmt: skip


def test_vllms_command_line_is_accepted():
    arguments = ["openai/gpt-oss-20b", "--speculative-config", json.dumps(VLLMS), "--served-model-name", "x"]
    arguments += ["--host", "0.0.0.0", "--api-key", "k", "--max-num-seqs", "8"]
    arguments += ["--allowed-origins", "https://a.example,null"]
    context = typer.main.get_command(app).commands["serve"].make_context("serve", arguments)
    assert context.params["model"] == "openai/gpt-oss-20b"
    assert context.params["served_model_name"] == "x"
    assert context.params["max_num_seqs"] == 8


def test_a_model_that_cannot_be_downloaded_is_said(tmp_path):
    """The command of the announcement, word for word, where there is no network."""
    ran = peagle(
        "serve", "openai/gpt-oss-20b", "--speculative-config", json.dumps(VLLMS), "--port", 0,
        HF_HUB_OFFLINE="1", HF_HOME=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert lines[0] == "loading openai/gpt-oss-20b"
    assert "asking the Hub" in lines[1]
    assert "'openai/gpt-oss-20b' is neither a local directory nor in the local Hub cache" in lines[-1]
    assert "Traceback" not in ran.stderr
