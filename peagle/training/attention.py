"""Who sees whom among training rows, as a plain torch reference ("dense") and as FlexAttention ("flex").

The relation: a row (anchor a, depth d) sees the real rows of its document up to a and its own chain up to itself.
Packed causal attention of the target is the same relation with every token its own anchor at depth 0.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peagle.errors import PeagleError
from peagle.models.layers import Attend
from peagle.training.rows import Rows

Backend = Literal["dense", "flex"]


def may_attend(
    anchor_q: Tensor, depth_q: Tensor, doc_q: Tensor, anchor_k: Tensor, depth_k: Tensor, doc_k: Tensor
) -> Tensor:
    """Whether query rows may attend key rows; the arguments broadcast. False wherever a padding row (doc -1) takes
    part; the backends add the diagonal, so a padding row sees itself and its softmax stays finite."""
    context = (depth_k == 0) & (anchor_k <= anchor_q)
    chain = (anchor_k == anchor_q) & (depth_k <= depth_q)
    return (doc_q == doc_k) & (doc_q >= 0) & (context | chain)


def attend_rows(rows: Rows, backend: Backend) -> Attend:
    """The drafter's attention over one step's rows. Build it once per step: all layers share it."""
    return _backend(backend)(rows.anchor_R, rows.depth_R, rows.doc_R)


def causal_document_attend(doc_S: Tensor, backend: Backend) -> Attend:
    """Causal attention within documents, for tokens packed in order; `doc_S` is -1 on padding."""
    index_S = torch.arange(len(doc_S), device=doc_S.device)
    return _backend(backend)(index_S, torch.zeros_like(index_S), doc_S)


def dense_attend(anchor_R: Tensor, depth_R: Tensor, doc_R: Tensor) -> Attend:
    """Reference: masked SDPA with an R x R bool mask. Any device and float type; for tests and small runs."""
    mask_RR = may_attend(
        anchor_R[:, None], depth_R[:, None], doc_R[:, None], anchor_R[None], depth_R[None], doc_R[None]
    )
    mask_RR = mask_RR | torch.eye(len(anchor_R), dtype=torch.bool, device=anchor_R.device)

    def attend(_layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_RND, k_RMD, v_RMD))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_RR, enable_gqa=True)[0].transpose(0, 1)

    return attend


def flex_attend(anchor_R: Tensor, depth_R: Tensor, doc_R: Tensor) -> Attend:
    """FlexAttention over the blocks the relation leaves. Compiled on CUDA; on CPU it can only run without gradients."""
    compiled = anchor_R.is_cuda
    mask = _block_mask(anchor_R.int(), depth_R.int(), doc_R.int(), compiled)
    kernel = _flex_kernel(compiled)

    def attend(_layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        if not compiled and torch.is_grad_enabled() and q_RND.requires_grad:
            raise PeagleError("attention backend 'flex' has no gradients on the CPU: use 'dense' there")
        q, k, v = (x.transpose(0, 1)[None] for x in (q_RND, k_RMD, v_RMD))
        out: Tensor = kernel(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def _backend(backend: Backend) -> Callable[[Tensor, Tensor, Tensor], Attend]:
    if backend not in ("dense", "flex"):
        raise PeagleError(f"attention backend {backend!r}: expected 'dense' or 'flex'")
    return dense_attend if backend == "dense" else flex_attend


def _block_mask(anchor_R: Tensor, depth_R: Tensor, doc_R: Tensor, compiled: bool) -> BlockMask:
    def mask_mod(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = may_attend(anchor_R[q], depth_R[q], doc_R[q], anchor_R[k], depth_R[k], doc_R[k])
        return seen | (q == k)

    size = len(anchor_R)
    return _mask_builder(compiled)(mask_mod, None, None, size, size, device=anchor_R.device)


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    kernel: Any = flex_attention
    return torch.compile(kernel, dynamic=False) if compiled else kernel


@functools.cache
def _mask_builder(compiled: bool) -> Callable[..., BlockMask]:
    """Compiled, the R x R mask is reduced to blocks on the fly and never stored."""
    return torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
