"""Hopper's form of the streaming linear layers: how work is divided, which layers take it, and what it computes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels import stream_ring
from peagle.kernels.rms_norm import add_rms_norm
from peagle.kernels.stream_linear import gated_stream_linear, linear_parts, stream_linear
from peagle.kernels.stream_ring import SLAB, STEP, has_ring, prefers_ring, ring_of, suits_ring
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.test_fused_linear import distance
from tests.kernels.test_stream_linear import OPERATIONS, tensors

other = pytest.importorskip("peagle.kernels.stream_linear_triton", reason="needs triton")
kernels = pytest.importorskip("peagle.kernels.stream_ring_triton", reason="needs Gluon")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_ring(torch.device("cuda")), reason="needs a Hopper GPU"
)

SHARED_BYTES = 227 << 10  # of a multiprocessor, for a program
DTYPES = [torch.bfloat16, torch.float16]
QWEN = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "head": (151936, 4096)}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that an element nobody wrote shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))


def launch(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The ring's output, also for layers that prefer the other form. Parts are not added."""
    assert suits_ring(weight, gated=operation == "gated")
    return kernels.launch_ring(x, weight, bias, gated=operation == "gated", parts=operation == "parts")


def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty((outputs, inputs), device="meta", dtype=dtype)


@given(st.integers(1, 300_000), st.integers(1, 30_000), st.booleans())
def test_every_turn_is_made_once(weight_rows: int, inputs: int, parts: bool):
    ring = ring_of(weight_rows, inputs, parts=parts)
    tiles, rest = divmod(ring.all_turns, ring.turns)
    assert rest == 0
    assert (tiles - 1) * ring.slabs * SLAB < weight_rows <= tiles * ring.slabs * SLAB
    assert ring.turns * STEP >= inputs
    assert (ring.programs - 1) * ring.own_turns < ring.all_turns <= ring.programs * ring.own_turns
    assert ring.programs <= 132
    if ring.cuts == 1:  # whole tiles
        assert ring.own_turns % ring.turns == 0
    else:  # a cut, and the output's place for it is the program's number modulo `cuts`
        assert parts
        assert ring.own_turns * ring.cuts == ring.turns
        assert ring.slabs == 1
    of_ring = ring.stages * (ring.slabs + 1) * SLAB * STEP * 2  # 64 rows are as much as a slab
    assert ring.stages >= 3
    assert of_ring + SLAB * SLAB * 4 + ring.stages * 8 <= SHARED_BYTES


@pytest.mark.parametrize(
    "name,expected",  # slabs, stages, cuts, tiles of a program, programs: as measured
    [("qkv", (1, 6, 1, 1, 96)), ("gate_up", (3, 3, 1, 1, 128)), ("head", (3, 3, 1, 6, 132)), ("o", (1, 6, 2, 0.5, 128)),
     ("down", (1, 6, 2, 0.5, 128))],
)  # fmt: skip
def test_measured_layers(name: str, expected: tuple[float, ...]):
    ring = ring_of(*QWEN[name], parts=expected[2] == 2)
    assert (ring.slabs, ring.stages, ring.cuts, ring.own_turns / ring.turns, ring.programs) == expected


def test_which_layers_take_the_ring(monkeypatch):
    def takes(weight: Tensor, rows: int = 8, *, gated: bool = False, parts: bool = False) -> bool:
        return prefers_ring(torch.empty((rows, 1), device="meta"), weight, gated=gated, parts=parts)

    assert not takes(layer(*QWEN["qkv"]))  # not a Hopper GPU
    monkeypatch.setattr(stream_ring, "has_ring", lambda _device: True)
    for name, sizes in QWEN.items():
        assert takes(layer(*sizes), gated=name == "gate_up", parts=name in ("o", "down")), name
    assert takes(layer(201_088, 2880))  # gpt-oss' head
    assert [takes(layer(*QWEN["qkv"]), rows) for rows in (0, 1, 64, 65)] == [False, True, True, False]
    assert not takes(layer(*QWEN["qkv"], torch.float32))
    small = [(5120, 2880), (2880, 4096), (17920, 1536), (151_936, 1536), (49_152, 576)]  # gpt-oss', 1.5B's, SmolLM2's
    assert not any(takes(layer(*sizes)) for sizes in small)
    assert not any(takes(layer(outputs, 8192), parts=True) for outputs in (2048, 5120))  # 64 and 80 programs


