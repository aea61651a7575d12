"""Every way to run a pack leaves the loss and the gradients of one plain autograd pass over all rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peagle.drafters.p_eagle import PEagleDrafter
from peagle.training.batches import Batch, make_batch
from peagle.training.features import RowIndex
from peagle.training.head_loss import HeadLoss
from peagle.training.partition import Charge, Passes, _leaf, _Prefix, prefix_once, recompute_prefix
from peagle.training.plan import PlanRule, plan_pack
from peagle.training.rows import RowLayout, draw_rows
from tests.training.tiny_drafter import (
    TARGET_HIDDEN,
    VOCAB,
    dense_attend,
    document,
    forward_rows,
    pack_one,
    random_taps,
    tiny_drafter,
)

POSITIONS, K = 60, 5
GAMMA = 0.75  # its powers are exact in float32, the type of row weights
PACKINGS = {
    "one document": [(62, slice(None))],
    "several, with prompts": [(20, slice(6, 20)), (9, slice(2, 7)), (25, slice(10, 25))],
    "two turns and padding": [(30, slice(4, 12)), (15, slice(None))],
    "answers of one token": [(20, slice(6, 7)), (30, slice(9, 10))],
}


class Case:
    """A random pack, a random head, random target states; everything in float64."""

    def __init__(self, packing: str, seed: int = 0, window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.drafter: PEagleDrafter = tiny_drafter(window=window)
        self.window = window
        documents = [document(n, part, seed=seed + i) for i, (n, part) in enumerate(PACKINGS[packing])]
        self.layout = RowLayout(positions=POSITIONS, mask_rows=4 * POSITIONS, num_depths=K, keep_ratio=0.8)
        self.packed = pack_one(documents, self.layout)
        self.taps = random_taps(self.drafter, POSITIONS, seed)
        self.target_hidden = torch.randn(POSITIONS, TARGET_HIDDEN, generator=generator, dtype=torch.float64)
        self.target_head = torch.randn(VOCAB, TARGET_HIDDEN, generator=generator, dtype=torch.float64)
        self.seed = seed

    def batch(
        self,
        partition: str,
        *,
        segments: int = 1,
        chunk_rows: int | None = None,
        loss_chunk: int = 7,
        fixed: bool = False,
    ) -> Batch:
        layout = replace(self.layout, chunk_rows=chunk_rows)
        rows = draw_rows(self.packed, layout, np.random.default_rng(self.seed))
        rule = PlanRule(
            partition=partition,
            segments=segments,
            depth_weight="gamma",
            gamma=GAMMA,
            num_depths=K,
            loss_chunk=loss_chunk,
            fixed=fixed,
        )
        plan = plan_pack(rows, layout, rule)
        nowhere = RowIndex(torch.empty(0), torch.empty(0), None)
        return make_batch(self.packed, rows, plan, rule, nowhere, epoch=0, index=0)

    def run(self, strategy, batch: Batch, train: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients, both of the sum."""
        drafter = self.drafter
        drafter.zero_grad()
        weight = drafter.lm_head.weight
        weight.grad = torch.zeros_like(weight)
        loss = HeadLoss(weight.detach(), weight.grad if train else None, self.target_head, None)
        charge = Charge(loss, batch, self.target_hidden, train)
        with torch.set_grad_enabled(train):
            strategy(Passes(drafter, "reference", torch.float64, K), batch, self.taps, charge)
        return charge.loss_sum.item(), gradients(drafter)

    def oracle(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Autograd through a masked softmax over all pairs of rows and a plain cross-entropy."""
        rows = self.batch("flat").rows
        self.drafter.zero_grad()
        hidden = forward_rows(self.drafter, self.packed, self.taps, rows, dense_attend(rows, self.window))
        probs = (self.target_hidden @ self.target_head.T).softmax(-1)[rows.target_R]
        losses = F.cross_entropy(self.drafter.logits(hidden), probs, reduction="none")
        loss = (losses * GAMMA**rows.depth_R * rows.supervised_R).sum()
        loss.backward()
        return loss.item(), gradients(self.drafter)


def gradients(drafter):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in drafter.named_parameters()}


def assert_equal(actual, expected):
    assert abs(actual[0] - expected[0]) < 1e-10 * abs(expected[0])
    for name, gradient in expected[1].items():
        assert (actual[1][name] - gradient).abs().max() < 1e-10, name


WAYS = [
    ("flat", recompute_prefix, {}),
    *(("algorithm1", recompute_prefix, {"segments": s}) for s in (1, 2, 4, 8, 60)),
    *(("prefix-once", prefix_once, {"chunk_rows": c}) for c in (None, 4, 5, 13, 40, 500)),
]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("partition", "strategy", "settings"), WAYS)
def test_loss_and_gradients_equal_plain_autograd(packing, partition, strategy, settings):
    case = Case(packing, seed=len(packing))
    assert_equal(case.run(strategy, case.batch(partition, **settings)), case.oracle())


@pytest.mark.parametrize(("partition", "strategy", "settings"), WAYS[::3])
def test_with_sliding_windows(partition, strategy, settings):
    case = Case("several, with prompts", window=6)
    assert_equal(case.run(strategy, case.batch(partition, **settings)), case.oracle())


@pytest.mark.parametrize(("partition", "strategy", "settings"), [*WAYS[:1], WAYS[3], WAYS[6]])
def test_one_depth_has_no_mask_rows(partition, strategy, settings):
    case = Case("several, with prompts")
    case.layout = RowLayout(positions=POSITIONS, mask_rows=0, num_depths=1)
    assert_equal(case.run(strategy, case.batch(partition, **settings)), case.oracle())


@pytest.mark.parametrize(("partition", "strategy", "settings"), WAYS[::4])
def test_with_activation_checkpoints(partition, strategy, settings):
    case = Case("two turns and padding")
    expected = case.oracle()
    case.drafter.checkpoint_activations = True
    assert_equal(case.run(strategy, case.batch(partition, **settings)), expected)


def test_activation_checkpoints_leave_the_random_state_alone(monkeypatch):
    """No layer is random, and reading the state of a GPU's generator is an error while a graph is captured."""
    case = Case("one document")
    case.drafter.checkpoint_activations = True
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("random state was read"))
    case.run(recompute_prefix, case.batch("flat"))


