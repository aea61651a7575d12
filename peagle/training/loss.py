"""Cross-entropy of the draft head against the target, without ever holding rows x vocabulary.

Rows are taken in chunks. The gradient is computed together with the loss and kept as one [R, H] tensor, so a chunk's
logits are gone before the next chunk starts. Soft labels are the target's distribution, computed once per packed
position although several rows (a, d) with the same a + d share it.

Shape suffixes: T target positions, V target vocabulary, U draft vocabulary (= V when the head has no own vocabulary),
R rows, C rows of one chunk, H hidden size, K depths.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.errors import PeagleError

ROW_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What each packed position should predict, in draft vocabulary ids: soft if `probs_TU` is set, else `labels_T`."""

    top_T: Tensor  # int64: the target's argmax; -1 when it is outside the draft vocabulary
    probs_TU: Tensor | None = None  # soft labels
    labels_T: Tensor | None = None  # int64 hard labels; -1 outside the draft vocabulary: the row carries no loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LossResult:
    """`loss` is differentiable; the per-row fields are detached and mean nothing on rows of weight 0."""

    loss: Tensor  # scalar: sum of weight * cross-entropy over rows, divided by the denominator
    row_loss_R: Tensor  # unweighted cross-entropy; 0 on rows of weight 0
    correct_R: Tensor  # bool: draft argmax == target argmax; False on rows of weight 0


def row_weights(depth_R: Tensor, supervised_R: Tensor, depth_weight: float) -> Tensor:
    """float32 weight of each row: depth_weight^depth on supervised rows (1.0 = flat), 0 elsewhere."""
    return torch.where(supervised_R, depth_weight ** depth_R.float(), 0.0)


@torch.no_grad()
def soft_targets(
    hidden_TH: Tensor, head_VH: Tensor, draft_vocab_ids: Tensor | None, *, chunk: int = ROW_CHUNK
) -> Targets:
    """The target's distribution at each position, over the draft vocabulary (renormalised) when ids [U] are given.

    `hidden_TH` are final-normed hidden states; probabilities are stored in their dtype.
    """
    size = head_VH.shape[0] if draft_vocab_ids is None else len(draft_vocab_ids)
    probs_TU = hidden_TH.new_empty(hidden_TH.shape[0], size)
    top_T = torch.empty(hidden_TH.shape[0], dtype=torch.int64, device=hidden_TH.device)
    to_draft_V = None if draft_vocab_ids is None else _draft_index(draft_vocab_ids, head_VH.shape[0])
    for start in range(0, len(hidden_TH), chunk):
        logits_CV = _wide(F.linear(hidden_TH[start : start + chunk], head_VH))
        top_C = logits_CV.argmax(-1)
        top_T[start : start + chunk] = top_C if to_draft_V is None else to_draft_V[top_C]
        logits_CU = logits_CV if draft_vocab_ids is None else logits_CV[:, draft_vocab_ids]
        probs_TU[start : start + chunk] = logits_CU.softmax(-1)
    return Targets(top_T=top_T, probs_TU=probs_TU)


@torch.no_grad()
def hard_targets(
    hidden_TH: Tensor, head_VH: Tensor, draft_vocab_ids: Tensor | None, labels_T: Tensor, *, chunk: int = ROW_CHUNK
) -> Targets:
    """Hard labels (target vocabulary ids of the next token), with the target's argmax for the statistics."""
    to_draft_V = None if draft_vocab_ids is None else _draft_index(draft_vocab_ids, head_VH.shape[0])
    pieces = [F.linear(piece, head_VH).argmax(-1) for piece in hidden_TH.split(chunk)]
    top_T = torch.cat(pieces)
    if to_draft_V is not None:
        top_T, labels_T = to_draft_V[top_T], to_draft_V[labels_T]
    return Targets(top_T=top_T, labels_T=labels_T)


