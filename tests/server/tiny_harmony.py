"""A tiny byte-level tokenizer with gpt-oss' special tokens, and a template that writes its format."""

import json
import string
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.engine.engine import LLM
from peagle.structured.outputs import StructuredOutputs
from tests.engine.tiny import EOS, tiny_llm

MARKED = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
PLAIN = ' \n{}[]":,-._=<>|/Q' + string.ascii_lowercase + string.digits

TEMPLATE = """
{%- if reasoning_effort %}<|start|>system<|message|>{{ reasoning_effort }}<|end|>{% endif %}
{%- if tools %}<|start|>developer<|message|>tools:
{% for tool in tools %}{{ '/' + tool.function.description }} {{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- set called = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'tool' -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set call = m.tool_calls[0].function %}{% set called.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments|tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def harmony_tokenizer() -> PreTrainedTokenizerFast:
    """Most of ASCII, the two bytes of "é", and the special tokens; 1 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chars = [mapped.pre_tokenize_str(char)[0][0] for char in (*PLAIN, "é")]
    words = ["<s>", "</s>", *dict.fromkeys(char for word in chars for char in word)]
    assert set(words[2:]) <= set(alphabet)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token=None))
    tokenizer.pre_tokenizer = mapped
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": [*MARKED, "<|hidden|>"]})
    made.chat_template = TEMPLATE
    return made


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def dictation(tokenizer: PreTrainedTokenizerFast, said: str) -> StructuredOutputs:
    """Holds an answer to this text, special tokens in it."""
    tokens = [{"type": "token", "token": token} for token in ids_of(tokenizer, said)]
    return StructuredOutputs(tag=json.dumps({"type": "sequence", "elements": tokens}))


def harmony_llm(k: int = 3, **engine: Any) -> LLM:
    """`tiny_llm` with that tokenizer, and the ends of gpt-oss."""
    llm = tiny_llm(k, **engine)
    llm.tokenizer = harmony_tokenizer()
    ends = (ids_of(llm.tokenizer, name)[0] for name in ("<|return|>", "<|call|>"))
    llm.target = replace(llm.target, spec=replace(llm.target.spec, eos_token_ids=(EOS, *ends)))
    return llm
