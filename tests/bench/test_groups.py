"""Figures of groups of requests and rounds, against counts by hand."""

import pytest

from peagle.bench.acceptance import RequestRounds
from peagle.bench.groups import bucket_name, by_category, by_context, counts, figures, pack_requests, unpack_requests


def rounds(*pairs):
    return RequestRounds(tuple(c for c, _ in pairs), tuple(a for _, a in pairs))


REQUESTS = [rounds((100, 3), (255, 0)), rounds((256, 1), (1500, 2)), rounds()]


def test_rounds_fall_into_buckets_and_categories():
    tables = by_context(REQUESTS, 3)
    assert {name: int(table.sum()) for name, table in tables.items()} == {"0-256": 2, "256-1k": 1, "1k-4k": 1}
    assert bucket_name(65536, None) == "64k+"
    parts = by_category(REQUESTS, ["x", "y", "x"], 3)
    assert {name: table.sum(axis=1).tolist() for name, table in parts.items()} == {"x": [2, 0], "y": [2]}


def test_figures_of_a_group():
    found = figures(counts(REQUESTS, 3))
    assert (found.requests, found.rounds, found.acceptance_length.value) == (2, 4, 2.5)
    assert [share.value for share in found.share_per_position] == [0.75, 0.5, 0.25]
    assert [share.value for share in found.conditional_per_position] == [0.75, pytest.approx(2 / 3), 0.5]
    empty = figures(counts([], 3))
    assert (empty.rounds, empty.acceptance_length, empty.share_per_position) == (0, None, ())


def test_requests_are_packed_and_unpacked():
    text = pack_requests(counts(REQUESTS, 3))
    assert text == "3/2 3/2 0/0"
    assert unpack_requests(text) == ([3, 3, 0], [2, 2, 0])
    for bad in ("", "3", "1/2/3", "a/b"):
        with pytest.raises(ValueError):  # noqa: PT011  # int's own message counts too
            unpack_requests(bad)
