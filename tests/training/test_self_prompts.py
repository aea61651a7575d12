"""`peagle self-prompts`: which draws become prompts, and that the file is whole or not there."""

import errno
import json
import os
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from peagle.config import SelfPromptConfig
from peagle.errors import PeagleError
from peagle.models.hub import resolve_model
from peagle.models.tokenizer import load_tokenizer
from peagle.prompt_file import read_prompts
from peagle.training import self_prompts as module
from peagle.training.self_prompts import self_prompts, user_prefix
from tests.models.tiny import tiny_gguf

REQUESTS = ["Name three rivers.", "Write a haiku about rain.", "What is the capital of Peru?"]


class FakeLLM:
    """Draw i says request i modulo 3; every fourth is cut off, every fifth is too short to be one."""

    def __init__(self, model, **sizes):
        self.sizes, self.prompts, self.seeds = sizes, [], []
        self.target = SimpleNamespace(name="fake")
        self.failure = None

    def generate(self, prompts, params, *, on_finish):
        if self.failure:
            raise self.failure
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            number = len(self.seeds)
            self.prompts.append(prompt)
            self.seeds.append(param.seed)
            text = " Hi " if number % 5 == 4 else f" {REQUESTS[number % 3]}\n"
            ended = "length" if number % 4 == 3 else "stop"
            outputs.append(SimpleNamespace(text=text, token_ids=[1], finish_reason=ended))
            on_finish(number, outputs[-1])
        return outputs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEAGLE_CACHE", str(folder / "cache"))
        path = str(tiny_gguf(folder / "tiny.gguf"))
        resolve_model(path)  # converts it, before a test lets the disk be full
        yield path


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM("fake")
    monkeypatch.setattr(module, "LLM", lambda _, **sizes: (fake.sizes.update(sizes), fake)[1])
    return fake


def run(model, out, **settings):
    stream = StringIO()
    count = self_prompts(model, out, SelfPromptConfig(**settings), Console(file=stream, width=300))
    return count, stream.getvalue()


def test_usable_draws_become_prompts_once(model, llm, tmp_path):
    count, shown = run(model, tmp_path / "self.jsonl", count=21, max_num_seqs=2, max_tokens=100)
    rows = [json.loads(line) for line in (tmp_path / "self.jsonl").read_text().splitlines()]
    assert count == len(rows) == 3
    assert "3 different user turns of 21 drawn" in shown
    assert [row["prompt"] for row in rows] == REQUESTS
    assert len({row["id"] for row in rows}) == 3
    assert {(row["source"], row["license"]) for row in rows} == {("self_prompted", "output of fake")}
    assert len(set(llm.seeds)) == 21
    assert llm.sizes["max_model_len"] == 100 + len(llm.prompts[0])
    assert [row.messages[0]["content"] for row in read_prompts(tmp_path / "self.jsonl")] == REQUESTS
    run(model, tmp_path / "again.jsonl", count=21, seed=1)
    assert not set(llm.seeds[:21]) & set(llm.seeds[21:])


def test_the_prompt_is_the_template_up_to_the_user(model, llm, tmp_path):
    run(model, tmp_path / "self.jsonl", count=1)
    tokenizer = load_tokenizer(module.resolve_model(model))
    assert user_prefix(tokenizer) == "<|im_start|>"
    assert llm.prompts == [tokenizer.encode("<|im_start|>")]
    for template in ("{{ messages[0].content }}", "<|im_start|>{{ messages[0].content | length }}"):
        tokenizer.chat_template = template
        with pytest.raises(PeagleError, match="does not frame user messages"):
            user_prefix(tokenizer)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_an_interruption_leaves_no_file(model, llm, tmp_path, failure):
    llm.failure = failure
    with pytest.raises(type(failure)):
        run(model, tmp_path / "self.jsonl", count=4)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_file(model, llm, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PeagleError, match="no space left on the disk"):
        run(model, tmp_path / "self.jsonl", count=4)
    assert not list(tmp_path.iterdir())


def test_nothing_usable_is_an_error(model, llm, tmp_path):
    llm.seeds = [0] * 4  # the next draw is the fifth
    with pytest.raises(PeagleError, match="none of 1 draws was a request"):
        run(model, tmp_path / "self.jsonl", count=1)
    assert not list(tmp_path.iterdir())


def test_refusals_come_before_the_model_loads(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    taken = tmp_path / "taken.jsonl"
    taken.write_text("precious")
    with pytest.raises(PeagleError, match="exists already"):
        run(model, taken, count=1)
    assert taken.read_text() == "precious"
    with pytest.raises(PeagleError, match="is not a folder"):
        run(model, taken / "self.jsonl", count=1)
    monkeypatch.setattr(os, "access", lambda *_: False)  # a test may run as root, whom no permission stops
    with pytest.raises(PeagleError, match="is not writable"):
        run(model, tmp_path / "self.jsonl", count=1)
    monkeypatch.undo()
    monkeypatch.setattr(module, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(PeagleError, match="the model's context leaves 255 for a user turn"):
        run(model, tmp_path / "self.jsonl", count=1, max_tokens=256)
