"""Held-out evaluation through the training forward: every row of every chain (r = 1), nothing dropped.

The real decode loop is the other half of an evaluation; it belongs to the engine and the benchmarks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.errors import PeagleError
from peagle.training.batches import generator, make_batch, map_tensors
from peagle.training.objective import Objective
from peagle.training.plan import PlanRule, plan_pack
from peagle.training.rows import Packed, RowLayout, Rows, TokenDocument, draw_rows, pack_documents
from peagle.training.statistics import DepthReport, DepthStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`acceptance_length` comes from walking the documents round by round: from each anchor the drafts count up to the
    first that differs from the target's argmax, and the next anchor follows the bonus token. It equals greedy
    decoding's on text the target wrote greedily. `depths.acceptance_length` weighs all anchors alike instead."""

    documents: int
    positions: int
    loss: float
    depths: DepthReport
    acceptance_length: float


@torch.no_grad()
def evaluate(
    objective: Objective,
    documents: Sequence[TokenDocument],
    first_number: int,
    layout: RowLayout,
    rule: PlanRule,
    device: torch.device,
) -> Evaluation:
    """Evaluate on `documents`, at least one, numbers `first_number`... of the objective's feature source.

    Uses the training's static shapes: a pack then holds fewer documents, as each supervised position has all K rows.
    """
    every_row = replace(layout, keep_ratio=1.0, min_keep=0.0)
    statistics = DepthStatistics(torch.zeros(4, layout.num_depths, dtype=torch.int64, device=device))
    loss_sum = weight = 0.0
    rounds = emitted = seen = positions = 0
    for packed in pack_documents(documents, every_row):
        rows = draw_rows(packed, every_row, generator(0, 0))  # draws everything: the generator is not used
        plan = plan_pack(rows, every_row, rule)
        index = objective.features.index(packed, packed.source_D + first_number)
        batch = make_batch(packed, rows, plan, rule, index, epoch=0, index=0)
        outcome = objective(map_tensors(batch, lambda tensor: tensor.to(device)), train=False)
        statistics = statistics + outcome.statistics
        loss_sum += outcome.loss_sum.item()
        weight += plan.weight
        pack_rounds, pack_emitted = count_rounds(packed, accepted_drafts(rows, outcome.correct_R.cpu().numpy(), layout))
        rounds, emitted = rounds + pack_rounds, emitted + pack_emitted
        seen, positions = seen + len(packed.source_D), positions + batch.positions
    if weight == 0.0:
        raise PeagleError(
            f"no held-out document fits batch_positions {layout.positions} with a supervised position: raise it"
        )
    return Evaluation(
        documents=seen,
        positions=positions,
        loss=loss_sum / weight,
        depths=statistics.report(),
        acceptance_length=emitted / rounds,
    )


def accepted_drafts(rows: Rows, correct_R: NDArray[np.bool_], layout: RowLayout) -> NDArray[np.int64]:
    """Per packed position as an anchor, how many of its K drafts are right from the first on, [P]."""
    anchor_R, depth_R = rows.anchor_R.numpy(), rows.depth_R.numpy()
    right_PK = np.zeros((layout.positions, layout.num_depths), np.int64)
    real = anchor_R >= 0
    right_PK[anchor_R[real], depth_R[real]] = correct_R[real]
    accepted_P: NDArray[np.int64] = right_PK.cumprod(axis=1).sum(axis=1)
    return accepted_P


def count_rounds(packed: Packed, accepted_P: NDArray[np.int64]) -> tuple[int, int]:
    """Rounds and emitted tokens of decoding every supervised span of a pack from its first row to its end."""
    rounds = emitted = 0
    anchor = 0
    while anchor < len(accepted_P):
        if not packed.supervised_P[anchor]:
            anchor += 1
            continue
        accepted = int(accepted_P[anchor])
        rounds, emitted = rounds + 1, emitted + accepted + 1
        # Drafts stop at the end of a span. Where that ends the document, no position goes with the bonus token.
        reached = anchor + accepted
        inside = reached < len(accepted_P) and packed.doc_P[reached] == packed.doc_P[anchor]
        anchor = reached + 1 if inside else reached
    return rounds, emitted
