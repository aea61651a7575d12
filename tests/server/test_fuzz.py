"""Bodies at random: whatever comes in, the server answers, and never with a fault of its own."""

import json
import string
import threading
from copy import deepcopy

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.config import ServeConfig
from peagle.server.app import make_app
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, Message, StreamOptions, TokenizeBody
from tests.server.serving import chat_llm, started

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODELS = {COMPLETIONS: CompletionBody, CHAT: ChatBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ODD = st.sampled_from(
    [10**30, -(10**4000), 1e308, float("nan"), float("-inf"), "\ud800", "\udfff x", "\0", "", " ", "x" * 5000, True,
     [], {}, [[]], [None], {"": 0}, "1", "null", "NaN", 0, -1, 2**63, 2**64, 0.1, [0], ["a"], {"type": "text"}]
)  # fmt: skip
VALID = (
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "n": 2, "seed": 5, "temperature": 0.5, "top_k": 3}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "stop": ["a", "b"], "logit_bias": {"5": 1}, "echo": True}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 3}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_completion_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "u"}], "stream": True, "stop_token_ids": [5], "max_tokens": 3}),
    ("/tokenize", {"messages": [{"role": "user", "content": "u"}], "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [5, 6, 7], "model": "tiny"}),
)


def fields_of(body):
    names = st.sampled_from([*body.model_fields, *body.not_supported]) | st.text(st.characters(), max_size=8)
    return st.dictionaries(names, JSON | st.sampled_from([0, 1, 2, 0.5, "a", ["a"], [5], {"5": 1}, True]), max_size=3)


MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)}), max_size=3)
BODIES = st.one_of(
    st.tuples(st.just(COMPLETIONS), JSON),
    st.tuples(st.just(COMPLETIONS), fields_of(CompletionBody).map(lambda f: {"prompt": "x", "max_tokens": 2} | f)),
    st.tuples(st.just(CHAT), fields_of(Message).map(lambda f: {"messages": [f], "max_tokens": 2})),
    st.tuples(
        st.just(CHAT), st.builds(lambda m, f: {"messages": m, "max_tokens": 2} | f, MESSAGES, fields_of(ChatBody))
    ),
)


@st.composite
def mutated(draw):
    """A valid body with something changed, at any depth, once or several times."""
    path, body = draw(st.sampled_from(VALID))
    body, depths = json.loads(json.dumps(body)), [1, 2, 50, 600]
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(places(body)))
        change = draw(st.sampled_from(["odd", "json", "drop", "deep", "again", "rename"]))
        if change == "drop":
            del holder[key]
        elif change == "deep":
            for _ in range(draw(st.sampled_from(depths))):
                holder[key] = [holder[key]]
            depths = depths[:2]  # deeper bodies Python itself cannot write
        elif change == "again" and isinstance(holder[key], list):
            holder[key] = holder[key] * 200
        elif change == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from([str(key).upper(), f" {key}", "maxTokens", "__class__", "input", ""]))] = 1
        else:
            holder[key] = deepcopy(draw(ODD if change == "odd" else JSON))  # the next change may be inside of it
        if not body:
            break
    return path, body


def places(value, depth=0):
    """(container, key) of everything inside a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [place for key in keys if depth < 6 for place in places(value[key], depth + 1)]


@pytest.fixture(scope="module")
def client():
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine:
        with TestClient(make_app(engine, llm, config), raise_server_exceptions=False) as client:
            client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
            threads = threading.active_count()
            yield client
            assert threading.active_count() <= threads + 1
        assert engine.failure is None
        assert not engine._live
        assert not engine._untold
        assert engine.snapshot().num_running == engine.snapshot().num_waiting == 0
        assert engine.snapshot().kv_usage == 0
        assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks
        assert len(llm.core.scheduler._free_slots) == llm.core.max_num_seqs


def check(response, path, body):
    """An answer, or OpenAI's error, which names a field wherever the body has any."""
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in response.text
        return
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 1000
    if response.status_code == 413:  # nobody looks into a body that is too large
        assert len(response.request.content) > 8_000_000, error
    elif isinstance(body, dict):
        sent = {str(key).encode("utf-8", "replace").decode() for key in body}
        inner = {*Message.not_supported, *StreamOptions.not_supported}  # fields of what is inside
        assert error["param"] in sent | inner | set(MODELS[path].model_fields), error


def fuzz(examples):
    return settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples)


@fuzz(250)
@given(BODIES | mutated())
def test_no_body_is_the_servers_fault(client, asked):
    path, body = asked
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    check(response, path, body)


@fuzz(150)
@given(st.sampled_from(VALID), st.data())
def test_no_text_is_the_servers_fault(client, asked, data):
    """Cut off, with keys said twice, in other encodings, with bytes changed, under other content types."""
    path, body = asked
    content = json.dumps(body).encode()
    change = data.draw(st.sampled_from(["cut", "twice", "bytes", "encoding", "type", "escapes"]))
    kind = "application/json"
    if change == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif change == "twice":
        key = data.draw(st.sampled_from(list(body)))
        content = content[:-1] + f", {json.dumps(key)}: {json.dumps(data.draw(ODD))}}}".encode()
    elif change == "bytes":
        at = data.draw(st.integers(0, len(content)))
        content = content[:at] + data.draw(st.binary(min_size=1, max_size=6)) + content[at + 1 :]
    elif change == "encoding":
        content = content.decode().encode(data.draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7"])))
    elif change == "escapes":
        content = content.replace(b'"', data.draw(st.sampled_from([b"'", b'\\"', b"\\u0022", b"\xe2\x80\x9c"])))
    else:
        letters = st.text(string.printable, max_size=20).map(lambda text: text.encode("latin-1"))
        kind = data.draw(st.sampled_from(["text/json", "application/json; charset=latin-1", "application/x-json"]))
        kind = data.draw(st.just(kind) | letters.filter(lambda text: not set(text) & set(b"\r\n\x0b\x0c")))
    response = client.post(path, content=content, headers={"content-type": kind})
    if response.status_code == 415:
        assert change == "type"
        assert response.json()["error"]["message"]
    else:
        check(response, path, None)
