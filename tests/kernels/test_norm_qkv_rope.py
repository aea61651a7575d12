"""Norm, projections, rotation and cache write in one launch, against the operations one after the other."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.fused_linear import norm_linear
from peagle.kernels.kv_write import kv_write
from peagle.kernels.norm_qkv_rope import NormedLinear, norm_qkv_rope
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.models.layers import RopeSpec, rope_inverse_frequencies
from tests.kernels.hopper import before_the_wait, compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted

kernels = pytest.importorskip("peagle.kernels.norm_qkv_rope_triton", reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


class Case:
    """A layer's input, weights, tables, slots and caches; rows lie apart with NaN between them."""

    def __init__(
        self,
        rows: int,
        inputs: int,
        heads: int,
        kv_heads: int,
        dim: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        generator = torch.Generator().manual_seed(rows + inputs + dim)

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

        outputs, num_slots = (heads + 2 * kv_heads) * dim, 3 * rows + 2
        self.heads, self.kv_heads = heads, kv_heads
        x = make(rows, inputs, scale=3.0)
        self.x = torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[:, :inputs]
        self.qkv = NormedLinear(
            1 + make(inputs, scale=0.3), EPS, make(outputs, inputs, scale=inputs**-0.5), make(outputs) if bias else None
        )
        inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e4, head_dim=dim)).to(device)
        self.tables = rope_tables(torch.arange(rows, device=device) * 37, inv_freq, dtype, backend="torch")
        self.slots = torch.randperm(num_slots - 1, generator=generator)[:rows].to(device)
        self.slots[rows // 2 : rows // 2 + 1] = -1
        self.caches = make(2, kv_heads, num_slots, dim)

    def run(self, backend: str, rows: slice = slice(None), norms: HeadNorms | None = None) -> tuple[Tensor, Tensor]:
        """The queries and the caches afterwards, in one operation."""
        caches, (cos, sin) = self.caches.clone(), self.tables
        q = norm_qkv_rope(
            self.x[rows], self.qkv, cos[rows], sin[rows], self.heads, caches[0], caches[1], self.slots[rows], norms,
            backend=backend,
        )  # fmt: skip
        return q, caches

    def run_parts(self, backend: str) -> tuple[Tensor, Tensor]:
        """The same in three operations."""
        caches = self.caches.clone()
        # oneDNN reads past rows of an odd number of bfloat16, so torch gets them dense.
        qkv = norm_linear(self.x.contiguous() if backend == "torch" else self.x, *self.qkv, backend=backend)
        q, k, v = rope_qkv(qkv, *self.tables, self.heads, self.kv_heads, backend=backend)
        kv_write(caches[0], caches[1], self.slots, k, v, backend=backend)
        return q, caches


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that an element nobody wrote shows."""
    empty = torch.empty

    def poisoned_empty(*args, **options):
        out = empty(*args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def check(case: Case) -> None:
    """The bits of the three operations; near torch's; slot -1 and slots nobody names stay as they were."""
    got, expected, twin = case.run("triton"), case.run_parts("triton"), case.run_parts("torch")
    for ours, theirs in zip(got, expected):
        assert torch.equal(ours, theirs)
    unnamed = [s for s in range(case.caches.shape[2]) if s not in case.slots.tolist()]
    assert torch.equal(got[1][:, :, unnamed], case.caches[:, :, unnamed])
    # Float32 sums in another order; other dtypes round x * norm once where torch does twice.
    tolerance = 1e-5 if case.x.dtype == torch.float32 else 1e-2
    for ours, theirs in ((got[0], twin[0]), (got[1][:, :, :-1], twin[1][:, :, :-1])):  # torch uses the spare slot
        assert ours.shape == theirs.shape
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < tolerance


def check_rows_alone(case: Case, counts: list[int]) -> None:
    """A row has the same bits alone, among others, and next to a row of NaN."""
    together_q, together = case.run("triton")

    def check_rows(rows: slice) -> None:
        q, caches = case.run("triton", rows)
        slots = case.slots[rows][case.slots[rows] >= 0]
        assert torch.equal(q, together_q[rows]), rows
        assert torch.equal(caches[:, :, slots], together[:, :, slots]), rows

    for count in counts:
        check_rows(slice(count))
    check_rows(slice(1, 2))
    case.x = case.x.clone()
    case.x[0] = torch.nan
    q, caches = case.run("triton")
    slots = case.slots[1:][case.slots[1:] >= 0]
    assert torch.equal(q[1:], together_q[1:])
    assert torch.equal(caches[:, :, slots], together[:, :, slots])


SHAPES = [
    (1, 64, 1, 1, 16, True),
    (5, 256, 4, 2, 16, False),
    (3, 333, 3, 1, 32, True),
    (19, 64, 1, 1, 64, False),
    (2, 64, 1, 1, 128, True),
    (2, 96, 2, 2, 24, True),  # tiles of 8 columns
]


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_the_operations_one_after_the_other(dtype: torch.dtype):
    case = Case(5, 64, 4, 2, 16, bias=True, dtype=dtype, device="cpu")
    for backend in ("torch", "auto"):
        assert all(torch.equal(a, b) for a, b in zip(case.run(backend), case.run_parts("torch")))


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows,inputs,heads,kv_heads,dim,bias", SHAPES)
def test_interpreted(rows: int, inputs: int, heads: int, kv_heads: int, dim: int, bias: bool, dtype: torch.dtype):
    check(Case(rows, inputs, heads, kv_heads, dim, bias=bias, dtype=dtype, device="cpu"))


@interpreter
def test_interpreted_caches_of_another_dtype():
    case = Case(3, 64, 2, 1, 16, bias=False, dtype=torch.float32, device="cpu")
    case.caches = case.caches.half()
    assert all(torch.equal(a, b) for a, b in zip(case.run("triton"), case.run_parts("triton")))


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_rows_alone(dtype: torch.dtype):
    check_rows_alone(Case(18, 300, 2, 1, 16, bias=True, dtype=dtype, device="cpu"), [1, 3, 7, 16])


@interpreter
def test_interpreted_empty_batch():
    case = Case(0, 64, 2, 1, 16, bias=False, dtype=torch.float32, device="cpu")
    q, caches = case.run("triton")
    assert q.shape == (0, 2, 16)
    assert torch.equal(caches, case.caches)


@interpreter
@pytest.mark.parametrize("dim,normed", [(16, True), (12, False)])
def test_interpreted_heads_it_does_not_fit(dim: int, normed: bool, monkeypatch):
    """Head norms, and heads that no tile divides, take two launches."""
    monkeypatch.setattr(kernels, "norm_qkv_rope_triton", None)
    case = Case(3, 64, 2, 1, dim, bias=True, dtype=torch.float32, device="cpu")
    norms = HeadNorms(torch.full((dim,), 1.5), torch.full((dim,), 0.5), EPS) if normed else None
    for got, expected in zip(case.run("triton", norms=norms), case.run("torch", norms=norms)):
        torch.testing.assert_close(got[..., :-1, :], expected[..., :-1, :], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("rows,inputs,heads,kv_heads,dim", [(8, 576, 9, 3, 64), (64, 896, 14, 2, 64)])
def test_compiles_for_hopper_without_a_gpu(rows: int, inputs: int, heads: int, kv_heads: int, dim: int):
    """On tensor cores, with loads in flight while products are made, and weights asked for before the wait."""
    tile = kernels.tile_of(rows, inputs, (heads + 2 * kv_heads) * dim, torch.bfloat16, within=dim)
    compiled = compile_for_hopper(
        kernels._qkv_linear_tile, {"rows": "i32", "eps": "fp32", "slots_R": "*i64"}, tile.slices, IN=inputs,
        QUERY_HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, ROWS=kernels.TILE_ROWS, COLUMNS=tile.columns,
        SLICES=tile.slices, STEP=tile.step, STAGES=tile.stages, NORM_FIRST=False, BIAS=True, EARLY=True,
    )  # fmt: skip
    assert all(word in compiled.asm["ptx"] for word in ("mma.sync", "cp.async.cg"))
    assert compiled.metadata.shared < 113 << 10  # two programs of a multiprocessor
    before = before_the_wait(compiled.asm["ptx"])
    assert "prefetch.global.L2" in before
    assert not any(word in before for word in ("ld.global", "cp.async", "st.global"))


@pytest.mark.parametrize("dim,outputs", [(64, 960), (24, 4800), (128, 6144), (80, 3840)])
def test_a_tile_lies_within_one_head(dim: int, outputs: int):
    """And the order of its sums is that of `norm_linear`."""
    for dtype in DTYPES:
        for rows in (1, 8, 100):
            tile = kernels.tile_of(rows, 576, outputs, dtype, within=dim)
            free = kernels.tile_of(rows, 576, outputs, dtype)
            assert dim % tile.columns == 0
            assert (tile.slices, tile.step) == (free.slices, free.step)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,inputs,heads,kv_heads,dim,bias",
    [*SHAPES, (1, 576, 9, 3, 64, False), (16, 576, 9, 3, 64, False), (8, 896, 14, 2, 64, True),
     (100, 1024, 16, 8, 128, True)],
)  # fmt: skip
def test_on_gpu(rows: int, inputs: int, heads: int, kv_heads: int, dim: int, bias: bool, dtype: torch.dtype):
    check(Case(rows, inputs, heads, kv_heads, dim, bias=bias, dtype=dtype, device="cuda"))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs,heads,kv_heads,dim", [(576, 9, 3, 64), (2048, 16, 8, 128)])
def test_rows_alone_on_gpu(inputs: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """Whatever the tile's width."""
    case = Case(64, inputs, heads, kv_heads, dim, bias=True, dtype=dtype, device="cuda")
    check_rows_alone(case, [1, 8, 16, 17, 32, 33])


@gpu
@pytest.mark.gpu
def test_auto_takes_it_for_few_rows_on_gpu(monkeypatch):
    launched = []
    launch = kernels.norm_qkv_rope_triton
    monkeypatch.setattr(kernels, "norm_qkv_rope_triton", lambda *args: launched.append(1) or launch(*args))
    for rows in (8, 64):
        with torch.inference_mode():
            Case(rows, 576, 9, 3, 64, bias=False, dtype=torch.bfloat16, device="cuda").run("auto")
    assert launched == [1]
