"""Streaming linear layers against their torch forms, alone and inside a model whose norms add their parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels.rms_norm import add_rms_norm
from peagle.kernels.stream_linear import gated_stream_linear, linear_parts, prefers_stream, stream_linear
from peagle.models import layers
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted
from tests.kernels.test_fused_linear import MODELS, check_model, distance

kernels = pytest.importorskip("peagle.kernels.stream_linear_triton", reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Operation = Callable[[Tensor, Tensor, Tensor | None, str], Tensor]
OPERATIONS: dict[str, Operation] = {
    "linear": lambda x, w, b, backend: stream_linear(x, w, b, backend=backend),
    "gated": lambda x, w, b, backend: gated_stream_linear(x, w, b, backend=backend),
    "parts": lambda x, w, b, backend: linear_parts(x, w, b, backend=backend).sum(dim=0).to(x.dtype),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that an element nobody wrote shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))


@pytest.fixture
def short_cuts(monkeypatch):
    """Narrow layers are cut at the sizes of tests too."""
    monkeypatch.setattr(kernels, "_LEAST_INPUTS", 64)


def tensors(rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x, its rows apart with NaN between them, weight and bias."""
    generator = torch.Generator().manual_seed(rows + inputs + outputs)
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    x = torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[:, :inputs]
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(device, dtype)
    return x, weight, *([torch.randn(outputs, generator=generator).to(device, dtype)] if bias else [])