def test_a_detached_prefix_has_the_right_loss_and_wrong_gradients(monkeypatch):
    """The mistake that no loss curve shows: nothing flows from the mask rows into the positions' keys and values."""
    case = Case("several, with prompts")
    batch = case.batch("prefix-once", chunk_rows=13)

    def forgetful(prefix):
        torch.autograd.backward([prefix.hidden_PH], [prefix.gradient_PH])

    monkeypatch.setattr(_Prefix, "backward", forgetful)
    actual, expected = case.run(prefix_once, batch), case.oracle()
    assert abs(actual[0] - expected[0]) < 1e-10 * abs(expected[0])
    with pytest.raises(AssertionError):
        assert_equal(actual, expected)
    name = "fusion.self_attn.qkv_proj.weight"
    assert (actual[1][name] - expected[1][name]).norm() > 0.05 * expected[1][name].norm()


def test_gradients_of_many_chunks_are_summed_in_float32():
    leaf = _leaf(torch.ones(1, dtype=torch.bfloat16))
    for _ in range(1000):
        leaf.to(torch.bfloat16).backward(torch.ones(1, dtype=torch.bfloat16))
    assert leaf.grad.item() == 1000, "256 in bfloat16"


@pytest.mark.parametrize(("partition", "strategy", "settings"), WAYS)
def test_every_supervised_row_is_charged_once(partition, strategy, settings):
    case = Case("several, with prompts")
    batch = case.batch(partition, **settings)
    charged = torch.cat([chunk.charged_L for chunk in batch.plan.chunks])
    assert sorted(charged.tolist()) == batch.rows.supervised_R.nonzero()[:, 0].tolist()
    weights = (GAMMA**batch.rows.depth_R * batch.rows.supervised_R).sum().item()
    assert batch.plan.weight == pytest.approx(weights, rel=1e-6)


