"""Attention where every query row sees one contiguous range of keys of each of two sources: the trainer's attention.

A training row (anchor a, depth d) sees the real rows of its document up to its anchor (the CONTEXT source) and its own
chain of mask rows (the CHAIN source). With rows sorted by anchor both are contiguous ranges, so no mask is needed. The
two parts merge by log-sum-exp, which makes them one softmax over the union:

    out = o1 exp(l1 - l) + o2 exp(l2 - l),   l = log(exp(l1) + exp(l2))

Shape suffixes: R query rows, P context keys, C chain keys, S keys, N query heads, M kv heads, D head dim.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from peagle.errors import PeagleError

_HEAD_DIMS = (16, 32, 64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16)
_HAS_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, looks once


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """One contiguous range of keys per query row: row r sees keys lo[r] .. hi[r] - 1 of a source, none if lo >= hi.

    Ranges that are not empty lie within the source. Any order of rows is right; fast is `hi` non-decreasing and `lo`
    non-decreasing up to small dips, as rows sorted by anchor have it, with padding rows (lo = hi) last.
    """

    lo_R: Tensor  # int32
    hi_R: Tensor  # int32


def range_attention(
    q_RND: Tensor,
    context_k_PMD: Tensor,
    context_v_PMD: Tensor,
    context: KeyRanges,
    chain_k_CMD: Tensor | None = None,
    chain_v_CMD: Tensor | None = None,
    chain: KeyRanges | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the union of a row's two ranges, [R, N, D]; softmax in float32 or wider.

    Differentiable in q and in the keys and values of both sources. A row that sees nothing gives 0, whatever its q
    and its gradient hold. Keys and values before the first and after the last that any row sees may hold anything, NaN
    included; the others must be finite, seen or not. `backend`: "auto" is Triton on CUDA and
    torch elsewhere; "torch" and "triton" force one. Rows may be further apart than they are long (slices of one
    projection); only the last dimension must be dense.
    """
    if not _use_triton(q_RND, backend):
        return range_attention_ref(q_RND, context_k_PMD, context_v_PMD, context, chain_k_CMD, chain_v_CMD, chain)
    if chain_k_CMD is None or chain_v_CMD is None or chain is None:
        chain_k_CMD = chain_v_CMD = context_k_PMD.new_empty((0, *context_k_PMD.shape[1:]))
        chain = KeyRanges(context.lo_R, context.lo_R)
    out_RND, _lse_NR = _forward(
        q_RND, context_k_PMD, context_v_PMD, context.lo_R, context.hi_R,
        chain_k_CMD, chain_v_CMD, chain.lo_R, chain.hi_R,
    )  # fmt: skip
    return out_RND


def range_attention_ref(
    q_RND: Tensor,
    context_k_PMD: Tensor,
    context_v_PMD: Tensor,
    context: KeyRanges,
    chain_k_CMD: Tensor | None = None,
    chain_v_CMD: Tensor | None = None,
    chain: KeyRanges | None = None,
) -> Tensor:
    """The torch form of `range_attention`: one masked softmax over both sources, a mask of rows x keys."""
    keys_SMD, values_SMD = context_k_PMD, context_v_PMD
    visible_RS = _inside(context, len(context_k_PMD))
    if chain_k_CMD is not None and chain_v_CMD is not None and chain is not None:
        keys_SMD, values_SMD = torch.cat((keys_SMD, chain_k_CMD)), torch.cat((values_SMD, chain_v_CMD))
        visible_RS = torch.cat((visible_RS, _inside(chain, len(chain_k_CMD))), dim=1)
    blind_R11, unseen_S11 = ~visible_RS.any(dim=1)[:, None, None], ~visible_RS.any(dim=0)[:, None, None]
    # A zero weight does not remove NaN, so what takes no part is replaced. A blind row attends to everything, which
    # keeps its softmax finite; its output, and with it its gradient, is then dropped.
    q, k, v = (
        x.masked_fill(hidden, 0).transpose(0, 1)[None]
        for x, hidden in ((q_RND, blind_R11), (keys_SMD, unseen_S11), (values_SMD, unseen_S11))
    )
    mask_RS = visible_RS | blind_R11[:, 0]
    out_RND = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_RS, enable_gqa=True)[0].transpose(0, 1)
    return out_RND.masked_fill(blind_R11, 0)


