"""Per-depth statistics of agreement."""

import math

import torch

from peagle.training.statistics import depth_statistics


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
