"""The relation between rows, as a formula and as the ranges that the backends work on."""

import numpy as np
import pytest
import torch

from peagle.errors import PeagleError
from peagle.training.attention import RowAttention, attend_all, causal_document_attend
from peagle.training.rows import draw_rows, sample_rows
from tests.helpers import causal_attend
from tests.training.tiny_drafter import (
    dense_attend,
    document,
    forward_rows,
    layout,
    may_attend,
    pack_one,
    random_taps,
    rows_of,
    tiny_drafter,
)

# Rows d0@0 d0@1 d0@2 d0@3 d1@1 d1@2 d1@3 d2@2 d2@3 of four positions and three depths; query per line, 1 = may attend.
WORKED_TABLE = """
1 . . . . . . . .
1 1 . . . . . . .
1 1 1 . . . . . .
1 1 1 1 . . . . .
1 . . . 1 . . . .
1 1 . . . 1 . . .
1 1 1 . . . 1 . .
1 . . . 1 . . 1 .
1 1 . . . 1 . . 1
"""


def attend_rows(rows, positions, backend, windows=(None,) * 3):
    """All rows in one pass, through their ranges."""
    parts = (slice(0, positions), False), (slice(positions, None), True)
    attentions = (
        RowAttention(rows, positions, part, chains=chains, windows=windows, backend=backend) for part, chains in parts
    )
    return attend_all(positions, *attentions)


def relation(anchor, depth, doc):
    return may_attend(anchor[:, None], depth[:, None], doc[:, None], anchor[None], depth[None], doc[None])


def test_worked_table():
    doc = np.zeros(4, np.int64)
    mask_anchor, mask_depth = sample_rows(
        np.ones(4, np.bool_), doc, num_depths=3, keep_ratio=1.0, min_keep=0.0, rng=np.random.default_rng(0)
    )
    anchor = torch.cat((torch.arange(4), torch.from_numpy(mask_anchor)))
    depth = torch.cat((torch.zeros(4, dtype=torch.int64), torch.from_numpy(mask_depth)))
    assert [(int(d), int(a + d)) for a, d in zip(anchor, depth)] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3)
    ]  # fmt: skip
    expected = [[cell == "1" for cell in line.split()] for line in WORKED_TABLE.strip().splitlines()]
    assert relation(anchor, depth, torch.zeros(9, dtype=torch.int64)).tolist() == expected


def test_documents_and_padding_are_invisible_to_each_other():
    packed = pack_one([document(6, seed=1), document(5, seed=2)], layout(9, 3))
    rows = draw_rows(packed, layout(9, 3), np.random.default_rng(0))
    seen = relation(rows.anchor_R, rows.depth_R, rows.doc_R)
    same = rows.doc_R[:, None] == rows.doc_R[None]
    assert not (seen & ~same).any()
    padding = rows.doc_R < 0
    assert padding.sum() == 2 + 18 - 8, "9 - 7 positions, and the rows left of 2 x 9 after 2 x 4 - 3 + 2 x 3 - 3"
    assert not seen[padding].any()
    assert not seen[:, padding].any()


def test_dropping_rows_leaves_the_survivors_unchanged():
    drafter, shape = tiny_drafter(), layout(40, 6)
    packed = pack_one([document(25, seed=1), document(14, slice(4, 14), seed=2)], shape)
    taps = random_taps(drafter, 40)
    full = rows_of(packed, [(a, d) for d in range(1, 6) for a in range(35) if packed.doc_P[a] == packed.doc_P[a + d]])
    some = draw_rows(packed, layout(40, 6, 0.7), np.random.default_rng(3))
    outputs = {
        (a, d): hidden
        for a, d, hidden in zip(
            full.anchor_R.tolist(), full.depth_R.tolist(), forward_rows(drafter, packed, taps, full)
        )
    }
    kept = [(a, d) for a, d in zip(some.anchor_R.tolist(), some.depth_R.tolist()) if a >= 0]
    assert 40 < len(kept) < len(outputs)
    hidden = forward_rows(drafter, packed, taps, some)[some.anchor_R >= 0]
    expected = torch.stack([outputs[pair] for pair in kept])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)


