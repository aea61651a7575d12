"""Paged attention against a loop over requests and rows, with everything that must not be read set to NaN."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.accept import accept_ref
from peagle.kernels.kv_write import kv_write_ref
from peagle.kernels.linear import can_pack, pack_weight, packed_linear
from peagle.kernels.paged_attention import paged_attention, paged_attention_ref, plan_rectangles
from peagle.kernels.paged_decode import CacheView

BLOCK = 4


def reference(
    q_RND: Tensor,
    keys_SMD: list[Tensor],
    values_SMD: list[Tensor],
    rows: list[list[int]],
    window: int | None = None,
) -> Tensor:
    out, r = torch.zeros_like(q_RND), 0
    for k_SMD, v_SMD, limits in zip(keys_SMD, values_SMD, rows, strict=True):
        for limit in limits:
            seen = slice(0 if window is None else max(0, limit + 1 - window), limit + 1)
            for head in range(q_RND.shape[1]):
                kv = head // (q_RND.shape[1] // k_SMD.shape[1])
                weights_S = (k_SMD[seen, kv] @ q_RND[r, head] * q_RND.shape[-1] ** -0.5).softmax(0)
                out[r, head] = weights_S @ v_SMD[seen, kv]
            r += 1
    return out


@pytest.mark.parametrize("window", [None, 1, 6, 16])
@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("shapes", [[(1, 1)], [(4, 9), (4, 30), (1, 2), (17, 17)], [(1, 5)] * 5 + [(8, 64)]])
def test_equals_the_loop_and_reads_nothing_else(
    heads: int, kv_heads: int, shapes: list[tuple[int, int]], window: int | None
):
    torch.manual_seed(0)
    dim, blocks = 8, 64
    generator = np.random.default_rng(0)
    free = generator.permutation(blocks).tolist()
    keys = torch.full((kv_heads, blocks * BLOCK + 1, dim), torch.nan, dtype=torch.float64)
    values = keys.clone()
    tables = np.zeros((len(shapes), 16), dtype=np.int64)
    contexts = []
    for i, (_, length) in enumerate(shapes):
        needed = -(-length // BLOCK)
        tables[i, :needed] = [free.pop() for _ in range(needed)]
        k, v = torch.randn(2, length, kv_heads, dim, dtype=torch.float64)
        slots = torch.tensor([tables[i, p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
        kv_write_ref(keys, slots, k)
        kv_write_ref(values, slots, v)
        contexts.append((k, v))
    rows = [list(range(length - q, length)) for q, length in shapes]
    q_RND = torch.randn(sum(q for q, _ in shapes), heads, dim, dtype=torch.float64)
    lens = [np.array(column) for column in zip(*shapes, strict=True)]
    # The plan's key lengths are an upper bound: rows past it may exist in the block table and hold NaN.
    key_lens, cpu = np.minimum(lens[1] + 3, 64), torch.device("cpu")
    plan = plan_rectangles(lens[0], key_lens, tables, BLOCK, heads_per_kv=heads // kv_heads, device=cpu)
    limit = torch.tensor([r for request in rows for r in request])
    out = paged_attention_ref(q_RND, CacheView(keys, values, limit, window), plan)
    expected = reference(q_RND, [k for k, _ in contexts], [v for _, v in contexts], rows, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_long_prompts_are_cut_and_rectangles_stay_small():
    """Scores of one rectangle: 256 rows by the keys there are, or fewer; the cut changes no result."""
    torch.manual_seed(0)
    length, dim, blocks = 700, 8, 175
    k, v = torch.randn(2, 1, blocks * BLOCK + 1, dim, dtype=torch.float64)
    q_RND, limit = torch.randn(length, 1, dim, dtype=torch.float64), torch.arange(length)
    tables = np.arange(blocks)[None]
    plan = plan_rectangles(
        np.array([length]), np.array([length]), tables, BLOCK, heads_per_kv=1, device=torch.device("cpu"),
        max_scores=256 * length,
    )  # fmt: skip
    assert [tuple(r.rows_bQ.shape) for r in plan.rectangles] == [(1, 188), (1, 256), (1, 256)]
    out = paged_attention(q_RND, CacheView(k, v, limit), plan)
    scores = (q_RND[:, 0] @ k[0, :length].T * dim**-0.5).masked_fill(limit[:, None] < limit[None], -torch.inf)
    torch.testing.assert_close(out[:, 0], scores.softmax(-1) @ v[0, :length], rtol=0, atol=1e-12)


def test_padding_slots_are_never_written_to_a_block():
    cache = torch.zeros(2, 9, 3)
    kv_write_ref(cache, torch.tensor([4, -1, 7]), torch.ones(3, 2, 3))
    assert cache[:, [4, 7]].eq(1).all()
    assert cache[:, :8].sum() == 2 * 2 * 3


@pytest.mark.parametrize(
    "tokens,drafts,accepted",
    [
        ([5, 6, 7, 8], [5, 6, 7], 3),
        ([5, 6, 7, 8], [5, 9, 7], 1),
        ([5, 6, 7, 8], [9, 6, 7], 0),
        ([5, 5, 5, 5], [-1] * 3, 0),
    ],
)
def test_accept_counts_the_matching_prefix(tokens: list[int], drafts: list[int], accepted: int):
    assert accept_ref(torch.tensor([tokens]), torch.tensor([drafts])).tolist() == [accepted]


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_plain(rows: int, bias: bool):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 96), torch.randn(80, 96)
    b = torch.randn(80) if bias else None
    if not can_pack(weight):
        pytest.skip("oneDNN is not available")
    torch.testing.assert_close(packed_linear(x, pack_weight(weight), b), F.linear(x, weight, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (5, 1), (12, 4)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.usefixtures("numbers_of_threads")
def test_a_row_has_the_same_bits_whatever_shares_its_call(heads: int, kv_heads: int, has_sinks: bool):
    """Alone as among other rows, other requests and other numbers of keys, all of which change what MKL does."""
    torch.manual_seed(0)
    dim, blocks, cpu = 16, 250, torch.device("cpu")
    k, v = torch.randn(2, kv_heads, blocks * BLOCK + 1, dim)
    sinks = torch.randn(heads) if has_sinks else None

    def attend(q_RND: Tensor, rows: list[int], keys: list[int], limits: list[int]) -> Tensor:
        tables = np.arange(blocks)[None].repeat(len(rows), axis=0)
        plan = plan_rectangles(
            np.array(rows), np.array(keys), tables, BLOCK, heads_per_kv=heads // kv_heads, device=cpu
        )  # fmt: skip
        return paged_attention(q_RND, CacheView(k, v, torch.tensor(limits), sinks_N=sinks), plan)

    for limit in (2, 9, 31, 250, 300, 500):
        q_RND = torch.randn(1, heads, dim)
        alone = attend(q_RND, [1], [limit + 1], [limit])
        for rows, more, others in ((1, 5, 0), (1, 70, 0), (3, 0, 0), (5, 3, 0), (7, 0, 2), (9, 100, 0), (18, 9, 1)):
            among = attend(
                torch.cat((torch.randn(others, heads, dim), q_RND, torch.randn(rows - 1, heads, dim))),
                [1] * others + [rows], [limit + 20] * others + [limit + 1 + more],
                [limit] * (others + rows),
            )  # fmt: skip
            assert torch.equal(among[others : others + 1], alone), (limit, rows, more, others)
