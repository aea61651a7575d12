"""Attacks on the server, and what stands in their way."""

import ast
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from peagle.config import ServeConfig
from peagle.errors import PeagleError
from peagle.models.tokenizer import render_chat
from peagle.server import guard, web
from peagle.server.app import make_app
from peagle.server.run import bind, listen
from tests.engine.tiny import tiny_tokenizer
from tests.models.tiny import tiny_gguf
from tests.server.serving import chat_llm, started
from tests.test_cli import environment

ROOT = Path(__file__).resolve().parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def engine():
    with started(chat_llm(), ServeConfig()) as engine:
        yield engine


def client_of(engine, **config) -> TestClient:
    return TestClient(make_app(engine, engine.llm, ServeConfig(**config)), raise_server_exceptions=False)


@contextmanager
def listening(engine, config=None):
    """The server on a socket; its address."""
    with bind("127.0.0.1", 0) as sock:
        listen(sock)
        app = make_app(engine, engine.llm, config or ServeConfig())
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def client(engine):
    return client_of(engine)


# Keys


def test_the_key_is_compared_in_constant_time(engine, monkeypatch):
    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda *pair: compared.append(pair) or False)
    client = client_of(engine, api_key="secret")
    for given in ("Bearer x", "Bearer secret", ""):
        assert client.get("/v1/models", headers={"authorization": given}).status_code == 401
    assert compared == [(b"x", b"secret"), (b"secret", b"secret"), (b"", b"secret")]
    tree = ast.parse((ROOT / "peagle/server/guard.py").read_text(encoding="utf-8"))
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and "_key" in ast.unparse(node)]
    assert [ast.unparse(node) for node in plain if not isinstance(node.ops[0], ast.Is)] == []


def test_nothing_but_probes_and_the_pages_files_is_open(engine):
    client = client_of(engine, api_key="secret")
    for path in ("/v1/models", "/v1/models/tiny", "/openapi.json", "/nowhere", "/page", "/health/", "/v1"):
        assert client.get(path).status_code == 401, path
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/", "/health"):
        expected = 405 if path in guard.OPEN_PATHS else 401
        assert client.post(path, content=json.dumps(BODY), headers=HEADERS).status_code == expected, path
    assert client.get("/").status_code == 200
    assert client.post("/HEALTH/../v1/chat/completions", json=BODY).status_code == 401


# Sizes


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"99999999999999999999999999", b"x", b"0x10"])
def test_a_lie_about_the_length_is_refused(client, length):
    response = client.post(CHAT, content=b"{}", headers={**HEADERS, "content-length": length.decode()})
    assert response.status_code == 413


def test_a_body_that_never_ends_is_cut(client, monkeypatch):
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 5000)
    sent = []

    def endless():
        for _ in range(10_000):
            sent.append(1)
            yield b" " * 100

    assert client.post(CHAT, content=endless(), headers=HEADERS).status_code == 413


def test_a_body_that_never_comes_is_given_up(engine):
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    config = ServeConfig(receive_timeout=0.2)
    with listening(engine, config) as address, socket.create_connection(address, timeout=20) as sock:
        sock.sendall(head.encode())
        answer = b"".join(iter(lambda: sock.recv(1000), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer.lower()


# Other sites


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://evil.example:8000", "null", "http://127.0.0.1.evil.example", "http://[", "",
     "http://localhost.evil.example", "file://", "http://8.8.8.8", "http://127.0.0.1@evil.example"],
)  # fmt: skip
def test_a_name_that_leads_here_does_not_make_a_page_ours(client, origin):
    """DNS rebinding: to the browser, page and server are of one origin."""
    host = origin.removeprefix("http://")
    headers = {**HEADERS, "origin": origin, "host": host or "x"}
    response = client.post(CHAT, content=json.dumps(BODY), headers=headers)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "--allowed-origins" in response.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", None])
def test_our_own_page_and_programs_are_served(client, origin):
    headers = HEADERS | ({"origin": origin} if origin else {})
    assert client.post(CHAT, content=json.dumps(BODY), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": "k"},
        {"allowed_origins": ("https://mine.example",)},
        {"allowed_origins": ("*",)},
        {"host": "0.0.0.0"},
    ],
)
def test_pages_that_are_allowed_are_served(engine, config):
    headers = {**HEADERS, "origin": "https://mine.example", "authorization": "Bearer k"}
    assert client_of(engine, **config).post(CHAT, content=json.dumps(BODY), headers=headers).status_code == 200


def test_no_form_of_another_site_reaches_an_endpoint(client):
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        assert client.post(path, data={"prompt": "x"}).status_code == 415
        assert client.post(path, content=json.dumps(BODY), headers={"content-type": "text/plain"}).status_code == 415


# Paths


