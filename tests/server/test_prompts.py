"""From a body to a prompt's tokens as clients of vLLM expect: special tokens, templates, fields that go with them."""

import json

import pytest
from fastapi.testclient import TestClient
from tokenizers import processors

from peagle.config import ServeConfig
from peagle.models.tokenizer import ChatText, encode, render_chat
from peagle.sampling import SamplingParams
from peagle.server.app import make_app
from tests.engine.tiny import tiny_llm
from tests.server.serving import started

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.name or '' }}{{ m.content }}{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}A{% endif %}{% if enable_thinking is false %}N{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BOS = 0


@pytest.fixture(scope="module")
def llm():
    """Its tokenizer puts a BOS before text, as Llama's does."""
    made = tiny_llm()
    made.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def client(llm):
    config = ServeConfig()
    with started(llm, config) as engine:
        yield TestClient(make_app(engine, llm, config))


def post(client, path, status=200, **body):
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    return response.json()


def prompt_of(client, **body):
    """What the model was given for a chat, as text."""
    tokens = post(client, "/tokenize", **body)["tokens"]
    return post(client, "/detokenize", tokens=tokens)["prompt"]


def test_text_gets_the_tokenizers_own_tokens_and_a_template_does_not(llm):
    plain = encode(llm.tokenizer, "abc", add_special_tokens=False)
    assert encode(llm.tokenizer, "abc") == [BOS, *plain]
    rendered = render_chat(llm.tokenizer, HELLO, add_generation_prompt=True)
    assert isinstance(rendered, ChatText)
    assert encode(llm.tokenizer, rendered).count(BOS) == 1
    assert encode(llm.tokenizer, rendered, add_special_tokens=True)[:2] == [BOS, BOS]


def test_the_library_does_as_the_server_does(llm):
    params = SamplingParams(max_tokens=2, temperature=0)
    request = llm.make_request("abc", params)
    assert request.prompt_ids == [BOS, 2, 3, 4]
    assert llm.make_request(render_chat(llm.tokenizer, HELLO, add_generation_prompt=True), params).prompt_ids[1] != BOS


def test_completions(client):
    def prompt_tokens(**fields):
        return post(client, COMPLETIONS, max_tokens=1, **fields)["usage"]["prompt_tokens"]

    assert prompt_tokens(prompt="abc") == prompt_tokens(prompt="abc", add_special_tokens=True) == 4
    assert prompt_tokens(prompt="abc", n=2) == 4
    assert prompt_tokens(prompt="abc", add_special_tokens=False) == prompt_tokens(prompt=[2, 3, 4]) == 3
    chat = dict(messages=HELLO, max_tokens=1)
    assert post(client, CHAT, **chat)["usage"]["prompt_tokens"] == 8
    assert post(client, CHAT, **chat, add_special_tokens=True)["usage"]["prompt_tokens"] == 9


def test_tokenize_and_back(client):
    assert post(client, "/tokenize", prompt="abc")["tokens"] == [BOS, 2, 3, 4]
    bare = post(client, "/tokenize", prompt="abc", add_special_tokens=False)["tokens"]
    assert bare == [2, 3, 4]
    assert post(client, "/detokenize", tokens=bare)["prompt"] == "abc"
    whole = post(client, "/detokenize", tokens=[BOS, *bare])["prompt"]  # as vLLM: nothing is left out
    assert post(client, "/tokenize", prompt=whole, add_special_tokens=False)["tokens"] == [BOS, *bare]


def test_an_echo_has_no_bos_in_its_text(client):
    choice = post(client, COMPLETIONS, prompt="abc", echo=True, logprobs=1, max_tokens=2)["choices"][0]
    assert choice["text"].startswith("abc")
    assert choice["logprobs"]["tokens"][:4] == ["<s>", "a", "b", "c"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1] < 0


def test_how_a_conversation_is_put_into_the_template(client):
    assert prompt_of(client, messages=HELLO) == "<s>uhelloA"
    assert prompt_of(client, messages=HELLO, add_generation_prompt=False) == "<s>uhello"
    assert prompt_of(client, messages=[{**HELLO[0], "name": "Bo"}]) == "<s>uBohelloA"
    # Tools come as text, for the template writes calls in no dialect that is read.
    assert post(client, "/tokenize", messages=HELLO, tools=[TOOL])["count"] > 100
    assert prompt_of(client, messages=HELLO, chat_template_kwargs={"enable_thinking": False}) == "<s>uhelloAN"
    begun = [*HELLO, {"role": "assistant", "content": "Sure"}]
    assert prompt_of(client, messages=begun, continue_final_message=True) == "<s>uhelloaSure"
    for fields in ({"continue_final_message": True}, {"chat_template_kwargs": {"enable_thinking": False}}):
        count = post(client, "/tokenize", messages=begun, **fields)["count"]
        usage = post(client, CHAT, messages=begun, max_tokens=1, **fields)["usage"]
        assert usage["prompt_tokens"] == count


@pytest.mark.parametrize(
    "variables",
    [
        *({name: 1} for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "self")),
        *({name: 1} for name in ("m", "role", "for", "length", "", "a b", "\ud800", "Enable_Thinking", "x" * 10_000)),
        {str(number): 1 for number in range(20_000)},
    ],
)
def test_variables_that_the_template_does_not_read(client, variables):
    for path in (CHAT, "/tokenize"):
        said = post(client, path, 400, messages=HELLO, chat_template_kwargs=variables)["error"]
        assert said["param"] == "chat_template_kwargs"
        assert said["message"].endswith(": this model's template reads no such variable, leave it out")
        assert len(said["message"]) < 200


