"""What the frozen target contributes to training: taps g_i and final-normed hidden states, online or cached.

Online, the target runs over each pack's token stream at every step. Cached, it runs once over all documents, padded to
a common length per forward: right padding under a causal mask changes nothing for the tokens before it and needs
neither a mask tensor nor a compiled kernel, so that every length is free. The third kind, from files,
is in feature_store.py.

Shape suffixes: P packed positions, S stream tokens, T cached tokens, F = C + H, C concatenated taps, H target hidden
size, B documents of a block, L its padded length.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from peagle.errors import PeagleError
from peagle.meter import Meter, say
from peagle.models.decoder import TargetModel
from peagle.models.layers import Attend
from peagle.training.attention import Backend, causal_document_attend
from peagle.training.rows import Packed
from peagle.training.show import size_text

# Padded tokens of one target forward while the cache fills: enough to saturate a large GPU.
FILL_TOKENS = 65536
# Share of the free memory that the cache may take: the rest is for activations, gradients and optimiser state.
CACHE_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens the target runs over for one pack."""

    ids_S: Tensor
    positions_S: Tensor
    doc_S: Tensor  # -1 padding


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where the packed positions find their features: rows of `stream`, or of the cache when that is None."""

    tap_P: Tensor
    target_P: Tensor
    stream: Stream | None


@dataclass(frozen=True, slots=True)
class PackFeatures:
    """The features themselves, for a source that gathers them on the host."""

    taps_PC: Tensor
    hidden_PH: Tensor


FeatureIndex = RowIndex | PackFeatures


class FeatureSource(Protocol):
    """Target features of packed positions: `index` runs on the host ahead of time, `gather` on the training device."""

    def index(self, packed: Packed, document_D: NDArray[np.int64], /) -> FeatureIndex:
        """`document_D`: the number of each packed document among those the source was made for."""
        ...

    def gather(self, index: FeatureIndex) -> tuple[Tensor, Tensor]:
        """Taps [P, C] of token i and final-normed hidden states [P, H] of token i + 1; anything on padding."""
        ...


class OnlineFeatures:
    """Runs the target at every step: no memory beyond one pack."""

    def __init__(self, model: TargetModel, tap_ids: tuple[int, ...], backend: Backend) -> None:
        self.model, self.tap_ids, self.backend = model, tap_ids, backend

    def index(self, packed: Packed, _document_D: NDArray[np.int64], /) -> RowIndex:
        """The pack's own stream."""
        arrays = (packed.stream_ids_S, packed.stream_positions_S, packed.stream_doc_S)
        stream = Stream(*(torch.from_numpy(array) for array in arrays))
        return RowIndex(torch.from_numpy(packed.tap_index_P), torch.from_numpy(packed.target_index_P), stream)

    @torch.no_grad()
    def gather(self, index: FeatureIndex) -> tuple[Tensor, Tensor]:
        """One target forward, then two gathers."""
        if not isinstance(index, RowIndex) or index.stream is None:
            raise TypeError("an index into a cache cannot run the target: it has no stream")
        stream = index.stream
        attend = causal_document_attend(stream.doc_S, self.backend)
        hidden_SH, taps_SC = self.model(stream.ids_S, stream.positions_S, attend, self.tap_ids)
        return taps_SC.index_select(0, index.tap_P), hidden_SH.index_select(0, index.target_P)


class CachedFeatures:
    """Features of all documents, computed once: one tensor [T, C + H] on the training device."""

    def __init__(self, cache_TF: Tensor, feature_size: int, first_token_D: NDArray[np.int64]) -> None:
        """`first_token_D` is the cache row of each document's token 0."""
        self.taps_TC, self.hidden_TH = cache_TF[:, :feature_size], cache_TF[:, feature_size:]
        self.first_token_D = first_token_D

    def index(self, packed: Packed, document_D: NDArray[np.int64], /) -> RowIndex:
        """Offsets into the cache; padding reads its first rows."""
        first_D = self.first_token_D[document_D]
        tap_P = np.where(packed.doc_P >= 0, first_D[packed.doc_P] + packed.positions_P, 0)
        return RowIndex(torch.from_numpy(tap_P), torch.from_numpy(tap_P + 1), None)

    def gather(self, index: FeatureIndex) -> tuple[Tensor, Tensor]:
        """Two gathers."""
        if not isinstance(index, RowIndex):
            raise TypeError("features gathered on the host are no index into a cache")
        return self.taps_TC.index_select(0, index.tap_P), self.hidden_TH.index_select(0, index.target_P)


