"""Chunked loss and gradients against a plain full-size computation in float64, and the per-depth statistics."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from peagle.training.loss import (
    cross_entropy,
    depth_statistics,
    hard_targets,
    row_weights,
    soft_targets,
)

R, T, H, V = 23, 11, 6, 17
VOCABULARIES = [None, torch.tensor([2, 3, 5, 7, 11, 13])]


def problem(draft_ids, seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, head = rand(R, H), rand(V if draft_ids is None else len(draft_ids), H)
    index = torch.randint(0, T, (R,), generator=g)
    weight = torch.rand(R, generator=g, dtype=torch.float64) * (torch.rand(R, generator=g) < 0.7)
    labels = torch.randint(0, V, (T,), generator=g)
    return hidden.requires_grad_(), head.requires_grad_(), rand(T, H), rand(V, H), index, weight, labels


def make_targets(kind, target_hidden, target_head, draft_ids, labels, chunk=4):
    if kind == "soft":
        return soft_targets(target_hidden, target_head, draft_ids, chunk=chunk)
    return hard_targets(target_hidden, target_head, draft_ids, labels, chunk=chunk)


def naive(kind, hidden, head, target_hidden, target_head, draft_ids, index, weight, labels, denominator):
    """Textbook loss, rows x vocabulary at once."""
    target_logits = target_hidden @ target_head.T
    log_q = F.log_softmax(hidden @ head.T, -1)
    ids = torch.arange(V) if draft_ids is None else draft_ids
    one_hot = (labels[:, None] == ids[None]).double()
    target = target_logits[:, ids].softmax(-1) if kind == "soft" else one_hot
    row_loss = -(target[index] * log_q).sum(-1)
    correct = ids[log_q.argmax(-1)] == target_logits.argmax(-1)[index]
    return (row_loss * weight).sum() / denominator, row_loss, correct


@pytest.mark.parametrize("draft_ids", VOCABULARIES, ids=["full", "restricted"])
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("chunk", [1, 8, 23, 64])
def test_equals_the_naive_computation(kind, draft_ids, chunk):
    hidden, head, target_hidden, target_head, index, weight, labels = problem(draft_ids)
    expected, row_loss, correct = naive(
        kind, hidden, head, target_hidden, target_head, draft_ids, index, weight, labels, 7.0
    )
    expected_grads = torch.autograd.grad(3 * expected, (hidden, head))
    targets = make_targets(kind, target_hidden, target_head, draft_ids, labels)
    result = cross_entropy(hidden, head, targets, index, weight, 7.0, chunk=chunk)
    grads = torch.autograd.grad(3 * result.loss, (hidden, head))
    live = weight > 0
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.row_loss_R[live], row_loss[live].detach(), rtol=1e-12, atol=1e-12)
    assert (result.correct_R == (correct & live)).all()
    for actual, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_rows_of_weight_zero_may_hold_anything(kind):
    hidden, head, target_hidden, target_head, index, weight, labels = problem(None)
    clean = cross_entropy(
        hidden, head, make_targets(kind, target_hidden, target_head, None, labels), index, weight, 7.0, chunk=8
    )
    clean_grads = torch.autograd.grad(clean.loss, (hidden, head))
    dead = weight == 0
    poisoned = hidden.detach().clone()
    poisoned[dead] = float("nan")
    poisoned.requires_grad_()
    bad_target = torch.cat((target_hidden, torch.full((1, H), float("nan"), dtype=torch.float64)))
    targets = make_targets(kind, bad_target, target_head, None, torch.cat((labels, torch.zeros(1, dtype=torch.int64))))
    result = cross_entropy(poisoned, head, targets, torch.where(dead, T, index), weight, 7.0, chunk=8)
    grads = torch.autograd.grad(result.loss, (poisoned, head))
    torch.testing.assert_close(result.loss, clean.loss, rtol=1e-12, atol=0)
    for actual, wanted in zip(grads, clean_grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)
    assert (grads[0][dead] == 0).all()
    assert not result.correct_R[dead].any()
    assert (result.row_loss_R[dead] == 0).all()


def test_chunks_and_denominator_are_one_loss():
    """Two halves under the global denominator add up to the whole, in loss and gradients."""
    hidden, head, target_hidden, target_head, index, weight, _ = problem(None)
    targets = soft_targets(target_hidden, target_head, None)
    total = weight.sum()
    whole = cross_entropy(hidden, head, targets, index, weight, total, chunk=4).loss
    halves = [
        cross_entropy(hidden[part], head, targets, index[part], weight[part], total, chunk=4).loss
        for part in (slice(0, 9), slice(9, None))
    ]
    torch.testing.assert_close(sum(halves), whole)
    for actual, wanted in zip(
        torch.autograd.grad(sum(halves), (hidden, head)), torch.autograd.grad(whole, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


def test_a_frozen_head_and_evaluation_cost_no_gradient():
    hidden, head, target_hidden, target_head, index, weight, _ = problem(None)
    targets = soft_targets(target_hidden, target_head, None)
    result = cross_entropy(hidden, head.detach(), targets, index, weight, 7.0)
    (grad,) = torch.autograd.grad(result.loss, (hidden,))
    both = torch.autograd.grad(cross_entropy(hidden, head, targets, index, weight, 7.0).loss, (hidden, head))
    assert (grad == both[0]).all()
    with torch.no_grad():
        quiet = cross_entropy(hidden, head, targets, index, weight, 7.0)
    assert not quiet.loss.requires_grad
    assert quiet.loss == result.loss


def test_half_precision_accumulates_in_float32():
    hidden, head, target_hidden, target_head, index, weight, _ = problem(None)
    exact = cross_entropy(hidden, head, soft_targets(target_hidden, target_head, None), index, weight, 7.0)
    grads = torch.autograd.grad(exact.loss, (hidden, head))
    hidden16, head16 = (x.detach().bfloat16().requires_grad_() for x in (hidden, head))
    targets = soft_targets(target_hidden.bfloat16(), target_head.bfloat16(), None)
    assert targets.probs_TU.dtype == torch.bfloat16
    result = cross_entropy(hidden16, head16, targets, index, weight.float(), 7.0, chunk=2)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), exact.loss, rtol=2e-2, atol=0)
    for actual, wanted in zip(torch.autograd.grad(result.loss, (hidden16, head16)), grads, strict=True):
        assert actual.dtype == torch.bfloat16
        assert (actual.double() - wanted).norm() < 0.03 * wanted.norm()


def test_targets_outside_the_draft_vocabulary_never_count_as_matched():
    head = torch.eye(4, dtype=torch.float64)
    targets = soft_targets(head[:2] * 9, head, torch.tensor([1, 2]))
    assert targets.top_T.tolist() == [-1, 0]
    torch.testing.assert_close(targets.probs_TU.sum(-1), torch.ones(2, dtype=torch.float64))
    hard = hard_targets(head[:2] * 9, head, torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert (hard.top_T.tolist(), hard.labels_T.tolist()) == ([-1, 0], [1, -1])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_chunks_equal_plain_ones():
    hidden, head, target_hidden, target_head, index, weight, _ = problem(None)
    hidden, head = (x.detach().float().requires_grad_() for x in (hidden, head))
    targets = soft_targets(target_hidden.float(), target_head.float(), None)
    plain, fused = (
        cross_entropy(hidden, head, targets, index, weight.float(), 7.0, chunk=8, compiled=flag)
        for flag in (False, True)
    )
    torch.testing.assert_close(fused.loss, plain.loss)
    for a, b in zip(*(torch.autograd.grad(r.loss, (hidden, head)) for r in (plain, fused)), strict=True):
        torch.testing.assert_close(a, b)


def test_row_weights():
    depth, supervised = torch.tensor([0, 1, 2, 2]), torch.tensor([True, True, True, False])
    torch.testing.assert_close(row_weights(depth, supervised, 0.8), torch.tensor([1.0, 0.8, 0.64, 0.0]))
    assert row_weights(depth, supervised, 1.0).tolist() == [1, 1, 1, 0]


def test_depth_statistics_count_whole_chains():
    # anchor: depth 0, 1, 2 right?          (missing = row not drawn)
    outcomes = {0: [1, 1, 0], 1: [1, 0, 1], 2: [0, 1, 1], 3: [1, 1, 1], 4: [1, 1], 5: [1], 6: [0]}
    triples = [(a, d, bool(ok)) for a, oks in outcomes.items() for d, ok in enumerate(oks)]
    triples.sort(key=lambda t: t[1])
    anchor, depth, correct = (torch.tensor(column) for column in zip(*triples, strict=True))
    # one padding row and one unsupervised row that happens to be "right"
    anchor = torch.cat((anchor, torch.tensor([-1, 7])))
    depth = torch.cat((depth, torch.tensor([0, 0])))
    correct = torch.cat((correct, torch.tensor([True, True])))
    valid = torch.ones(len(anchor), dtype=torch.bool)
    valid[-2:] = False
    statistics = depth_statistics(anchor, depth, correct, valid, 4)
    report = statistics.report()
    assert report.counts == [7, 5, 4, 0]
    assert report.accuracy == [5 / 7, 4 / 5, 3 / 4, 0]
    assert report.prefix_accuracy == [5 / 7, 3 / 5, 1 / 4, 0]
    assert math.isclose(report.acceptance_length, 1 + 5 / 7 + 3 / 5 + 1 / 4)
    assert (statistics + statistics).report().counts == [14, 10, 8, 0]
    assert (statistics + statistics).report().prefix_accuracy == report.prefix_accuracy
