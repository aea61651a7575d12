"""Which rows a training step sees: documents packed into positions, mask rows drawn by conditional drop-token (COD).

Shape suffixes: P packed positions (= depth-0 rows), M mask rows (depth >= 1), R = P + M rows, S target stream tokens,
D documents of one pack.

Alignment. A document of tokens x_0..x_{L-1} gives n = L - 2 positions. Position i is the pair (token x_{i+1}, taps of
token i), sits at RoPE position i, is supervised iff token x_{i+1} is, and learns to predict x_{i+2}: its hard label is
x_{i+2}, its soft label the target's distribution after token i+1. A row (anchor a, depth d) has the label of position
a + d.

Static shapes. Every pack has exactly P positions, every step exactly M mask rows and every target stream exactly S
tokens, so compiled kernels see one shape. A padding position has doc -1 and token 0; a padding mask row has anchor -1,
depth 0 and doc -1. Nothing attends to padding, padding attends to nothing, and it never carries loss weight.

Chunks. Mask rows lie in chunks of `chunk_rows`, each holding whole chains and then padding, so that a chunk can be run
by itself. One chunk of M rows is the rule unless the partition asks for smaller ones.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.errors import PeagleError

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

ROW_BLOCK = 128  # FlexAttention's block size: row counts are multiples of it on the GPU


class TokenDocument(Protocol):
    """What packing needs of a document: its tokens and which of them the target produced."""

    @property
    def input_ids(self) -> NDArray[np.int32]: ...

    @property
    def loss_mask(self) -> BoolArray: ...


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple


def keep_share(depth: int, keep_ratio: float, min_keep: float) -> float:
    """Share of the supervised positions that keep a row at `depth`: max(r^d, floor)."""
    return max(keep_ratio**depth, min_keep)


def mask_rows_per_supervised(num_depths: int, keep_ratio: float, min_keep: float) -> float:
    """Upper bound of the mask rows drawn per supervised position."""
    return sum(keep_share(depth, keep_ratio, min_keep) for depth in range(1, num_depths))


def mask_rows_capacity(
    positions: int, supervised_share: float, num_depths: int, keep_ratio: float, min_keep: float
) -> int:
    """Mask rows to reserve for packs of which about `supervised_share` is supervised, rounded up to 128.

    One whole chain fits, whatever the share: an evaluation drops none of its rows.
    """
    expected = positions * supervised_share * mask_rows_per_supervised(num_depths, keep_ratio, min_keep)
    return round_up(max(math.ceil(expected), num_depths - 1), ROW_BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """The static shape of a training step and the COD rule: K depths, keep ratio r, floor of the kept share."""

    positions: int
    mask_rows: int
    num_depths: int
    keep_ratio: float = 0.8
    min_keep: float = 0.0
    chunk_rows: int | None = None  # None: one chunk

    def __post_init__(self) -> None:
        if self.chunk_rows is not None and self.chunk_rows < self.longest_chain:
            raise PeagleError(
                f"chunk_rows is {self.chunk_rows}: a chunk must hold a whole chain, at least {self.longest_chain} rows"
            )
        if self.positions < 1 or self.mask_rows < 0 or self.num_depths < 1:
            raise PeagleError(
                f"row layout of {self.positions} positions, {self.mask_rows} mask rows and {self.num_depths} depths: "
                "needs at least 1 position, 0 mask rows and 1 depth"
            )
        if not 0.0 < self.keep_ratio <= 1.0 or not 0.0 <= self.min_keep <= 1.0:
            raise PeagleError(
                f"keep ratio {self.keep_ratio} and floor {self.min_keep}: "
                "the ratio must be in (0, 1] and the floor in [0, 1]"
            )
        if self.max_supervised < 1:
            raise PeagleError(f"{self.mask_rows} mask rows do not fit one supervised position: raise the number")

    @property
    def longest_chain(self) -> int:
        """Mask rows of the longest chain."""
        return max(1, self.num_depths - 1)

    @property
    def chunk_size(self) -> int:
        """Mask rows of one chunk, padding included."""
        return self.mask_rows if self.chunk_rows is None else min(self.chunk_rows, self.mask_rows)

    @property
    def chunks(self) -> int:
        """Chunks that hold `mask_rows` mask rows however the chains fall: each may end short of one whole chain."""
        if self.chunk_size == self.mask_rows:
            return 1
        return -(-self.mask_rows // (self.chunk_size - self.longest_chain + 1))

    @property
    def stream_tokens(self) -> int:
        """Static length S of the target stream. A document needs one token more than it has positions, so S exceeds P
        by at least P / 64; a pack is closed early once its documents would use up that surplus (S - P documents)."""
        return round_up(self.positions + max(1, self.positions // 64), ROW_BLOCK)

    @property
    def max_supervised(self) -> int:
        """Most supervised positions a pack may hold so that its mask rows fit `mask_rows` whatever is drawn."""
        per_position = mask_rows_per_supervised(self.num_depths, self.keep_ratio, self.min_keep)
        return self.positions if per_position == 0 else min(self.positions, int(self.mask_rows / per_position))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Whole documents laid end to end, padded to P positions, and the token stream the target runs to serve them.

    The stream holds x_0..x_{L-2} of every document (n + 1 tokens). `tap_index_P` and `target_index_P` point into it:
    position i takes the taps of stream token `tap_index_P[i]` and learns from the target's final hidden state of
    stream token `target_index_P[i]`. Padding positions point at the last stream token, whatever it is.
    """

    input_ids_P: IntArray  # x_{i+1}
    positions_P: IntArray  # i, the position within the document
    doc_P: IntArray  # number of the document within the pack, -1 padding
    supervised_P: BoolArray
    labels_P: IntArray  # x_{i+2}
    tap_index_P: IntArray
    target_index_P: IntArray
    stream_ids_S: IntArray
    stream_positions_S: IntArray
    stream_doc_S: IntArray  # -1 padding
    source_D: IntArray  # per packed document: its index in the documents that were packed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The R = P + M rows of one step as tensors: first every packed position in order (depth 0), then the mask rows.

    Mask rows are ordered by (anchor, depth), chunk by chunk. int64 unless said.
    """

    anchor_R: Tensor  # packed position; -1 for padding mask rows
    depth_R: Tensor
    doc_R: Tensor  # -1 padding
    position_R: Tensor  # RoPE position: position of the anchor within its document + depth
    target_R: Tensor  # packed position whose label and target distribution the row learns (anchor + depth; 0 padding)
    supervised_R: Tensor  # bool


def sample_rows(
    supervised_P: BoolArray,
    doc_P: IntArray,
    *,
    num_depths: int,
    keep_ratio: float,
    min_keep: float,
    rng: np.random.Generator,
) -> tuple[IntArray, IntArray]:
    """Draw the mask rows of one pack: (anchors, depths), depth-major, anchors ascending within a depth.

    Depth d keeps floor(max(0, |V| - d) * max(r^d, floor)) rows, or its whole pool when that is smaller; V are the
    supervised positions. A row (a, d) needs a and a + 1..a + d supervised in one document and (a, d-1) kept, so every
    kept row has its whole chain and dropping rows changes no surviving row's output.
    """
    allowed_P = supervised_P & (doc_P >= 0)
    follows_P = np.zeros_like(allowed_P)  # this position and the one before it may be in one chain
    follows_P[1:] = allowed_P[1:] & allowed_P[:-1] & (doc_P[1:] == doc_P[:-1])
    total = int(np.count_nonzero(allowed_P))
    anchors: list[IntArray] = [np.empty(0, np.int64)]
    depths: list[IntArray] = [np.empty(0, np.int64)]
    pool = np.flatnonzero(follows_P)
    for depth in range(1, num_depths):
        wanted = math.floor(max(0, total - depth) * keep_share(depth, keep_ratio, min_keep))
        chosen = pool if wanted >= len(pool) else np.sort(rng.choice(pool, wanted, replace=False, shuffle=False))
        if len(chosen) == 0:
            break
        anchors.append(chosen - depth)
        depths.append(np.full(len(chosen), depth, np.int64))
        following = chosen[chosen + 1 < len(doc_P)] + 1
        pool = following[follows_P[following]]
    return np.concatenate(anchors), np.concatenate(depths)


def build_rows(packed: Packed, anchor: IntArray, depth: IntArray, layout: RowLayout) -> Rows:
    """Rows of a pack from its mask rows (any order, whole chains). Raises PeagleError if they do not fit."""
    if len(anchor) > layout.mask_rows:
        raise PeagleError(f"{len(anchor)} mask rows drawn, capacity {layout.mask_rows}: raise the mask row capacity")
    order = np.lexsort((depth, anchor))
    positions = len(packed.doc_P)
    place_M = positions + place_chains(anchor[order], layout)
    anchor_R = np.full(positions + layout.chunks * layout.chunk_size, -1, np.int64)
    depth_R = np.zeros(len(anchor_R), np.int64)
    anchor_R[:positions] = np.arange(positions)
    anchor_R[place_M] = anchor[order]
    depth_R[place_M] = depth[order]
    real_R = anchor_R >= 0
    target_R = np.where(real_R, anchor_R + depth_R, 0)
    arrays = {
        "anchor_R": anchor_R,
        "depth_R": depth_R,
        "doc_R": np.where(real_R, packed.doc_P[target_R], -1),
        "position_R": np.where(real_R, packed.positions_P[anchor_R] + depth_R, 0),
        "target_R": target_R,
        "supervised_R": packed.supervised_P[target_R] & real_R,
    }
    return Rows(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def place_chains(anchor_M: IntArray, layout: RowLayout) -> IntArray:
    """Where each mask row goes, [M]: chains (runs of one anchor) in order, none across the edge of a chunk."""
    start_M = np.flatnonzero(np.diff(anchor_M, prepend=-1))  # first row of each chain
    end_M = np.append(start_M[1:], len(anchor_M))
    place_M = np.arange(len(anchor_M))
    first = chunk = 0  # chain and chunk
    while first < len(start_M):
        stop = int(np.searchsorted(end_M, start_M[first] + layout.chunk_size, side="right"))
        rows = slice(start_M[first], end_M[stop - 1])
        place_M[rows] += chunk * layout.chunk_size - start_M[first]
        first, chunk = stop, chunk + 1
    return place_M


def draw_rows(packed: Packed, layout: RowLayout, rng: np.random.Generator) -> Rows:
    """Sample the mask rows of a pack and lay out all rows of the step, on the CPU."""
    anchor, depth = sample_rows(
        packed.supervised_P,
        packed.doc_P,
        num_depths=layout.num_depths,
        keep_ratio=layout.keep_ratio,
        min_keep=layout.min_keep,
        rng=rng,
    )
    return build_rows(packed, anchor, depth, layout)


def pack_documents(documents: Iterable[TokenDocument], layout: RowLayout) -> Iterator[Packed]:
    """Pack documents in the given order, each whole, opening a new pack whenever the next one does not fit.

    A document longer than a pack (in positions, or in mask rows) is cut to the longest prefix that fits; one that
    yields no supervised position is skipped. Lazy: holds one pack at a time.
    """
    open_pack = _OpenPack(layout)
    for source, document in enumerate(documents):
        length = fitting_positions(document, layout)
        if length == 0:
            continue
        if not open_pack.fits(document, length):
            yield open_pack.close()
            open_pack = _OpenPack(layout)
        open_pack.add(source, document, length)
    if open_pack.sources:
        yield open_pack.close()


def fitting_positions(document: TokenDocument, layout: RowLayout) -> int:
    """Positions of a document that fit an empty pack; 0 when none of them is supervised."""
    length = min(len(document.input_ids) - 2, layout.positions)
    if length < 1:
        return 0
    supervised = np.flatnonzero(document.loss_mask[1 : length + 1])
    if len(supervised) > layout.max_supervised:
        length = int(supervised[layout.max_supervised])
    return length if len(supervised) else 0


class _OpenPack:
    """A pack under construction."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.positions = 0
        self.supervised = 0
        self.sources: list[int] = []
        self.pieces: list[tuple[NDArray[np.int32], BoolArray, int]] = []  # tokens, loss mask, positions

    def fits(self, document: TokenDocument, length: int) -> bool:
        positions = self.positions + length
        supervised = self.supervised + int(np.count_nonzero(document.loss_mask[1 : length + 1]))
        stream = positions + len(self.pieces) + 1
        layout = self.layout
        return (
            positions <= layout.positions
            and supervised <= layout.max_supervised
            and stream <= layout.stream_tokens
        )  # fmt: skip

    def add(self, source: int, document: TokenDocument, length: int) -> None:
        self.sources.append(source)
        self.pieces.append((document.input_ids[: length + 2], document.loss_mask[: length + 2], length))
        self.positions += length
        self.supervised += int(np.count_nonzero(document.loss_mask[1 : length + 1]))

    def close(self) -> Packed:
        capacity, stream_capacity = self.layout.positions, self.layout.stream_tokens
        lengths = np.array([length for _, _, length in self.pieces], np.int64)
        docs = np.arange(len(lengths))
        doc = np.repeat(docs, lengths)
        stream_doc = np.repeat(docs, lengths + 1)
        positions = np.arange(len(doc)) - (np.cumsum(lengths) - lengths)[doc]
        tap_index = np.arange(len(doc)) + doc  # each earlier document has one stream token more than positions
        return Packed(
            input_ids_P=_padded([ids[1:-1] for ids, _, _ in self.pieces], capacity, 0),
            positions_P=_padded([positions], capacity, 0),
            doc_P=_padded([doc], capacity, -1),
            supervised_P=_padded([mask[1:-1] for _, mask, _ in self.pieces], capacity, 0).astype(np.bool_),
            labels_P=_padded([ids[2:] for ids, _, _ in self.pieces], capacity, 0),
            tap_index_P=_padded([tap_index], capacity, stream_capacity - 1),
            target_index_P=_padded([tap_index + 1], capacity, stream_capacity - 1),
            stream_ids_S=_padded([ids[:-1] for ids, _, _ in self.pieces], stream_capacity, 0),
            stream_positions_S=_padded([np.arange(length + 1) for length in lengths], stream_capacity, 0),
            stream_doc_S=_padded([stream_doc], stream_capacity, -1),
            source_D=np.array(self.sources, np.int64),
        )


def _padded(parts: list[NDArray[np.generic]], size: int, fill: int) -> IntArray:
    """The parts end to end as int64, filled up to `size`."""
    joined = np.concatenate(parts).astype(np.int64)
    out = np.full(size, fill, np.int64)
    out[: len(joined)] = joined
    return out
