"""The Triton form of paged attention against its torch twin: on a GPU as it is, elsewhere in Triton's interpreter.

Triton decides at import whether it interprets, so the CPU tests run in a process of their own.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.kernels.backend import INVARIANT
from peagle.kernels.paged_attention import TilePlan, most_tile, paged_attention, plan_attention
from peagle.kernels.paged_decode import CacheView
from tests.kernels.interpreter import INTERPRETED, run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

RAGGED = [(4, 9), (4, 30), (1, 2), (17, 17)]
# Relative error of the whole output (2-norm). Both forms round in the input's precision, in a different order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def relative_error(
    shapes: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    dtype: torch.dtype,
    device: str,
    dead_rows: int = 0,
    window: int | None = None,
    sinks: bool = False,
) -> float:
    """Attend with both forms; `shapes` are (new rows, keys). Every slot past a request's keys holds NaN, and where the
    kernel runs those of blocks that no window reaches.

    The last `dead_rows` rows of a request see what the row before them sees, as in the drafter's layout.
    """
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    query_lens, lengths = (np.array(column) for column in zip(*shapes, strict=True))
    needed = -(-lengths // block)
    free = rng.permutation(int(needed.sum()) + 3)
    tables = np.zeros((len(shapes), int(needed.max()) + 2), dtype=np.int64)
    keys = torch.full((kv_heads, len(free) * block + 1, dim), torch.nan)
    values, limits = keys.clone(), []
    unseen = torch.zeros(keys.shape[1], dtype=torch.bool)
    for i, (rows, length) in enumerate(shapes):
        tables[i, : needed[i]], free = free[: needed[i]], free[needed[i] :]
        at = torch.from_numpy((tables[i, : needed[i], None] * block + np.arange(block)).ravel()[:length])
        keys[:, at], values[:, at] = torch.randn(2, kv_heads, length, dim)
        limit = torch.arange(length - rows, length)
        live = max(rows - dead_rows, 1)
        limit[live:] = limit[live - 1]
        limits.append(limit)
        if window is not None:
            first = max(0, length - rows + 1 - window) // block * block
            unseen[at[:first]] = True
    # A slice of a wider projection: rows are further apart than they are long.
    q = torch.randn(int(query_lens.sum()), heads + 2 * kv_heads, dim).to(device, dtype)[:, :heads]

    sinks_N = torch.randn(heads).to(device, dtype) if sinks else None

    def run(backend: str) -> Tensor:
        # The plan's key lengths are an upper bound.
        plan = plan_attention(
            query_lens, lengths + block + 1, tables, block,
            heads_per_kv=heads // kv_heads, head_dim=dim, device=q.device, backend=backend,
        )  # fmt: skip
        assert isinstance(plan, TilePlan) == (backend == "triton")
        limit = torch.cat(limits).to(device)
        poison = torch.nan if backend == "triton" else 0.0
        k, v = (cache.masked_fill(unseen[None, :, None], poison).to(device, dtype) for cache in (keys, values))
        return paged_attention(q, CacheView(k, v, limit, window, sinks_N), plan).double()

    expected, out = run("torch"), run("triton")
    assert expected.isfinite().all()
    return float((out - expected).norm() / expected.norm())


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (6, 2, 16), (4, 4, 32), (8, 1, 16)])
@pytest.mark.parametrize("shapes", [[(1, 1)], RAGGED, [(1, 5)] * 5 + [(8, 64)], [(3, 70), (40, 90)]])
def test_interpreted(heads: int, kv_heads: int, dim: int, shapes: list[tuple[int, int]]):
    error = relative_error(shapes, heads, kv_heads, dim, 4, torch.float32, "cpu")
    assert error < TOLERANCE[torch.float32]


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("window", [None, 3])
def test_interpreted_rows_that_see_nothing_are_zero(window: int | None):
    """Padding of a captured pass: a request whose rows see no key, beside one whose rows do; and tiles of no rows."""
    q, keys, values = torch.randn(6, 4, 16), *torch.full((2, 2, 8, 16), torch.nan)
    keys[:, :3], values[:, :3] = torch.randn(2, 2, 3, 16)
    limit = torch.tensor([0, 1, 2, -1, -1, -1])
    tiles = torch.tensor([[3, 3, 1], [0, 3, 0], [0, 0, 0]])
    plan = TilePlan(tiles, torch.tensor([[0], [1]], dtype=torch.int32), 4, 16)
    out = paged_attention(q, CacheView(keys, values, limit, window, None), plan)
    assert (out[3:] == 0).all()
    assert out[:3].isfinite().all()
    assert (out[:3] != 0).any()


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "products_in_order")
def test_interpreted_invariant_rows_do_not_depend_on_their_number():
    """A prompt at once, and rows of it as if the others had been there before."""
    q, keys, values = torch.randn(100, 6, 16), *torch.randn(2, 2, 112, 16)
    table, position = np.arange(7)[None], torch.arange(100)

    def run(first: int, end: int) -> Tensor:
        plan = plan_attention(
            np.array([end - first]), np.array([end]), table, 16,
            heads_per_kv=3, head_dim=16, device=torch.device("cpu"), backend=INVARIANT,
        )  # fmt: skip
        assert isinstance(plan, TilePlan)
        assert plan.tile_size == most_tile(3)
        return paged_attention(q[first:end], CacheView(keys, values, position[first:end]), plan)

    whole = run(0, 100)
    for first, end in ((0, 1), (99, 100), (37, 61)):
        assert torch.equal(run(first, end), whole[first:end])


@pytest.mark.skipif(INTERPRETED, reason="the host's part")
@pytest.mark.parametrize("requests", range(1, 9))
def test_tables_begin_where_kernels_are_compiled_for(requests: int):
    """At 16 bytes, whatever the number of tiles before them."""
    rows = np.full(requests, 5)
    plan = plan_attention(
        rows, rows, np.ones((requests, 2), dtype=np.int64), 4,
        heads_per_kv=1, head_dim=16, device=torch.device("cpu"), backend="triton",
    )  # fmt: skip
    assert isinstance(plan, TilePlan)
    assert (plan.tables_BN.data_ptr() - plan.tiles_W3.data_ptr()) % 16 == 0
    assert plan.tables_BN.tolist() == [[1, 1]] * requests


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("block", [1, 16])
def test_interpreted_with_dead_rows_and_other_blocks(block: int):
    error = relative_error([(8, 30), (8, 9), (8, 100)], 9, 3, 64, block, torch.float32, "cpu", dead_rows=3)
    assert error < TOLERANCE[torch.float32]


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("window", [1, 5, 16, 50])
@pytest.mark.parametrize("block", [4, 16])
def test_interpreted_windows(window: int, block: int):
    """Windows that begin inside a block, and tiles whose rows begin to see at different turns of the loop."""
    shapes = [(1, 1), (1, 150), (8, 100), (40, 90), (3, 7)]
    for dead_rows in (0, 3):
        error = relative_error(shapes, 6, 2, 16, block, torch.float32, "cpu", dead_rows, window)
        assert error < TOLERANCE[torch.float32]


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_sinks():
    for window in (None, 5):
        error = relative_error(RAGGED, 6, 2, 16, 4, torch.float32, "cpu", window=window, sinks=True)
        assert error < TOLERANCE[torch.float32]


@interpreter
def test_interpreted_head_dims_that_do_not_tile_go_to_torch():
    lens, tables = np.array([1]), np.zeros((1, 1), dtype=np.int64)
    for dim in (8, 80):
        plan = plan_attention(
            lens, lens, tables, 16, heads_per_kv=1, head_dim=dim, device=torch.device("cpu"), backend="triton"
        )
        assert not isinstance(plan, TilePlan)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (8, 1, 128), (14, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, length) for length in range(1, 400, 3)],  # decode
        [(8, length) for length in range(8, 400, 7)],  # verification
        [(1500, 1500), (500, 2000), (3, 700)],  # prefill, and chunks of it
        [(1, 300)] * 64 + [(1000, 1000)],
        RAGGED,
    ],
    ids=["decode", "verify", "prefill", "mixed", "ragged"],
)
def test_on_gpu(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, shapes: list[tuple[int, int]]):
    error = relative_error(shapes, heads, kv_heads, dim, 16, dtype, "cuda")
    assert error < TOLERANCE[dtype]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_on_gpu(dtype: torch.dtype):
    shapes = [(8, length) for length in range(8, 400, 7)] + [(500, 500)]
    assert relative_error(shapes, 64, 8, 64, 16, dtype, "cuda", sinks=True) < TOLERANCE[dtype]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_rows_on_gpu(dtype: torch.dtype):
    shapes = [(14, length) for length in range(14, 300, 5)]
    assert relative_error(shapes, 9, 3, 64, 16, dtype, "cuda", dead_rows=6) < TOLERANCE[dtype]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [9, 100, 1024])
def test_windows_on_gpu(dtype: torch.dtype, window: int):
    shapes = [(14, length) for length in range(14, 3000, 61)] + [(1500, 1500), (500, 2000)]
    for dead_rows in (0, 6):
        assert relative_error(shapes, 9, 3, 64, 16, dtype, "cuda", dead_rows, window) < TOLERANCE[dtype]
