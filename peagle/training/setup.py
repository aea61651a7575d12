"""Before the first step of a run: usable documents, the mask token, a fresh drafter, what is frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.config import TrainConfig
from peagle.drafters.init import new_drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.drafters.vocab import select_draft_ids
from peagle.errors import PeagleError
from peagle.models.target import Target
from peagle.training.attention import Backend
from peagle.training.batches import has_rows, split_holdout
from peagle.training.dataset import Document, draft_token_counts
from peagle.training.regenerate import file_sha256
from peagle.training.rows import ROW_BLOCK, RowLayout, mask_rows_capacity, round_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SHARE_MARGIN = 1.03  # mask rows to spare, for packs with more than the average supervision


@dataclass(frozen=True, slots=True)
class Corpus:
    """Usable documents: the first `training` of them are trained on, the others are held out."""

    documents: list[Document]
    training: int

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
    usable = [document for document in documents if has_rows(document, config.batch_positions)]
    if not usable and any(has_rows(document) for document in documents):
        raise PeagleError(
            f"no document fits batch_positions {config.batch_positions} with a supervised position: raise it"
        )
    if not usable:
        raise PeagleError(
            f"none of {len(documents)} documents has a supervised token that drafts can follow: prepare the data again"
        )
    training, held_out = split_holdout([document.id for document in usable], config.holdout, config.seed)
    return Corpus([usable[d] for d in (*training, *held_out)], len(training))


def check_prepared_for(model: str, path: Path, data: Path, manifest: Mapping[str, Any]) -> None:
    """PeagleError unless the data set at `data` was prepared with the model at `path`, which the user calls `model`."""
    settings = manifest.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    for key, file in (("target_config_sha256", "config.json"), ("tokenizer_sha256", "tokenizer.json")):
        if key in settings and settings[key] != file_sha256(path / file):
            raise PeagleError(
                f"{data} was prepared with {settings.get('model')}, whose {file} differs from that of {model}: train "
                f"for the model that the data were prepared with, or prepare them again with {model}"
            )


def resolve_attention(name: str, device: torch.device) -> Backend:
    """Attention backend; "auto" is flex on a GPU and dense on a CPU."""
    if name == "flex" and device.type != "cuda":
        raise PeagleError("attention 'flex' trains on a CUDA GPU only: use dense, or auto")
    return "flex" if device.type == "cuda" and name != "dense" else "dense"


def row_layout(config: TrainConfig, backend: Backend, documents: Sequence[Document]) -> RowLayout:
    """Static shape of a step; FlexAttention wants whole blocks of positions.

    Without a configured share of supervised positions, the documents' own plus a little: packs then run out of
    positions and of mask rows at about the same time.
    """
    share = config.supervised_share
    if share is None:
        supervised = sum(int(document.loss_mask.sum()) for document in documents)
        share = min(1.0, _SHARE_MARGIN * supervised / max(1, sum(len(d.input_ids) for d in documents)))
    positions = round_up(config.batch_positions, ROW_BLOCK) if backend == "flex" else config.batch_positions
    rule = (config.num_depths, config.keep_ratio, config.min_keep)
    return RowLayout(
        positions=positions,
        mask_rows=mask_rows_capacity(positions, share, *rule),
        num_depths=config.num_depths,
        keep_ratio=config.keep_ratio,
        min_keep=config.min_keep,
    )


def build_drafter(
    target: Target, documents: Sequence[Document], config: TrainConfig, dtype: torch.dtype, device: torch.device
) -> PEagleDrafter:
    """A fresh drafter on `device`: float32 masters, frozen tables in the compute precision `dtype`."""
    counts_V = draft_token_counts(documents, target.spec.vocab_size)
    draft_ids = None
    if config.draft_vocab_size is not None and config.draft_vocab_size != target.spec.vocab_size:
        specials = target.spec.eos_token_ids
        draft_ids = select_draft_ids(torch.from_numpy(counts_V), config.draft_vocab_size, specials)
    drafter = new_drafter(
        target.spec,
        target.model,
        num_layers=config.num_layers,
        mask_token_id=choose_mask_token(target, documents, config.mask_token_id),
        seed=config.seed,
        target_init=config.target_init,
        tap_ids=config.tap_ids,
        draft_ids=draft_ids,
        norm_before_fc=config.norm_before_fc,
    ).to(device)
    for table, trained in (
        (drafter.embed_tokens, config.train_embeddings),
        (drafter.lm_head, config.train_lm_head),
    ):
        if not trained:
            # Its values come from the target in this very precision, so nothing is lost and no step casts it again.
            table.requires_grad_(False).to(dtype)
    return drafter


def choose_mask_token(target: Target, documents: Sequence[Document], wanted: int | None) -> int:
    """The id that stands for "not known yet": `wanted`, or one that neither the tokenizer's text nor the data use.

    Preferred are rows of the embedding beyond the tokenizer's ids, then special tokens other than those with a role.
    """
    size = target.spec.vocab_size
    seen_V = _seen_ids(documents, size)
    if wanted is not None:
        if not 0 <= wanted < size:
            raise PeagleError(f"mask token id {wanted} is outside the target's vocabulary: use an id below {size}")
        if seen_V[wanted]:
            raise PeagleError(f"mask token id {wanted} occurs in the data: choose an id that no text contains")
        return wanted
    free = [token for token in range(len(target.tokenizer), size) if not seen_V[token]]
    free += [token for token in _roleless_specials(target.tokenizer) if token < size and not seen_V[token]]
    if not free:
        raise PeagleError(f"{target.name} has no unused token for the mask: name a rare one with --mask-token-id")
    return free[0]


def _seen_ids(documents: Sequence[Document], vocab_size: int) -> NDArray[np.bool_]:
    """Which ids occur anywhere in the data, [V]."""
    seen_V = np.zeros(vocab_size, np.bool_)
    for document in documents:
        seen_V[document.input_ids] = True
    return seen_V


def _roleless_specials(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Special tokens that are not bos, eos, pad, unk or part of the chat template, lowest id first."""
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = sorted(tokenizer.added_tokens_decoder.items())
    return [token for token, entry in added if entry.special and token not in roles and entry.content not in template]
