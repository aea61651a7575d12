"""The benchmark of how decoding attention is launched: what it tries, and what of it is kept."""

import pytest

from benchmarks.decode_attention import Case, Variant, _row, fastest, variants

CASE = Case("qwen3-8b", 64, 4, 400)  # 16 pairs of a row and a query head for each of 8 key heads


def test_what_is_tried():
    tried = list(variants(CASE))
    assert len(set(tried)) == len(tried) > 20
    assert {one.tile for one in tried} == {16}  # a higher one would be half empty
    assert {one.splits for one in tried} == {1, 2}  # 512 tiles: four programs each would be two waves of them
    assert {one.tile for one in variants(CASE._replace(rows=8))} == {16, 32}
    assert {one.splits for one in variants(CASE._replace(requests=8))} == {1, 4, 8}  # of fewer the GPU is not full
    assert {one.tile for one in tried if one.own} == {16}


def test_what_is_kept():
    rows = [_row(CASE, Variant(64, 4, stages, None, 16, 1), 20.0 - stages) for stages in range(1, 11)]
    rows += [_row(CASE, None, 18.5), _row(CASE._replace(rows=8), None, 30.0)]
    kept = fastest(rows, CASE)
    assert [row.microseconds for row in kept] == [18.5, *range(10, 18)]
    assert [row.taken for row in kept] == [True] + [False] * 8
    assert kept[0].stages is None
    assert kept[1].floor_us == pytest.approx(64 * 400 * 8 * 128 * 4 / 4800e3, abs=0.01)
