"""The held-out evaluation charges every row of every chain, however few rows training draws."""

from types import SimpleNamespace

import pytest
import torch

from peagle.training.batches import Batch
from peagle.training.evaluate import evaluate
from peagle.training.features import RowIndex
from peagle.training.objective import Outcome
from peagle.training.plan import PlanRule
from peagle.training.statistics import depth_statistics
from tests.training.tiny_drafter import document, layout

K = 4


class AlwaysRight:
    """Stands where the objective stands: every draft is right, every row's loss is 2."""

    features = SimpleNamespace(index=lambda _packed, _document_D: RowIndex(torch.empty(0), torch.empty(0), None))

    def __call__(self, batch: Batch, *, train: bool) -> Outcome:
        assert not train
        rows = batch.rows
        statistics = depth_statistics(rows.anchor_R, rows.depth_R, rows.supervised_R, rows.supervised_R, K)
        return Outcome(torch.tensor(2.0 * batch.plan.weight), statistics, rows.supervised_R)


def test_nothing_is_dropped():
    rule = PlanRule(partition="flat", segments=1, depth_weight="gamma", gamma=0.5, num_depths=K, loss_chunk=64)
    held_out = [document(12, slice(5, 12), seed=seed) for seed in range(2)]  # 10 positions, the last 6 supervised
    shape = layout(30, K, keep_ratio=0.3)
    result = evaluate(AlwaysRight(), held_out, 0, shape, rule, torch.device("cpu"))
    assert result.depths.counts == [12, 10, 8, 6]
    assert (result.documents, result.positions) == (2, 20)
    assert result.loss == pytest.approx(2)
    assert result.acceptance_length == 7 / 2  # of each document: 4 drafts and the bonus token, then 1 and the bonus
