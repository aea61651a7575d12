"""Log-probabilities in answers: OpenAI's two forms, each token with the text it belongs to, whole and streamed."""

import json
import math
import time

import pytest
from fastapi.testclient import TestClient
from openai import BadRequestError, OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.engine.outputs import Logprobs, ScoredToken
from peagle.engine.text import MeasuredStream
from peagle.sampling import SamplingParams
from peagle.server.app import make_app
from peagle.server.engine_thread import Delta
from peagle.server.logprobs import Echo, TokenNames, chat_logprobs, completion_logprobs
from tests.engine.test_logprobs import check_all
from tests.engine.tiny import random_prompts, tiny_tokenizer
from tests.server.serving import chat_llm, serving, started
from tests.server.test_engine_thread import Reader, begin, running

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served():
    with serving(chat_llm()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def byte_level() -> PreTrainedTokenizerFast:
    """A token per byte, then a pair."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """As in Llama 2: marks for spaces, one of them before each text, and bytes for what has no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_of_a_character_are_shown_together():
    tokenizer = byte_level()
    stream, shown = MeasuredStream(tokenizer, ()), []
    for token in tokenizer.encode("a鷲é"):
        stream.push(token)
        shown.append((stream.take(), stream.num_shown))
    assert shown == [("a", 1), ("", 1), ("", 1), ("鷲", 4), ("", 4), ("é", 6)]
    assert stream.ends == [1, 1, 1, 2, 2, 3]


class TestTokenNames:
    @pytest.mark.parametrize("make", [byte_level, sentence_pieces])
    @pytest.mark.parametrize("text", ["ab", "a ba  b", "naïve – 東🦅!", "a\n\t\x00\x7f\xa0\xadb", "hehe<end>a"])
    def test_bytes_make_the_text_again(self, make, text: str):
        tokenizer = make()
        names, ids = TokenNames(tokenizer), tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(names.data, ids)).decode().removeprefix(" ") == text
        ends = names.ends(ids, text)
        assert ends[-1] == len(text)
        for i, end in enumerate(ends):
            whole = b"".join(map(names.data, ids[: i + 1])).decode(errors="ignore")
            assert text[:end] == whole.removeprefix(" ")

    def test_plain_words_and_padding(self):
        names = TokenNames(tiny_tokenizer())
        assert [names.data(i) for i in (0, 2, 90)] == [b"<s>", b"a", tiny_tokenizer().decode([90]).encode()]
        assert names.data(4000) == b""

    def test_pieces_of_a_character_keep_apart(self):
        tokenizer = byte_level()
        names, ids = TokenNames(tokenizer), tokenizer.encode("é")
        token = ScoredToken(ids[0], 3, -1.5, [(ids[1], -0.5), (300, -math.inf)])
        assert completion_logprobs(names, [token]) == {
            "tokens": ["bytes:\\xc3"], "token_logprobs": [-1.5], "text_offset": [3],
            "top_logprobs": [{"bytes:\\xa9": -0.5, "": -9999.0, "bytes:\\xc3": -1.5}],
        }  # fmt: skip
        (entry,) = chat_logprobs(names, [token])["content"]
        assert (entry["token"], entry["bytes"]) == ("�", [0xC3])
        assert entry["top_logprobs"][0] == {"token": "�", "logprob": -0.5, "bytes": [0xA9]}
        json.dumps(entry, allow_nan=False)

    def test_a_prompt_that_was_cut_short_has_gaps(self):
        told = Logprobs(0)
        tokens = Echo("abc", [1, 2, 3]).scored([2, 3, 4], told)
        assert tokens == [ScoredToken(2, 0, None, []), ScoredToken(3, 1, None, []), ScoredToken(4, 2, None, [])]


def content_of(chunks) -> list:
    return [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]


def word_id(served, word: str) -> int:
    return served.llm.tokenizer.convert_tokens_to_ids(word)


