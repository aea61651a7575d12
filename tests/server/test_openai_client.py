"""The official client against a real server: what it calls, what it streams, what it raises."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams
from peagle.speculation import SpeculationFlags, choose_speculation
from tests.engine.tiny import random_prompts
from tests.server.serving import chat_llm, serving, wait_for

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served():
    with serving(chat_llm()) as served:
        yield served


@pytest.fixture
def client(served):
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(client):
    asked = dict(model="tiny", prompt="hello", max_tokens=12, seed=1, stop=["q"], n=2)
    whole = client.completions.create(**asked)
    assert whole.usage.prompt_tokens == 5
    assert whole.peagle["rounds"] > 0
    texts, reasons = ["", ""], {}
    for chunk in client.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_chat(client):
    asked = dict(model="tiny", messages=HELLO, max_completion_tokens=12, seed=1, temperature=0.5)
    ours = dict(extra_body={"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True})
    whole = client.chat.completions.create(**asked, **ours)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(**asked, **ours, stream=True, stream_options={"include_usage": True})
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == whole.choices[0].message.content
    assert events[-1].usage.total_tokens == whole.usage.total_tokens
    messages = [*HELLO, whole.choices[0].message, *HELLO]  # as people go on with a conversation
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).usage.completion_tokens == 2


def test_the_accumulating_helper(client):
    asked = dict(model="tiny", messages=HELLO, max_tokens=9, seed=2, extra_body={"stop_token_ids": [*range(2, 96)]})
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()  # it raises where the answer was cut by its length
    assert final.choices[0].message.content == client.chat.completions.create(**asked).choices[0].message.content


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=21)
    assert error.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert error.value.code == "model_not_found"
    with serving(chat_llm(), ServeConfig(api_key="k")) as locked:
        wrong = OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        assert OpenAI(base_url=f"{locked.url}/v1", api_key="k").models.list().data


def test_many_at_once_say_what_each_says_alone(served):
    """Greedy and sampled, streamed and not, more than there are slots; nothing is lost, doubled or mixed up."""
    prompts = random_prompts(40, seed=3)
    params = [SamplingParams(max_tokens=20, temperature=i % 2, seed=i) for i in range(len(prompts))]
    wanted = [output.text for output in chat_llm().generate(prompts, params)]

    async def ask(client: AsyncOpenAI, i: int) -> str:
        asked = dict(model="tiny", prompt=prompts[i], max_tokens=20, temperature=i % 2, seed=i)
        if i % 3:
            return (await client.completions.create(**asked)).choices[0].text
        stream = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(prompts))))

    assert asyncio.run(ask_all()) == wanted
    wait_for(lambda: served.engine.snapshot().num_running == 0)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_its_blocks(streamed):
    llm = chat_llm()
    step = llm.core.step
    with serving(llm) as served:
        llm.core.step = lambda: time.sleep(0.05) or step()
        body = {"prompt": "hello", "max_tokens": 120, "ignore_eos": True, "stream": streamed, "n": 3}
        if streamed:
            with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
                lines = response.iter_lines()  # kept: without it the connection is closed
                next(lines)
                assert served.engine.snapshot().num_running == 3
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.5)
        left = time.perf_counter()
        wait_for(lambda: served.engine.snapshot().num_running == 0)
        assert time.perf_counter() - left < 0.5  # a few steps, of the twenty or more that it would have taken
        assert served.engine.snapshot().tokens_generated < 300
        assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


def test_too_many_are_told_when_to_come_back():
    llm = chat_llm(max_num_seqs=2)
    step = llm.core.step
    body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
    with serving(llm, ServeConfig(max_waiting=2)) as served, ThreadPoolExecutor(12) as pool:
        llm.core.step = lambda: time.sleep(0.02) or step()
        asked = [pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=30) for _ in range(12)]
        responses = [future.result() for future in asked]
        refused = [response for response in responses if response.status_code == 429]
        assert {response.status_code for response in responses} == {200, 429}
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert all(response.json()["error"]["type"] == "rate_limit_error" for response in refused)
        # Of several answers, none is begun when not all can ever be, and coming back would not help.
        response = httpx.post(f"{served.url}/v1/completions", json={**body, "n": 8}, timeout=30)
        assert response.status_code == 400
        assert "takes 4 answers at once" in response.json()["error"]["message"]
        wait_for(lambda: served.engine.snapshot().num_running == served.engine.snapshot().num_waiting == 0)


def test_a_slow_prompt_keeps_nobody_waiting(served, monkeypatch):
    """Prompts are prepared off the event loop."""
    make_request = served.engine.make_request

    def slowly(*arguments, **named):
        time.sleep(1)
        return make_request(*arguments, **named)

    monkeypatch.setattr(served.engine, "make_request", slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(httpx.post, f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
        time.sleep(0.2)
        began = time.perf_counter()
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert time.perf_counter() - began < 0.5
        assert slow.result().status_code == 200


def test_smollm2_with_its_head():
    """Real text, characters of several tokens among it, streamed by a model that accepts several tokens a round."""
    model = "smollm2-135m"
    llm = LLM(
        model, speculative_config=choose_speculation(model, SpeculationFlags()), max_model_len=512, max_num_seqs=4
    )
    messages = [{"role": "user", "content": "Repeat this line: 🙂 naïve 日本語 🙂🙃 日本語 naïve 🙂"}]
    wanted = llm.chat([messages], SamplingParams(max_tokens=60, temperature=0.0))[0]
    with serving(llm) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        asked = dict(model=llm.target.name, messages=messages, max_tokens=60, temperature=0)
        whole = client.chat.completions.create(**asked)
        pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    assert whole.choices[0].message.content == wanted.text == "".join(pieces)
    assert any(ord(character) > 127 for character in wanted.text)
    assert not any("\ufffd" in piece for piece in pieces)
    assert whole.peagle["acceptance_length"] > 1.5


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens(served, monkeypatch):
    def encode(*_: object) -> list[int]:
        raise AssertionError("it was cut")

    monkeypatch.setattr("peagle.server.service.encode", encode)
    monkeypatch.setattr("peagle.engine.engine.encode", encode)
    monkeypatch.setattr("peagle.server.app.encode", encode)
    text = "a" * 100_000
    for path, body in {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/tokenize": {"prompt": text},
    }.items():
        response = httpx.post(f"{served.url}{path}", json=body, timeout=30)
        assert response.status_code == 400, path
        assert "shorten it" in response.json()["error"]["message"]
