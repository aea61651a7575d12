"""The trainer's forward pass computes exactly what the engine computes: every row of every chain, logit by logit.

The engine decodes a text with drafts that are right or wrong at random. Whenever it drafts at an anchor, the logits of
its K rows must be those of the training rows (anchor, 0) .. (anchor, K - 1) of the finished text.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.models.target import Target
from peagle.sampling import SamplingParams
from peagle.training.batches import Batch, make_batch
from peagle.training.features import OnlineFeatures
from peagle.training.head_loss import RowLoss
from peagle.training.partition import Charge, Passes, prefix_once, recompute_prefix, unrolled
from peagle.training.plan import PlanRule, plan_pack
from peagle.training.rows import RowLayout, draw_rows
from tests.engine.tiny import random_prompts, tiny_parts
from tests.training.tiny_drafter import Document, pack_one

K, POSITIONS = 4, 80
STRATEGIES = {
    "flat": recompute_prefix,
    "algorithm1": recompute_prefix,
    "prefix-once": prefix_once,
    "unrolled": unrolled,
}
HEADS = {
    "plain": {},
    "sliding window": {"window": 7},
    "draft vocabulary": {"draft_ids": range(3, 80, 2)},
}


def decode(target: Target, drafter: Eagle3Drafter, prompt: list[int]) -> tuple[list[int], dict[int, Tensor]]:
    """The decoded text, and the logits [K, U] of the drafts made at each anchor position of it."""
    llm = LLM.from_parts(target, drafter, K, EngineConfig(block_size=4), pack=False)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    llm.set_speculation(False)
    text = prompt + llm.generate([prompt], params)[0].token_ids
    llm.set_speculation(True)
    step, rng, seen, now = llm.core._speculative, np.random.default_rng(0), dict[int, list[Tensor]](), SimpleNamespace()
    draft = step._draft

    def pick(side, stream_UH, rows):
        """Record; then pretend that the draft was right, so that EAGLE-3's next row continues the true text."""
        seen[now.anchor] += side.drafter.logits(side.drafter.norm(stream_UH))
        at = now.anchor + 2 + len(seen[now.anchor]) - len(stream_UH)
        truth = (text + [0] * K)[at : at + len(stream_UH)]
        return torch.tensor(truth)

    def draft_and_spoil(side, rows, kept_B, next_B, taps_TC, num_drafts, mode):
        now.anchor = int(rows.first_B[0] + kept_B[0])
        seen[now.anchor] = []
        drafts_BK = draft(side, rows, kept_B, next_B, taps_TC, num_drafts, mode)
        return torch.where(torch.from_numpy(rng.random(K) < 0.7), drafts_BK, (drafts_BK + 1) % 90)

    step._pick, step._draft = pick, draft_and_spoil
    assert prompt + llm.generate([prompt], params)[0].token_ids == text
    return text, {anchor: torch.stack(logits) for anchor, logits in seen.items()}


def training_batch(text: list[int], target: Target, drafter: Eagle3Drafter, partition: str) -> tuple[Batch, Tensor]:
    """Every row of the text as one document among others, and the taps of its positions."""
    own = Document(np.array(text, np.int32), np.ones(len(text), np.bool_))
    other = Document(np.arange(10, 25, dtype=np.int32), np.ones(15, np.bool_))
    chunk_rows = 3 * (K - 1) if partition == "prefix-once" else None
    layout = RowLayout(
        positions=POSITIONS, mask_rows=POSITIONS * (K - 1), num_depths=K, keep_ratio=1.0, chunk_rows=chunk_rows
    )  # fmt: skip
    packed = pack_one([other, own], layout)
    rows = draw_rows(packed, layout, np.random.default_rng(0))
    rule = PlanRule(
        partition=partition, segments=3, depth_weight="flat", gamma=1.0, num_depths=K, loss_chunk=50
    )  # fmt: skip
    source = OnlineFeatures(target.model, drafter.config.tap_ids, "reference")
    index = source.index(packed, packed.source_D)
    batch = make_batch(packed, rows, plan_pack(rows, layout, rule), rule, index, epoch=0, index=0)
    return batch, source.gather(index)[0]


class RecordedLogits:
    """Stands where the loss stands and keeps the logits of the rows that are charged."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.drafter, self.calls = drafter, list[Tensor]()

    def __call__(self, hidden_XH: Tensor, _hidden: Tensor, _labels: Tensor, loss_rows, *, want_grad: bool) -> RowLoss:
        assert not want_grad
        self.calls.append(self.drafter.logits(hidden_XH[loss_rows.rows_L]))
        nothing = torch.zeros(len(loss_rows.rows_L))
        return RowLoss(loss_sum=torch.zeros(()), grad_XH=None, correct_L=nothing.bool(), row_loss_L=nothing)


def trained_logits(text: list[int], target: Target, drafter: Eagle3Drafter, partition: str) -> dict:
    """Logits [U] of every row, by (anchor within the text, depth)."""
    batch, taps_PC = training_batch(text, target, drafter, partition)
    recorded = RecordedLogits(drafter)
    charge = Charge(recorded, batch, taps_PC, False)
    with torch.no_grad():
        STRATEGIES[partition](Passes(drafter, "reference", torch.float64, K), batch, taps_PC, charge)
    rows, first = batch.rows, 13  # the other document's positions come before
    by_row = {}
    for chunk, logits_LU in zip(batch.plan.chunks, recorded.calls, strict=True):
        for row, logits_U in zip(chunk.charged_L.tolist(), logits_LU, strict=True):
            by_row[int(rows.anchor_R[row]) - first, int(rows.depth_R[row])] = logits_U
    return by_row


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("partition", STRATEGIES)
def test_every_row_equals_the_engines(partition: str, head: str):
    target, drafter = tiny_parts(torch.float64, 0, partition != "unrolled", **HEADS[head])
    text, served = decode(target, drafter, random_prompts(1, seed=8, longest=20)[0])
    trained = trained_logits(text, target, drafter, partition)
    compared = 0
    for anchor, logits_KU in served.items():
        for depth, logits_U in enumerate(logits_KU):
            if anchor + depth + 2 < len(text):  # further drafts have no token to learn from
                torch.testing.assert_close(trained[anchor, depth], logits_U, rtol=0, atol=1e-10)
                compared += 1
    assert len(served) > 10
    assert compared > K * 10