def test_chat(client, served):
    asked = dict(model="tiny", messages=HELLO, max_tokens=30, seed=1, temperature=0.7, extra_body={"ignore_eos": True})
    bare = client.chat.completions.create(**asked)
    assert bare.choices[0].logprobs is None
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    assert whole.choices[0].message == bare.choices[0].message
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens == 30
    words = [served.llm.tokenizer.decode([word_id(served, entry.token)]) for entry in content]
    assert "".join(e.token for e in content if e.token not in ("<s>", "</s>")) == whole.choices[0].message.content
    for entry, word in zip(content, words, strict=True):
        assert bytes(entry.bytes).decode() == entry.token == word
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6
        same = [likely.logprob for likely in entry.top_logprobs if likely.token == entry.token]
        assert same in ([], [entry.logprob])
    chunks = list(client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True))
    assert content_of(chunks) == content
    own = client.chat.completions.create(**asked, logprobs=True)
    assert [entry.logprob for entry in own.choices[0].logprobs.content] == [entry.logprob for entry in content]
    assert own.choices[0].logprobs.content[0].top_logprobs == []
    ended = {**asked, "extra_body": {"stop_token_ids": [word_id(served, content[8].token)], "ignore_eos": True}}
    with client.chat.completions.stream(**ended, logprobs=True, top_logprobs=3) as stream:
        final = stream.get_final_completion().choices[0]
    assert [entry.logprob for entry in final.logprobs.content] == [e.logprob for e in content[:9]]


def test_every_chunk_has_the_tokens_of_its_text(client, served):
    """Also where a stop string holds text back, or cuts it."""
    asked = dict(model="tiny", messages=HELLO, max_tokens=40, temperature=0, extra_body={"ignore_eos": True})
    text = client.chat.completions.create(**asked).choices[0].message.content
    for stop in ([text[1:3] + "!", text[4:9] + "!"], [text[20:23]], [text[20]]):
        whole = client.chat.completions.create(**asked, stop=stop, logprobs=True)
        chunks = list(client.chat.completions.create(**asked, stop=stop, logprobs=True, stream=True))
        content = content_of(chunks)
        assert content == whole.choices[0].logprobs.content
        assert len(content) == whole.usage.completion_tokens
        shown, told = "", ""
        for chunk in chunks[:-1]:
            shown += chunk.choices[0].delta.content or ""
            told += "".join(entry.token for entry in content_of([chunk]))
            assert shown.startswith(told)  # never a token before its text
            assert len(shown) - len(told) < 2  # nor later, but for the second half of one
        assert shown + (chunks[-1].choices[0].delta.content or "") == whole.choices[0].message.content
        assert (told + "".join(e.token for e in content_of(chunks[-1:]))).startswith(whole.choices[0].message.content)


def joined(chunks) -> dict[int, dict[str, list]]:
    """The lists of a stream's chunks put together, by answer."""
    parts: dict[int, dict[str, list]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        into = parts.setdefault(choice.index, {"text": []})
        into["text"].append(choice.text)
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            into.setdefault(name, []).extend(values)
    return parts


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["hello", [[5, 6, 7], [8, 0, 9, 10]]])
def test_completions(client, prompt, echo: bool):
    asked = dict(model="tiny", prompt=prompt, max_tokens=20, n=2, seed=3, stop=["qq"], echo=echo)
    bare = client.completions.create(**asked)
    whole = client.completions.create(**asked, logprobs=2)
    assert [c.text for c in whole.choices] == [c.text for c in bare.choices]
    assert whole.usage.total_tokens == bare.usage.total_tokens
    streamed = joined(client.completions.create(**asked, logprobs=2, stream=True))
    in_prompts = whole.usage.prompt_tokens * 2 if echo else 0
    assert sum(len(c.logprobs.tokens) for c in whole.choices) == in_prompts + whole.usage.completion_tokens
    for choice in whole.choices:
        told = choice.logprobs
        assert "".join(streamed[choice.index].pop("text")) == choice.text
        assert streamed[choice.index] == told.model_dump()
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
        for i, (token, own, top) in enumerate(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True)):
            assert choice.text[told.text_offset[i] :].startswith(token) or token == "</s>" or "q" in token
            if i == 0 and echo:
                assert own is None
                assert top is None
                continue
            assert top[token] == own
            assert 2 <= len(top) <= 3


@pytest.mark.parametrize("prompt", ["hello", [5], ["hello", "x"]])
def test_a_prompt_alone(client, served, prompt):
    """No token is generated where none may be, and the prompt's are those of a longer answer."""
    asked = dict(model="tiny", prompt=prompt, echo=True, logprobs=2, temperature=0)
    longer = client.completions.create(**asked, max_tokens=3)
    alone = client.completions.create(**asked, max_tokens=0)
    streamed = joined(client.completions.create(**asked, max_tokens=0, stream=True))
    assert alone.usage.completion_tokens == 0
    assert alone.usage.prompt_tokens == longer.usage.prompt_tokens
    for choice, other in zip(alone.choices, longer.choices, strict=True):
        count = len(choice.logprobs.tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs[:count])
        assert len(other.logprobs.tokens) > count
        assert choice.text == "".join(choice.logprobs.tokens) == "".join(streamed[choice.index].pop("text"))
        assert streamed[choice.index]["tokens"] == choice.logprobs.tokens
        assert choice.finish_reason == "length"
    assert served.engine.snapshot().kv_usage == 0
    for fewer in (dict(asked, echo=False), dict(asked, logprobs=None)):
        with pytest.raises(BadRequestError, match="max_tokens is 0"):
            client.completions.create(**fewer, max_tokens=0)