def _inside(ranges: KeyRanges, keys: int) -> Tensor:
    """Bool [R, S]: which of a source's keys each row sees."""
    key_S = torch.arange(keys, device=ranges.lo_R.device)
    return (ranges.lo_R[:, None] <= key_S) & (key_S < ranges.hi_R[:, None])


def _use_triton(q_RND: Tensor, backend: str) -> bool:
    if backend not in ("auto", "torch", "triton"):
        raise PeagleError(f"attention backend {backend!r}: expected 'auto', 'torch' or 'triton'")
    possible = _HAS_TRITON and q_RND.shape[2] in _HEAD_DIMS and q_RND.dtype in _DTYPES
    if backend == "triton" and not (possible and (q_RND.is_cuda or _INTERPRETED)):
        raise PeagleError(
            f"attention backend 'triton' with head dim {q_RND.shape[2]} and {q_RND.dtype} on {q_RND.device}: it needs "
            "CUDA, triton, a head dim of 16, 32, 64, 128 or 256 and float32 or bfloat16; choose 'torch'"
        )
    return backend == "triton" or (backend == "auto" and q_RND.is_cuda and possible)


# Custom operators, so that torch.compile neither looks inside nor breaks its graph.


@custom_op("peagle::range_attention", mutates_args=())
def _forward(
    q_RND: Tensor,
    context_k_PMD: Tensor,
    context_v_PMD: Tensor,
    context_lo_R: Tensor,
    context_hi_R: Tensor,
    chain_k_CMD: Tensor,
    chain_v_CMD: Tensor,
    chain_lo_R: Tensor,
    chain_hi_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output [R, N, D] and what the backward pass needs beside it: log2 of each row's sum of exponentials [N, R]."""
    from peagle.kernels.range_attention_triton import forward

    context = (context_k_PMD, context_v_PMD, context_lo_R, context_hi_R)
    return forward(q_RND, context, (chain_k_CMD, chain_v_CMD, chain_lo_R, chain_hi_R))


@custom_op("peagle::range_attention_backward", mutates_args=())
def _backward(
    dout_RND: Tensor,
    out_RND: Tensor,
    lse_NR: Tensor,
    q_RND: Tensor,
    context_k_PMD: Tensor,
    context_v_PMD: Tensor,
    context_lo_R: Tensor,
    context_hi_R: Tensor,
    chain_k_CMD: Tensor,
    chain_v_CMD: Tensor,
    chain_lo_R: Tensor,
    chain_hi_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, context keys, context values, chain keys and chain values."""
    from peagle.kernels.range_attention_backward_triton import backward

    context = (context_k_PMD, context_v_PMD, context_lo_R, context_hi_R)
    return backward(dout_RND, out_RND, lse_NR, q_RND, context, (chain_k_CMD, chain_v_CMD, chain_lo_R, chain_hi_R))


@_forward.register_fake
def _(q_RND: Tensor, *_sources: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q_RND.shape
    return q_RND.new_empty(q_RND.shape), q_RND.new_empty((heads, rows), dtype=torch.float32)


@_backward.register_fake
def _(
    _dout: Tensor, _out: Tensor, _lse: Tensor, q_RND: Tensor, *sources: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    k_PMD, v_PMD, _lo, _hi, k_CMD, v_CMD, *_ranges = sources
    dq, dk, dv, dchain_k, dchain_v = (x.new_empty(x.shape) for x in (q_RND, k_PMD, v_PMD, k_CMD, v_CMD))
    return dq, dk, dv, dchain_k, dchain_v


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the second output never has one
    ctx.save_for_backward(*output, *inputs)


def _differentiate(ctx: Any, dout_RND: Tensor | None, _dlse_NR: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout_RND is None:
        return (None,) * 9
    dq, dk, dv, dchain_k, dchain_v = _backward(dout_RND, *ctx.saved_tensors)
    return dq, dk, dv, None, None, dchain_k, dchain_v, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