def test_packed_documents_equal_separate_runs():
    drafter = tiny_drafter()
    documents = [document(9, seed=1), document(12, seed=2), document(5, seed=3)]
    together = pack_one(documents, layout(24, 4))
    taps = random_taps(drafter, 24)
    rows = draw_rows(together, layout(24, 4), np.random.default_rng(0))
    hidden = forward_rows(drafter, together, taps, rows)
    start = 0
    for number, doc in enumerate(documents):
        n = len(doc.input_ids) - 2
        alone = pack_one([doc], layout(n, 4))
        alone_rows = draw_rows(alone, layout(n, 4), np.random.default_rng(0))
        expected = forward_rows(drafter, alone, taps[start : start + n], alone_rows)[alone_rows.doc_R >= 0]
        torch.testing.assert_close(hidden[rows.doc_R == number], expected, rtol=0, atol=1e-12)
        start += n


def test_padding_rows_stay_finite():
    drafter = tiny_drafter()
    packed = pack_one([document(5)], layout(8, 3))
    rows = draw_rows(packed, layout(8, 3), np.random.default_rng(0))
    hidden = forward_rows(drafter, packed, random_taps(drafter, 8), rows)
    assert hidden.isfinite().all()
    hidden.sum().backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)


def test_mask_vectors_receive_gradients():
    drafter = tiny_drafter()
    packed = pack_one([document(8)], layout(6, 3))
    rows = draw_rows(packed, layout(6, 3), np.random.default_rng(0))
    hidden = forward_rows(drafter, packed, random_taps(drafter, 6), rows)
    torch.logsumexp(drafter.logits(hidden), -1).sum().backward()
    assert drafter.mask_hidden.grad.abs().min() > 0
    assert drafter.mask_embedding.grad.abs().min() > 0


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_target_attention_is_causal_within_documents(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(13, 4, 16), torch.randn(13, 2, 16), torch.randn(13, 2, 16)
    doc = torch.tensor([0] * 6 + [1] * 4 + [-1] * 3)
    out = causal_document_attend(doc, backend)(0, q, k, v)
    torch.testing.assert_close(out[:10], causal_attend([6, 4, 3])(0, q, k, v)[:10], rtol=1e-5, atol=1e-6)
    assert (out[10:] == 0).all()


@pytest.mark.parametrize("window", [None, 5, 9])
@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_ranges_equal_the_formula(backend, window):
    dtype = torch.float64 if backend == "reference" else torch.float32
    drafter = tiny_drafter(dtype)
    packed = pack_one([document(60, seed=1), document(30, seed=2)], layout(128, 5))
    rows = draw_rows(packed, layout(128, 5, 0.8, mask_rows=256), np.random.default_rng(0))
    taps = random_taps(drafter, 128)
    with torch.no_grad():
        expected = forward_rows(drafter, packed, taps, rows, dense_attend(rows, window))
        hidden = forward_rows(drafter, packed, taps, rows, attend_rows(rows, 128, backend, (window,) * 3))
    real = rows.doc_R >= 0
    tolerance = 1e-12 if backend == "reference" else 1e-4
    torch.testing.assert_close(hidden[real], expected[real], rtol=tolerance, atol=tolerance)


def test_layers_may_have_windows_of_their_own():
    torch.manual_seed(0)
    packed = pack_one([document(40)], layout(38, 3))
    rows = draw_rows(packed, layout(38, 3), np.random.default_rng(0))
    q, k, v = (torch.randn(len(rows.anchor_R), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    attend, real = attend_rows(rows, 38, "reference", (None, 6)), rows.doc_R >= 0
    for layer, window in enumerate((None, 6)):
        torch.testing.assert_close(attend(layer, q, k, v)[real], dense_attend(rows, window)(0, q, k, v)[real])


def test_flex_on_the_cpu_names_the_way_out():
    drafter = tiny_drafter(torch.float32)
    packed = pack_one([document(8)], layout(6, 3))
    rows = draw_rows(packed, layout(6, 3), np.random.default_rng(0))
    with pytest.raises(PeagleError, match="use 'reference'"):
        forward_rows(drafter, packed, random_taps(drafter, 6), rows, attend_rows(rows, 6, "flex"))
