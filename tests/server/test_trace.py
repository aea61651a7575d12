"""Where tokens came from, as a stream tells it, and requests that want no drafts."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.config import ServeConfig
from peagle.engine.outputs import ShownRound
from peagle.models.tokenizer import added_tokens
from peagle.sampling import SamplingParams
from peagle.server.app import make_app
from peagle.server.engine_thread import Delta
from peagle.server.harmony import Harmony
from peagle.server.trace import Trace
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm, tiny_tokenizer
from tests.server.serving import chat_llm, started
from tests.server.test_app import CHAT, COMPLETIONS, HELLO, chunks, error, post
from tests.server.test_engine_thread import begin, running
from tests.server.tiny_harmony import TEMPLATE, harmony_tokenizer, ids_of

K = 3


@pytest.fixture(scope="module")
def client():
    """Drafts that are right four times of five, so that every kind of token comes about."""
    llm, config = chat_llm(k=K), ServeConfig()
    plain = chat_llm().generate(["hello"], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    force_drafts(llm, plain, seed=1)
    with started(llm, config) as engine, TestClient(make_app(engine, llm, config)) as client:
        yield client


def traced(client, **fields):
    """(tokens, chunks) of a traced stream."""
    asked = dict(prompt="hello", max_tokens=60, temperature=0, ignore_eos=True, stream=True, peagle={"trace": True})
    events = chunks(post(client, COMPLETIONS, **asked | fields))
    return [token for event in events for token in event["peagle"].get("tokens", [])], events


def test_every_token_is_told_once(client):
    tokens, events = traced(client)
    assert len(tokens) == 60
    text = "".join(event["choices"][0]["text"] for event in events)
    assert "".join(token["text"] for token in tokens) == text
    ids = post(client, "/tokenize", prompt=text).json()["count"]
    assert ids >= 60
    assert tokens[0]["kind"] == "plain"  # the prompt's own: nothing was drafted yet


def test_kinds_add_up_to_the_servers_counts(client):
    tokens, events = traced(client)
    stats, kinds = events[-1]["peagle"], [token["kind"] for token in tokens]
    assert set(kinds) == {"plain", "accepted", "corrected", "bonus"}
    assert kinds.count("accepted") == stats["accepted_tokens"]
    own = kinds.count("corrected") + kinds.count("bonus")
    assert own in (stats["rounds"], stats["rounds"] - 1)  # the last round may have been cut short
    for position, count in enumerate(stats["accepted_per_position"], 1):
        assert [(t["kind"], t.get("position")) for t in tokens].count(("accepted", position)) == count


def test_what_was_rejected_is_told(client):
    tokens, _ = traced(client)
    position = 0
    for token in tokens[1:]:
        if token["kind"] == "accepted":
            position += 1
            assert token["position"] == position
            assert "rejected" not in token
            continue
        if token["kind"] == "corrected":
            assert token["position"] == position + 1
            assert len(token["rejected"]) == K - position
            assert token["rejected"][0]["id"] != token["id"]
            assert all(draft["text"] for draft in token["rejected"])
        else:
            assert (token["kind"], position) == ("bonus", K)
        position = 0


def test_chat_and_several_answers(client):
    body = dict(messages=HELLO, max_tokens=20, n=2, seed=3, stream=True, ignore_eos=True, peagle={"trace": True})
    events = chunks(post(client, CHAT, **body))
    for index in (0, 1):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        tokens = [token for event in mine for token in event.get("peagle", {}).get("tokens", [])]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in mine)
        assert len(tokens) == 20
        assert "".join(token["text"] for token in tokens) == text


def test_it_is_off_by_default_and_changes_no_token(client):
    asked = dict(prompt="hello", max_tokens=40, seed=4, stream=True)
    without = chunks(post(client, COMPLETIONS, **asked))
    assert all("tokens" not in event.get("peagle", {}) for event in without)
    _, events = traced(client, max_tokens=40, seed=4, temperature=1, ignore_eos=False)
    assert "".join(e["choices"][0]["text"] for e in events) == "".join(e["choices"][0]["text"] for e in without)


@pytest.mark.parametrize(
    "wrong", [{"trace": True}, {"trace": 1}, {"drafts": "no"}, {"more": 1}, [], "trace", {"trace": {}}]
)
def test_what_is_refused(client, wrong):
    assert error(post(client, COMPLETIONS, prompt="x", peagle=wrong))["param"] == "peagle"


def test_half_characters_wait_in_the_trace():
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(letters, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone)
    ids = tokenizer.encode("aé🙂b")
    assert len(ids) == 8
    trace = Trace(tokenizer)
    told = [token["text"] for i in ids for token in trace.tokens(Delta("", [i], None))]
    assert told == ["a", "", "é", "", "", "", "🙂", "b"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_headers_have_no_text_and_thoughts_are_marked(size):
    tokenizer = harmony_tokenizer()
    said = "<|channel|>analysis<|message|>hmé<|end|><|start|>assistant<|channel|>final<|message|>hey <|return|>"
    ids = ids_of(tokenizer, said)
    trace = Trace(tokenizer, Harmony.of(TEMPLATE, added_tokens(tokenizer)))
    told = [token for at in range(0, len(ids), size) for token in trace.tokens(Delta("", ids[at : at + size], None))]
    assert [token["id"] for token in told] == ids
    spoken = [token for token in told if token["text"]]
    assert "".join(token["text"] for token in spoken if token.get("thought")) == "hmé"
    assert "".join(token["text"] for token in spoken if not token.get("thought")) == "hey "


def test_what_turns_out_to_be_no_header_comes_with_the_last_token():
    tokenizer = harmony_tokenizer()
    trace = Trace(tokenizer, Harmony.of(TEMPLATE, added_tokens(tokenizer)))
    first, last = ids_of(tokenizer, "to")
    assert [token["text"] for token in trace.tokens(Delta("", [first], None))] == [""]
    output = SimpleNamespace(finish_reason="stop")
    assert [token["text"] for token in trace.tokens(Delta("", [last], output))] == ["to"]


def test_rounds_are_laid_over_tokens():
    tokenizer = tiny_tokenizer()
    trace = Trace(tokenizer)
    shown = ShownRound(first_index=1, drafts=[5, 6], accepted=1, token=7)
    first = trace.tokens(Delta("", [4], None))
    rest = trace.tokens(Delta("", [5, 7], None, [shown]))
    assert [token["kind"] for token in first + rest] == ["plain", "accepted", "corrected"]
    assert rest[1]["rejected"] == [{"id": 6, "text": tokenizer.decode([6])}]


def test_a_round_that_the_end_cut_short():
    trace = Trace(tiny_tokenizer())
    shown = ShownRound(first_index=0, drafts=[5, 6, 7], accepted=2, token=None)
    assert [t["kind"] for t in trace.tokens(Delta("", [5, 6], None, [shown]))] == ["accepted", "accepted"]


# Without drafts


def test_without_drafts_nothing_is_drafted_and_the_answer_is_the_same(client):
    asked = dict(prompt="hello", max_tokens=40, seed=4, ignore_eos=True)
    with_drafts = post(client, COMPLETIONS, **asked).json()
    without = post(client, COMPLETIONS, **asked, peagle={"drafts": False}).json()
    assert without["choices"] == with_drafts["choices"]
    assert with_drafts["peagle"]["rounds"] > 0
    assert without["peagle"]["draft_tokens"] == without["peagle"]["rounds"] == 0
    tokens, _ = traced(client, peagle={"trace": True, "drafts": False})
    assert {token["kind"] for token in tokens} == {"plain"}


def test_others_keep_their_drafts():
    """Requests beside one that wants none draft as ever, and all answers are what they are alone."""
    prompts = random_prompts(6, seed=5)
    each = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, drafts=i != 2) for i in range(6)]
    alone = [tiny_llm(K).generate([p], s)[0] for p, s in zip(prompts, each, strict=True)]
    assert alone[2].stats.num_rounds == 0
    assert all(output.stats.num_rounds for i, output in enumerate(alone) if i != 2)
    with running(tiny_llm(K)) as engine:
        readers = [begin(engine, p, s)[1] for p, s in zip(prompts, each, strict=True)]
        outputs = [reader.finish() for reader in readers]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    drafted = [o.stats.num_draft_tokens / max(o.stats.num_rounds, 1) for i, o in enumerate(outputs) if i != 2]
    assert drafted == [K] * 5


def test_one_that_loses_its_company_goes_on_without(client):
    body = dict(prompt="hello", max_tokens=100, temperature=0, ignore_eos=True, stream=True)
    with ThreadPoolExecutor(4) as pool:
        some = [pool.submit(post, client, COMPLETIONS, **body) for _ in range(3)]
        plain = pool.submit(post, client, COMPLETIONS, **body, peagle={"drafts": False}).result()
    texts = {"".join(e["choices"][0]["text"] for e in chunks(answer.result())) for answer in some}
    assert texts == {"".join(e["choices"][0]["text"] for e in chunks(plain))}
