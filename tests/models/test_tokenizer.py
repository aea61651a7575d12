"""Chat rendering and encoding."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from peagle.errors import PeagleError
from peagle.models.tokenizer import ChatText, encode, load_tokenizer, render_chat

USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A word-level tokenizer that would add <s> by itself."""
    words = {word: i for i, word in enumerate(["<s>", "<unk>", "user", "assistant", "hi"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", model_max_length=4
    ).save_pretrained(tmp_path)
    return tmp_path


def test_encode_adds_the_tokenizers_own_tokens_to_text_alone(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    assert encode(tokenizer, "user hi") == [0, 2, 4]
    assert encode(tokenizer, ChatText("user hi")) == encode(tokenizer, "user hi", False) == [2, 4]
    assert encode(tokenizer, ChatText("<s> hi")) == [0, 4]
    assert encode(tokenizer, ChatText("")) == []
    assert encode(tokenizer, "hi " * 9, add_special_tokens=False) == [4] * 9  # model_max_length cuts nothing


def test_render_chat(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    tokenizer.chat_template = TEMPLATE
    assert render_chat(tokenizer, USER, add_generation_prompt=True) == "user hi assistant"
    assert render_chat(tokenizer, USER, add_generation_prompt=False) == "user hi "


def test_no_chat_template(saved: Path) -> None:
    with pytest.raises(PeagleError, match="has no chat template: expected an instruct model"):
        render_chat(load_tokenizer(saved), USER, add_generation_prompt=True)


def test_template_that_refuses(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(PeagleError, match=r"roles \['tool'\] \(no tools here\)"):
        render_chat(tokenizer, [{"role": "tool", "content": "x"}], add_generation_prompt=True)


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 3}'])
def test_unusable_tokenizer(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(PeagleError, match="has no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_lone_surrogates_are_refused(saved: Path) -> None:
    tokenizer = load_tokenizer(saved)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(PeagleError, match="not valid Unicode text"):
        encode(tokenizer, "hi \ud800")
    with pytest.raises(PeagleError, match="role 'user' is not valid Unicode text"):
        render_chat(tokenizer, [{"role": "user", "content": "\ud800"}], add_generation_prompt=True)
