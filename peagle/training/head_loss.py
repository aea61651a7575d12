"""The head's loss with its gradients written out: no autograd, and never more than one slab of rows x vocabulary.

Charged rows are sorted by the position they predict and cut into slabs. The target's logits of a slab are made once
for all of its rows, which share positions: rows (a, d) of equal a + d have one label. Gradients are those of the SUM
of weighted row losses; dividing by a global weight is the trainer's.

Shape suffixes: X hidden states passed in, L charged rows, T distinct target positions of them, P packed positions,
C rows of a slab, S targets of a slab, H hidden size, V target vocabulary, U draft vocabulary (= V without an own one).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels.draft_loss import HardLabels, Labels, LossMix, SoftLabels, draft_loss, row_summary

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

LOSSES = ("soft-ce", "kl", "hard-ce")
DEPTH_WEIGHTS = ("flat", "per-depth", "gamma")
# Slabs of one plan differ by a few rows. Blocks of equal size are what the allocator can use again.
_ROUND_ROWS = 256


@dataclass(frozen=True, slots=True)
class LossRows:
    """Rows charged together, sorted so that their targets ascend. Made on the host; the tensors move to the device."""

    rows_L: Tensor  # int64: which hidden state is the row's; different for all rows with weight
    rank_L: Tensor  # int64: place of its target in targets_T
    weight_L: Tensor  # float32; a row of weight 0 may hold anything
    targets_T: Tensor  # int64: packed positions, ascending within a slab
    slabs: tuple[tuple[int, int, int, int], ...]  # first and end row, first and end target: the rows use only those


@dataclass(frozen=True, slots=True)
class RowLoss:
    """What a call of `HeadLoss` gives; nothing of it is differentiable. Row fields are in the order of `rows_L`."""

    loss_sum: Tensor  # scalar, float32 or wider: sum of weight * loss
    grad_XH: Tensor | None  # gradient of loss_sum in the hidden states; 0 on rows that are not charged
    correct_L: Tensor  # bool: the draft's argmax is the target's; False on rows of weight 0
    row_loss_L: Tensor  # not weighted; 0 on rows of weight 0


def plan_loss_rows(rows: IntArray, target: IntArray, weight: FloatArray, max_rows: int) -> LossRows:
    """Sort rows by target position and cut them into slabs of at most `max_rows` rows, never within a target.

    `rows` index the hidden states of one call and are all different; those of one target keep their order. A target
    with more rows than `max_rows` (it has at most one per depth) is a slab of its own.
    """
    if max_rows < 1:
        raise PeagleError(f"rows per loss chunk is {max_rows}: it must be at least 1")
    order = np.argsort(target, kind="stable")
    targets, rank, counts = np.unique(target[order], return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)  # rows up to and including each target
    slabs, first_row, first_target = [], 0, 0
    while first_target < len(targets):
        fitting = int(np.searchsorted(ends, first_row + max_rows, side="right"))
        end_target = max(fitting, first_target + 1)
        end_row = int(ends[end_target - 1])
        slabs.append((first_row, end_row, first_target, end_target))
        first_row, first_target = end_row, end_target
    return LossRows(
        rows_L=torch.from_numpy(rows[order].astype(np.int64)),
        rank_L=torch.from_numpy(rank.astype(np.int64)),
        weight_L=torch.from_numpy(weight[order].astype(np.float32)),
        targets_T=torch.from_numpy(targets.astype(np.int64)),
        slabs=tuple(slabs),
    )


def fixed_loss_rows(loss_rows: LossRows, slabs: int, rows: int, targets: int) -> LossRows | None:
    """The same rows in exactly `slabs` slabs of `rows` rows and `targets` targets each, filled up with rows of weight
    0; None where they do not fit. A target at a slab's edge may be in both slabs."""
    count, rank_L = len(loss_rows.rows_L), loss_rows.rank_L.numpy()
    starts = np.arange(0, count, rows)
    first_S = rank_L[starts]
    last_S = rank_L[np.minimum(starts + rows, count) - 1]
    if len(starts) > slabs or np.any(last_S - first_S >= targets):
        return None
    slab_L = np.arange(count) // rows
    places = np.minimum(first_S[:, None] + np.arange(targets), len(loss_rows.targets_T) - 1)
    targets_T = np.zeros(slabs * targets, np.int64)
    targets_T[: places.size] = loss_rows.targets_T.numpy()[places].ravel()
    padding = (0, slabs * rows - count)
    return LossRows(
        rows_L=F.pad(loss_rows.rows_L, padding),
        rank_L=F.pad(torch.from_numpy(rank_L - first_S[slab_L] + slab_L * targets), padding),
        weight_L=F.pad(loss_rows.weight_L, padding),
        targets_T=torch.from_numpy(targets_T),
        slabs=tuple((s * rows, (s + 1) * rows, s * targets, (s + 1) * targets) for s in range(slabs)),
    )


