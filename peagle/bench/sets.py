"""The prompts of a load: which data set, in which order, and how long the answers may get."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.bench.prompt_sets import SHIPPED_SETS, shipped_set
from peagle.bench.settings import DEFAULT_OUTPUT_LEN, OWN_OUTPUT_LEN, BenchServeConfig
from peagle.errors import PeagleError
from peagle.prompt_file import Message, PromptRow, read_prompts

_RANDOM_PROMPTS = 1000
# What SPEED-Bench has in place of texts that it may not hand on.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPrompt:
    """One request to come: a conversation, or token ids."""

    id: str
    output_len: int
    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    category: str = ""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The requests of a load, where they are from, and what a user should know of them."""

    prompts: Sequence[LoadPrompt]
    source: str
    rows: int
    warnings: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of what is sent, in its order: equal for equal loads."""
        sent = [[p.id, list(p.messages), list(p.token_ids), p.output_len] for p in self.prompts]
        return hashlib.sha256(json.dumps(sent, ensure_ascii=False).encode()).hexdigest()


def load_prompts(config: BenchServeConfig) -> PromptSet:
    """The prompts that the settings ask for. Raises PeagleError."""
    if config.dataset_name == "random":
        return _random_prompts(config)
    rows, source = _rows(config)
    if config.category is not None:
        categories = sorted({row.category for row in rows if row.category})
        rows = [row for row in rows if row.category == config.category]
        if not rows:
            raise PeagleError(f"no row of category {config.category!r}: there are {', '.join(categories) or 'none'}")
    chosen, warnings = _choose(rows, config)
    prompts = [
        LoadPrompt(
            id=identity, messages=row.messages, category=row.category, output_len=_output_len(config, row)
        )
        for identity, row in chosen
    ]  # fmt: skip
    return PromptSet(prompts, source, len(rows), warnings)


def _rows(config: BenchServeConfig) -> tuple[list[PromptRow], str]:
    """All rows of a data set, and where they are from."""
    from peagle.bench.foreign_sets import hub_rows, sharegpt_rows

    name, path = config.dataset_name, config.dataset_path
    if name == "hf":
        return hub_rows(config)
    if name.replace("-", "_") in SHIPPED_SETS and path is None:
        file = shipped_set(name)
        return read_prompts(file), file.name
    if path is None:
        raise PeagleError(f"data set {name} is a file of yours: give it with --dataset-path")
    rows = sharegpt_rows(Path(path)) if name == "sharegpt" else read_prompts(path)
    if name == "speed-bench":
        _check_filled(rows)
    return rows, Path(path).name


def _check_filled(rows: Sequence[PromptRow]) -> None:
    for row in rows:
        if any(_PLACEHOLDER in message["content"] for message in row.messages):
            raise PeagleError(
                f"row {row.id} holds a placeholder in place of its text: fill the file with the script that "
                "SPEED-Bench has for it"
            )


def _choose(rows: Sequence[PromptRow], config: BenchServeConfig) -> tuple[list[tuple[str, PromptRow]], list[str]]:
    """(id, row) of the requests in their order, and what to say about it. A repeated row gets an id of its own."""
    order = list(rows)
    if config.shuffle:
        random.Random(config.seed).shuffle(order)
    wanted = config.num_prompts or len(order)
    if wanted <= len(order):
        return [(row.id, row) for row in order[:wanted]], []
    if not config.oversample:
        return [(row.id, row) for row in order], [f"{len(order)} prompts, not {wanted}: the data set has no more"]
    turns = [(turn, row) for turn in range(-(-wanted // len(order))) for row in order][:wanted]
    note = (
        f"the data set has {len(order)} rows for {wanted} requests: rows are sent again, a prefix cache will know them"
    )
    return [(f"{row.id} ({turn + 1})" if turn else row.id, row) for turn, row in turns], [note]


def _output_len(config: BenchServeConfig, row: PromptRow) -> int:
    own = OWN_OUTPUT_LEN.get(config.dataset_name)
    length: int | None = getattr(config, own) if own is not None else None
    if length == -1:
        if row.output_tokens is None:
            raise PeagleError(f"row {row.id} has no output_tokens: add it, or give --custom-output-len a length")
        return row.output_tokens
    return length or config.output_len or DEFAULT_OUTPUT_LEN


def _random_prompts(config: BenchServeConfig) -> PromptSet:
    """Token ids drawn evenly. The lowest sixteenth is left out: special tokens and single bytes are often there."""
    draw = random.Random(config.seed)
    size = config.random_vocab_size
    prompts = [
        LoadPrompt(
            id=f"random-{number}",
            token_ids=tuple(draw.randrange(size // 16, size) for _ in range(config.random_input_len)),
            output_len=config.output_len or config.random_output_len,
        )
        for number in range(config.num_prompts or _RANDOM_PROMPTS)
    ]
    note = (
        "random tokens say NOTHING about acceptance: no drafter was trained on them, and what a model answers to them "
        "is no text. Use them for the cost of prompts and steps alone"
    )
    return PromptSet(prompts, "random", len(prompts), [note])
