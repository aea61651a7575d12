"""The tiny engine with a vocabulary that can write JSON, and random schemas with what they allow."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.engine.engine import LLM
from tests.engine.tiny import tiny_llm

Check = Callable[[Any], bool]
# An expression of 24 kB over one letter, whose compilation takes hours.
HANGING = "((" + "|".join(f"a{{{i}}}" for i in range(1, 3000)) + "){1,300}){1,300}"


def json_tokenizer() -> PreTrainedTokenizerFast:
    """96 tokens: letters, digits, JSON's marks, and tokens of several characters that cross its borders."""
    words = ["<s>", "</s>", "<hidden>", *'{}[]",:-.<>_;/= \n', *string.ascii_lowercase, *string.digits]
    words += ['{"', '":', '",', '"}', '":"', "},", "[[", "]]", "true", "null", "false", "ab", "abc", "12", "  ", '["']
    words += [*string.ascii_uppercase, "AB", "ab12", '","']
    assert len(set(words)) == len(words)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[:96])}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<hidden>"]})
    return made


def json_llm(k: int = 3, **engine: Any) -> LLM:
    """`tiny_llm` that can write JSON."""
    llm = tiny_llm(k, **engine)
    llm.tokenizer = json_tokenizer()
    return llm


def process_group(pid: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def random_schema(rng: np.random.Generator, depth: int = 2) -> tuple[dict[str, Any], Check]:
    """A schema that ends, and whether a value obeys it."""
    kind = rng.integers(5 if depth else 3)
    if kind == 0:
        words = ["".join(rng.choice(list("abcxyz"), rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
        return {"enum": words}, lambda value: value in words
    if kind == 1:
        low = int(rng.integers(-20, 20))
        high = low + int(rng.integers(0, 30))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        return schema, lambda value: type(value) is int and low <= value <= high
    if kind == 2:
        most = int(rng.integers(0, 5))
        return {"type": "string", "maxLength": most}, lambda value: isinstance(value, str) and len(value) <= most
    if kind == 3:
        items, check = random_schema(rng, depth - 1)
        most = int(rng.integers(1, 4))
        schema = {"type": "array", "items": items, "maxItems": most}
        return schema, lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))
    names = [f"k{i}" for i in range(rng.integers(1, 4))]
    fields = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema = {
        "type": "object", "properties": {name: field[0] for name, field in fields.items()}, "required": required,
        "additionalProperties": False,
    }  # fmt: skip

    def obeys(value: Any) -> bool:
        if not isinstance(value, dict) or not set(required) <= set(value) <= set(names):
            return False
        return all(fields[name][1](inner) for name, inner in value.items())

    return schema, obeys
