"""The fused draft layout against the worked example of vLLM's kernels and against a scalar loop."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.draft_layout import PADDING_SLOT_ID, DraftLayout, LayoutSizes, draft_layout_ref

MASK = 99


def lay_out(ids, positions, next_tokens, starts, ends, tables, *, k: int, block: int, limit: int) -> DraftLayout:
    as_tensor = [torch.as_tensor(x) for x in (ids, positions, next_tokens, starts, ends)]
    return draft_layout_ref(
        *as_tensor, torch.as_tensor(tables), LayoutSizes(MASK, k, len(ids) + len(next_tokens) * (k - 1), block, limit)
    )


def test_worked_example_with_two_requests():
    """K = 3, block size 4. A keeps one draft of three, B keeps all three."""
    b_a, d1, d2, d3, n_a = 1, 11, 12, 13, 50
    b_b, e1, e2, e3, n_b = 2, 21, 22, 23, 60
    layout = lay_out(
        [b_a, d1, d2, d3, b_b, e1, e2, e3],
        [10, 11, 12, 13, 5, 6, 7, 8],
        [n_a, n_b],
        [0, 4, 8],
        [1, 7],
        [[7, 2, 9, 4, 5], [1, 3, 6, 8, 0]],
        k=3, block=4, limit=100,
    )  # fmt: skip
    assert layout.input_ids.tolist() == [d1, n_a, MASK, MASK, 0, 0, e1, e2, e3, n_b, MASK, MASK]
    assert layout.positions.tolist() == [10, 11, 12, 13, 0, 0, 5, 6, 7, 8, 9, 10]
    assert layout.last_keys.tolist() == [10, 11, 12, 13, 13, 13, 5, 6, 7, 8, 9, 10]
    assert layout.slots.tolist() == [38, 39, 16, 17, -1, -1, 13, 14, 15, 24, 25, 26]
    assert layout.is_masked.tolist() == [False, False, True, True] + [False] * 6 + [True, True]
    assert layout.is_rejected.tolist() == [False] * 4 + [True] * 2 + [False] * 6
    assert layout.sample_rows.tolist() == [1, 2, 3, 9, 10, 11]
    assert layout.source_rows.tolist() == [0, 1, -1, -1, -1, -1, 4, 5, 6, 7, -1, -1]
    assert layout.next_ids.tolist() == [d1, n_a, 0, 0, e1, e2, e3, n_b]


def scalar_layout(ids, first, next_tokens, starts, ends, tables, *, k: int, block: int, limit: int) -> list[tuple]:
    """(id, position, slot, masked, rejected) of every drafter row, one request and one row at a time."""
    rows = []
    for r, next_token in enumerate(next_tokens):
        copied = ends[r] - starts[r]
        rejected = starts[r + 1] - ends[r] - 1
        for j in range(copied + k + rejected):
            dead = j >= copied + k
            position = 0 if dead else first[r] + j
            slot = PADDING_SLOT_ID
            if not dead and position < limit:
                slot = tables[r][position // block] * block + position % block
            filler = next_token if j == copied else 0 if dead else MASK
            token = ids[starts[r] + 1 + j] if j < copied else filler
            rows.append((token, position, slot, copied < j < copied + k, dead))
    return rows


def columns(*tensors: Tensor) -> list[tuple]:
    return list(zip(*(t.tolist() for t in tensors), strict=True))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 7), st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=5), st.data()
)
def test_equals_a_scalar_loop(k: int, requests: list[tuple[int, int]], data: st.DataObject):
    """Random prefill chunks and decode rows, any number of rejected rows, positions up to and past the length limit."""
    block, limit = 4, 48
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    lengths = [n for n, _ in requests]
    first = [p for _, p in requests]
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    ends = [starts[r] + data.draw(st.integers(0, n - 1)) for r, n in enumerate(lengths)]
    ids = rng.integers(0, 90, starts[-1]).tolist()
    next_tokens = rng.integers(0, 90, len(requests)).tolist()
    tables = rng.integers(0, 1000, (len(requests), limit // block)).tolist()
    positions = [p + j for n, p in requests for j in range(n)]
    layout = lay_out(ids, positions, next_tokens, starts, ends, tables, k=k, block=block, limit=limit)
    rows = columns(layout.input_ids, layout.positions, layout.slots, layout.is_masked, layout.is_rejected)
    assert rows == scalar_layout(ids, first, next_tokens, starts, ends, tables, k=k, block=block, limit=limit)
    expected_samples = [ends[r] + r * (k - 1) + j for r in range(len(requests)) for j in range(k)]
    assert layout.sample_rows.tolist() == expected_samples
    token_of = {s: t for s, t in columns(layout.source_rows, layout.input_ids) if s >= 0}
    assert layout.next_ids.tolist() == [token_of.get(t, 0) for t in range(len(ids))]
