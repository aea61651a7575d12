"""The mixture of experts: the torch form against the formula, the Triton form against the torch form."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.moe import ExpertWeights, moe
from tests.kernels.interpreter import INTERPRETED, run_interpreted

interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

ALPHA, LIMIT = 1.702, 1.5  # a limit that cuts off many
SIZES = (40, 32, 5, 2)  # hidden, features, experts, chosen


def inputs(
    rows: int, hidden: int, features: int, experts: int, *, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """Rows of x and of the logits lie apart, with NaN between them."""
    generator = torch.Generator(device).manual_seed(rows)

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    def apart(x: Tensor) -> Tensor:
        return torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[:, : x.shape[-1]]

    weights = ExpertWeights(
        make(experts, hidden, 2 * features, scale=hidden**-0.5), make(experts, 2 * features),
        make(experts, features, hidden, scale=features**-0.5), make(experts, hidden),
    )  # fmt: skip
    logits = torch.rand(rows, experts, generator=generator, device=device).argsort(dim=1) / 2  # no two are equal
    return apart(make(rows, hidden)), apart(logits.to(dtype)), weights


def formula(x_RH: Tensor, logits_RE: Tensor, w: ExpertWeights, top_k: int) -> Tensor:
    """Row by row in float64."""
    out = torch.zeros(x_RH.shape, dtype=torch.float64)
    w = ExpertWeights(*(t.double() for t in w))
    for row, (x, logits) in enumerate(zip(x_RH.double(), logits_RE.double())):
        top = logits.topk(top_k)
        for share, expert in zip(top.values.softmax(-1), top.indices):
            gate_up = x @ w.gate_up_EHJ[expert] + w.gate_up_bias_EJ[expert]
            gate, up = gate_up[::2].clamp(max=LIMIT), gate_up[1::2].clamp(-LIMIT, LIMIT)
            gated = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            out[row] += share * (gated @ w.down_EFH[expert] + w.down_bias_EH[expert])
    return out


def run(x: Tensor, logits: Tensor, weights: ExpertWeights, top_k: int, backend: str) -> Tensor:
    return moe(x, logits, weights, top_k=top_k, alpha=ALPHA, limit=LIMIT, backend=backend)


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def check(
    rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu", crowd: bool = False
) -> None:
    """As near as torch to float64. `crowd`: all rows prefer the same expert, and some experts get none."""
    *shape, top_k = sizes
    x, logits, weights = inputs(rows, *shape, dtype=dtype, device=device)
    if crowd:
        logits[:, 1] = 60.0
        logits[:, 0] = -60.0
    truth = run(x.double(), logits.double(), ExpertWeights(*(w.double() for w in weights)), top_k, "torch")
    got, twin = run(x, logits, weights, top_k, "triton"), run(x.contiguous(), logits, weights, top_k, "torch")
    assert (got.shape, got.dtype) == (x.shape, dtype)
    assert distance(got, truth) < (3e-6 if dtype == torch.float32 else 1.1 * distance(twin, truth) + 1e-3)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_torch_form_is_the_formula(rows: int):
    *shape, top_k = SIZES
    x, logits, weights = inputs(rows, *shape, dtype=torch.float64)
    assert distance(run(x, logits, weights, top_k, "torch"), formula(x, logits, weights, top_k)) < 1e-12


@pytest.mark.usefixtures("numbers_of_threads")
def test_a_row_alone_has_the_bits_it_has_among_others():
    for *shape, top_k in (SIZES, (40, 1504, 2, 2)):  # few features and many
        x, logits, weights = inputs(40, *shape, dtype=torch.float32)
        together = run(x, logits, weights, top_k, "torch")
        for count in range(1, 40):
            assert torch.equal(run(x[:count], logits[:count], weights, top_k, "torch"), together[:count])


def test_no_rows():
    *shape, top_k = SIZES
    x, logits, weights = inputs(1, *shape, dtype=torch.float32)
    assert run(x[:0], logits[:0], weights, top_k, "torch").shape == (0, 40)


def test_of_equal_logits_the_lower_number_is_preferred():
    *shape, top_k = SIZES
    x, logits, weights = inputs(3, *shape, dtype=torch.float32)
    tied, lower = logits.clone(), logits.clone()
    tied[:], lower[:] = 1.0, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert torch.equal(run(x, tied, weights, top_k, "torch"), run(x, lower, weights, top_k, "torch"))


def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("tests/kernels/test_moe.py")


@interpreter
@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_interpreted_float32(rows: int, crowd: bool, numpy_scalars):
    check(rows, SIZES, torch.float32, crowd=crowd)


@interpreter
@pytest.mark.parametrize("rows", [1, 9])
def test_interpreted_bfloat16(rows: int, numpy_scalars, bfloat16_products):
    check(rows, (64, 32, 4, 4), torch.bfloat16)


@interpreter
def test_interpreted_many_rows(numpy_scalars, bfloat16_products, monkeypatch):
    """More rows than the router takes in a turn, in the highest tiles."""
    monkeypatch.setattr("peagle.kernels.moe_triton._ROUTED", 64)
    check(150, (16, 16, 2, 2), torch.bfloat16)
    check(150, (16, 16, 3, 1), torch.bfloat16, crowd=True)


@interpreter
def test_interpreted_equal_logits_and_no_rows(numpy_scalars):
    *shape, top_k = SIZES
    x, logits, weights = inputs(3, *shape, dtype=torch.float32)
    logits[:] = 1.0
    torch.testing.assert_close(run(x, logits, weights, top_k, "triton"), run(x, logits, weights, top_k, "torch"))
    assert run(x[:0], logits[:0], weights, top_k, "triton").shape == (0, 40)


@interpreter
def test_interpreted_rows_of_nan_spoil_no_others(numpy_scalars):
    *shape, top_k = SIZES
    x, logits, weights = inputs(6, *shape, dtype=torch.float32)
    clean = run(x, logits, weights, top_k, "triton")
    x, logits = x.clone(), logits.clone()
    x[0], logits[0] = torch.nan, torch.nan
    assert torch.equal(run(x, logits, weights, top_k, "triton")[1:], clean[1:])


GPT_OSS = (2880, 2880, 32, 4)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 64, 200, 512, 1500])
def test_gpt_oss_sizes_on_gpu(rows: int, crowd: bool):
    check(rows, GPT_OSS, torch.bfloat16, "cuda", crowd)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_odd_sizes_on_gpu(rows: int, dtype: torch.dtype):
    check(rows, (200, 72, 5, 2), dtype, "cuda")
    check(rows, (96, 48, 128, 4), dtype, "cuda")


def check_rows_keep_their_bits(x: Tensor, logits: Tensor, weights: ExpertWeights, top_k: int) -> None:
    """64 rows, among as few of them per expert that tiles are equally high."""
    together = run(x, logits, weights, top_k, "triton")
    for count in (1, 2, 8, 33):
        assert torch.equal(run(x[:count], logits[:count], weights, top_k, "triton"), together[:count])
    for row in range(0, 64, 7):
        assert torch.equal(run(x[row : row + 1], logits[row : row + 1], weights, top_k, "triton")[0], together[row])


def check_graph(x: Tensor, logits: Tensor, weights: ExpertWeights, top_k: int) -> None:
    """A captured call computes what its inputs hold when it is replayed, whichever experts they choose."""
    x, logits = x.clone(), logits.clone()
    run(x, logits, weights, top_k, "triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, logits, weights, top_k, "triton")
    other = torch.randn_like(x), logits.flip(1)
    x.copy_(other[0]), logits.copy_(other[1])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, run(*other, weights, top_k, "triton"))


@pytest.mark.gpu
@gpu
def test_a_row_keeps_its_bits_on_gpu():
    *shape, top_k = GPT_OSS
    check_rows_keep_their_bits(*inputs(64, *shape, dtype=torch.bfloat16, device="cuda"), top_k)


@pytest.mark.gpu
@gpu
def test_a_graph_replays_with_other_routing():
    *shape, top_k = GPT_OSS
    check_graph(*inputs(8, *shape, dtype=torch.bfloat16, device="cuda"), top_k)
