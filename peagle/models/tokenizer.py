"""Tokenizers and chat templates, through transformers. The library is imported on first use: it takes seconds."""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import PeagleError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# What a template, which is a program, may raise for a conversation beside its own errors.
_REFUSALS = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RecursionError)


def check_unicode(text: str, what: str) -> str:
    """`text` itself; `what` names it in the PeagleError for a lone surrogate, which no tokenizer or UTF-8 file takes.

    They come from `\\ud800` in JSON, and from bytes that are not UTF-8 on a command line or in terminal input.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start + 1}"
        raise PeagleError(f"{what} is not valid Unicode text (lone surrogate {found}): give it as UTF-8") from None
    return text


class ChatText(str):
    """What a chat template wrote: it has its special tokens in it, so `encode` adds none."""

    __slots__ = ()


def load_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a Hugging Face style directory. Never runs code from the directory or uses the network."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises plain Exception for a malformed tokenizer.json
        raise PeagleError(
            f"{path} has no usable tokenizer ({one_line(error)}): expected tokenizer.json and tokenizer_config.json; "
            "download the model again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PeagleError(
            f"{path} has only a slow tokenizer ({type(tokenizer).__name__}): expected tokenizer.json; "
            "use a copy of the model that has the file"
        )
    return tokenizer


def added_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """The tokens beyond a vocabulary of text, by name."""
    return {str(token.content): number for number, token in tokenizer.added_tokens_decoder.items()}


def placeholder_tokenizer(vocab_size: int) -> "PreTrainedTokenizerFast":
    """For a model with random weights: token 5 reads "<5>"; in a text, any other word is taken for "<0>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{token}>": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def render_chat(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[dict[str, Any]] | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatText:
    """The conversation as the model's own template writes it, special tokens spelled out in the text. `tools` are the
    functions that it tells the model about, as OpenAI's field describes them; `variables` are further ones that the
    template reads, such as `enable_thinking`. With `continue_final_message` the text ends with the last message's."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise PeagleError(
            f"{tokenizer.name_or_path} has no chat template: expected an instruct model; "
            "give plain prompts, or choose a model tuned for chat"
        )
    for message in messages:
        check_unicode(str(message.get("content")), f"a message of the role {message.get('role')!r}")
    told = dict(variables or {})
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    try:
        known = _variables(tokenizer.get_chat_template(tools=None if tools is None else list(tools))) if told else ()
        if unknown := next((repr(name[:80]) for name in told if name in own or name not in known), None):
            raise PeagleError(
                f"chat_template_kwargs has {unknown}: this model's template reads no such variable, leave it out"
            )
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **told,
        )
    except (TemplateError, *_REFUSALS) as error:
        roles = [message.get("role") for message in messages]
        raise PeagleError(
            f"the chat template refused a conversation with roles {roles} ({error}): "
            "expected messages with role and content in an order that the model knows"
        ) from error
    return ChatText(text)


def chat_prompt(tokenizer: "PreTrainedTokenizerFast", messages: Sequence[dict[str, str]], *, raw: bool = False) -> str:
    """What the target is to answer: a conversation in its chat template, or its texts alone if `raw` or if the model
    has no template."""
    if raw or not tokenizer.chat_template:
        return "\n\n".join(message["content"] for message in messages)
    return render_chat(tokenizer, messages, add_generation_prompt=True)


@cache
def _variables(template: str) -> frozenset[str]:
    """What a chat template reads from outside, the conversation and what transformers adds left out.

    Raises TemplateSyntaxError."""
    from jinja2 import Environment, meta

    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers' own
    tree = Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"]).parse(plain)
    return frozenset(meta.find_undeclared_variables(tree) - {"messages", "raise_exception", "strftime_now"})


def encode(tokenizer: "PreTrainedTokenizerFast", text: str, add_special_tokens: bool | None = None) -> list[int]:
    """Token ids of `text`; special tokens written out in it become their ids. Unless told, plain text gets what the
    tokenizer adds by itself, such as a BOS, and the text of a chat template gets nothing."""
    adds = not isinstance(text, ChatText) if add_special_tokens is None else add_special_tokens
    return tokenizer.encode(check_unicode(text, "a text to be tokenized"), add_special_tokens=adds, verbose=False)
