"""The documents of a run: prepared with its target, cut to what that can read, those with something to learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.meter import say
from peagle.models.fingerprint import file_sha256, template_sha256, weights_fingerprint
from peagle.models.hub import resolve_model
from peagle.models.tokenizer import load_tokenizer
from peagle.training.batches import has_rows, split_holdout
from peagle.training.dataset import Document, data_hash, load_documents
from peagle.training.rows import RowLayout, fitting_positions
from peagle.waiting import said_if_slow


@dataclass(frozen=True, slots=True)
class Corpus:
    """Usable documents: the first `training` of them are trained on, the others are held out.

    `number_D` is the number of each in the data set; `left_out` counts those without a supervised position in reach.
    """

    documents: list[Document]
    training: int
    number_D: NDArray[np.int64]
    left_out: int

    @property
    def train(self) -> list[Document]:
        """Documents to train on, numbers 0 to training - 1."""
        return self.documents[: self.training]

    @property
    def held_out(self) -> list[Document]:
        """Documents for evaluation, numbers from `training` on."""
        return self.documents[self.training :]


def split_corpus(documents: Sequence[Document], config: TrainConfig) -> Corpus:
    """Drop documents without a supervised position that fits a step and hold some prompts out.

    Raises PeagleError if none is left.
    """
    numbers = [n for n, document in enumerate(documents) if has_rows(document, config.batch_positions)]
    usable = [documents[n] for n in numbers]
    if not usable and any(has_rows(document) for document in documents):
        raise PeagleError(
            f"no document fits batch_positions {config.batch_positions} with a supervised position: raise it"
        )
    if not usable:
        raise PeagleError(
            f"none of {len(documents)} documents has a supervised token that drafts can follow: prepare the data again"
        )
    training, held_out = split_holdout([document.id for document in usable], config.holdout, config.seed)
    order = [*training, *held_out]
    number_D = np.array(numbers, np.int64)[order]
    return Corpus([usable[d] for d in order], len(training), number_D, len(documents) - len(usable))


def cut_to_context(documents: Sequence[Document], context: int) -> tuple[list[Document], str]:
    """Documents cut to the target's `context` in tokens, and a note of how many were longer, "" for none.

    Raises PeagleError when all are: such data are not the target's own.
    """
    long = sum(len(document.input_ids) > context for document in documents)
    if long == 0:
        return list(documents), ""
    if long == len(documents):
        raise PeagleError(
            f"all {long} documents are longer than the target's context of {context} tokens: "
            "prepare the data with this target"
        )
    cut = [Document(d.id, d.input_ids[:context], d.loss_mask[:context]) for d in documents]
    return cut, f"{long:,} of {len(documents):,} documents are longer than the target's {context:,} tokens: cut to that"


def cut_report(documents: Sequence[Document], layout: RowLayout) -> str:
    """How many documents a step cannot hold whole and how many of their tokens are left out; "" for none."""
    lost = [len(document.input_ids) - 2 - fitting_positions(document, layout) for document in documents]
    long = [tokens for tokens in lost if tokens > 0]
    if not long:
        return ""
    return f"{len(long):,} documents cut to what fits a step, {sum(long):,} of their tokens left out"


def load_prepared(model: str, data: Path, console: Console) -> tuple[list[Document], str]:
    """The documents that were prepared for `model` in the folder `data`, and the hash of the data set.

    Raises PeagleError when they cannot be read or were prepared with another model.
    """
    with said_if_slow(f"reading {data} and checking that it was prepared with {model}"):
        documents, manifest = load_documents(data)
        settings = manifest.get("settings")
        check_prepared_for(model, resolve_model(model), data, settings if isinstance(settings, dict) else {})
    if not manifest.get("complete", True):
        say(console, f"{data} is not complete: the documents of its finished shards are used")
    return documents, data_hash(manifest)


def check_prepared_for(model: str, path: Path, data: Path, settings: dict[str, Any]) -> None:
    """PeagleError unless the data set at `data` was prepared with the model at `path`, which the user calls `model`.

    Compared are its config, weights, tokenizer and chat template, as far as the data set's `settings` name them.
    """
    for key, what, present in (
        ("target_config_sha256", "config.json", lambda: file_sha256(path / "config.json")),
        ("tokenizer_sha256", "tokenizer.json", lambda: file_sha256(path / "tokenizer.json")),
        ("target_weights_fingerprint", "weights", lambda: weights_fingerprint(path)),
        ("chat_template_sha256", "chat template", lambda: template_sha256(load_tokenizer(path))),
    ):
        if key in settings and settings[key] != present():
            raise PeagleError(
                f"{data} was prepared with {settings.get('model')}, whose {what} differs from that of {model}: train "
                f"for the model that the data were prepared with, or prepare them again with {model}"
            )