def test_values_that_break_the_template(client):
    deep = json.loads("[" * 900 + "]" * 900)
    said = post(client, CHAT, 400, messages=HELLO, chat_template_kwargs={"enable_thinking": deep})["error"]
    assert said["message"].startswith("the chat template refused a conversation")
    for value in ("\ud800", 10**300, None, [], "x" * 100_000):
        assert post(client, "/tokenize", messages=HELLO, chat_template_kwargs={"enable_thinking": value})["count"] == 8
    said = post(client, CHAT, 400, messages=HELLO, chat_template_kwargs={"bos_token": "\ud800"})["error"]
    assert "not valid Unicode text" in said["message"]


def test_what_changes_no_answer_is_taken(client):
    harmless = {
        "user": "me", "safety_identifier": "x", "prompt_cache_key": "k", "service_tier": "flex", "store": True,
        "metadata": {"a": "b"},
    }  # fmt: skip
    asked = dict(prompt="abc", max_tokens=6, seed=1)
    assert post(client, COMPLETIONS, **asked, **harmless)["choices"] == post(client, COMPLETIONS, **asked)["choices"]


def test_seeds(client):
    def texts(**fields):
        body = post(client, COMPLETIONS, prompt="abc", max_tokens=12, ignore_eos=True, **fields)
        return [choice["text"] for choice in body["choices"]]

    last = 2**63 - 1
    assert texts(seed=last, n=2) == [*texts(seed=last), *texts(seed=0)]
    assert texts(seed=-5) == texts(seed=-5) != texts(seed=5)
    assert texts(seed=-1) != texts(seed=-1)  # none at all


def test_a_stop_string_is_named_and_can_be_kept(client):
    asked = dict(prompt="abc", max_tokens=30, seed=3, ignore_eos=True)
    whole = post(client, COMPLETIONS, **asked)["choices"][0]["text"]
    stop = whole[6:9]
    for stream in (False, True):
        for keeps in (False, True):
            fields = dict(**asked, stop=[stop], include_stop_str_in_output=keeps)
            end = whole.index(stop) + len(stop) * keeps
            if stream:
                lines = client.post(COMPLETIONS, json={**fields, "stream": True}).text.split("\n\n")
                choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
                text, last = "".join(choice["text"] for choice in choices), choices[-1]
            else:
                last = post(client, COMPLETIONS, **fields)["choices"][0]
                text = last["text"]
            assert text == whole[:end]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_a_stop_token_is_named_and_the_end_is_not(client):
    asked = dict(prompt="abc", max_tokens=30, seed=3)
    ended = post(client, COMPLETIONS, **asked, logit_bias={"7": 100}, stop_token_ids=[7])["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", 7)
    ended = post(client, COMPLETIONS, **asked, logit_bias={"1": 100})["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)


def test_usage_says_what_the_prefix_cache_had(client):
    asked = dict(prompt="prefixcachedprompt", max_tokens=1)
    cached = [post(client, COMPLETIONS, **asked)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 16]  # whole blocks of 4 of the 19 tokens


def test_ping_and_load(client):
    assert client.get("/ping").status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
