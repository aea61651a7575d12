"""Boundaries come from the chat template, ids from the target: literal cases on SmolLM2's own tokenizer."""

import json

import pytest

from peagle.errors import PeagleError
from peagle.models.hub import resolve_model
from peagle.models.tokenizer import encode, load_tokenizer
from peagle.prompt_file import PromptRow, read_prompts
from peagle.training.conversations import Dialogue, Response, conversation_from_row, encode_all

END = "<|im_end|>"
IM_START, IM_END, NEWLINE = 1, 2, 198
STRIPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSES_OTHERWISE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


@pytest.fixture
def tokenizer():
    return load_tokenizer(resolve_model("smollm2-135m"))


def user(*texts):
    row = PromptRow(id="row", messages=({"role": "user", "content": texts[0]},), later_turns=texts[1:])
    return Dialogue(conversation_from_row(row))


def ask(dialogue, tokenizer):
    text = dialogue.open_turn(tokenizer)
    dialogue.add_prompt(encode(tokenizer, text))
    return text


def test_two_turns_literally(tokenizer):
    dialogue = user("Say hi", "And bye")
    first = ask(dialogue, tokenizer)
    assert first == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"
    )
    # "Hi!" as two tokens that the tokenizer itself would never choose: H, i! must survive as they are.
    odd = [*encode(tokenizer, "H"), *encode(tokenizer, "i"), *encode(tokenizer, "!")]
    assert odd != encode(tokenizer, "Hi!")
    dialogue.add_response(Response(text="Hi!", token_ids=[*odd, IM_END], finish_reason="stop"), END)
    second = ask(dialogue, tokenizer)
    assert second == "\n<|im_start|>user\nAnd bye<|im_end|>\n<|im_start|>assistant\n"
    dialogue.add_response(Response(text="Bye", token_ids=[50, 51], finish_reason="length"), "")
    dialogue.close()

    (document,) = dialogue.documents
    prompt, connecting = encode(tokenizer, first), [198, 1, 4093, 198, 3528, 411, 85, 2, 198, 1, 520, 9531, 198]
    assert document.token_ids == [*prompt, *odd, IM_END, *connecting, 50, 51]
    assert document.loss_mask == [False] * 32 + [True] * 4 + [False] * 13 + [True] * 2
    assert document.finish_reason == "length"
    assert dialogue.splits == 0
    assert dialogue.turns_left == 0


def test_end_token_that_only_the_template_wrote_is_not_supervised(tokenizer):
    dialogue = user("Count", "Go on")
    ask(dialogue, tokenizer)
    dialogue.add_response(Response(text="1, 2", token_ids=encode(tokenizer, "1, 2"), finish_reason="length"), "")
    assert ask(dialogue, tokenizer).startswith(f"{END}\n<|im_start|>user\nGo on")
    dialogue.close()
    (document,) = dialogue.documents
    supervised = [token for token, mine in zip(document.token_ids, document.loss_mask, strict=True) if mine]
    assert tokenizer.decode(supervised) == "1, 2"


def test_half_a_character_at_the_end_keeps_its_ids(tokenizer):
    dialogue = user("Smile", "Again")
    ask(dialogue, tokenizer)
    emoji = encode(tokenizer, "\N{SLIGHTLY SMILING FACE}")
    cut = emoji[:-1]
    dialogue.add_response(Response(text=tokenizer.decode(cut), token_ids=cut, finish_reason="length"), "")
    ask(dialogue, tokenizer)
    assert dialogue.splits == 0
    assert cut == [token for token, mine in zip(dialogue.token_ids, dialogue._loss_mask, strict=True) if mine]


@pytest.mark.parametrize(
    ("template", "text", "end_text"),
    [(STRIPS_REASONING, "<think>hm</think>Yes", END), (TRIMS, " Yes", END), (CLOSES_OTHERWISE, "Yes", "<|endoftext|>")],
)
def test_template_that_rewrites_history_splits_the_dialogue(tokenizer, template, text, end_text):
    tokenizer.chat_template = template
    dialogue = user("Ready?", "Sure?", "Really?")
    answers = []
    for _ in range(3):
        ask(dialogue, tokenizer)
        answer = [*encode(tokenizer, text), *encode(tokenizer, end_text)]
        answers.append(answer)
        dialogue.add_response(Response(text=text, token_ids=answer, finish_reason="stop"), end_text)
    dialogue.close()

    assert dialogue.splits == 2
    messages = []
    for question, document, answer in zip(("Ready?", "Sure?", "Really?"), dialogue.documents, answers, strict=True):
        messages.append({"role": "user", "content": question})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert document.token_ids == [*encode(tokenizer, rendered), *answer]  # what a server would have fed
        assert document.loss_mask == [False] * (len(document.token_ids) - len(answer)) + [True] * len(answer)
        messages.append({"role": "assistant", "content": text})


def test_the_same_template_continues_when_it_has_nothing_to_rewrite(tokenizer):
    tokenizer.chat_template = STRIPS_REASONING
    dialogue = user("Ready?", "Sure?")
    ask(dialogue, tokenizer)
    dialogue.add_response(
        Response(text="Yes", token_ids=[*encode(tokenizer, "Yes"), IM_END], finish_reason="stop"), END
    )
    assert ask(dialogue, tokenizer) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert dialogue.splits == 0


def test_drop_turn_keeps_what_was_answered(tokenizer):
    dialogue = user("One", "Two")
    ask(dialogue, tokenizer)
    prompt = list(dialogue.token_ids)
    dialogue.add_response(Response(text="1", token_ids=[33, IM_END], finish_reason="stop"), END)
    ask(dialogue, tokenizer)
    dialogue.drop_turn()
    (document,) = dialogue.documents
    assert document.token_ids == [*prompt, 33, IM_END]
    assert document.loss_mask == [False] * len(prompt) + [True, True]
    nothing = user("One")
    ask(nothing, tokenizer)
    nothing.drop_turn()
    assert nothing.documents == []


def test_messages_keep_system_and_lose_assistant(tmp_path):
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    file = tmp_path / "p.jsonl"
    rows = [{"id": 7, "messages": messages, "license": "MIT"}, {"prompt": "x"}, {"turns": ["y", "z"]}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    first, second, third = map(conversation_from_row, read_prompts(file))
    assert [[m["content"] for m in step] for step in first.steps] == [["Be terse.", "a"], ["b"], ["c"]]
    assert (first.id, first.license, first.source) == ("7", "MIT", "unknown")
    assert second.steps == (({"role": "user", "content": "x"},),)
    assert len(third.steps) == 2


def test_a_template_that_refuses_names_the_prompt(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(PeagleError, match=r"prompt row: .*no system role"):
        user("x").open_turn(tokenizer)


def test_encode_all_equals_encode(tokenizer):
    texts = ["<|im_start|>user\nhi<|im_end|>", "", "naïve  \n\n text"]
    assert encode_all(tokenizer, texts) == [encode(tokenizer, text) for text in texts]
    assert encode_all(tokenizer, []) == []