def test_they_are_the_engines(client, served):
    """In a body as in an output: prompt, answer, values."""
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=1)
    reader = Reader()
    served.engine.submit(served.engine.make_request("hello", params), reader)
    output = reader.finish()
    check_all([output], [params])
    told = (
        client.completions.create(model="tiny", prompt="hello", max_tokens=6, temperature=0, logprobs=1, echo=True)
        .choices[0]
        .logprobs
    )
    expected = [*(t.logprob for t in output.prompt_logprobs), *(t.logprob for t in output.logprobs)]
    assert told.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)


def test_a_cut_answer_has_what_there_is():
    llm, config = chat_llm(), ServeConfig(request_timeout=0.3)
    asked = dict(prompt="hello", logprobs=1, echo=True, ignore_eos=True, max_tokens=90)
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        step = llm.core.step
        llm.core.step = lambda: time.sleep(0.05) or step()
        choice = client.post(COMPLETIONS, json=asked).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert 6 <= len(choice["logprobs"]["tokens"]) < 90
        llm.core.step = lambda: time.sleep(0.5) or []
        lines = client.post(COMPLETIONS, json=asked | {"stream": True}).text.split("\n\n")
        echo, last = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:2])
        assert echo["text"] == "hello"
        assert echo["logprobs"]["tokens"] == list("hello")
        assert echo["logprobs"]["token_logprobs"] == [None] * 5
        assert last["finish_reason"] == "abort"
        llm.core.step = step


@pytest.mark.parametrize("ahead", [0, 1])
def test_deltas_tell_each_thing_once(ahead: int):
    llm, prompts = chat_llm(num_kv_blocks=60), random_prompts(12, seed=2)
    llm.core._steps_ahead = ahead
    params = [
        SamplingParams(
            max_tokens=24, temperature=0.9, seed=i, stop=("aQ", "7"), show_drafts=i % 2 == 0,
            logprobs=[None, 2, 0][i % 3], prompt_logprobs=[1, None][i // 6],
        )
        for i in range(12)
    ]  # fmt: skip
    with running(llm) as engine:
        readers = [begin(engine, prompt, p, i)[1] for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
        outputs = [reader.finish() for reader in readers]
    check_all(outputs, params)
    for reader, output, asked in zip(readers, outputs, params, strict=True):
        deltas: list[Delta] = reader.deltas
        assert [r for delta in deltas for r in delta.trace] == output.trace
        assert bool(output.trace) == (asked.show_drafts and bool(output.rounds))
        scored = [token for delta in deltas for token in delta.scored]
        assert [token.token_id for token in scored] == (output.token_ids if asked.logprobs is not None else [])
        assert [token.logprob for token in scored] == [t.logprob for t in output.logprobs or ()]
        told = [delta.prompt_logprobs for delta in deltas]
        assert told == [output.prompt_logprobs] + [None] * (len(deltas) - 1)


def test_others_get_no_extras(client: OpenAI, served):
    seen = []
    run = served.llm.core._speculative.run
    served.llm.core._speculative.run = lambda *args: seen.append(run(*args)) or seen[-1]
    client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4)
    served.llm.core._speculative.run = run
    assert seen
    assert all(out[1:] == (None, None, None) for out in seen)


def test_smollm2():
    """Real text, in which characters take several tokens."""
    llm = LLM("smollm2-135m", max_model_len=256, max_num_seqs=4)
    with serving(llm) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        prompt = "The Japanese for eagle is 鷲, the emoji is 🦅. Again: 鷲 🦅"
        asked = dict(model=llm.target.name, prompt=prompt, max_tokens=12, temperature=0.0, logprobs=3, echo=True)
        choice = client.completions.create(**asked).choices[0]
        told = choice.logprobs
        assert choice.text.startswith(prompt)
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            assert choice.text[offset:].startswith(token) or token.startswith(("bytes:", "<|"))
        assert any(token.startswith("bytes:") for token in told.tokens)
        streamed = joined(client.completions.create(**asked, stream=True))[0]
        assert "".join(streamed.pop("text")) == choice.text
        assert streamed["tokens"] == told.tokens
        assert streamed["text_offset"] == told.text_offset
        assert streamed["token_logprobs"][1:] == pytest.approx(told.token_logprobs[1:], abs=1e-3)
