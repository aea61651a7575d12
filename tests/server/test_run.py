"""`peagle serve` as a process: how it begins, and how it ends on a signal under load."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import typer

from peagle.cli import app
from peagle.config import ServeConfig
from peagle.errors import PeagleError
from peagle.server import run
from tests.models.tiny import tiny_gguf
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


def last_reason(url):
    """The finish reason that a stream ends with; it must end properly."""
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return json.loads(lines[-2])["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    "drain, number, reasons", [("30", signal.SIGTERM, {"length"}), ("0", signal.SIGINT, {"length", "abort"})]
)
def test_a_signal_under_load(tiny, drain, number, reasons):
    with process(tiny, "--drain-seconds", drain, "--max-num-seqs", "4") as (running, url, lines):
        said = [word for line in lines for word in ("loading", "loaded", "listening") if line.startswith(word)]
        assert said == ["loading", "loaded", "listening"]
        assert httpx.get(f"{url}/health").status_code == 200
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(last_reason, url) for _ in range(16)]
            while not re.search(r"vllm:num_requests_running\{[^}]*\} [1-9]", httpx.get(f"{url}/metrics").text):
                assert not all(future.done() for future in asked)
            os.kill(running.pid, number)
            ended = [future.exception() or future.result() for future in asked]
        assert running.wait(timeout=30) == 0
        rest = running.stderr.read()
        assert "Traceback" not in rest
        assert "shutting down" in rest
        assert "stopped" in rest
    # Those that had not even connected are refused.
    assert {reason for reason in ended if isinstance(reason, str)} <= reasons
    assert all(isinstance(reason, str | httpx.TransportError | AssertionError) for reason in ended)
    assert sum(isinstance(reason, str) for reason in ended) >= 4


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000}, {"port": -1}, {"max_waiting": 0}, {"request_timeout": 0.0}, {"drain_seconds": -1.0},
        {"api_key": ""}, {"host": ""}, {"ssl_keyfile": "key.pem"},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(PeagleError, match=next(iter(wrong))):
        ServeConfig(**wrong)


def test_vllms_command_line_is_accepted():
    config = {
        "method": "eagle3", "model": "amazon/gpt-oss-20b-p-eagle", "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }  # fmt: skip
    arguments = ["openai/gpt-oss-20b", "--speculative-config", json.dumps(config), "--served-model-name", "x"]
    arguments += ["--host", "0.0.0.0", "--api-key", "k", "--max-num-seqs", "8", "--allowed-origins", "a,b"]
    context = typer.main.get_command(app).commands["serve"].make_context("serve", arguments)
    assert context.params["model"] == "openai/gpt-oss-20b"
    assert context.params["served_model_name"] == "x"
    assert context.params["max_num_seqs"] == 8
