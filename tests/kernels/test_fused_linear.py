"""Linear layers with norm, gate and sum fused, and rotation that writes into the cache, against their torch forms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.engine.kv_cache import PagedCache
from peagle.kernels.fused_linear import linear_add, norm_gated_linear, norm_linear, prefers_fused
from peagle.kernels.kv_write import kv_write
from peagle.kernels.paged_decode import plan_decode
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.rope_write import rope_write
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec, rope_inverse_frequencies, use_kernels
from tests.engine.tiny import tiny_spec
from tests.helpers import random_weights
from tests.kernels.hopper import before_the_wait, compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted

kernels = pytest.importorskip("peagle.kernels.fused_linear_triton", reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def _even(tensor: Tensor | None) -> Tensor | None:
    """As many gates as ups."""
    return None if tensor is None else tensor[: len(tensor) // 2 * 2]


# The tensors an operation takes, by name, and how it is called with them.
OPERATIONS: dict[str, Callable[[dict[str, Tensor], str], Tensor]] = {
    "norm_linear": lambda t, b: norm_linear(t["x"], t["norm"], EPS, t["weight"], t.get("bias"), backend=b),
    "norm_gated_linear": lambda t, b: norm_gated_linear(
        t["x"], t["norm"], EPS, _even(t["weight"]), _even(t.get("bias")), backend=b
    ),
    "linear_add": lambda t, b: linear_add(t["x"], t["weight"], t.get("bias"), t["residual"], backend=b),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that an element nobody wrote shows."""
    empty = torch.empty

    def poisoned_empty(*args, **options):
        out = empty(*args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def tensors(
    operation: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    dtype: torch.dtype,
    device: str,
    exact: bool = False,
) -> dict[str, Tensor]:
    """Rows lie apart with NaN between them. `exact`: multiples of 1/8, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rows + inputs + outputs)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        if exact:
            return torch.randint(-16, 17, shape, generator=generator) / 8
        return scale * torch.randn(shape, generator=generator)

    def apart(x: Tensor) -> Tensor:
        x = x.to(device, dtype)
        return torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[:, : x.shape[-1]]

    made = {
        "x": apart(make(rows, inputs, scale=3.0)),
        "weight": make(outputs, inputs, scale=inputs**-0.5).to(device, dtype),
    }
    made["norm"] = (1 + 0.3 * torch.randn(inputs, generator=generator)).to(device, dtype)
    made["residual"] = apart(make(rows, outputs))
    if bias:
        made["bias"] = make(outputs).to(device, dtype)
    return made


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check_operation(
    operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    """As near as torch to what float64 says; exact where sums are."""
    call = OPERATIONS[operation]
    t = tensors(operation, rows, inputs, outputs, bias=bias, dtype=dtype, device=device)
    truth = call({name: x.double() for name, x in t.items()}, "torch")
    # oneDNN reads past rows of an odd number of bfloat16, so torch gets them dense.
    got, twin = call(t, "triton"), call({name: x.contiguous() for name, x in t.items()}, "torch")
    assert (got.shape, got.dtype) == (twin.shape, dtype)
    assert distance(got, truth) < (2e-6 if dtype == torch.float32 else 1.1 * distance(twin, truth) + 1e-4)
    exact = tensors("linear_add", rows, inputs, outputs, bias=bias, dtype=dtype, device=device, exact=True)
    expected = call_linear_add({name: x.double() for name, x in exact.items()}, dtype)
    assert torch.equal(OPERATIONS["linear_add"](exact, "triton"), expected)


def call_linear_add(t: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """With float64 sums, rounded where torch rounds: the layer's output, then the sum with the residual."""
    return t["residual"].to(dtype) + torch.nn.functional.linear(t["x"], t["weight"], t.get("bias")).to(dtype)


def check_rows_alone(
    operation: str, counts: list[int], inputs: int, outputs: int, dtype: torch.dtype, device: str
) -> None:
    """A row has the same bits alone, among others, and next to rows of NaN."""
    call = OPERATIONS[operation]
    t = tensors(operation, max(counts), inputs, outputs, bias=True, dtype=dtype, device=device)
    together = call(t, "triton")
    for count in counts:
        part = {**t, "x": t["x"][:count], "residual": t["residual"][:count]}
        assert torch.equal(call(part, "triton"), together[:count]), count
    alone = {**t, "x": t["x"][1:2], "residual": t["residual"][1:2]}
    assert torch.equal(call(alone, "triton"), together[1:2])
    t["x"] = t["x"].clone()
    t["x"][0] = torch.nan
    assert torch.equal(call(t, "triton")[1:], together[1:])


def check_rope_write(
    rows: int, heads: int, kv_heads: int, dim: int, normed: bool, device: str, dtype: torch.dtype
) -> None:
    """The bits of `rope_qkv` and `kv_write`; slot -1 and slots nobody names stay as they were."""
    generator = torch.Generator().manual_seed(rows + heads)
    width, num_slots = (heads + 2 * kv_heads) * dim, 3 * rows + 1
    wide = torch.randn(rows, width + 5, generator=generator).to(device, dtype)
    slots = torch.randperm(num_slots - 1, generator=generator)[:rows].to(device)
    slots[rows // 2] = -1
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e4, head_dim=dim)).to(device)
    tables = rope_tables(torch.arange(rows, device=device) * 37, inv_freq, dtype, backend="torch")
    norm = (1 + 0.3 * torch.randn(2, dim, generator=generator)).to(device, dtype)
    norms = HeadNorms(norm[0], norm[1], EPS) if normed else None
    before = torch.randn(2, kv_heads, num_slots, dim, generator=generator).to(device, dtype)

    def run(backend: str, fused: bool) -> tuple[Tensor, Tensor]:
        qkv, cache = wide.clone()[:, :width], before.clone()
        if fused:
            q = rope_write(qkv, *tables, heads, cache[0], cache[1], slots, norms, backend=backend)
        else:
            q, k, v = rope_qkv(qkv, *tables, heads, kv_heads, norms, backend=backend)
            kv_write(cache[0], cache[1], slots, k, v, backend=backend)
        return q, cache

    expected_q, expected = run("triton", fused=False)
    q, cache = run("triton", fused=True)
    if normed and device == "cuda":  # two kernels, whose compilers fuse multiplications and additions as they like
        close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
        torch.testing.assert_close((q, cache), (expected_q, expected), **close)
    else:
        assert torch.equal(q, expected_q)
        assert torch.equal(cache, expected)
    unnamed = [s for s in range(num_slots) if s not in slots.tolist()]
    assert torch.equal(cache[:, :, unnamed], before[:, :, unnamed])
    twin_q, twin = run("torch", fused=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(q, twin_q, **tolerance)
    torch.testing.assert_close(cache[:, :, :-1], twin[:, :, :-1], **tolerance)  # torch uses the spare slot for -1


def run_model(model: TargetModel, backend: str, device: str, taps: tuple[int, ...]) -> list[Tensor]:
    """Three requests (one only pads) in steps of three rows each over a paged cache: hidden states and taps."""
    spec, rows, block = model.spec, 3, 4
    use_kernels(model, backend)
    cache = PagedCache(spec, 64, dtype=torch.float32, device=torch.device(device), kernels=backend)
    tables = torch.arange(1, 13, device=device, dtype=torch.int32).view(3, 4)
    plan = plan_decode(
        rows, tables, block, heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, backend=backend
    )
    outs = []
    for step in range(2):
        positions = (torch.arange(rows, device=device) + rows * step).repeat(3)
        request = torch.arange(3, device=device).repeat_interleave(rows)
        slots = tables[request, positions // block].long() * block + positions % block
        pads = request == 1
        attend = cache.attend(slots.masked_fill(pads, -1), positions.masked_fill(pads, -1), plan)
        with torch.inference_mode():
            hidden, tapped = model((positions * 7 + request) % spec.vocab_size, positions, attend, taps)
        outs += [hidden[~pads], tapped[~pads]]
    return outs


def check_model(device: str, **changes: object) -> None:
    """The whole decode step of a small target: fused kernels say what torch says, to float32's rounding."""
    spec = tiny_spec(head_dim=16, rope=RopeSpec(theta=1e4, head_dim=16), num_layers=2, **changes)
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, 0)
    model = model.to(device)
    for got, expected in zip(*(run_model(model, backend, device, (0, 1, 2)) for backend in ("triton", "torch"))):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


MODELS = ({}, {"qkv_bias": True}, {"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True})


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


def test_small_layers_of_few_rows_are_fused():
    small, large = (torch.empty(shape, device="meta") for shape in ((3072, 576), (9728, 896)))
    assert [prefers_fused(rows, small) for rows in (1, 16, 17)] == [True, True, False]
    assert not prefers_fused(1, large)


@pytest.mark.parametrize("inputs,outputs", [(576, 1536), (896, 4864), (4096, 12288), (12288, 4096)])
def test_the_order_of_sums_does_not_follow_from_the_rows(inputs: int, outputs: int):
    tiles = [kernels.tile_of(rows, inputs, outputs, torch.bfloat16) for rows in range(1, 100)]
    assert len({(tile.slices, tile.step) for tile in tiles}) == 1
    assert len({tile.columns for tile in tiles}) > (outputs < 2000)


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "rows,inputs,outputs,bias", [(1, 64, 24, True), (5, 256, 40, False), (19, 333, 37, True), (40, 512, 16, False)]
)
def test_interpreted_linears(operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype):
    check_operation(operation, rows, inputs, outputs, bias, dtype, "cpu")


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
def test_interpreted_norm_of_large_float16_rows():
    """Rows near the end of float16's range, times a weight that leaves it."""
    t = tensors("norm_linear", 3, 64, 16, bias=False, dtype=torch.float16, device="cpu")
    t["x"], t["norm"] = t["x"] * 4000, t["norm"] * 10
    got, expected = (OPERATIONS["norm_linear"](t, backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_interpreted_rows_alone(operation: str, dtype: torch.dtype):
    check_rows_alone(operation, [1, 3, 7, 16], 300, 24, dtype, "cpu")


@interpreter
@pytest.mark.parametrize("operation,outputs", [("linear_add", 16), ("norm_gated_linear", 8)])
def test_interpreted_empty_batch(operation: str, outputs: int):
    t = tensors(operation, 0, 64, 16, bias=False, dtype=torch.float32, device="cpu")
    assert OPERATIONS[operation](t, "triton").shape == (0, outputs)


@interpreter
@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (1, 1, 16), (4, 2, 24)])
def test_interpreted_rope_write(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype):
    check_rope_write(5, heads, kv_heads, dim, normed, "cpu", dtype)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles")
@pytest.mark.parametrize("changes", MODELS)
def test_interpreted_decode(changes: dict[str, object], monkeypatch):
    launches = []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args, **options: launches.append(1) or launch(*args, **options))
    check_model("cpu", **changes)
    # Steps, layers, linears but the one with a gate, and but the projections that rotate as well.
    assert len(launches) == 2 * 2 * (3 if "qk_norm" in changes else 2)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("rows,inputs,outputs", [(8, 576, 1536), (14, 4096, 4096), (64, 896, 1152)])
def test_compiles_for_hopper_without_a_gpu(rows: int, inputs: int, outputs: int):
    """On tensor cores, with loads in flight while products are made, and weights asked for before the wait."""
    tile = kernels.tile_of(rows, inputs, outputs, torch.bfloat16)
    compiled = compile_for_hopper(
        kernels._linear_tile, {"rows": "i32", "eps": "fp32"}, tile.slices, IN=inputs, OUT=outputs,
        ROWS=kernels.TILE_ROWS, COLUMNS=tile.columns, SLICES=tile.slices, STEP=tile.step, STAGES=tile.stages, NORM=True,
        NORM_FIRST=False, BIAS=True, ADD=True, EARLY=True,
    )  # fmt: skip
    assert all(word in compiled.asm["ptx"] for word in ("mma.sync", "cp.async.cg"))
    assert compiled.metadata.shared < 113 << 10  # two programs of a multiprocessor
    gated = compile_for_hopper(
        kernels._gated_linear_tile, {"rows": "i32", "eps": "fp32"}, tile.slices, IN=inputs, OUT=outputs,
        ROWS=kernels.TILE_ROWS, COLUMNS=tile.columns, SLICES=tile.slices, STEP=tile.step, STAGES=tile.stages,
        NORM_FIRST=False, BIAS=True, EARLY=True,
    )  # fmt: skip
    assert all(word in gated.asm["ptx"] for word in ("mma.sync", "cp.async.cg"))
    assert gated.metadata.shared < 113 << 10
    for ptx in (compiled.asm["ptx"], gated.asm["ptx"]):
        before = before_the_wait(ptx)
        assert "prefetch.global.L2" in before
        assert not any(word in before for word in ("ld.global", "cp.async", "st.global"))


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "rows,inputs,outputs,bias",
    [(1, 576, 960, True), (8, 4096, 6144, False), (14, 1536, 576, False), (64, 896, 1157, True), (100, 333, 40, False)],
)
def test_linears_on_gpu(operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype):
    check_operation(operation, rows, inputs, outputs, bias, dtype, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("inputs,outputs", [(576, 960), (4096, 4096)])
def test_rows_alone_on_gpu(operation: str, inputs: int, outputs: int, dtype: torch.dtype):
    """Whatever the tile's height."""
    check_rows_alone(operation, [1, 8, 16, 17, 32, 33, 64], inputs, outputs, dtype, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows,heads,kv_heads,dim", [(8, 9, 3, 64), (64, 32, 8, 128), (14, 14, 2, 64)])
def test_rope_write_on_gpu(rows: int, heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype):
    check_rope_write(rows, heads, kv_heads, dim, normed, "cuda", dtype)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("changes", MODELS)
def test_decode_on_gpu(changes: dict[str, object]):
    check_model("cuda", **changes)