def test_no_path_of_a_request_is_opened(client, tmp_path):
    secret = tmp_path / "secret-file.json"
    secret.write_text('{"messages": "secret"}')
    opened = []

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and "secret-file" in str(arguments[0]):
            opened.append(arguments[0])

    sys.addaudithook(hook)  # for the rest of the process: there is no way back
    secret.read_text()
    assert len(opened) == 1
    for path in (str(secret), f"file://{secret}", f"../../..{secret}"):
        fields = dict(model=path, user=path, stop=path, chat_template=path, guided_json=path, response_format=path)
        for name, value in fields.items():
            client.post(CHAT, json={**BODY, name: value})
            client.post(COMPLETIONS, json={"prompt": path, "max_tokens": 1, name: value})
        client.post("/tokenize", json={"prompt": path, "model": path})
        client.post("/tokenize", json={"messages": [{"role": "user", "content": path}]})
        client.get(f"/v1/models/{path}")
        client.get(path)
        assert client.get(f"//{path}").status_code == 404
    assert len(opened) == 1


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/page.js/../web.py", "/%2e%2e/web.py", "/page.js%00", "/..%2fweb.py", "/page/index.html"],
)
def test_only_the_pages_files_are_served(client, path):
    assert client.get(path).status_code == 404


def test_no_text_of_a_request_is_in_the_log(client, caplog):
    caplog.set_level("DEBUG", logger="peagle")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1}
    answer = client.post(CHAT, json=body, headers={"authorization": "Bearer a-secret"}).json()
    client.post(CHAT, json={**body, "no-such-field": "hello"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("peagle")]
    assert len([line for line in lines if line.startswith("request id=chatcmpl-")]) == 1
    for text in ("hello", answer["choices"][0]["message"]["content"], "a-secret"):
        assert not any(text in line for line in lines)


# Templates and code


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
        "{{ raise_exception.__globals__['__builtins__']['open']('PATH', 'w') }}",
        "{{ lipsum.__globals__['os'].popen('touch PATH').read() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'system'}) %}",
        "{% include 'PATH' %}",
        "{% import 'PATH' as x %}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ '%s' % (1, 2) }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ 'x'.nothing.more }}",
    ],
)
def test_a_hostile_template_gets_nowhere(template, tmp_path):
    tokenizer, made = tiny_tokenizer(), tmp_path / "made"
    tokenizer.chat_template = template.replace("PATH", str(made))
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(PeagleError, match="the chat template refused"):
        render_chat(tokenizer, messages, add_generation_prompt=True)
    assert not made.exists()
    assert messages == [{"role": "user", "content": "hello"}]


def test_a_message_is_no_template(client):
    for content in ("{{ 7 * 7 }}", "{% for x in y %}", "{{ ''.__class__ }}"):
        messages = [{"role": "user", "content": content}]
        tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert tokens == client.post("/tokenize", json={"prompt": f"u{content}A"}).json()["tokens"]


def test_no_pickle_and_no_remote_code():
    """Weights are safetensors and GGUF. What torch.load reads of our own is tensors only."""
    for path in sorted((ROOT / "peagle").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        where = str(path)
        assert not re.search(r"\b(import (pickle|dill|cloudpickle|marshal|shelve)|allow_pickle=True)", text), where
        assert not re.search(r"trust_remote_code=(?!False)", text.replace("trust_remote_code: bool", "")), where
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", text):
            assert "weights_only=True" in call, where


# The page


class _Sources(HTMLParser):
    """What a document loads, and what of it would be script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]
        self.inline += [name for name in attributes if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in attributes):
            self.inline.append(tag)


def test_the_page_needs_nothing_from_elsewhere(client):
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    assert "http" not in policy
    sources = _Sources(response.text)
    assert sources.inline == []
    assert {f"/{name}" for name in sources.loaded if name != "data:,"} <= set(web.FILES)
    for path in web.FILES:
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cross-origin-opener-policy"] == "same-origin"
        assert "access-control-allow-origin" not in response.headers
        assert not re.search(r"https?://|//cdn|@import", response.text)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", response.text
        )
    assert all(f"/{name}" in web.FILES for name in re.findall(r'from "\./([^"]+)"', client.get("/page.js").text))


def test_the_page_can_be_turned_off(engine):
    client = client_of(engine, page=False)
    assert {client.get(path).status_code for path in web.FILES} == {404}
    assert client.get("/health").status_code == 200


def test_the_page_is_packaged():
    folder = ROOT / "peagle" / "server" / "page"
    assert {name for name, _ in web.FILES.values()} == {path.name for path in folder.iterdir()}


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_tls(certificate, tmp_path):
    """`peagle serve` itself, with a certificate that nobody else has signed."""
    cert, key = certificate
    command = [sys.executable, "-m", "peagle", "serve", str(tiny_gguf(tmp_path / "tiny.gguf")), "--port", "0"]
    command += ["--ssl-certfile", cert, "--ssl-keyfile", key, "--trust-remote-code", "--log-level", "warning"]
    variables = environment(PEAGLE_CACHE=str(tmp_path / "cache"), COLUMNS="200")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as running:
        try:
            lines = []
            while not (found := re.search(r"https://127\.0\.0\.1:\d+", lines[-1] if lines else "")):
                lines.append(running.stderr.readline())
                assert lines[-1], lines
            trusted = ssl.create_default_context(cafile=cert)
            body = {"prompt": [5, 6, 7], "max_tokens": 3}
            answer = httpx.post(f"{found[0]}{COMPLETIONS}", json=body, verify=trusted, timeout=30)
            assert answer.status_code == 200
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(f"{found[0]}/health")
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{found[0].replace('https', 'http')}/health")
            running.terminate()
            lines += running.stderr.readlines()
            assert running.wait(timeout=30) == 0
        finally:
            running.kill()
    said = "".join(lines)
    assert "--trust-remote-code has no effect: code that comes with a model is never run" in said
    assert " INFO " not in said  # with --log-level warning