def test_which_weights_tma_can_read():
    whole = torch.zeros(72, 136, dtype=torch.bfloat16)
    assert [suits_ring(whole[:, :inputs], gated=False) for inputs in (136, 72, 71)] == [True, True, False]
    assert [suits_ring(whole[:, first : first + 64], gated=False) for first in (8, 4)] == [True, False]
    assert not suits_ring(whole[:64].T, gated=False)
    assert not suits_ring(whole[:1, :64].expand(64, 64), gated=False)
    assert [suits_ring(weight, gated=True) for weight in (whole[:64], whole, whole[:64, :64])] == [True, False, False]


@pytest.mark.parametrize("value", ["", "2", "off", " 0"])
def test_a_setting_that_says_neither_is_refused(value: str, monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setenv("PEAGLE_WEIGHT_RING", value)
    with pytest.raises(PeagleError, match=r"PEAGLE_WEIGHT_RING is .*: set it to 0 or 1"):
        has_ring.__wrapped__(device)
    monkeypatch.setenv("PEAGLE_WEIGHT_RING", "0")
    assert not has_ring.__wrapped__(device)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_ring_stands_behind_the_same_functions(operation: str, monkeypatch):
    asked = []
    monkeypatch.setattr(other, "prefers_ring", lambda *args, **form: asked.append(form) or True)
    monkeypatch.setattr(kernels, "launch_ring", lambda x, *args, **form: x.new_full((1, 1, 1), len(form)))
    x, weight = tensors(3, 64, 32, False, torch.bfloat16, "cpu")
    assert OPERATIONS[operation](x, weight, None, "triton").unique() == 2
    assert asked == [{"gated": operation == "gated", "parts": operation == "parts"}]


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name,operation", [("qkv", "linear"), ("gate_up", "gated"), ("down", "parts")])
def test_compiles_for_hopper_without_a_gpu(name: str, operation: str, rows: int, monkeypatch):
    """All weights of the ring are asked for before the wait, and nothing else is read or written before it."""
    calls: list[Any] = []

    class Recorder:
        def __getitem__(self, _grid: tuple[int]) -> Any:
            return lambda *args, **options: calls.extend((args, options))

    kernel = kernels._stream_ring
    monkeypatch.setattr(kernels, "_stream_ring", Recorder())
    monkeypatch.setattr(kernels, "launches_early", lambda _device: True)
    x, weight = (torch.zeros(count, QWEN[name][1], dtype=torch.bfloat16) for count in (rows, QWEN[name][0]))
    launch(operation, x, weight, weight[:, 0].contiguous())
    args, options = calls
    assert (options.pop("num_warps"), options.pop("launch_pdl")) == (4, True)
    told = {n: f"tensordesc<bf16{list(t.block_shape)},{t.layout!r}>" for n, t in zip(("x", "weight"), args[2:4])}
    kinds = told | {"rows": "i32"} | ({"out": "*fp32"} if operation == "parts" else {})
    compiled = compile_for_hopper(kernel, kinds, 4, **options)
    ptx = compiled.asm["ptx"]
    assert all(word in ptx for word in ("wgmma.mma_async", "mbarrier.try_wait"))
    wait = ptx.index("griddepcontrol.wait")
    assert wait < ptx.index("griddepcontrol.launch_dependents")
    assert ptx[:wait].count("cp.async.bulk.tensor") == options["SLABS"] * options["STAGES"]
    assert not any(word in ptx[:wait] for word in ("ld.global", "st.global", "cp.async.ca", "cp.async.cg"))
    assert compiled.metadata.shared <= SHARED_BYTES


ODD = [
    (1, 256, 96, False, "linear"), (5, 320, 200, True, "linear"), (64, 576, 25_000, True, "linear"),
    (40, 72, 72, False, "linear"), (64, 4096, 6144, True, "linear"), (17, 4864, 1000, True, "parts"),
    (64, 4864, 896, False, "parts"), (8, 8960, 1536, True, "parts"), (33, 896, 3008, True, "gated"),
    (64, 1536, 17_920, False, "gated"), (16, 2880, 5760, True, "gated"),
]  # fmt: skip


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,inputs,outputs,bias,operation", ODD)
def test_layers_on_gpu(rows: int, inputs: int, outputs: int, bias: bool, operation: str, dtype: torch.dtype):
    """As near as torch to what float64 says; again and with strided weights the same bits."""
    x, weight, *rest = tensors(rows, inputs, outputs, bias, dtype, "cuda")
    b, call = rest[0] if rest else None, OPERATIONS[operation]
    got = launch(operation, x, weight, b)
    assert torch.equal(launch(operation, x, weight, b), got)
    if operation != "gated":
        strided = torch.cat((weight, torch.full_like(weight[:, :8], torch.nan)), dim=-1)[:, :inputs]
        torch.cuda.synchronize()
        assert torch.equal(launch(operation, x, strided, b), got)
    whole = got.sum(0).to(dtype) if operation == "parts" else got
    truth = call(x.double(), weight.double(), b if b is None else b.double(), "torch")
    twin = call(x.contiguous(), weight, b, "torch")
    assert (whole.shape, whole.dtype) == (twin.shape, dtype)
    assert distance(whole, truth) < 1.1 * distance(twin, truth) + 1e-4


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name,operation", [("qkv", "linear"), ("o", "parts"), ("gate_up", "gated"), ("down", "parts"), ("head", "linear")]
)
def test_rows_alone_on_gpu(name: str, operation: str):
    """A row has the same bits alone, among others, next to rows of NaN, and where TMA cannot read it as it lies."""
    outputs, inputs = QWEN[name]
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    x = torch.randn(64, inputs, device="cuda", dtype=torch.bfloat16)
    odd = torch.cat((x[:, :1], x), dim=-1)[:, 1:]
    together = launch(operation, x, weight, None)
    for count in (1, 8, 33, 64):
        for some in (x[:count], odd[:count]):
            assert torch.equal(launch(operation, some, weight, None), together[..., :count, :]), count
    x[0] = torch.nan
    assert torch.equal(launch(operation, x, weight, None)[..., 1:, :], together[..., 1:, :])