def cross_entropy(
    hidden_RH: Tensor,
    head_UH: Tensor,
    targets: Targets,
    target_index_R: Tensor,
    weight_R: Tensor,
    denominator: float | Tensor,
    *,
    chunk: int = ROW_CHUNK,
    compiled: bool = False,
) -> LossResult:
    """sum_r weight_r * CE_r / denominator, differentiable in `hidden_RH` and, if it requires grad, `head_UH`.

    `target_index_R` maps rows to positions of `targets`. Rows of weight 0 may hold anything, even NaN. The caller
    passes the one global denominator of the step. `compiled` fuses the per-chunk arithmetic (CUDA).
    """
    grad = torch.is_grad_enabled()
    wants = (grad and hidden_RH.requires_grad, grad and head_UH.requires_grad)
    job = _Job(targets, target_index_R, weight_R / denominator, chunk, compiled, *wants)
    loss, row_loss_R, correct_R = _ChunkedLoss.apply(hidden_RH, head_UH, job)
    return LossResult(loss=loss, row_loss_R=row_loss_R, correct_R=correct_R)


@dataclass(frozen=True, slots=True)
class _Job:
    """Non-differentiable arguments of one loss call."""

    targets: Targets
    index_R: Tensor
    scale_R: Tensor  # weight / denominator
    chunk: int
    compiled: bool
    wants_hidden: bool
    wants_head: bool


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, head_UH: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_RH.shape[0]
        padding = -rows % job.chunk if job.compiled else 0  # compiled code sees one shape of chunk
        hidden_RH = F.pad(hidden_RH, (0, 0, 0, padding))
        index_R, scale_R = F.pad(job.index_R, (0, padding)), F.pad(job.scale_R, (0, padding))
        grad_head = torch.zeros_like(head_UH, dtype=_wide_dtype(head_UH.dtype)) if job.wants_head else None
        parts: list[_ChunkResult] = []
        for start in range(0, rows, job.chunk):
            part = slice(start, start + job.chunk)
            result = _chunk_function(job.compiled)(
                hidden_RH[part], head_UH, job.targets, index_R[part], scale_R[part], job.wants_hidden, job.wants_head
            )
            if grad_head is not None:
                grad_head += result.grad_head_UH
            parts.append(result._replace(grad_head_UH=None))
        row_loss_R = torch.cat([part.loss_C for part in parts])[:rows]
        correct_R = torch.cat([part.correct_C for part in parts])[:rows]
        ctx.grad_hidden = torch.cat([part.grad_hidden_CH for part in parts])[:rows] if job.wants_hidden else None
        ctx.grad_head = None if grad_head is None else grad_head.to(head_UH.dtype)
        ctx.mark_non_differentiable(row_loss_R, correct_R)
        return (row_loss_R * job.scale_R).sum(), row_loss_R, correct_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        scaled = [None if grad is None else grad * grads[0].to(grad.dtype) for grad in (ctx.grad_hidden, ctx.grad_head)]
        ctx.grad_hidden = ctx.grad_head = None  # free them as soon as autograd has taken them over
        return scaled[0], scaled[1], None


class _ChunkResult(NamedTuple):
    """Of one chunk; the gradients are None when nobody wants them."""

    grad_hidden_CH: Any
    grad_head_UH: Any
    loss_C: Tensor
    correct_C: Tensor


def _chunk_loss(
    hidden_CH: Tensor,
    head_UH: Tensor,
    targets: Targets,
    index_C: Tensor,
    scale_C: Tensor,
    wants_hidden: bool,
    wants_head: bool,
) -> _ChunkResult:
    live_C = scale_C != 0
    # Rows that do not count may hold NaN, and 0 * NaN is NaN: replace, do not multiply.
    hidden_CH = torch.where(live_C[:, None], hidden_CH, 0.0)
    logits_CU = _wide(F.linear(hidden_CH, head_UH))
    log_sum_C = logits_CU.logsumexp(-1)
    target_CU = _target_rows(targets, index_C, live_C, logits_CU)
    mass_C = target_CU.sum(-1)  # not exactly 1 in bf16
    loss_C = mass_C * log_sum_C - (target_CU * logits_CU).sum(-1)
    correct_C = live_C & (logits_CU.argmax(-1) == targets.top_T[index_C])
    if not (wants_hidden or wants_head):
        return _ChunkResult(None, None, loss_C, correct_C)
    softmax_CU = (logits_CU - log_sum_C[:, None]).exp()
    grad_logits_CU = ((softmax_CU * mass_C[:, None] - target_CU) * scale_C[:, None]).to(head_UH.dtype)
    return _ChunkResult(
        grad_logits_CU @ head_UH if wants_hidden else None,
        grad_logits_CU.T @ hidden_CH if wants_head else None,
        loss_C,
        correct_C,
    )


