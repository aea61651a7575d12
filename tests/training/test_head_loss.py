"""The head's loss and its explicit gradients against autograd on the plain formula, in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peagle.errors import PeagleError
from peagle.training.batches import map_tensors
from peagle.training.head_loss import HeadLoss, LossRows, depth_weights, fixed_loss_rows, plan_loss_rows

X, P, H, V = 29, 13, 6, 19
DRAFT_IDS = torch.tensor([0, 3, 5, 7, 11, 13])
VOCABULARIES = pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "restricted"])
LOSSES = pytest.mark.parametrize("loss", ["soft-ce", "kl", "hard-ce"])


class Problem:
    """Random heads, hidden states and rows; 23 of the 29 hidden states are charged, some of them with weight 0."""

    def __init__(self, draft_ids, seed=0):
        g = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)

        def rand(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.draft_ids = draft_ids
        self.target_hidden, self.target_head = rand(P, H), rand(V, H)
        self.labels = torch.randint(0, V, (P,), generator=g)
        self.rows = rng.permutation(X)[:23]
        self.target = rng.integers(0, P - 2, 23)
        self.weight = (rng.random(23) * (rng.random(23) < 0.7)).astype(np.float32)
        # Close enough to the target that some rows are right.
        self.head = self.target_head if draft_ids is None else self.target_head[draft_ids]
        self.head = (self.head + 0.5 * rand(*self.head.shape)).requires_grad_()
        self.hidden = rand(X, H)
        self.hidden[self.rows] = self.target_hidden[self.target] + 0.5 * self.hidden[self.rows]
        self.hidden.requires_grad_()

    def plan(self, max_rows=8) -> LossRows:
        return plan_loss_rows(self.rows, self.target, self.weight, max_rows)

    def run(self, loss, tv_weight=0.0, max_rows=8, **options):
        """(result, gradient of the head)."""
        grad = torch.zeros_like(self.head, requires_grad=False)
        head_loss = HeadLoss(
            self.head, grad, self.target_head, self.draft_ids, loss=loss, tv_weight=tv_weight, backend="torch"
        )
        plan = self.plan(max_rows)
        return head_loss(self.hidden, self.target_hidden, self.labels, plan, want_grad=True, **options), grad

    def plain(self, loss, tv_weight):
        """(row losses in the order of the rows, correct), rows x vocabulary at once, differentiable."""
        ids = torch.arange(V) if self.draft_ids is None else self.draft_ids
        target_logits = self.target_hidden @ self.target_head.T
        log_q = F.log_softmax(self.hidden[self.rows] @ self.head.T, -1)
        one_hot = (self.labels[:, None] == ids).double()
        p = (one_hot if loss == "hard-ce" else target_logits[:, ids].softmax(-1))[self.target]
        row_loss = (1 - tv_weight) * -(p * log_q).sum(-1) + tv_weight * 0.5 * (p - log_q.exp()).abs().sum(-1)
        row_loss = row_loss * (p.sum(-1) > 0)
        if loss == "kl":
            row_loss = row_loss + (1 - tv_weight) * (p * p.log()).sum(-1)
        return row_loss, ids[log_q.argmax(-1)] == target_logits.argmax(-1)[self.target]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@VOCABULARIES
@LOSSES
@pytest.mark.parametrize("tv_weight", [0.0, 0.9, 1.0])
def test_equals_autograd_on_the_plain_formula(loss, draft_ids, tv_weight):
    problem = Problem(draft_ids)
    row_loss, correct = problem.plain(loss, tv_weight)
    weight = torch.from_numpy(problem.weight)
    expected = (row_loss * weight).sum()
    grads = torch.autograd.grad(expected, (problem.hidden, problem.head))
    result, grad_head = problem.run(loss, tv_weight)
    order = np.argsort(problem.target, kind="stable")
    close(result.loss_sum, expected.detach())
    close(result.row_loss_L, torch.where(weight > 0, row_loss.detach(), 0.0)[order])
    assert (result.correct_L == (correct & (weight > 0))[order]).all()
    assert 0 < result.correct_L.sum() < len(order)
    close(result.grad_XH, grads[0])
    close(grad_head, grads[1])
    assert not any(value.requires_grad for value in (result.loss_sum, result.grad_XH, result.row_loss_L))


@VOCABULARIES
@LOSSES
def test_slabs_of_any_size_give_the_same(loss, draft_ids):
    problem = Problem(draft_ids)
    whole, whole_head = problem.run(loss, 0.3, max_rows=1000)
    for max_rows in (1, 2, 5, 23):
        part, part_head = problem.run(loss, 0.3, max_rows=max_rows)
        close(part.loss_sum, whole.loss_sum)
        close(part.row_loss_L, whole.row_loss_L)
        close(part.grad_XH, whole.grad_XH)
        close(part_head, whole_head)
        assert (part.correct_L == whole.correct_L).all()


@LOSSES
def test_rows_filled_up_to_a_shape_give_the_same(loss):
    """Slabs cut within a target, and one of filling rows alone."""
    problem = Problem(DRAFT_IDS)
    (expected, expected_head), plan = problem.run(loss, 0.3), problem.plan()
    shared = plan.rank_L[[5, 11, 17]] == plan.rank_L[[6, 12, 18]]
    assert shared.any(), "a target's rows are in two slabs"
    fixed = fixed_loss_rows(plan, slabs=5, rows=6, targets=6)
    assert fixed.slabs == tuple((6 * s, 6 * s + 6, 6 * s, 6 * s + 6) for s in range(5))
    problem.plan = lambda _max_rows: fixed
    result, head = problem.run(loss, 0.3)
    close(result.loss_sum, expected.loss_sum)
    close(result.grad_XH, expected.grad_XH)
    close(head, expected_head)
    close(result.row_loss_L[:23], expected.row_loss_L)
    assert (result.correct_L[:23] == expected.correct_L).all()
    assert not result.row_loss_L[23:].any()
    assert not result.correct_L[23:].any()


def test_rows_that_do_not_fit_a_shape():
    plan = Problem(None).plan()
    most = max(len(plan.rank_L[first : first + 6].unique()) for first in range(0, 23, 6))
    assert fixed_loss_rows(plan, slabs=4, rows=6, targets=most) is not None
    assert fixed_loss_rows(plan, slabs=4, rows=6, targets=most - 1) is None
    assert fixed_loss_rows(plan, slabs=3, rows=6, targets=most) is None


@LOSSES
def test_what_is_not_charged_may_hold_anything(loss):
    clean, poisoned = Problem(DRAFT_IDS), Problem(DRAFT_IDS)
    dead = poisoned.rows[poisoned.weight == 0]
    others = np.setdiff1d(np.arange(X), poisoned.rows)
    poisoned.target[poisoned.weight == 0] = P - 1
    poisoned.target_hidden[P - 1] = torch.nan
    poisoned.hidden.data[others] = torch.nan
    poisoned.hidden.data[dead] = torch.inf
    (expected, expected_head), (result, head) = clean.run(loss, 0.3), poisoned.run(loss, 0.3)
    close(result.loss_sum, expected.loss_sum)
    close(result.grad_XH, expected.grad_XH)
    close(head, expected_head)
    assert (result.grad_XH[np.concatenate((dead, others))] == 0).all()
    last = result.row_loss_L[-len(dead) :], result.correct_L[-len(dead) :]
    assert not any(values.any() for values in last)


def test_the_gradient_is_added_to_the_head():
    problem = Problem(None)
    _, once = problem.run("soft-ce")
    total = once.clone()
    head_loss = HeadLoss(problem.head, total, problem.target_head, None)
    head_loss(problem.hidden, problem.target_hidden, problem.labels, problem.plan(), want_grad=True)
    close(total, 2 * once)


def test_a_frozen_head_and_evaluation():
    problem = Problem(None)
    expected, _ = problem.run("kl")
    arguments = (problem.hidden, problem.target_hidden, problem.labels, problem.plan())
    grad = torch.zeros_like(problem.head, requires_grad=False)
    frozen = HeadLoss(problem.head, None, problem.target_head, None, loss="kl")(*arguments, want_grad=True)
    quiet = HeadLoss(problem.head, grad, problem.target_head, None, loss="kl")(*arguments, want_grad=False)
    assert (frozen.grad_XH == expected.grad_XH).all()
    assert quiet.grad_XH is None
    assert not grad.any()
    assert quiet.loss_sum == frozen.loss_sum == expected.loss_sum


def test_no_rows():
    problem = Problem(None)
    empty = np.zeros(0, np.int64)
    plan = plan_loss_rows(empty, empty, empty.astype(np.float32), 8)
    assert plan.slabs == ()
    head_loss = HeadLoss(problem.head, None, problem.target_head, None)
    result = head_loss(problem.hidden, problem.target_hidden, problem.labels, plan, want_grad=True)
    assert result.loss_sum == 0
    assert not result.grad_XH.any()
    assert len(result.correct_L) == len(result.row_loss_L) == 0


def test_bfloat16_is_close_and_sums_in_float32():
    problem = Problem(DRAFT_IDS)
    exact, exact_head = problem.run("soft-ce", 0.5)
    grad = torch.zeros_like(problem.head, dtype=torch.float32, requires_grad=False)
    halves = (x.detach().bfloat16() for x in (problem.head, problem.target_head, problem.hidden, problem.target_hidden))
    head, target_head, hidden, target_hidden = halves
    head_loss = HeadLoss(head, grad, target_head, DRAFT_IDS, tv_weight=0.5)
    result = head_loss(hidden, target_hidden, problem.labels, problem.plan(), want_grad=True)
    assert (result.loss_sum.dtype, result.grad_XH.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(result.loss_sum.double(), exact.loss_sum, rtol=2e-2, atol=0)
    for actual, wanted in ((result.grad_XH, exact.grad_XH), (grad, exact_head)):
        assert (actual.double() - wanted).norm() < 0.03 * wanted.norm()


def test_targets_outside_the_draft_vocabulary_never_count_as_matched():
    identity = torch.eye(4, dtype=torch.float64)
    two = np.arange(2)
    plan = plan_loss_rows(two, two, np.ones(2, np.float32), 8)
    head_loss = HeadLoss(identity[1:3], None, identity, torch.tensor([1, 2]), loss="hard-ce")
    # The target says 0 and 1, of which the drafter knows 1; it drafts 2 (row 0) and 1 (row 1).
    result = head_loss(9 * identity[[2, 1]], 9 * identity[:2], torch.tensor([3, 2]), plan, want_grad=True)
    assert result.correct_L.tolist() == [False, True]
    assert result.row_loss_L[0] == 0  # its label, 3, is outside
    assert not result.grad_XH[0].any()
    assert result.row_loss_L[1] > 8


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 100])
def test_a_plan_charges_each_row_once_and_no_target_twice(max_rows):
    rng = np.random.default_rng(max_rows)
    rows, target = rng.permutation(90)[:60], rng.integers(5, 40, 60)
    weight = rng.random(60).astype(np.float32)
    plan = plan_loss_rows(rows, target, weight, max_rows)
    found = zip(plan.rows_L.tolist(), plan.targets_T[plan.rank_L].tolist(), plan.weight_L.tolist())
    assert sorted(found) == sorted(zip(rows.tolist(), target.tolist(), weight.tolist()))
    assert (plan.targets_T.diff() > 0).all()
    ends = [(end, end_target) for _, end, _, end_target in plan.slabs]
    assert [(first, target) for first, _, target, _ in plan.slabs] == [(0, 0), *ends[:-1]]
    assert ends[-1] == (60, len(plan.targets_T))
    for first, end, first_target, end_target in plan.slabs:
        assert plan.rank_L[first:end].unique().tolist() == list(range(first_target, end_target))
        assert end - first <= max_rows or end_target - first_target == 1
    sizes = [end - first for first, end, _, _ in plan.slabs]
    firsts = [int((plan.rank_L == slab[2]).sum()) for slab in plan.slabs[1:]]
    assert all(size + more > max_rows for size, more in zip(sizes, firsts))  # greedy: the next target did not fit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [5003, 8192])
@pytest.mark.parametrize("share", [1, 3], ids=["full", "restricted"])
@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpu(loss, share, vocab, dtype):
    """Against float64 of the same rounded numbers; nothing may wait for the device."""
    g, rng = torch.Generator().manual_seed(vocab), np.random.default_rng(vocab)
    ids = None if share == 1 else torch.arange(1, vocab, share)
    sizes = ((700, 96), (vocab if ids is None else len(ids), 96), (300, 96), (vocab, 96))
    hidden, head, target_hidden, target_head = (
        (0.5 * torch.randn(*size, generator=g)).to(dtype).double() for size in sizes
    )
    labels = torch.randint(0, vocab, (300,), generator=g)
    weight = (rng.random(600) * (rng.random(600) < 0.8)).astype(np.float32)
    plan = plan_loss_rows(rng.permutation(700)[:600], rng.integers(0, 300, 600), weight, 128)

    def run(device, precision):
        inputs = [x.to(device, precision) for x in (hidden, head, target_hidden, target_head)]
        moved = [map_tensors(value, lambda x: x.to(device)) for value in (labels, plan, ids)]
        wide = torch.promote_types(precision, torch.float32)
        grad = torch.ones(inputs[1].shape, dtype=wide, device=device)
        head_loss = HeadLoss(inputs[1], grad, inputs[3], moved[2], loss=loss, tv_weight=0.5)
        head_loss(inputs[0], inputs[2], moved[0], moved[1], want_grad=False)  # compiles
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            return head_loss(inputs[0], inputs[2], moved[0], moved[1], want_grad=True), grad - 1
        finally:
            torch.cuda.set_sync_debug_mode("default")

    (exact, exact_head), (result, head_grad) = run("cpu", torch.float64), run("cuda", dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(result.loss_sum.double().cpu(), exact.loss_sum, rtol=tolerance, atol=0)
    assert (result.correct_L.cpu() != exact.correct_L).sum() <= 6  # rounded logits may tie
    for actual, wanted in ((result.grad_XH, exact.grad_XH), (head_grad, exact_head)):
        assert (actual.double().cpu() - wanted).norm() < 3 * tolerance * wanted.norm()


def test_depth_weights():
    depth = np.array([0, 0, 0, 0, 1, 1, 2])

    def weights(kind):
        values = depth_weights(depth, kind=kind, gamma=0.5, num_depths=4)
        assert values.dtype == np.float32
        return values.tolist()

    assert weights("flat") == [1] * 7
    assert weights("gamma") == [1, 1, 1, 1, 0.5, 0.5, 0.25]
    assert weights("per-depth") == [1, 1, 1, 1, 2, 2, 4]


def test_bad_settings_are_named():
    head = torch.eye(2)
    with pytest.raises(PeagleError, match="'mse'"):
        HeadLoss(head, None, head, None, loss="mse")
    with pytest.raises(PeagleError, match=r"tv_weight is 1\.5"):
        HeadLoss(head, None, head, None, tv_weight=1.5)
    with pytest.raises(PeagleError, match="'deep'"):
        depth_weights(np.zeros(1, np.int64), kind="deep", gamma=1.0, num_depths=1)
    with pytest.raises(PeagleError, match="rows per loss chunk is 0"):
        plan_loss_rows(*[np.zeros(1, np.int64)] * 2, np.ones(1, np.float32), 0)
