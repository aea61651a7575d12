"""`peagle self-prompts`: user turns drawn from the target itself.

A chat model given its own template up to where the user speaks continues with a plausible request. Such prompts cost
nothing, carry no licence but the model's, and follow what the model was tuned on.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from peagle.config import EngineConfig, SelfPromptConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.files import write_atomic
from peagle.meter import Meter, say
from peagle.models.hub import resolve_model
from peagle.models.target import read_spec
from peagle.models.tokenizer import ChatText, encode, load_tokenizer, render_chat
from peagle.sampling import SamplingParams
from peagle.waiting import said_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}user turn\N{OBJECT REPLACEMENT CHARACTER}"
_SHORTEST = 12  # characters; below that a "request" is a greeting or noise


def self_prompts(model: str, out: Path, config: SelfPromptConfig, console: Console) -> int:
    """Write up to `config.count` different user turns to the prompts file `out`; returns how many there are.

    A turn counts only when the model ended it by itself. The file appears whole, at the end. Raises PeagleError for a
    model, setting or `out` that cannot be used, before the weights are loaded, and when the disk is full.
    """
    params = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p)
    _check_out(out)
    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    prefix_ids = encode(tokenizer, user_prefix(tokenizer))
    room = read_spec(path).max_position_embeddings - len(prefix_ids)
    if config.max_tokens > room:
        raise PeagleError(f"max_tokens is {config.max_tokens}: the model's context leaves {room} for a user turn")
    with said_if_slow(f"loading {model}"):
        llm = LLM(
            model,
            dtype=config.dtype,
            device=config.device,
            max_model_len=len(prefix_ids) + config.max_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(EngineConfig().max_num_batched_tokens, 4 * config.max_num_seqs),
        )
    texts = _draw(llm, prefix_ids, params, config, console)
    if not texts:
        raise PeagleError(
            f"none of {config.count} draws was a request that {llm.target.name} ended by itself: "
            "raise max_tokens or count, or lower top_p"
        )
    _write(out, texts, llm.target.name)
    say(console, f"{out}: {len(texts):,} different user turns of {config.count:,} drawn")
    return len(texts)


def user_prefix(tokenizer: "PreTrainedTokenizerFast") -> ChatText:
    """The chat template's text up to the first character of the user's message."""
    rendered = render_chat(tokenizer, [{"role": "user", "content": _PLACE}], add_generation_prompt=False)
    before, _, after = rendered.partition(_PLACE)
    if not before or not after:
        raise PeagleError(
            f"the chat template of {tokenizer.name_or_path} does not frame user messages with text of its own: "
            "self-prompting needs a model whose template does"
        )
    return ChatText(before)


def _check_out(out: Path) -> None:
    if out.exists():
        raise PeagleError(f"{out} exists already: choose another --out or delete it")
    if not out.parent.is_dir():
        raise PeagleError(f"cannot write {out}: {out.parent} is not a folder; create it or choose another --out")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise PeagleError(f"cannot write {out}: {out.parent} is not writable; choose another --out")


def _draw(
    llm: LLM, prefix_ids: Sequence[int], params: SamplingParams, config: SelfPromptConfig, console: Console
) -> list[str]:
    """The different usable user turns among `config.count` draws, in the order drawn."""
    texts: dict[str, None] = {}
    batch = 4 * config.max_num_seqs  # bounds how many finished draws are in memory as token ids
    with Meter(console, "user turns", config.count) as meter:
        for first in range(0, config.count, batch):
            numbers = range(first, min(first + batch, config.count))
            outputs = llm.generate(
                [prefix_ids] * len(numbers),
                [replace(params, seed=(config.seed << 40) + number) for number in numbers],
                on_finish=lambda _, output: meter.advance(tokens=len(output.token_ids)),
            )
            for output in outputs:
                text = output.text.strip()
                if output.finish_reason == "stop" and len(text) >= _SHORTEST:
                    texts[text] = None
    return list(texts)


def _write(out: Path, texts: Sequence[str], model: str) -> None:
    labels = {"source": "self_prompted", "license": f"output of {model}", "category": "chat"}
    # The id is the text's own: files of several runs can be prepared together.
    ids = [f"self_prompted/{hashlib.sha256(text.encode()).hexdigest()[:10]}" for text in texts]
    rows = [{"id": row_id, **labels, "prompt": text} for row_id, text in zip(ids, texts, strict=True)]
    write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
