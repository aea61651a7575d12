"""Before the first step of a run: usable documents, the mask token, a fresh drafter, what is frozen."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.config import TrainConfig
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.drafters.head_config import default_tap_ids
from peagle.drafters.init import new_drafter
from peagle.drafters.vocab import select_draft_ids
from peagle.drafters.warm_start import warm_drafter
from peagle.errors import PeagleError
from peagle.models.fingerprint import weights_fingerprint
from peagle.models.target import Target
from peagle.models.tokenizer import load_tokenizer
from peagle.training.attention import Backend
from peagle.training.batches import has_rows, split_holdout
from peagle.training.dataset import Document, draft_token_counts
from peagle.training.features import free_bytes
from peagle.training.plan import DepthWeight, Partition, PlanRule
from peagle.training.regenerate import file_sha256
from peagle.training.rows import ROW_BLOCK, RowLayout, fitting_positions, mask_rows_capacity, round_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SHARE_MARGIN = 1.03  # mask rows to spare, for packs with more than the average supervision
_CHUNK_SHARE = 0.4  # of the free memory; the rest is for logits, gradients and optimiser state
_LEAST_CHUNK = 1024  # rows: below, a GPU waits for launches


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


def check_prepared_for(model: str, path: Path, data: Path, manifest: Mapping[str, Any]) -> None:
    """PeagleError unless the data set at `data` was prepared with the model at `path`, which the user calls `model`.

    Compared are its config, weights, tokenizer and chat template, as far as the manifest names them.
    """
    settings = manifest.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    for key, file in (("target_config_sha256", "config.json"), ("tokenizer_sha256", "tokenizer.json")):
        if key in settings and settings[key] != file_sha256(path / file):
            raise PeagleError(
                f"{data} was prepared with {settings.get('model')}, whose {file} differs from that of {model}: train "
                f"for the model that the data were prepared with, or prepare them again with {model}"
            )
    weights = settings.get("target_weights_fingerprint")
    if weights is not None and weights != weights_fingerprint(path):
        raise PeagleError(
            f"{data} was prepared with {settings.get('model')}, whose weights are not those of {model}: train for the "
            f"model that the data were prepared with, or prepare them again with {model}"
        )
    template = settings.get("chat_template_sha256")
    if template is not None and template != template_sha256(load_tokenizer(path)):
        raise PeagleError(
            f"{data} was prepared with {settings.get('model')} under another chat template than {model} has now: "
            f"restore that template, or prepare the data again with {model}"
        )


def template_sha256(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Identity of a tokenizer's chat template."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def resolve_attention(name: str, device: torch.device) -> Backend:
    """Attention backend; "auto" is the Triton kernel on a GPU and the torch reference on a CPU."""
    if name in ("flex", "kernel") and device.type != "cuda":
        raise PeagleError(f"attention {name!r} trains on a CUDA GPU only: use reference, or auto")
    if name == "auto":
        return "kernel" if device.type == "cuda" else "reference"
    return cast(Backend, name)


def plan_rule(config: TrainConfig) -> PlanRule:
    """How the packs of a run are cut and charged."""
    unrolled = config.method == "eagle3"
    return PlanRule(
        partition="unrolled" if unrolled else cast(Partition, config.partition),
        segments=config.segments,
        depth_weight=cast(DepthWeight, config.depth_weight),
        gamma=config.depth_decay,
        num_depths=config.num_depths,
        loss_chunk=config.loss_chunk,
    )


def row_layout(
    config: TrainConfig, documents: Sequence[Document], drafter: DrafterConfig, device: torch.device
) -> RowLayout:
    """Static shape of a step: whole blocks of positions on a GPU, chunks of mask rows that fit its free memory.

    Without a configured share of supervised positions, the documents' own plus a little: packs then run out of
    positions and of mask rows at about the same time.
    """
    share = config.supervised_share
    if share is None:
        supervised = sum(int(document.loss_mask.sum()) for document in documents)
        share = min(1.0, _SHARE_MARGIN * supervised / max(1, sum(len(d.input_ids) for d in documents)))
    positions = round_up(config.batch_positions, ROW_BLOCK) if device.type == "cuda" else config.batch_positions
    # Unrolled passes run every anchor at every depth: nothing is dropped.
    keep_ratio, min_keep = (1.0, 0.0) if config.method == "eagle3" else (config.keep_ratio, config.min_keep)
    layout = RowLayout(
        positions=positions,
        mask_rows=mask_rows_capacity(positions, share, config.num_depths, keep_ratio, min_keep),
        num_depths=config.num_depths,
        keep_ratio=keep_ratio,
        min_keep=min_keep,
    )
    if config.partition != "prefix-once" or config.method == "eagle3":
        return layout
    return replace(layout, chunk_rows=config.chunk_rows or _fitting_chunk(layout, drafter, device))


def activation_bytes(drafter: DrafterConfig) -> int:
    """Bytes that one row leaves behind for the backward pass in bfloat16, all layers: an estimate for eager code.

    Two norms keep a float32 and two narrow copies of the stream, attention its input, q, k, v before and after the
    rotation and its output, the feed-forward layer four tensors of its inner size.
    """
    heads = (drafter.num_heads + 2 * drafter.num_kv_heads) * drafter.head_dim
    return drafter.num_layers * (
        18 * drafter.hidden_size + 4 * heads + 2 * drafter.num_heads * drafter.head_dim + 8 * drafter.intermediate_size
    )


def _fitting_chunk(layout: RowLayout, drafter: DrafterConfig, device: torch.device) -> int | None:
    """Rows of a chunk that fit beside the activations of the positions; None (one chunk) on a CPU."""
    if device.type != "cuda":
        return None
    per_row = activation_bytes(drafter)
    room = _CHUNK_SHARE * (free_bytes(device) - layout.positions * per_row)
    rows = max(_LEAST_CHUNK, int(room / per_row) // ROW_BLOCK * ROW_BLOCK)
    return None if rows >= layout.mask_rows else rows


def choose_tap_ids(wanted: tuple[int, ...] | None, target_layers: int) -> tuple[int, ...]:
    """Tap ids for a new head: `wanted`, or 2, n//2, n-3. Raises PeagleError unless they exist and ascend.

    vLLM collects taps in the order of the layers, so that another order would feed a head differently when served.
    """
    taps = default_tap_ids(target_layers) if wanted is None else wanted
    whose = "" if wanted is not None else f", the default for {target_layers} layers,"
    if not taps or min(taps) < 0 or max(taps) > target_layers:
        raise PeagleError(f"tap ids {list(taps)}{whose} do not all exist: give ids from 0 to {target_layers}")
    if list(taps) != sorted(set(taps)):
        raise PeagleError(f"tap ids {list(taps)}{whose} do not ascend: give each once, in ascending order")
    return taps


def build_drafter(
    target: Target, documents: Sequence[Document], config: TrainConfig, dtype: torch.dtype, device: torch.device
) -> Eagle3Drafter:
    """The drafter a run starts with, on `device`: float32 masters, frozen tables in the compute precision `dtype`."""
    counts_V = draft_token_counts(documents, target.spec.vocab_size)
    parallel = config.method == "p-eagle"
    mask_token_id = choose_mask_token(target, documents, config.mask_token_id) if parallel else None
    if config.init_head is None:
        drafter = _fresh_drafter(target, counts_V, config, mask_token_id).to(device)
    else:
        drafter = _warm_drafter(config.init_head, target, config, mask_token_id).to(device)
    for table, trained in (
        (drafter.embed_tokens, config.train_embeddings),
        (drafter.lm_head, config.train_lm_head),
    ):
        if not trained:
            # Its values come from the target in this very precision, so nothing is lost and no step casts it again.
            table.requires_grad_(False).to(dtype)
    return drafter


def _fresh_drafter(
    target: Target, counts_V: NDArray[np.int64], config: TrainConfig, mask_token_id: int | None
) -> Eagle3Drafter:
    draft_ids = None
    if config.draft_vocab_size is not None and config.draft_vocab_size != target.spec.vocab_size:
        specials = target.spec.eos_token_ids
        draft_ids = select_draft_ids(torch.from_numpy(counts_V), config.draft_vocab_size, specials)
    return new_drafter(
        target.spec,
        target.model,
        num_layers=config.num_layers,
        mask_token_id=mask_token_id,
        seed=config.seed,
        target_init=config.target_init and target.native,  # layers of another kind cannot be copied
        tap_ids=choose_tap_ids(config.tap_ids, target.spec.num_layers),
        draft_ids=draft_ids,
        norm_before_fc=config.norm_before_fc,
        sliding_window=config.sliding_window,
        sliding_layers=config.sliding_layers,
    )


def _warm_drafter(head: str, target: Target, config: TrainConfig, mask_token_id: int | None) -> Eagle3Drafter:
    return warm_drafter(
        head,
        target.spec,
        target.model,
        num_layers=config.num_layers,
        mask_token_id=mask_token_id,
        seed=config.seed,
        target_init=config.target_init and target.native,
        tap_ids=config.tap_ids,
        draft_vocab_size=config.draft_vocab_size,
        sliding_window=config.sliding_window,
        sliding_layers=config.sliding_layers,
    )


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
        if role := _roles(target).get(wanted):
            raise PeagleError(f"mask token id {wanted} is the {role} token: choose an id without a role")
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


def _tokenizer_roles(tokenizer: "PreTrainedTokenizerFast") -> dict[int | None, str]:
    """Token id -> its role: bos, eos, pad or unk."""
    return {getattr(tokenizer, f"{role}_token_id"): role for role in ("unk", "pad", "bos", "eos")}


def _roles(target: Target) -> dict[int | None, str]:
    """Token id -> its role, by the tokenizer and by the model's own end tokens."""
    return {**_tokenizer_roles(target.tokenizer), **dict.fromkeys(target.spec.eos_token_ids, "eos")}


def _roleless_specials(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Special tokens that are not bos, eos, pad, unk or part of the chat template, lowest id first."""
    roles = _tokenizer_roles(tokenizer)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = sorted(tokenizer.added_tokens_decoder.items())
    return [token for token, entry in added if entry.special and token not in roles and entry.content not in template]