def check(operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    """As near as torch to what float64 says."""
    x, weight, *rest = tensors(rows, inputs, outputs, bias, dtype, device)
    b, call = rest[0] if rest else None, OPERATIONS[operation]
    truth = call(x.double(), weight.double(), b if b is None else b.double(), "torch")
    got, twin = call(x, weight, b, "triton"), call(x.contiguous(), weight, b, "torch")
    assert (got.shape, got.dtype) == (twin.shape, dtype)
    assert distance(got, truth) < (2e-6 if dtype == torch.float32 else 1.1 * distance(twin, truth) + 1e-4)


def check_rows_alone(operation: str, counts: list[int], inputs: int, outputs: int, device: str) -> None:
    """A row has the same bits alone, among others, and next to rows of NaN."""
    x, weight, bias = tensors(max(counts), inputs, outputs, True, torch.bfloat16, device)
    call = OPERATIONS[operation]
    together = call(x, weight, bias, "triton")
    for count in counts:
        assert torch.equal(call(x[:count], weight, bias, "triton"), together[:count]), count
    x = x.clone()
    x[0] = torch.nan
    assert torch.equal(call(x, weight, bias, "triton")[1:], together[1:])


def check_norm_of_parts(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4, 5, 72, generator=generator).to(device)
    residual, weight = torch.randn(5, 72, generator=generator), torch.rand(72, generator=generator)
    args = parts, residual.to(device, dtype), weight.to(device, dtype), 1e-5
    whole = (parts.double().sum(0).to(dtype), *args[1:])
    for got, expected in zip(add_rms_norm(*args, backend="triton"), add_rms_norm(*whole, backend="torch")):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_which_layers_stream():
    def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((outputs, inputs), device="meta", dtype=dtype)

    def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((count, 1), device="meta", dtype=dtype)

    wide, short, long = layer(24576, 4096), layer(960, 576), layer(4096, 12288)
    assert [prefers_stream(rows(32), weight, cut=False) for weight in (wide, short, long)] == [True, True, False]
    assert prefers_stream(rows(32), long, cut=True)
    assert not prefers_stream(rows(65), wide, cut=True)
    assert not prefers_stream(rows(8, torch.float32), wide, cut=True)  # exact products are cuBLAS's


def test_long_layers_are_cut_only_where_a_norm_adds_the_cuts(monkeypatch):
    for name in ("stream_linear", "linear_parts"):
        monkeypatch.setattr(layers, name, lambda *_, name=name, backend: name)
    x = torch.empty(4, 8192, dtype=torch.bfloat16)
    long, short = (torch.nn.Linear(n, 64, bias=False, device="meta", dtype=torch.bfloat16) for n in (8192, 512))
    assert layers.project_parts(long, x, "triton") == "linear_parts"
    assert layers.project(short, x[:, :512], "triton") == "stream_linear"
    assert layers.project(long, x.to("meta"), "triton").shape == (4, 64)  # cuBLAS's


@pytest.mark.parametrize("inputs,outputs", [(4096, 4096), (12288, 4096), (4096, 24576), (1536, 2048), (2880, 201_088)])
def test_the_order_of_sums_does_not_follow_from_the_rows(inputs: int, outputs: int):
    tiles = [kernels._tile(rows, inputs, outputs, True) for rows in range(1, 100)]
    assert len({tile.cuts for tile in tiles}) == 1
    assert tiles[0].cuts == 1 or -(-inputs // tiles[0].cuts) >= kernels._LEAST_INPUTS


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


SIZES = [(1, 64, 24, True), (5, 256, 40, False), (19, 333, 74, True), (70, 512, 16, False)]


@interpreter
@pytest.mark.usefixtures("short_cuts", "bfloat16_products")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("rows,inputs,outputs,bias", SIZES)
def test_interpreted_linears(operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype):
    check(operation, rows, inputs, outputs, bias, dtype, "cpu")


@interpreter
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("inputs", [4864, 4100, 1536])
def test_interpreted_early_weights_are_the_layer_s(inputs: int, monkeypatch):
    """What is asked for before the wait lies within the weights, also where cuts are rounded up past their end."""
    asked: list[tuple[int, int]] = []

    def prefetch(first_R: Any, LENGTH: Any) -> None:
        addresses = first_R.handle.data
        asked.append((int(addresses.min()), int(addresses.max()) + 2 * int(LENGTH)))

    monkeypatch.setattr(kernels, "prefetch_rows", prefetch)
    monkeypatch.setattr(kernels, "wait_for_previous", lambda EARLY: None)
    x, weight = tensors(3, inputs, 64, False, torch.bfloat16, "cpu")
    tile = kernels._tile(3, inputs, 64, True)
    cut = -(-inputs // tile.cuts // tile.step) * tile.step
    out = torch.empty(tile.cuts, 3, 64)
    kernels._stream_tile[(1, tile.cuts, 1)](
        out, x, weight, x, 3, x.stride(0), inputs, IN=inputs, OUT=64, CUT=cut, ROWS=16, COLUMNS=64, STEP=tile.step,
        STAGES=2, GATED=False, BIAS=False, PARTS=True, WHOLE=False, EARLY=True,
    )  # fmt: skip
    assert len(asked) == tile.cuts > 1
    assert max(end for _, end in asked) - min(begin for begin, _ in asked) <= 2 * weight.numel()
    torch.testing.assert_close(out.sum(0), x.float() @ weight.float().T, rtol=1e-3, atol=1e-3)


@interpreter
@pytest.mark.usefixtures("short_cuts", "bfloat16_products")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_interpreted_rows_alone(operation: str):
    check_rows_alone(operation, [1, 3, 17], 300, 24, "cpu")


@interpreter
@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_interpreted_norm_of_parts(dtype: torch.dtype):
    check_norm_of_parts("cpu", dtype)


@interpreter
def test_interpreted_empty_batch():
    x, weight = tensors(0, 64, 16, False, torch.float32, "cpu")
    assert stream_linear(x, weight, backend="triton").shape == (0, 16)


@interpreter
@pytest.mark.usefixtures("short_cuts", "numpy_scalars", "wide_tiles")
@pytest.mark.parametrize("changes", MODELS)
def test_interpreted_model(changes: dict[str, object], monkeypatch):
    """Every projection of a target streams, and its norms add the parts."""
    launches = []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *args, **options: launches.append(1) or launch(*args, **options))
    monkeypatch.setattr(layers, "prefers_stream", lambda *_, cut: True)
    monkeypatch.setattr(layers, "prefers_fused", lambda *_: False)
    check_model("cpu", **changes)
    assert len(launches) == 2 * 2 * 4  # steps, layers, linears


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    "rows,inputs,outputs,kind",
    [
        (8, 4096, 6144, "plain"), (15, 4096, 24576, "gated"), (64, 12288, 4096, "parts"), (64, 4096, 24576, "gated"),
        (8, 2880, 5760, "gated"),
    ],
)  # fmt: skip
def test_compiles_for_hopper_without_a_gpu(rows: int, inputs: int, outputs: int, kind: str):
    """On Hopper's tensor cores, with loads in flight while products are made, and weights asked for before the wait."""
    tile = kernels._tile(rows, inputs, outputs, kind == "parts")
    compiled = compile_for_hopper(
        kernels._stream_tile, {"rows": "i32", "out": "*fp32" if kind == "parts" else "*bf16"}, 4,
        IN=inputs, OUT=outputs // 2 if kind == "gated" else outputs, CUT=inputs // tile.cuts, ROWS=tile.rows,
        COLUMNS=tile.columns, STEP=tile.step, STAGES=tile.stages, GATED=kind == "gated", BIAS=False,
        PARTS=kind == "parts", WHOLE=inputs % 512 == 0, EARLY=True,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert all(word in ptx for word in ("wgmma", "cp.async.cg"))
    wait = ptx.index("griddepcontrol.wait")
    assert ptx.index("prefetch.global.L2") < wait < ptx.index("griddepcontrol.launch_dependents")
    assert not any(word in ptx[:wait] for word in ("ld.global", "cp.async", "st.global"))
    assert compiled.metadata.shared < 227 << 10


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "rows,inputs,outputs,bias",
    [(1, 576, 960, True), (8, 4096, 6144, False), (64, 896, 1154, True), (100, 333, 40, False)],
)
def test_linears_on_gpu(operation: str, rows: int, inputs: int, outputs: int, bias: bool, dtype: torch.dtype):
    check(operation, rows, inputs, outputs, bias, dtype, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("inputs,outputs", [(1536, 2048), (4096, 4096)])
def test_rows_alone_on_gpu(operation: str, inputs: int, outputs: int):
    check_rows_alone(operation, [1, 8, 16, 17, 33, 64], inputs, outputs, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_norm_of_parts_on_gpu(dtype: torch.dtype):
    check_norm_of_parts("cuda", dtype)


@pytest.mark.parametrize("value", ["", "2", "off", "false", " 0"])
def test_a_setting_that_says_neither_is_refused(value, monkeypatch):
    from peagle.kernels.early_launch import launches_early

    monkeypatch.setenv("PEAGLE_EARLY_LAUNCH", value)
    with pytest.raises(PeagleError, match=r"PEAGLE_EARLY_LAUNCH is .*: set it to 0 or 1"):
        launches_early.__wrapped__(torch.device("cuda"))
    monkeypatch.setenv("PEAGLE_EARLY_LAUNCH", "0")
    assert not launches_early.__wrapped__(torch.device("cuda"))
