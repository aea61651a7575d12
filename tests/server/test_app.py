"""The endpoints over a tiny engine, in one process: what is answered, what is refused and how it is said."""

import json
import time

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from peagle.config import ServeConfig
from peagle.errors import NoMemory
from peagle.sampling import SamplingParams
from peagle.server import guard, service
from peagle.server.app import make_app
from peagle.server.errors import of_validation, shown
from peagle.server.metrics import Metrics
from peagle.server.protocol import ChatBody
from tests.server.serving import chat_llm, started

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def llm():
    return chat_llm()


@pytest.fixture(scope="module")
def client(llm):
    config, metrics = ServeConfig(), Metrics("tiny")
    with started(llm, config, metrics) as engine:
        app = make_app(engine, llm, config, metrics)
        with TestClient(app, raise_server_exceptions=False) as client:
            yield client


def post(client, path, **body):
    return client.post(path, content=json.dumps(body), headers=JSON)


def chunks(response):
    """The events of a stream, which must end as OpenAI's do."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def error(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_completion(client):
    body = post(client, COMPLETIONS, prompt="hello", max_tokens=9, temperature=0).json()
    choice = body["choices"][0]
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert choice["stop_reason"] is None
    assert choice["text"] == "BBBnnnWkaa"  # nine tokens of one letter or two
    assert choice["finish_reason"] == "length"
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14, **details}
    stats = body["peagle"]
    assert stats["rounds"] * 3 == stats["draft_tokens"]
    assert stats["acceptance_length"] == round(1 + stats["accepted_tokens"] / stats["rounds"], 4)
    assert sum(stats["accepted_per_position"]) == stats["accepted_tokens"]


def test_defaults_are_openais(client):
    assert post(client, COMPLETIONS, prompt="x", ignore_eos=True).json()["usage"]["completion_tokens"] == 16
    usage = post(client, CHAT, messages=HELLO, ignore_eos=True).json()["usage"]
    assert usage["total_tokens"] == 128  # what the context leaves
    texts = {post(client, COMPLETIONS, prompt="x").json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1  # temperature 1 and fresh seeds


def test_every_form_of_prompt_says_the_same(client):
    ids = post(client, "/tokenize", prompt="hello").json()["tokens"]
    asked = ("hello", ["hello", "hello"], ids, [ids, ids])
    bodies = [post(client, COMPLETIONS, prompt=p, max_tokens=7, seed=3, echo=True).json() for p in asked]
    texts = [choice["text"] for body in bodies for choice in body["choices"]]
    assert [len(body["choices"]) for body in bodies] == [1, 2, 1, 2]
    assert len(set(texts)) == 1
    assert texts[0].startswith("hello")
    assert [body["usage"]["prompt_tokens"] for body in bodies] == [5, 10, 5, 10]


@pytest.mark.parametrize("stop", [None, ["e", "tt", "zz"]])
def test_a_stream_says_what_a_whole_answer_does(client, stop):
    asked = dict(prompt=["abc", "xyz"], n=2, seed=5, max_tokens=40, stop=stop, echo=True)
    whole = post(client, COMPLETIONS, **asked).json()
    events = chunks(post(client, COMPLETIONS, **asked, stream=True, stream_options={"include_usage": True}))
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"]
        if stop:
            assert not any(text in choice["text"][3:] for text in stop)


def test_choices_differ_by_seed_alone(client, llm):
    body = post(client, COMPLETIONS, prompt="hello", n=3, seed=7, max_tokens=12).json()
    outputs = llm_texts(client, [dict(prompt="hello", seed=7 + i, max_tokens=12) for i in range(3)])
    assert [choice["text"] for choice in body["choices"]] == outputs
    assert len(set(outputs)) == 3
    assert [body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [5, 36, 41]


def llm_texts(client, asked):
    return [post(client, COMPLETIONS, **one).json()["choices"][0]["text"] for one in asked]


def test_sampling_fields_reach_the_engine():
    """Against `LLM.generate` with the same parameters, on an engine of its own."""
    fields = dict(
        max_tokens=20, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.2, seed=11, stop_token_ids=[30], ignore_eos=True,
    )  # fmt: skip
    bias = {"5": 2.5, "6": -100}
    wanted = chat_llm().generate(["hello"], SamplingParams(**fields, logit_bias=bias))[0]
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        body = post(client, COMPLETIONS, prompt="hello", **fields, logit_bias=bias).json()
        assert client.get("/metrics").status_code == 404  # without metrics
    assert body["choices"][0]["text"] == wanted.text
    assert body["choices"][0]["finish_reason"] == wanted.finish_reason
    assert body["peagle"]["rounds"] == wanted.stats.num_rounds


def test_chat(client):
    asked = dict(messages=[{"role": "system", "content": "s"}, *HELLO], seed=1, max_tokens=9)
    body = post(client, CHAT, **asked).json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    text = post(client, COMPLETIONS, prompt="ssuhelloA", seed=1, max_tokens=9).json()["choices"][0]["text"]
    assert choice["message"]["content"] == text
    assert post(client, CHAT, **asked | {"max_tokens": None, "max_completion_tokens": 9}).json()["choices"] == [choice]
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    parts = post(client, "/tokenize", messages=[{"role": "user", "content": parts}]).json()
    assert parts["tokens"] == post(client, "/tokenize", prompt="uhel\nloA").json()["tokens"]
    developer = post(client, "/tokenize", messages=[{"role": "developer", "content": "s"}]).json()
    assert developer["tokens"] == post(client, "/tokenize", prompt="ssA").json()["tokens"]
    events = chunks(post(client, CHAT, **asked, stream=True))
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    assert "usage" not in events[-1]
    assert events[-1]["peagle"] == body["peagle"]


def test_fields_that_ask_for_nothing_are_accepted(client):
    nothing = dict.fromkeys(("logprobs", "tools", "response_format", "stop", "logit_bias", "seed", "n", "stream"))
    usual = dict(
        response_format={"type": "text"}, tools=[], tool_choice="none", parallel_tool_calls=True, logprobs=False,
        top_logprobs=0, store=False, service_tier="auto", user="me", model="tiny",
    )  # fmt: skip
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    for fields in (nothing, usual):
        assert post(client, CHAT, messages=[*HELLO, said, *HELLO], max_tokens=2, **fields).status_code == 200


REFUSED = [
    (CHAT, dict(messages=[{"role": "user", "content": []}]), "messages"),
    (CHAT, dict(logprobs=1), "logprobs"),
    (CHAT, dict(top_logprobs=3), "top_logprobs"),
    (CHAT, dict(logprobs=False, top_logprobs=3), "top_logprobs"),
    (CHAT, dict(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, dict(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, dict(logprobs=True, prompt_logprobs=1), "prompt_logprobs"),
    (CHAT, dict(tools=[{"type": "function"}]), "tools"),
    (CHAT, dict(tool_choice="required"), "tool_choice"),
    (CHAT, dict(response_format={"type": "json_object"}), "response_format"),
    (CHAT, dict(chat_template="{{ 1 }}"), "chat_template"),
    (CHAT, dict(made_up=1), "made_up"),
    (CHAT, dict(messages=[]), "messages"),
    (CHAT, dict(messages=[{"role": "robot", "content": "x"}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": None}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": "x", "more": 1}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": "refuse"}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": "x" * 200}]), "messages"),
    (CHAT, dict(messages=[{"role": "user", "content": "\ud800"}]), "messages"),
    (CHAT, dict(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (CHAT, dict(max_completion_tokens=0), "max_completion_tokens"),
    (COMPLETIONS, dict(logprobs=True), "logprobs"),
    (COMPLETIONS, dict(logprobs=21), "logprobs"),
    (COMPLETIONS, dict(logprobs=-1), "logprobs"),
    (COMPLETIONS, dict(top_logprobs=1), "top_logprobs"),
    (COMPLETIONS, dict(best_of=2), "best_of"),
    (COMPLETIONS, dict(suffix="x"), "suffix"),
    (COMPLETIONS, dict(max_completion_tokens=3), "max_completion_tokens"),
    (COMPLETIONS, dict(max_tokens=0), "max_tokens"),
    (COMPLETIONS, dict(max_tokens="5"), "max_tokens"),
    (COMPLETIONS, dict(max_tokens=True), "max_tokens"),
    (COMPLETIONS, dict(max_tokens=2.5), "max_tokens"),
    (COMPLETIONS, dict(temperature=-1), "temperature"),
    (COMPLETIONS, dict(temperature=float("nan")), "temperature"),
    (COMPLETIONS, dict(top_p=0), "top_p"),
    (COMPLETIONS, dict(top_k=-2), "top_k"),
    (COMPLETIONS, dict(top_k=2**70), "top_k"),
    (COMPLETIONS, dict(min_p=2), "min_p"),
    (COMPLETIONS, dict(presence_penalty=3), "presence_penalty"),
    (COMPLETIONS, dict(repetition_penalty=0), "repetition_penalty"),
    (COMPLETIONS, dict(logit_bias={"a": 1}), "logit_bias"),
    (COMPLETIONS, dict(logit_bias={"96": 1}), "logit_bias"),
    (COMPLETIONS, dict(seed=2**63), "seed"),
    (COMPLETIONS, dict(seed=-(2**63) - 1), "seed"),
    (CHAT, dict(chat_template_kwargs={"made_up": 1}), "chat_template_kwargs"),
    (CHAT, dict(chat_template_kwargs={"chat_template": "m"}), "chat_template_kwargs"),
    (CHAT, dict(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (CHAT, dict(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (CHAT, dict(verbosity="low"), "verbosity"),
    (COMPLETIONS, dict(n=0), "n"),
    (COMPLETIONS, dict(n=129), "n"),
    (COMPLETIONS, dict(prompt=["x"] * 65, n=2), "n"),
    (COMPLETIONS, dict(prompt=["x"] * 129), "prompt"),
    (COMPLETIONS, dict(prompt=""), "prompt"),
    (COMPLETIONS, dict(prompt=[]), "prompt"),
    (COMPLETIONS, dict(prompt=[[]]), "prompt"),
    (COMPLETIONS, dict(prompt=[1, "x"]), "prompt"),
    (COMPLETIONS, dict(prompt=[96]), "prompt"),
    (COMPLETIONS, dict(prompt=[-1]), "prompt"),
    (COMPLETIONS, dict(prompt=[2**80]), "prompt"),
    (COMPLETIONS, dict(prompt="x" * 200), "prompt"),
    (COMPLETIONS, dict(prompt="\udfff"), "prompt"),
    (COMPLETIONS, dict(prompt=None), "prompt"),
    (COMPLETIONS, dict(prompt={"x": 1}), "prompt"),
    (COMPLETIONS, dict(stop=[""]), "stop"),
    (COMPLETIONS, dict(stop=["x"] * 33), "stop"),
    (COMPLETIONS, dict(stop_token_ids=[96]), "stop_token_ids"),
    (COMPLETIONS, dict(stop_token_ids=[10**4000]), "stop_token_ids"),
    (COMPLETIONS, dict(max_tokens=-(10**4000)), "max_tokens"),
    (COMPLETIONS, dict(seed=10**4000), "seed"),
    (COMPLETIONS, dict(logit_bias={str(token): 1 for token in range(10_001)}), "logit_bias"),
    (CHAT, dict(messages=HELLO * 10_001), "messages"),
    (COMPLETIONS, dict(stream_options={"include_usage": True}), "stream_options"),
    (COMPLETIONS, dict(stream=True, stream_options={"x": 1}), "stream_options"),
]


@pytest.mark.parametrize("path, fields, param", REFUSED, ids=lambda value: str(value)[:30].encode("ascii", "replace"))
def test_refusals_name_the_field(client, path, fields, param):
    usual = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    said = error(post(client, path, **usual | fields))
    assert said["type"] == "invalid_request_error"
    assert said["param"] == param
    assert said["message"]
    assert len(said["message"]) < 400


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"5", b"\xff\xfe", b"[" * 100_000, b'{"prompt":' * 50_000,
        b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "seed": 1e999}', b'{"prompt": "x", "n": -1}', b'{"prompt": "x"', b"prompt=x",
        b'{"prompt": ' + json.dumps(["x"] * 50_000 + [1]).encode() + b"}", b'{"messages": {}}',
        b'{"messages": [[[]]]}', b'{"prompt": "x", "logit_bias": [1]}', b'{"prompt": "x", "model": {}}',
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {}}}',
        b'{"prompt": "x", "\\ud800": 1}', b'{"prompt": "\\u0000", "stop": "\\u0000", "max_tokens": null, "n": 1.5}',
    ],
    ids=range(23),
)  # fmt: skip
def test_rubbish_is_the_clients_fault(client, body):
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        error(client.post(path, content=body, headers=JSON))


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xff"}', b'{"prompt":' * 50_000, b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}"]
)
def test_what_cannot_be_read_at_all_has_a_remedy(client, body):
    said = error(client.post(COMPLETIONS, content=body, headers=JSON))
    assert "the body cannot be read" in said["message"]
    assert "UTF-8" in said["message"]


@pytest.mark.parametrize("body", [b"", b"null"])
def test_nothing_is_no_python_word(client, body):
    assert "empty or null" in error(client.post(COMPLETIONS, content=body, headers=JSON))["message"]


def test_echoes_have_a_limit(client, monkeypatch):
    monkeypatch.setattr(service, "MAX_SCORES", 60)
    asked = dict(prompt="hello", echo=True, n=2, max_tokens=1)  # 2 x 5 tokens, and 2 x 1 of the answers
    assert post(client, COMPLETIONS, **asked, logprobs=4).status_code == 200
    said = error(post(client, COMPLETIONS, **asked, logprobs=5))
    assert said["param"] == "logprobs"
    assert "72 log-probabilities: 60 is the most" in said["message"]


def test_scores_of_answers_have_a_limit(client, monkeypatch):
    monkeypatch.setattr(service, "MAX_SCORES", 60)
    asked = dict(messages=HELLO, n=2, logprobs=True, top_logprobs=2)
    assert post(client, CHAT, **asked, max_tokens=10).status_code == 200
    said = error(post(client, CHAT, **asked, max_tokens=11))
    assert said["param"] == "logprobs"
    assert "66 log-probabilities: 60 is the most" in said["message"]


MANY = {
    "messages": (CHAT, '{"messages": [', "{}", 2_700_000, "]}"),
    "stops": (COMPLETIONS, '{"prompt": "x", "stop": [', '""', 2_000_000, "]}"),
    "biases": (COMPLETIONS, '{"prompt": "x", "logit_bias": {', '"%d":"a"', 500_000, "}}"),
    "fields": (COMPLETIONS, '{"prompt": "x", ', '"k%d":1', 600_000, "}"),
    "tokens": ("/detokenize", '{"tokens": [', "5", 4_000_000, "]}"),
}


@pytest.mark.parametrize("what", MANY)
def test_a_body_of_millions_of_parts_is_refused_soon(client, what):
    """Of processor time: whoever validated all of them would keep everybody waiting, the first one for a minute."""
    path, begin, part, count, end = MANY[what]
    parts = [part % number for number in range(count)] if "%" in part else [part] * count
    body = begin + ",".join(parts) + end
    began = time.process_time()
    error(client.post(path, content=body.encode(), headers=JSON))
    assert time.process_time() - began < 4


def test_another_model(client):
    said = error(post(client, CHAT, messages=HELLO, model="gpt-4\ud800"), 404)
    assert said["code"] == "model_not_found"
    assert "'tiny'" in said["message"]
    assert client.get("/v1/models/tiny").json()["id"] == "tiny"
    error(client.get("/v1/models/other"), 404)


def test_the_rest(client, llm):
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 128)]
    assert "vllm:num_requests_running" in client.get("/metrics").text
    error(client.get("/nowhere"), 404)
    error(client.get(COMPLETIONS), 405)
    assert set(client.get("/openapi.json").json()["paths"]) > {COMPLETIONS, CHAT}


def test_tokens(client):
    tokens = post(client, "/tokenize", prompt="abc").json()
    assert tokens == {"tokens": [2, 3, 4], "count": 3, "max_model_len": 128}
    assert post(client, "/detokenize", tokens=[2, 3, 4]).json() == {"prompt": "abc"}
    assert error(post(client, "/detokenize", tokens=[-1]))["param"] == "tokens"
    assert error(post(client, "/tokenize"))["param"] == "prompt"
    assert error(post(client, "/tokenize", prompt="x", add_special_tokens=1))["param"] == "add_special_tokens"


def test_content_type_and_size(client, monkeypatch):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        error(client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}), 415)
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 1000)
    error(post(client, COMPLETIONS, prompt="x" * 2000), 413)
    # In pieces, with no length announced.
    parts = (b"x" * 100 for _ in range(20))
    error(client.post(COMPLETIONS, content=parts, headers=JSON), 413)


def test_key_and_origins(llm):
    config = ServeConfig(api_key="secret", allowed_origins=("https://page.example",), served_model_name="mine")
    preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
    with started(chat_llm(), config) as engine, TestClient(make_app(engine, engine.llm, config)) as client:
        for given in (
            {},
            {"authorization": "Bearer secre"},
            {"authorization": "secret"},
            {"authorization": "Bearer é"},
        ):
            headers = {name: value.encode() for name, value in given.items()}
            assert error(client.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
        models = client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert models.json()["data"][0]["id"] == "mine"
        assert client.get("/health").status_code == 200
        assert client.options(CHAT, headers=preflight).headers["access-control-allow-origin"] == preflight["origin"]
        elsewhere = client.options(CHAT, headers={**preflight, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in elsewhere.headers


def test_no_origin_is_allowed_by_default(client):
    response = client.get("/v1/models", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_an_engine_that_stops_is_said(llm):
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        engine.stop(0.0)
        assert client.get("/health").status_code == 503
        response = post(client, COMPLETIONS, prompt="x")
        assert error(response, 503)["type"] == "server_error"
        assert response.headers["retry-after"]


def test_an_engine_that_fails_is_said(llm, monkeypatch):
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:

        def fail():
            raise RuntimeError("broken")

        monkeypatch.setattr(llm.core, "step", fail)
        assert error(post(client, COMPLETIONS, prompt="x"), 500)["code"] == "engine_failed"
        assert error(post(client, COMPLETIONS, prompt="x"), 503)["message"].startswith("the engine has failed")


def test_a_failed_endpoint_is_a_500_in_the_same_form(llm, monkeypatch):
    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine:
        client = TestClient(make_app(engine, llm, config), raise_server_exceptions=False)
        monkeypatch.setattr(engine, "make_request", lambda *_, **__: 1 / 0)
        assert error(post(client, COMPLETIONS, prompt="x"), 500)["code"] == "internal_error"


def test_missing_memory_is_not_the_request_s_fault(llm, monkeypatch):
    def full(_size: int):
        raise NoMemory("no memory for penalties")

    llm, config = chat_llm(), ServeConfig()
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        monkeypatch.setattr(llm.core, "keep_history", full)
        assert error(post(client, COMPLETIONS, prompt="x", presence_penalty=1.0), 503)["code"] == "no_memory"


def test_a_time_limit_cuts(llm):
    llm, config = chat_llm(), ServeConfig(request_timeout=0.3)
    step = llm.core.step
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        llm.core.step = lambda: time.sleep(0.05) or step()
        body = post(client, CHAT, messages=HELLO, ignore_eos=True).json()
        assert body["choices"][0]["finish_reason"] == "abort"
        assert 0 < body["usage"]["completion_tokens"] < 100
        events = chunks(post(client, CHAT, messages=HELLO, ignore_eos=True, stream=True))
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        llm.core.step = lambda: time.sleep(0.5) or []
        response = post(client, CHAT, messages=HELLO)
        assert error(response, 503)["code"] == "timeout"
        assert response.headers["retry-after"]
        llm.core.step = step


def test_values_are_repeated_in_the_words_of_json():
    assert shown({"a": [None, True, "x"]}) == "{'a': [null, true, 'x']}"
    for body, says in (
        ({"messages": True}, "messages is true: it should be an array"),
        ({"messages": [None]}, "messages[0] is null: it should be an object"),
    ):
        with pytest.raises(ValidationError) as error:
            ChatBody.model_validate(body)
        assert of_validation(error.value.errors()).message == says
