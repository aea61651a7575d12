"""Bodies at random: whatever comes in, the server answers, and never with a fault of its own."""

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.config import ServeConfig
from peagle.server.app import make_app
from peagle.server.protocol import ChatBody, CompletionBody, Message
from tests.server.serving import chat_llm, started

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def fields_of(body):
    names = st.sampled_from([*body.model_fields, *body.not_supported]) | st.text(st.characters(), max_size=8)
    return st.dictionaries(names, JSON | st.sampled_from([0, 1, 2, 0.5, "a", ["a"], [5], {"5": 1}, True]), max_size=3)


MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)}), max_size=3)
BODIES = st.one_of(
    st.tuples(st.just("/v1/completions"), JSON),
    st.tuples(
        st.just("/v1/completions"), fields_of(CompletionBody).map(lambda f: {"prompt": "x", "max_tokens": 2} | f)
    ),
    st.tuples(st.just("/v1/chat/completions"), fields_of(Message).map(lambda f: {"messages": [f], "max_tokens": 2})),
    st.tuples(
        st.just("/v1/chat/completions"),
        st.builds(lambda m, f: {"messages": m, "max_tokens": 2} | f, MESSAGES, fields_of(ChatBody)),
    ),
)


@pytest.fixture(scope="module")
def client():
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine:
        with TestClient(make_app(engine, llm, config), raise_server_exceptions=False) as client:
            yield client
        assert engine.failure is None
        assert engine.snapshot().num_running == engine.snapshot().num_waiting == 0
        assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES)
def test_no_body_is_the_servers_fault(client, asked):
    path, body = asked
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text