@hopper
@pytest.mark.gpu
def test_replays_of_a_graph_on_gpu(monkeypatch):
    """Layers as in a decoder, 200 times: the same bits, whatever still runs when a layer starts, and those of eager."""
    launches: list[int] = []
    launch_ring = kernels.launch_ring
    monkeypatch.setattr(kernels, "launch_ring", lambda *args, **form: launches.append(1) or launch_ring(*args, **form))
    qkv, o, gate_up, down = (
        torch.randn(*QWEN[name], device="cuda", dtype=torch.bfloat16) * QWEN[name][1] ** -0.5
        for name in ("qkv", "o", "gate_up", "down")
    )
    start, norm = torch.randn(33, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()

    def layers() -> Tensor:
        x = residual = start
        for _ in range(3):
            attended = stream_linear(x, qkv, backend="triton")[:, :4096]
            parts = linear_parts(attended, o, backend="triton")
            x, residual = add_rms_norm(parts, residual, norm, 1e-6, backend="triton")
            parts = linear_parts(gated_stream_linear(x, gate_up, backend="triton"), down, backend="triton")
            x, residual = add_rms_norm(parts, residual, norm, 1e-6, backend="triton")
        return x

    with torch.inference_mode():
        eager = layers()
        assert len(launches) == 3 * 4
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            out.fill_(torch.nan)
            graph.replay()
            different += (out != eager).any()
        assert int(different) == 0
