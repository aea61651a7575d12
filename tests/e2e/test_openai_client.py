"""The official client's calls against the real server, SmolLM2 with its head on the CPU.

What only some models or extras can do has files of its own beside this one; they use the same fixtures.
"""

import httpx
import openai
import pytest

from tests.e2e.conftest import MODEL

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def chat(client, messages=CAPITAL, **asked):
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 12} | asked
    )


def test_chat(client):
    whole = chat(client)
    choice = whole.choices[0]
    assert whole.object == "chat.completion"
    assert whole.model == MODEL
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert 1 <= whole.usage.completion_tokens <= 12
    assert whole.peagle["acceptance_length"] > 1
    assert whole.peagle["draft_tokens"] == 5 * whole.peagle["rounds"]


def test_chat_streamed(client):
    whole = chat(client)
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == whole.choices[0].message.content
    assert [e.choices[0].finish_reason for e in events[:-1] if e.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_a_conversation_goes_on(client):
    first = chat(client).choices[0].message
    system = {"role": "system", "content": "You answer with one word."}
    messages = [system, *CAPITAL, first, {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]}]
    assert "Rome" in chat(client, messages).choices[0].message.content


def test_the_clients_own_accumulator(client):
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=60) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat(client, max_tokens=60).choices[0].message.content


def test_completions(client):
    asked = dict(model=MODEL, prompt="1 2 3 4 5 6 7 8", temperature=0, max_tokens=6)
    whole = client.completions.create(**asked, echo=True)
    assert whole.choices[0].text.startswith("1 2 3 4 5 6 7 8")
    streamed = list(client.completions.create(**asked, stream=True))
    assert "1 2 3 4 5 6 7 8" + "".join(e.choices[0].text for e in streamed) == whole.choices[0].text
    several = client.completions.create(**asked | {"prompt": [asked["prompt"]] * 2}).choices
    assert [choice.index for choice in several] == [0, 1]
    assert len({choice.text for choice in several}) == 1


def test_several_answers_are_those_of_their_seeds(client):
    drawn = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 8}
    together = chat(client, n=2, seed=40, **drawn)
    alone = [chat(client, seed=40 + index, **drawn).choices[0].message.content for index in range(2)]
    assert [choice.message.content for choice in together.choices] == alone
    assert len(set(alone)) > 1
    texts = ["", ""]
    for event in chat(client, n=2, seed=40, stream=True, **drawn):
        texts[event.choices[0].index] += event.choices[0].delta.content or ""
    assert texts == alone


@pytest.mark.parametrize("stop", ["Paris", ["nowhere to be found", " is"]])
def test_stop_strings(client, stop):
    without = chat(client).choices[0].message.content
    found = [text for text in ([stop] if isinstance(stop, str) else stop) if text in without]
    whole = chat(client, stop=stop).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.content == without[: without.index(found[0])]
    streamed = chat(client, stop=stop, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == whole.message.content


def test_fields_of_vllm(client):
    ours = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": [0]}
    greedy = chat(client).choices[0].message.content
    assert chat(client, temperature=1.0, extra_body={"top_k": 1}).choices[0].message.content == greedy
    assert chat(client, extra_body=ours).usage.completion_tokens <= 12
    banned = chat(client, logit_bias={"7042": -100}, presence_penalty=0.5, frequency_penalty=0.5)
    assert banned.choices[0].message.content


def test_models_and_tokens(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 512
    tokens = httpx.post(f"{server}/tokenize", json={"messages": CAPITAL}).json()
    assert tokens["count"] == chat(client, max_tokens=1).usage.prompt_tokens
    text = httpx.post(f"{server}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert CAPITAL[0]["content"] in text


@pytest.mark.parametrize(
    "asked, param",
    [({"temperature": -1}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"),
     ({"extra_body": {"made_up": 1}}, "made_up"), ({"messages": []}, "messages"),
     ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages")],
)  # fmt: skip
def test_refusals(client, asked, param):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **asked)
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"


def test_another_model(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=CAPITAL)
    assert error.value.code == "model_not_found"


def test_nothing_is_held_in_the_end(server):
    for line in httpx.get(f"{server}/metrics").text.splitlines():
        if line.startswith(("vllm:kv_cache_usage_perc{", "vllm:num_requests_running{")):
            assert float(line.rsplit(" ", 1)[1]) == 0.0