def _target_rows(targets: Targets, index_C: Tensor, live_C: Tensor, logits_CU: Tensor) -> Tensor:
    """What the chunk's rows should predict as rows of probabilities; zero where a row does not count."""
    if targets.probs_TU is not None:
        return torch.where(live_C[:, None], targets.probs_TU[index_C], 0.0).to(logits_CU.dtype)
    if targets.labels_T is None:
        raise PeagleError("loss targets without labels: expected probabilities or hard labels")
    label_C = torch.where(live_C, targets.labels_T[index_C], -1)
    return (torch.arange(logits_CU.shape[1], device=label_C.device) == label_C[:, None]).to(logits_CU.dtype)


@functools.cache
def _chunk_function(compiled: bool) -> Callable[..., _ChunkResult]:
    return torch.compile(_chunk_loss, dynamic=False) if compiled else _chunk_loss


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and accumulation precision: float32 for half precisions, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _wide(logits: Tensor) -> Tensor:
    return logits.to(_wide_dtype(logits.dtype))


def _draft_index(draft_vocab_ids_U: Tensor, vocab_size: int) -> Tensor:
    """Target id -> draft id [V], -1 for target ids outside the draft vocabulary."""
    to_draft_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_vocab_ids_U.device)
    to_draft_V[draft_vocab_ids_U] = torch.arange(len(draft_vocab_ids_U), device=draft_vocab_ids_U.device)
    return to_draft_V


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthReport:
    """Python numbers per depth 0..K-1."""

    counts: list[int]  # supervised rows
    accuracy: list[float]  # top-1 agreement with the target, each depth on its own
    prefix_accuracy: list[float]  # share of chains right at every depth up to this one
    acceptance_length: float  # implied estimate: 1 + sum of prefix_accuracy


@dataclass(frozen=True, slots=True)
class DepthStatistics:
    """Counts on the device, [4, K] int64: rows, matches, whole chains, chains right at every depth so far. Add steps
    up with `+`; `report` is the only place that waits for the GPU."""

    table_4K: Tensor

    def __add__(self, other: "DepthStatistics") -> "DepthStatistics":
        return DepthStatistics(self.table_4K + other.table_4K)

    def report(self) -> DepthReport:
        counts, matches, chains, right = self.table_4K.tolist()
        prefix = [hit / max(1, total) for hit, total in zip(right, chains, strict=True)]
        return DepthReport(
            counts=counts,
            accuracy=[hit / max(1, total) for hit, total in zip(matches, counts, strict=True)],
            prefix_accuracy=prefix,
            acceptance_length=1.0 + sum(prefix),
        )


@torch.no_grad()
def depth_statistics(
    anchor_R: Tensor, depth_R: Tensor, correct_R: Tensor, valid_R: Tensor, num_depths: int
) -> DepthStatistics:
    """Per-depth agreement of rows whose anchors are < R, without waiting for the GPU.

    The chain of an anchor is its own depth-0 row and its mask rows. It counts at depth d if all of its rows up to d
    are among the given rows and valid.
    """
    spare = len(anchor_R)  # all rows that do not count go to one extra anchor, which is cut off
    slot_R = torch.where(valid_R, anchor_R, spare) * num_depths + torch.where(valid_R, depth_R, 0)
    flags = torch.zeros(2, (spare + 1) * num_depths, dtype=torch.bool, device=anchor_R.device)
    flags[0, slot_R] = valid_R
    flags[1, slot_R] = correct_R & valid_R
    present_AK, right_AK = flags.unflatten(1, (-1, num_depths))[:, :spare].unbind()
    chain_AK, chain_right_AK = present_AK.long().cumprod(1), right_AK.long().cumprod(1)
    return DepthStatistics(
        torch.stack([part.long().sum(0) for part in (present_AK, right_AK, chain_AK, chain_right_AK)])
    )
