"""A tiny random drafter and its forward pass over training rows, for the tests of `peagle.training`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from peagle.drafters.p_eagle import DrafterConfig, PEagleDrafter
from peagle.models.layers import Attend, RopeSpec
from peagle.training.rows import Packed, RowLayout, Rows, build_rows, pack_documents

VOCAB = 50
TARGET_HIDDEN = 12


def may_attend(
    anchor_q: Tensor,
    depth_q: Tensor,
    doc_q: Tensor,
    anchor_k: Tensor,
    depth_k: Tensor,
    doc_k: Tensor,
    window: int | None = None,
) -> Tensor:
    """What a training row sees, as a formula; the arguments broadcast. False wherever padding (doc -1) takes part."""
    context = (depth_k == 0) & (anchor_k <= anchor_q)
    if window is not None:
        context &= anchor_q + depth_q - anchor_k < window
    chain = (anchor_k == anchor_q) & (depth_k <= depth_q) & (depth_k > 0)
    return (doc_q == doc_k) & (doc_q >= 0) & (context | chain)


@dataclass(frozen=True)
class Document:
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


def document(length: int, supervised: slice | None = None, seed: int = 0) -> Document:
    """Random tokens; all of them supervised, or those in `supervised`."""
    mask = np.zeros(length, np.bool_)
    mask[slice(None) if supervised is None else supervised] = True
    return Document(np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32), mask)


def layout(
    positions: int,
    num_depths: int,
    keep_ratio: float = 1.0,
    mask_rows: int | None = None,
    chunk_rows: int | None = None,
) -> RowLayout:
    """A layout whose mask rows always suffice, unless their number is given."""
    rows = positions * (num_depths - 1) if mask_rows is None else mask_rows
    return RowLayout(
        positions=positions, mask_rows=rows, num_depths=num_depths, keep_ratio=keep_ratio, chunk_rows=chunk_rows
    )


def pack_one(documents: Sequence[Document], shape: RowLayout) -> Packed:
    """The documents as a single pack."""
    (packed,) = pack_documents(documents, shape)
    return packed


def rows_of(packed: Packed, pairs: Sequence[tuple[int, int]]) -> Rows:
    """Rows of a pack with the given (anchor, depth) mask rows."""
    anchor, depth = np.array(pairs, np.int64).reshape(-1, 2).T
    shape = RowLayout(positions=len(packed.doc_P), mask_rows=len(pairs), num_depths=int(depth.max()) + 1)
    return build_rows(packed, anchor, depth, shape)


def dense_attend(rows: Rows, window: int | None = None) -> Attend:
    """The relation as a mask over all pairs of rows: the formula that everything else is compared with.

    Padding rows see themselves, so that their softmax stays finite.
    """
    a, d, doc = rows.anchor_R, rows.depth_R, rows.doc_R
    mask = may_attend(a[:, None], d[:, None], doc[:, None], a[None], d[None], doc[None], window)
    mask |= torch.eye(len(a), dtype=torch.bool, device=a.device)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def tiny_drafter(
    dtype: torch.dtype = torch.float64, num_layers: int = 3, window: int | None = None, head_dim: int = 8
) -> PEagleDrafter:
    """Three layers, grouped-query attention, everything random."""
    torch.manual_seed(1)
    config = DrafterConfig(
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, head_dim=head_dim),
        max_position_embeddings=128,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        target_hidden_size=TARGET_HIDDEN,
        tap_ids=(1, 2, 3),
        mask_token_id=3,
        norm_before_fc=True,
        sliding_window=window,
        layer_types=None if window is None else ("sliding_attention",) * num_layers,
    )
    drafter = PEagleDrafter(config)
    torch.nn.init.normal_(drafter.mask_embedding)
    return drafter.to(dtype)


def random_taps(drafter: PEagleDrafter, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = drafter.fc.weight.dtype
    return torch.randn(count, drafter.config.feature_size, generator=generator, dtype=dtype)


def forward_rows(
    drafter: PEagleDrafter, packed: Packed, taps_PC: Tensor, rows: Rows, attend: Attend | None = None
) -> Tensor:
    """Hidden states [R, H] of all rows, by the dense formula unless `attend` is given."""
    ids_P = torch.from_numpy(packed.input_ids_P)
    count = len(rows.anchor_R) - len(ids_P)
    embeds = torch.cat((drafter.embed_tokens(ids_P), drafter.mask_embedding.expand(count, -1)))
    features = torch.cat((drafter.combine(taps_PC), drafter.mask_feature().expand(count, -1)))
    return drafter(embeds, features, rows.position_R, attend or dense_attend(rows))