@pytest.mark.parametrize("chunk_rows", [None, 13])
def test_evaluation_charges_the_same_and_leaves_no_gradient(chunk_rows):
    case = Case("one document")
    batch = case.batch("prefix-once", chunk_rows=chunk_rows)
    loss, grads = case.run(prefix_once, batch, train=False)
    assert abs(loss - case.oracle()[0]) < 1e-9
    assert all((gradient == 0).all() for gradient in grads.values())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("partition", "strategy"), [("flat", recompute_prefix), ("prefix-once", prefix_once)])
def test_rows_filled_up_to_one_shape_change_nothing(packing, partition, strategy):
    case = Case(packing)
    batch = case.batch(partition, loss_chunk=150, fixed=True)
    assert batch.plan.fixed
    assert len(batch.plan.chunks[0].loss_rows.rows_L) > batch.plan.charged_rows
    assert_equal(case.run(strategy, batch), case.oracle())


def test_fixed_shapes_are_those_of_the_layout():
    plans = [Case(packing).batch("flat", loss_chunk=150, fixed=True).plan for packing in PACKINGS]
    shapes = {(len(p.chunks[0].loss_rows.rows_L), p.chunks[0].loss_rows.slabs) for p in plans}
    assert len(shapes) == 1


@pytest.mark.parametrize("segments", [2, 7])
def test_segments_take_positions_by_place_and_chains_by_the_place_after_their_anchor(segments):
    batch = Case("several, with prompts").batch("algorithm1", segments=segments)
    ends = [POSITIONS * (s + 1) // segments for s in range(segments)]
    anchor_R, depth_R = batch.rows.anchor_R, batch.rows.depth_R
    for chunk, first, end in zip(batch.plan.chunks, [0, *ends], ends, strict=False):
        place_L = anchor_R[chunk.charged_L] + (depth_R[chunk.charged_L] > 0)
        assert chunk.last == end
        assert ((first <= place_L) & (place_L < end)).all()


def test_one_segment_has_the_shape_of_a_flat_pass():
    """Else a captured pass would run as many mask rows in every pack as the first one had."""
    plans = [Case(packing).batch("algorithm1", loss_chunk=150, fixed=True).plan for packing in PACKINGS]
    assert all(plan.fixed for plan in plans)
    assert {(c.first, c.last, c.start, c.stop) for plan in plans for c in plan.chunks} == {(0, 60, 0, 240)}


def test_no_shape_is_fixed_where_packs_may_have_several_chunks():
    case = Case("two turns and padding")
    plan = case.batch("prefix-once", chunk_rows=200, loss_chunk=150, fixed=True).plan
    assert len(plan.chunks) == 1
    assert not plan.fixed


def test_targets_are_counted_once():
    case = Case("one document")
    ways = [{}, {"fixed": True, "loss_chunk": 150}, {"chunk_rows": 13}]
    batches = [case.batch("prefix-once", **way) for way in ways]
    rows = batches[0].rows
    assert {batch.plan.targets for batch in batches} == {len(rows.target_R[rows.supervised_R].unique())}


def test_chunks_of_mask_rows_hold_no_more_rows_than_asked_for():
    case = Case("one document")
    batch = case.batch("prefix-once", chunk_rows=13)
    assert len(batch.plan.chunks) > 5
    assert all(chunk.stop - chunk.start == 13 for chunk in batch.plan.chunks)
    assert [chunk.first for chunk in batch.plan.chunks[1:]] == [chunk.last for chunk in batch.plan.chunks[:-1]]
