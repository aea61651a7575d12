"""Packing and COD sampling."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import PeagleError
from peagle.training.rows import RowLayout, build_rows, draw_rows, mask_rows_capacity, pack_documents, sample_rows
from tests.training.tiny_drafter import Document, document, layout, pack_one


def draw(supervised, doc, num_depths, keep_ratio, seed=0, min_keep=0.0):
    return sample_rows(
        np.asarray(supervised, np.bool_),
        np.asarray(doc, np.int64),
        num_depths=num_depths,
        keep_ratio=keep_ratio,
        min_keep=min_keep,
        rng=np.random.default_rng(seed),
    )


@st.composite
def packs(draw_from):
    """(supervised, doc) of random documents, with padding at the end."""
    lengths = draw_from(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    padding = draw_from(st.integers(0, 5))
    doc = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), np.full(padding, -1)])
    supervised = draw_from(st.lists(st.booleans(), min_size=len(doc), max_size=len(doc)))
    return np.array(supervised), doc


def test_no_dropping_gives_every_pair():
    anchor, depth = draw([True] * 4, [0] * 4, num_depths=3, keep_ratio=1.0)
    assert list(zip(anchor, depth)) == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]


@settings(max_examples=150, deadline=None)
@given(
    pack=packs(),
    num_depths=st.integers(1, 8),
    ratio=st.floats(0.05, 1.0),
    floor=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_rows_are_nested_chains_inside_supervised_spans(pack, num_depths, ratio, floor, seed):
    supervised, doc = pack
    anchor, depth = draw(supervised, doc, num_depths, ratio, seed, floor)
    kept = set(zip(anchor.tolist(), depth.tolist()))
    assert len(kept) == len(anchor)
    for a, d in kept:
        assert 1 <= d < num_depths
        assert doc[a] >= 0
        assert (doc[a : a + d + 1] == doc[a]).all()
        assert supervised[a : a + d + 1].all()
        assert d == 1 or (a, d - 1) in kept
    total = int((supervised & (doc >= 0)).sum())
    for d in range(1, num_depths):
        assert (depth == d).sum() <= math.floor(max(0, total - d) * max(ratio**d, floor))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 200), num_depths=st.integers(1, 8), ratio=st.floats(0.3, 0.95), seed=st.integers(0, 99))
def test_counts_follow_the_formula_when_the_pool_allows(n, num_depths, ratio, seed):
    anchor, depth = draw([True] * n, [0] * n, num_depths, ratio, seed)
    pool = n - 1
    for d in range(1, num_depths):
        wanted = math.floor(max(0, n - d) * ratio**d)
        count = int((depth == d).sum())
        assert count == min(wanted, pool)
        # the next pool: the kept positions that have a successor
        pool = int((anchor[depth == d] + d + 1 < n).sum())


@settings(max_examples=50, deadline=None)
@given(pack=packs(), num_depths=st.integers(1, 8))
def test_ratio_one_keeps_all(pack, num_depths):
    supervised, doc = pack
    anchor, depth = draw(supervised, doc, num_depths, 1.0)
    expected = {
        (a, d)
        for d in range(1, num_depths)
        for a in range(len(doc) - d)
        if doc[a] >= 0 and doc[a] == doc[a + d] and supervised[a : a + d + 1].all()
    }  # fmt: skip
    assert set(zip(anchor.tolist(), depth.tolist())) == expected
    assert (np.diff(depth) >= 0).all(), "depth-major"


def test_same_generator_state_same_rows():
    first = draw([True] * 300, [0] * 300, 8, 0.8, seed=5)
    again = draw([True] * 300, [0] * 300, 8, 0.8, seed=5)
    other = draw([True] * 300, [0] * 300, 8, 0.8, seed=6)
    assert all((a == b).all() for a, b in zip(first, again))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other))


def test_sampling_is_fast_enough_to_hide():
    doc = np.repeat(np.arange(64), 256)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        draw(np.ones(len(doc)), doc, 8, 0.8)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02, "16,384 positions take about 2 ms on an idle core"


def test_packing_aligns_tokens_features_and_labels():
    first, second = document(6, seed=1), document(5, slice(3, 5), seed=2)
    packed = pack_one([first, second], layout(10, 3))
    stream = packed.stream_ids_S
    row = 0
    for number, doc in enumerate((first, second)):
        for i in range(len(doc.input_ids) - 2):
            assert packed.doc_P[row] == number
            assert packed.positions_P[row] == i
            assert packed.input_ids_P[row] == doc.input_ids[i + 1]
            assert packed.labels_P[row] == doc.input_ids[i + 2]
            assert packed.supervised_P[row] == doc.loss_mask[i + 1]
            tap, target = packed.tap_index_P[row], packed.target_index_P[row]
            assert (stream[tap], packed.stream_positions_S[tap]) == (doc.input_ids[i], i)
            assert (stream[target], packed.stream_positions_S[target]) == (doc.input_ids[i + 1], i + 1)
            assert packed.stream_doc_S[tap] == packed.stream_doc_S[target] == number
            row += 1
    assert (packed.doc_P[row:] == -1).all()
    assert not packed.supervised_P[row:].any()
    assert len(packed.doc_P) == 10
    assert (packed.stream_doc_S[packed.tap_index_P[row:]] == -1).all()
    assert (packed.stream_doc_S[packed.target_index_P[row:]] == -1).all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=30),
    positions=st.integers(1, 24),
    mask_rows=st.integers(8, 60),
    num_depths=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_every_pack_has_the_static_shape(lengths, positions, mask_rows, num_depths, seed):
    rng = np.random.default_rng(seed)
    documents = [Document(np.arange(n, dtype=np.int32), rng.random(n) < 0.7) for n in lengths]
    shape = layout(positions, num_depths, 0.9, mask_rows)
    used = []
    for packed in pack_documents(documents, shape):
        used += packed.source_D.tolist()
        rows = draw_rows(packed, shape, rng)
        assert len(packed.doc_P) == positions
        assert len(packed.stream_ids_S) == shape.stream_tokens
        assert len(rows.anchor_R) == positions + mask_rows
        assert (rows.doc_R.numpy()[:positions] == packed.doc_P).all()
        assert packed.supervised_P.any()
    # Everything that can teach is used, once and in order; what a pack cannot hold is cut, not lost.
    useful = [i for i, doc in enumerate(documents) if doc.loss_mask[1:-1][:positions].any()]
    assert used == useful


def test_many_short_documents_fit_the_stream():
    shape = layout(256, 2)
    packs_made = list(pack_documents([document(3)] * 256, shape))
    assert len(packs_made) == 2, "the stream of 384 tokens serves 192 documents of 1 position and 2 tokens"
    assert all(len(p.stream_ids_S) == 384 for p in packs_made)


def test_long_documents_are_cut():
    (packed,) = pack_documents([document(100)], layout(20, 3))
    assert (packed.doc_P == 0).all()
    (packed,) = pack_documents([document(100)], layout(50, 3, 1.0, mask_rows=20))
    assert packed.supervised_P.sum() == 10, "each supervised position may need 2 mask rows"
    draw_rows(packed, layout(50, 3, 1.0, mask_rows=20), np.random.default_rng(0))


def test_mask_rows_come_chain_by_chain_and_padded():
    packed = pack_one([document(6)], layout(6, 3))
    rows = build_rows(packed, np.array([0, 1, 0]), np.array([1, 1, 2]), layout(6, 3, mask_rows=5))
    assert rows.anchor_R.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1, -1, -1]
    assert rows.depth_R.tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 1, 0, 0]
    assert rows.doc_R.tolist() == [0, 0, 0, 0, -1, -1, 0, 0, 0, -1, -1]
    assert rows.position_R.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 2, 0, 0]
    assert rows.target_R.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 2, 0, 0]
    assert rows.supervised_R.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 6, 7, 8]
    with pytest.raises(PeagleError, match="capacity 2"):
        build_rows(packed, np.array([0, 1, 0]), np.array([1, 1, 2]), layout(6, 3, mask_rows=2))


def test_chunks_hold_whole_chains():
    packed = pack_one([document(7)], layout(7, 4))
    anchor, depth = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 2, 3, 1, 1, 2])
    rows = build_rows(packed, anchor, depth, layout(7, 4, mask_rows=8, chunk_rows=4))
    assert layout(7, 4, mask_rows=8, chunk_rows=4).chunks == 4, "each of them may be short of a chain of 3 by 2 rows"
    assert rows.anchor_R.tolist()[7:] == [0, 0, 0, 1] + [2, 2, -1, -1] + [-1] * 8
    assert rows.depth_R.tolist()[7:] == [1, 2, 3, 1] + [1, 2, 0, 0] + [0] * 8
    with pytest.raises(PeagleError, match="a whole chain, at least 3 rows"):
        layout(7, 4, chunk_rows=2)


def test_capacity_helper():
    assert mask_rows_capacity(8192, 1.0, 8, 0.8, 0.0) == 25984, "8192 x 3.16 = 25,895, rounded up to 128"
    assert mask_rows_capacity(8192, 1.0, 1, 0.8, 0.0) == 0
    assert mask_rows_capacity(256, 0.01, 200, 0.8, 0.0) == 256, "a whole chain of 199"
    assert mask_rows_capacity(8192, 1.0, 8, 0.7, 0.2) > mask_rows_capacity(8192, 1.0, 8, 0.7, 0.0)


@pytest.mark.parametrize(
    "values",
    [
        {"positions": 0},
        {"mask_rows": -1},
        {"mask_rows": 0},
        {"num_depths": 0},
        {"keep_ratio": 0.0},
        {"keep_ratio": 1.5},
        {"min_keep": -0.1},
    ],
)
def test_impossible_layouts_are_refused(values):
    with pytest.raises(PeagleError):
        RowLayout(**{"positions": 8, "mask_rows": 8, "num_depths": 4, **values})