def depth_weights(depth: IntArray, *, kind: str, gamma: float, num_depths: int) -> FloatArray:
    """The weight of each row by its depth: "flat" 1, "gamma" gamma^depth, "per-depth" n_0 / n_depth.

    n_d counts the given rows of depth d, so that with "per-depth" every depth weighs as much as depth 0.
    """
    if kind == "flat":
        table: NDArray[np.floating[Any]] = np.ones(num_depths)
    elif kind == "gamma":
        table = gamma ** np.arange(num_depths)
    elif kind == "per-depth":
        counts = np.bincount(depth, minlength=num_depths)
        table = counts[0] / np.maximum(counts, 1)
    else:
        raise PeagleError(f"depth weight {kind!r} is not known: use {', '.join(DEPTH_WEIGHTS)}")
    return table[depth].astype(np.float32)


class HeadLoss:
    """The loss of a draft head against a target's, for any number of calls between changes of the head.

    `head_UH` is in the compute precision, `head_grad_UH` in float32 or wider: every call ADDS its gradient to it.
    None: the head is frozen. `draft_ids_U` are the target ids of the draft vocabulary, ascending, None for all;
    the target's distribution is then renormalised over them. `backend` as in `kernels.draft_loss`.

    "soft-ce" and "kl" have one gradient; "kl" reports the loss less the target's entropy. "hard-ce" takes the next
    token; one outside the draft vocabulary carries no loss.
    """

    def __init__(
        self,
        head_UH: Tensor,
        head_grad_UH: Tensor | None,
        target_head_VH: Tensor,
        draft_ids_U: Tensor | None,
        *,
        loss: str = "soft-ce",
        tv_weight: float = 0.0,
        backend: str = "auto",
    ) -> None:
        if loss not in LOSSES:
            raise PeagleError(f"loss {loss!r} is not known: use {', '.join(LOSSES)}")
        self._head_UH, self._head_grad_UH = head_UH.detach(), head_grad_UH
        self._target_head_VH, self._draft_ids_U = target_head_VH.detach(), draft_ids_U
        self._to_draft_V = None if draft_ids_U is None else _draft_index(draft_ids_U, len(target_head_VH))
        self._loss, self._mix, self._backend = loss, LossMix(tv_weight), backend

    @torch.no_grad()
    def __call__(
        self, hidden_XH: Tensor, target_hidden_PH: Tensor, labels_P: Tensor, loss_rows: LossRows, *, want_grad: bool
    ) -> RowLoss:
        """Charge `loss_rows` of the draft's final hidden states against the target's.

        `labels_P` are target ids; only "hard-ce" reads them. Waits for nothing on the device.
        """
        wide = torch.promote_types(self._head_UH.dtype, torch.float32)
        count, device = len(loss_rows.rows_L), hidden_XH.device
        result = RowLoss(
            loss_sum=torch.zeros((), dtype=wide, device=device),
            grad_XH=torch.zeros_like(hidden_XH, requires_grad=False) if want_grad else None,
            correct_L=torch.empty(count, dtype=torch.bool, device=device),
            row_loss_L=torch.empty(count, dtype=wide, device=device),
        )
        draft_SU, target_SV = self._workspace(loss_rows.slabs)
        for first, end, first_target, end_target in loss_rows.slabs:
            targets_S = loss_rows.targets_T[first_target:end_target]
            target = self._target(target_hidden_PH[targets_S], labels_P[targets_S], target_SV[: len(targets_S)])
            self._charge(hidden_XH, loss_rows, slice(first, end), first_target, target, draft_SU[: end - first], result)
        result.loss_sum.add_((result.row_loss_L * loss_rows.weight_L).sum())
        return result

    def _workspace(self, slabs: tuple[tuple[int, int, int, int], ...]) -> tuple[Tensor, Tensor]:
        """Memory for the draft's and the target's logits of the largest slab."""
        rows = max((end - first for first, end, _, _ in slabs), default=0)
        targets = max((end - first for _, _, first, end in slabs), default=0)
        return tuple(  # type: ignore[return-value]  # two of them
            head.new_empty(-(-count // _ROUND_ROWS) * _ROUND_ROWS, len(head))
            for head, count in ((self._head_UH, rows), (self._target_head_VH, targets))
        )

    def _target(self, hidden_SH: Tensor, label_S: Tensor, logits_SV: Tensor) -> "_Target":
        """What the targets of a slab ask for, in draft ids; their logits go to `logits_SV`."""
        torch.mm(hidden_SH.to(logits_SV.dtype), self._target_head_VH.T, out=logits_SV)
        summary = row_summary(logits_SV, backend=self._backend)
        top_S, logits_SU = summary.top_T, logits_SV
        if self._draft_ids_U is not None and self._to_draft_V is not None:
            top_S = self._to_draft_V[top_S]
            label_S = self._to_draft_V[label_S]
            if self._loss != "hard-ce":
                logits_SU = logits_SV.index_select(1, self._draft_ids_U)
                summary = row_summary(logits_SU, backend=self._backend)
        return _Target(top_S, label_S, logits_SU, summary.lse_T, summary.entropy_T)

    def _charge(
        self,
        hidden_XH: Tensor,
        loss_rows: LossRows,
        part: slice,
        first_target: int,
        target: "_Target",
        logits_CU: Tensor,
        result: RowLoss,
    ) -> None:
        """Add the rows `part` of a slab to the result and to the head's gradient."""
        rows_C, weight_C = loss_rows.rows_L[part], loss_rows.weight_L[part]
        target_C = (loss_rows.rank_L[part] - first_target).clamp_(min=0)  # filling rows have none
        # A row of weight 0 may hold NaN, which a gradient of 0 would not keep out of the head's.
        hidden_CH = hidden_XH[rows_C].to(logits_CU.dtype).masked_fill_((weight_C == 0)[:, None], 0.0)
        torch.mm(hidden_CH, self._head_UH.T, out=logits_CU)
        want_grad = result.grad_XH is not None
        loss_C, top_C = draft_loss(
            logits_CU,
            weight_C,
            target.labels(self._loss, target_C),
            self._mix,
            want_grad=want_grad,
            backend=self._backend,
        )
        if self._loss == "kl":
            loss_C = torch.where(weight_C == 0, 0.0, loss_C - (1 - self._mix.tv_weight) * target.entropy_S[target_C])
        result.row_loss_L[part] = loss_C
        result.correct_L[part] = (top_C == target.top_S[target_C]) & (top_C >= 0)
        if result.grad_XH is None:
            return
        # Added, not written: filling rows, whose gradient is 0, name a row that may have one.
        result.grad_XH.index_add_(0, rows_C, torch.mm(logits_CU, self._head_UH).to(result.grad_XH.dtype))
        if self._head_grad_UH is not None:
            _add_product(self._head_grad_UH, logits_CU, hidden_CH)


@dataclass(frozen=True, slots=True)
class _Target:
    """Of the targets of a slab, in draft ids; -1 stands for ids outside the draft vocabulary."""

    top_S: Tensor
    label_S: Tensor
    logits_SU: Tensor
    lse_S: Tensor
    entropy_S: Tensor

    def labels(self, loss: str, target_C: Tensor) -> Labels:
        """What rows should predict that have the targets `target_C`."""
        if loss == "hard-ce":
            return HardLabels(self.label_S[target_C])
        return SoftLabels(self.logits_SU, self.lse_S, target_C)


def _add_product(total_UH: Tensor, grad_CU: Tensor, hidden_CH: Tensor) -> None:
    """total += grad^T hidden, summed in the total's precision where the device multiplies into it."""
    if total_UH.dtype == hidden_CH.dtype:
        total_UH.addmm_(grad_CU.T, hidden_CH)
    elif total_UH.is_cuda and total_UH.dtype == torch.float32:
        torch.addmm(total_UH, grad_CU.T, hidden_CH, out_dtype=torch.float32, out=total_UH)
    else:
        total_UH += grad_CU.T @ hidden_CH


def _draft_index(draft_ids_U: Tensor, vocab_size: int) -> Tensor:
    """Target id -> draft id [V], -1 for target ids outside the draft vocabulary."""
    to_draft_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_ids_U.device)
    to_draft_V[draft_ids_U] = torch.arange(len(draft_ids_U), device=draft_ids_U.device)
    return to_draft_V