def fill_cache(
    model: TargetModel, tap_ids: tuple[int, ...], documents: Sequence[NDArray[np.int32]], console: Console
) -> CachedFeatures:
    """Run the target over all documents (token ids, each at least 2). PeagleError when the result would not fit."""
    weight = model.embed_tokens.weight
    feature_size = len(tap_ids) * model.spec.hidden_size
    lengths = np.array([len(document) for document in documents], np.int64)
    first_token_D = np.cumsum(lengths) - lengths
    shape = (int(lengths.sum()), feature_size + model.spec.hidden_size)
    _check_fits(shape, weight, console)
    cache_TF = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    with Meter(console, "target features", shape[0]) as meter:
        for rows, features_XF in document_features(model, tap_ids, documents):
            cache_TF.index_copy_(0, rows.to(weight.device), features_XF)
            meter.advance(len(rows), tokens=len(rows))
    return CachedFeatures(cache_TF, feature_size, first_token_D)


def document_features(
    model: TargetModel, tap_ids: tuple[int, ...], documents: Sequence[NDArray[np.int32]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [X, C + H] of all documents (token ids, each at least 2), some documents at a time, longest first.

    With them their rows, int64 [X] on the CPU: the place of each token in the documents laid end to end.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    first_token_D = np.cumsum(lengths) - lengths
    device = model.embed_tokens.weight.device
    for members in fill_batches(lengths, FILL_TOKENS):
        ids_BL = _padded_block([documents[m] for m in members])
        within = np.concatenate([np.arange(n) for n in lengths[members]])
        # Places of every real token in the padded block and in the documents laid end to end.
        source = torch.from_numpy(np.repeat(np.arange(len(members)) * ids_BL.shape[1], lengths[members]) + within)
        rows = torch.from_numpy(np.repeat(first_token_D[members], lengths[members]) + within)
        positions_BL = torch.zeros_like(ids_BL)
        positions_BL.view(-1)[source] = torch.from_numpy(within)  # 0 on padding, as `HFTargetModel` wants it
        features_XF = _features(model, tap_ids, ids_BL.to(device), positions_BL.to(device))
        yield rows, features_XF.index_select(0, source.to(device))


def fill_batches(lengths: NDArray[np.int64], limit: int) -> list[NDArray[np.int64]]:
    """Documents longest first, cut where the padded size would pass `limit` tokens (one document may)."""
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        count = max(1, limit // int(lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches


def _padded_block(documents: Sequence[NDArray[np.int32]]) -> Tensor:
    """Token ids [B, L] of documents of which the first is the longest, zeros on the right."""
    block = np.zeros((len(documents), len(documents[0])), np.int64)
    for row, document in zip(block, documents, strict=True):
        row[: len(document)] = document
    return torch.from_numpy(block)


@torch.no_grad()
def _features(model: TargetModel, tap_ids: tuple[int, ...], ids_BL: Tensor, positions_BL: Tensor) -> Tensor:
    """Taps and hidden states side by side, [B * L, C + H], of right-padded documents."""
    attend = padded_causal_attend(*ids_BL.shape)
    hidden, taps = model(ids_BL.flatten(), positions_BL.flatten(), attend, tap_ids)
    return torch.cat((taps, hidden), dim=-1)


def padded_causal_attend(count: int, length: int) -> Attend:
    """Causal attention within each of `count` documents padded on the right to `length` tokens."""

    def attend(_layer: int, q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q_TND, k_TMD, v_TMD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _check_fits(shape: tuple[int, int], like: Tensor, console: Console) -> None:
    need, free = shape[0] * shape[1] * like.element_size(), free_bytes(like.device)
    say(console, f"feature cache: {shape[0]:,} tokens, {size_text(need)} on {like.device} ({size_text(free)} free)")
    if need > CACHE_SHARE * free:
        raise PeagleError(
            f"the feature cache needs {size_text(need)}, and {like.device} has {size_text(CACHE_SHARE * free)} for it "
            f"({CACHE_SHARE:.0%} of what is free): use --no-cache-features, or less data"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; for a CPU without /proc/meminfo, all of its memory."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
