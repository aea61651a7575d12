"""The loss of a block of draft logits and its gradient, written over the logits, so that a row is never held twice.

A row's label is a distribution p over the draft vocabulary, soft (the target's) or hard (one token). With
q = softmax(z) of the row's logits z, the loss is the mix

    (1 - w) CE + w TV,    CE = logsumexp(z) - sum p z,    TV = 1/2 sum |p - q|

whose gradients in z are q - p and q (sum h q - h), where h is 1 if q < p, 0 if q > p and 1/2 if they are equal. (It is
q (s - sum s q) / 2 with s = sign(q - p) = 1 - 2 h, without the rounding of a sum near 1.) Two forms: a Triton kernel,
one program per row (`draft_loss_triton.py`), and torch, its twin, which reads like the formulas.

Shape suffixes: C rows of the block, U vocabulary, T target positions.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels.backend import use_triton


@dataclass(frozen=True, slots=True)
class LossMix:
    """loss = (1 - tv_weight) * CE + tv_weight * TV, with 0 <= tv_weight <= 1."""

    tv_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.tv_weight <= 1.0:
            raise PeagleError(f"tv_weight is {self.tv_weight}: it must be in [0, 1], the share of total variation")


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """Row c should predict exp(logits_TU[index_C[c]] - lse_T[index_C[c]]). Rows of one target are best neighbours."""

    logits_TU: Tensor
    lse_T: Tensor  # of `row_summary`
    index_C: Tensor  # int64


@dataclass(frozen=True, slots=True)
class HardLabels:
    """The token each row should predict; -1: the row carries no loss."""

    token_C: Tensor  # int64


Labels = SoftLabels | HardLabels


class RowSummary(NamedTuple):
    """Of rows of logits, in float32 (float64 of float64 logits)."""

    lse_T: Tensor
    top_T: Tensor  # int64 argmax, the first of equal ones
    entropy_T: Tensor  # of the softmax, in nats


class RowResult(NamedTuple):
    loss_C: Tensor  # float32 or wider, not scaled
    top_C: Tensor  # int64 argmax, the first of equal ones


def draft_loss(
    logits_CU: Tensor, scale_C: Tensor, labels: Labels, mix: LossMix, *, want_grad: bool = True, backend: str = "auto"
) -> RowResult:
    """Loss and argmax of each row; `logits_CU` becomes the gradient of sum scale_C * loss_C in it if that is wanted.

    A row of scale 0 may hold anything, NaN included: its loss is 0, its gradient exactly 0, its argmax -1. `backend`
    "auto" is Triton on CUDA, "torch" turns it off.
    """
    form = draft_loss_ref
    if _use_triton(logits_CU, backend):
        from peagle.kernels.draft_loss_triton import draft_loss_triton as form
    return form(logits_CU, scale_C, labels, mix, want_grad=want_grad)


def row_summary(logits_TU: Tensor, *, backend: str = "auto") -> RowSummary:
    """Log-sum-exp, argmax and entropy of every row in one reading of the logits. `backend` as in `draft_loss`."""
    form = row_summary_ref
    if _use_triton(logits_TU, backend):
        from peagle.kernels.draft_loss_triton import row_summary_triton as form
    return form(logits_TU)


def draft_loss_ref(
    logits_CU: Tensor, scale_C: Tensor, labels: Labels, mix: LossMix, *, want_grad: bool = True
) -> RowResult:
    """The torch form of `draft_loss`; arithmetic in float32 or wider."""
    charged_C = scale_C != 0
    # 0 * NaN is NaN: what must not count is replaced, never multiplied by 0.
    z_CU = _wide(logits_CU).masked_fill(~charged_C[:, None], 0.0)
    p_CU, labelled_C = _distribution(labels, z_CU, charged_C)
    live_C = charged_C & labelled_C
    log_q_CU = z_CU.log_softmax(-1)
    q_CU, weight = log_q_CU.exp(), mix.tv_weight
    loss_C = (1 - weight) * -(p_CU * log_q_CU).sum(-1) + weight * 0.5 * (p_CU - q_CU).abs().sum(-1)
    top_C = z_CU.argmax(-1).where(charged_C, -1)
    if want_grad:
        h_CU = 0.5 - 0.5 * (q_CU - p_CU).sign()
        tv_grad_CU = q_CU * ((h_CU * q_CU).sum(-1, keepdim=True) - h_CU)
        grad_CU = (1 - weight) * (q_CU - p_CU) + weight * tv_grad_CU
        logits_CU.copy_(torch.where(live_C[:, None], scale_C[:, None] * grad_CU, 0.0))
    return RowResult(loss_C.where(live_C, 0.0), top_C)


def row_summary_ref(logits_TU: Tensor) -> RowSummary:
    """The torch form of `row_summary`."""
    z_TU = _wide(logits_TU)
    lse_T = z_TU.logsumexp(-1)
    entropy_T = lse_T - (z_TU.softmax(-1) * z_TU).sum(-1)
    return RowSummary(lse_T, z_TU.argmax(-1), entropy_T)


def _distribution(labels: Labels, z_CU: Tensor, charged_C: Tensor) -> tuple[Tensor, Tensor]:
    """p of every row, 0 where a row carries no loss, and whether it has a label."""
    if isinstance(labels, HardLabels):
        tokens_U = torch.arange(z_CU.shape[1], device=z_CU.device)
        return (tokens_U == labels.token_C[:, None]).to(z_CU.dtype), labels.token_C >= 0
    p_CU = (labels.logits_TU[labels.index_C].to(z_CU.dtype) - labels.lse_T[labels.index_C, None]).exp()
    return p_CU.masked_fill(~charged_C[:, None], 0.0), torch.ones_like(charged_C)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _use_triton(logits: Tensor, backend: str) -> bool:
    """The kernel is float32 arithmetic, so float64 goes to torch whatever the backend."""
    return use_triton(backend, logits.device) and logits.dtype != torch.float64
