"""Tokenizers and chat templates, through transformers. The library is imported on first use: it takes seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import PeagleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of a Hugging Face style directory. Never runs code from the directory or uses the network."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises plain Exception for a malformed tokenizer.json
        reason = " ".join(str(error).split())[:200]
        raise PeagleError(
            f"{path} has no usable tokenizer ({reason}): expected tokenizer.json and tokenizer_config.json; "
            "download the model again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PeagleError(
            f"{path} has only a slow tokenizer ({type(tokenizer).__name__}): expected tokenizer.json; "
            "use a copy of the model that has the file"
        )
    return tokenizer


def render_chat(
    tokenizer: "PreTrainedTokenizerFast", messages: Sequence[dict[str, str]], *, add_generation_prompt: bool
) -> str:
    """The conversation as the model's own template writes it, special tokens spelled out in the text."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise PeagleError(
            f"{tokenizer.name_or_path} has no chat template: expected an instruct model; "
            "give plain prompts, or choose a model tuned for chat"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, KeyError) as error:
        roles = [message.get("role") for message in messages]
        raise PeagleError(
            f"the chat template refused a conversation with roles {roles} ({error}): "
            "expected messages with role and content in an order that the model knows"
        ) from error
    return str(text)


def encode(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Token ids of `text`, nothing added at either end; special tokens written out in the text become their ids."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)
