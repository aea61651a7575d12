"""Who sees whom among training rows.

A row (anchor a, depth d) sees the real rows of its document up to a and its own chain up to itself; with a sliding
window W only real rows fewer than W positions back. Both parts are runs of keys: context keys [document start, a], and
in a chunk of mask rows the d rows that end with the row itself. So no mask tensor is needed, only two ranges per row
(`peagle.kernels.range_attention`).

Backends: "reference" is the two-part formula in torch, any device and float type, for tests and small runs; "flex" is
FlexAttention over the same ranges; "kernel" is the Triton kernel.

Suffixes: Q query rows, P context keys, C chain keys, R all rows of a step, S stream tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peagle.errors import PeagleError
from peagle.kernels.range_attention import KeyRanges, range_attention
from peagle.models.layers import Attend
from peagle.training.rows import Rows

Backend = Literal["reference", "flex", "kernel"]
Window = int | None


def document_starts(doc_P: Tensor) -> Tensor:
    """First position of each position's document, [P]."""
    index_P = torch.arange(len(doc_P), device=doc_P.device)
    begins_P = torch.ones_like(doc_P, dtype=torch.bool)
    begins_P[1:] = doc_P[1:] != doc_P[:-1]
    return torch.where(begins_P, index_P, 0).cummax(0).values


def context_ranges(rows: Rows, positions: int, part: slice, window: Window) -> KeyRanges:
    """Which of the first `positions` rows the rows of `part` see as context; none for padding."""
    anchor_Q, depth_Q, doc_Q = rows.anchor_R[part], rows.depth_R[part], rows.doc_R[part]
    real_Q = doc_Q >= 0
    lo_Q = document_starts(rows.doc_R[:positions])[anchor_Q.clamp(min=0)]
    if window is not None:
        lo_Q = torch.maximum(lo_Q, anchor_Q + depth_Q - window + 1)
    hi_Q = anchor_Q + 1
    return KeyRanges(*(torch.where(real_Q, bound, positions).int() for bound in (torch.minimum(lo_Q, hi_Q), hi_Q)))


def chain_ranges(rows: Rows, part: slice) -> KeyRanges:
    """Which of the mask rows in `part` each of them sees: its chain up to itself; none for padding."""
    depth_Q = rows.depth_R[part]
    index_Q = torch.arange(len(depth_Q), device=depth_Q.device)
    real_Q = rows.doc_R[part] >= 0
    bounds = (index_Q - depth_Q + 1, index_Q + 1)
    return KeyRanges(*(torch.where(real_Q, bound, len(depth_Q)).int() for bound in bounds))


class RowAttention:
    """Attention of a set of rows over a context and, for mask rows, their chains: one per step, shared by all layers.

    `windows` holds each layer's sliding window (None: none).
    """

    def __init__(
        self, rows: Rows, positions: int, part: slice, *, chains: bool, windows: Sequence[Window], backend: Backend
    ) -> None:
        """`part` are the rows that ask; the context are the first `positions` rows."""
        self._windows, self._backend = tuple(windows), backend
        self._context = {window: context_ranges(rows, positions, part, window) for window in set(windows)}
        self._chain = chain_ranges(rows, part) if chains else None
        self._masks: dict[Window, BlockMask] = {}
        if backend == "flex":
            keys = positions + (len(rows.anchor_R[part]) if chains else 0)
            self._masks = {
                window: _block_mask(context, self._chain, positions, keys) for window, context in self._context.items()
            }

    def __call__(
        self,
        layer: int,
        q_QND: Tensor,
        context: tuple[Tensor, Tensor],
        chain: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> Tensor:
        """Output [Q, N, D]; `context` and `chain` are (keys, values)."""
        window = self._windows[layer]
        if self._backend == "flex":
            return _flex(q_QND, context, chain, self._masks[window])
        backend = "torch" if self._backend == "reference" else "triton"
        keys, values = context
        return range_attention(
            q_QND, keys, values, self._context[window], chain[0], chain[1], self._chain, backend=backend
        )


def attend_positions(attention: RowAttention, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> Attend:
    """Positions among themselves; each layer's keys and values are left in `kept`."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kept is not None:
            kept[layer] = (k, v)
        return attention(layer, q, (k, v))

    return attend


def attend_chunk(attention: RowAttention, prefix: Sequence[tuple[Tensor, Tensor]]) -> Attend:
    """Mask rows over the positions' keys and values, which were computed before, and their chains."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = prefix[layer]
        return attention(layer, q, (keys.to(k.dtype), values.to(v.dtype)), (k, v))

    return attend


def attend_all(positions: int, among_positions: RowAttention, of_mask_rows: RowAttention | None) -> Attend:
    """Positions, followed by mask rows, in one forward pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = (k[:positions], v[:positions])
        out = among_positions(layer, q[:positions], context)
        if of_mask_rows is None:
            return out
        return torch.cat((out, of_mask_rows(layer, q[positions:], context, (k[positions:], v[positions:]))))

    return attend


def causal_document_attend(doc_S: Tensor, backend: Backend) -> Attend:
    """Causal attention within documents, for tokens packed in order; `doc_S` is -1 on padding."""
    index_S = torch.arange(len(doc_S), device=doc_S.device)
    padding = torch.zeros_like(index_S)
    rows = Rows(
        anchor_R=index_S, depth_R=padding, doc_R=doc_S, position_R=index_S, target_R=padding, supervised_R=padding
    )

    attention = RowAttention(rows, len(doc_S), slice(None), chains=False, windows=(None,), backend=backend)
    return lambda _layer, q, k, v: attention(0, q, (k, v))


def _flex(
    q_QND: Tensor, context: tuple[Tensor, Tensor], chain: tuple[Tensor, Tensor] | tuple[None, None], mask: BlockMask
) -> Tensor:
    if not q_QND.is_cuda and torch.is_grad_enabled() and q_QND.requires_grad:
        raise PeagleError("attention backend 'flex' has no gradients on the CPU: use 'reference' there")
    k, v = (ours if theirs is None else torch.cat((ours, theirs)) for ours, theirs in zip(context, chain, strict=True))
    inputs = (x.transpose(0, 1)[None] for x in (q_QND, k, v))
    out: Tensor = _flex_kernel(q_QND.is_cuda)(*inputs, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def _block_mask(context: KeyRanges, chain: KeyRanges | None, positions: int, keys: int) -> BlockMask:
    """Both ranges as one mask over the context's keys followed by the chains'."""
    chain = chain or KeyRanges(torch.zeros_like(context.lo_R), torch.zeros_like(context.lo_R))

    def mask_mod(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_context = (k >= context.lo_R[q]) & (k < context.hi_R[q])
        in_chain = (k - positions >= chain.lo_R[q]) & (k - positions < chain.hi_R[q])
        return torch.where(k < positions, in_context, in_chain)

    queries, device = len(context.lo_R), context.lo_R.device
    return _mask_builder(device.type == "cuda")(mask_mod, None, None, queries, keys, device=device)


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    kernel: Any = flex_attention
    return torch.compile(kernel) if compiled else kernel


@functools.cache
def _mask_builder(compiled: bool) -> Callable[..., BlockMask]:
    """Compiled, the queries x keys mask is reduced to blocks on the fly and never stored."""
    return torch.compile(create_block_mask) if compiled else create_block_mask
