"""Before the first step of a run: how its packs are run, the drafter it starts with, the mask token, what is frozen."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from peagle.config import TrainConfig
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.drafters.head_config import default_tap_ids
from peagle.drafters.init import new_drafter
from peagle.drafters.vocab import select_draft_ids
from peagle.drafters.warm_start import load_start, warm_drafter
from peagle.errors import PeagleError
from peagle.models.target import Target
from peagle.training.attention import Backend
from peagle.training.corpus import Corpus
from peagle.training.dataset import Document, draft_token_counts
from peagle.training.distributed import SINGLE, Ranks
from peagle.training.feature_store import open_features
from peagle.training.features import FeatureSource, OnlineFeatures, fill_cache, free_bytes
from peagle.training.plan import DepthWeight, Partition, PlanRule
from peagle.training.rows import ROW_BLOCK, RowLayout, mask_rows_capacity, round_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_SHARE_MARGIN = 1.03  # mask rows to spare, for packs with more than the average supervision
_CHUNK_SHARE = 0.4  # of the free memory; the rest is for logits, gradients and optimiser state
_LEAST_CHUNK = 1024  # rows: below, a GPU waits for launches


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


def unused_settings(config: TrainConfig) -> str:
    """A note of the settings that were given and that this run does not use; "" for none."""
    unrolled = config.method == "eagle3"
    uses = {
        "mask_token_id": not unrolled,
        "keep_ratio": not unrolled,
        "min_keep": not unrolled,
        "partition": not unrolled,
        "segments": not unrolled and config.partition == "algorithm1",
        "chunk_rows": not unrolled and config.partition == "prefix-once",
        "depth_decay": config.depth_weight == "gamma",
        "muon_lr": config.optimizer == "muon",
    }
    given = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
    unused = [name for name in given if not uses.get(name, True)]
    return f"without effect on this run: {', '.join(unused)}" if unused else ""


def row_layout(
    config: TrainConfig,
    documents: Sequence[Document],
    drafter: DrafterConfig,
    device: torch.device,
    ranks: Ranks = SINGLE,
) -> RowLayout:
    """Static shape of a step: whole blocks of positions on a GPU, chunks of mask rows that fit its free memory.

    The chunks are rank 0's on every rank: they decide what fits a pack, and free memory differs.

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
    (rows,) = ranks.share([config.chunk_rows or _fitting_chunk(layout, drafter, device) or 0])
    return replace(layout, chunk_rows=int(rows) or None)


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


def feature_source(
    config: TrainConfig, target: Target, corpus: Corpus, data_hash: str, tap_ids: tuple[int, ...], console: Console
) -> FeatureSource:
    """Where the target's features come from: files, memory, or the target itself at every step."""
    if config.features is not None:
        return open_features(Path(config.features), target, data_hash, tap_ids, corpus.number_D)
    if not config.cache_features:
        return OnlineFeatures(
            target.model, tap_ids, resolve_attention(config.attention, target.model.embed_tokens.weight.device)
        )
    # The last token of a document is only ever a label.
    ids = [document.input_ids[:-1] for document in corpus.documents]
    return fill_cache(target.model, tap_ids, ids, console)


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
    mask_token_id = choose_mask_token(target, documents, config.mask_token_id) if config.method == "p-eagle" else None
    start = draft_ids = None
    if config.init_head is None:
        taps, norm_before_fc = choose_tap_ids(config.tap_ids, target.spec.num_layers), config.norm_before_fc
        if config.draft_vocab_size not in (None, target.spec.vocab_size):
            draft_ids = select_draft_ids(torch.from_numpy(counts_V), config.draft_vocab_size, target.spec.eos_token_ids)
    else:
        start = load_start(
            config.init_head, target.model, num_layers=config.num_layers, tap_ids=config.tap_ids,
            draft_vocab_size=config.draft_vocab_size,
        )  # fmt: skip
        taps, norm_before_fc = start.config.tap_ids, start.config.norm_before_fc
    fresh = new_drafter(
        target.model,
        num_layers=config.num_layers,
        mask_token_id=mask_token_id,
        seed=config.seed,
        target_init=config.target_init and target.native,  # layers of another kind cannot be copied
        tap_ids=taps,
        draft_ids=draft_ids,
        norm_before_fc=norm_before_fc,
        sliding_window=config.sliding_window,
        sliding_layers=config.sliding_layers,
    )
    drafter = (fresh if start is None else warm_drafter(start, fresh, config.seed)).to(device)
    tables = ((drafter.embed_tokens, config.train_embeddings), (drafter.lm_head, config.train_lm_head))
    for table, trained in tables:
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
