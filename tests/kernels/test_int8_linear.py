"""Linear layers with a byte for each weight against their definition."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.int8_linear import WORDS, int8_linear, pack_bytes, unpack_bytes
from tests.kernels.hopper import before_the_wait, compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted

kernels = pytest.importorskip("peagle.kernels.int8_linear_triton", reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = [(1, 64, 24), (5, 256, 40), (16, 333, 74), (17, 128, 130), (64, 129, 200)]


def numbers(outputs: int, inputs: int) -> Tensor:
    """All that a byte can be."""
    generator = torch.Generator().manual_seed(inputs)
    return torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)


def check(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: str, backend: str) -> None:
    """Inputs stand apart with NaN between them; those of Triton's form are rounded to float16."""
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    x = torch.cat((x, torch.full_like(x, torch.nan)), dim=1).to(device, dtype)[:, :inputs]
    w, scale = numbers(outputs, inputs), torch.rand(outputs, generator=generator) / 64
    got = int8_linear(x, pack_bytes(w).to(device), scale.to(device), backend=backend).cpu()
    assert (got.shape, got.dtype) == ((rows, outputs), dtype)
    read = x.to(torch.float16) if backend == "triton" else x
    truth = read.double().cpu() @ w.double().T * scale.double()
    # Tensor cores keep fewer bits of their sums than float32 has.
    rounding = {torch.float32: 1e-5 if device == "cuda" else 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    assert (got.double() - truth).norm() / truth.norm() < rounding


@pytest.mark.parametrize("inputs", [1, 64, 65, 128, 200, 576])
def test_words_are_the_numbers(inputs: int):
    w = numbers(9, inputs)
    words = pack_bytes(w)
    assert (words.dtype, words.shape) == (torch.int16, (9, -(-inputs // 128) * WORDS))
    assert torch.equal(unpack_bytes(words, inputs), w)
    low, high = int(words[3, 0]) & 255, int(words[3, 0]) >> 8 & 255
    assert (low - 128, high - 128) == (int(w[3, 0]), int(w[3, WORDS]) if inputs > WORDS else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,inputs,outputs", SIZES)
def test_the_twin(rows: int, inputs: int, outputs: int, dtype: torch.dtype):
    check(rows, inputs, outputs, dtype, "cpu", "torch")


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows,inputs,outputs", SIZES)
def test_interpreted(rows: int, inputs: int, outputs: int, dtype: torch.dtype, monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    check(rows, inputs, outputs, dtype, "cpu", "triton")


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_compiles_for_hopper_without_a_gpu(rows: int):
    """Words come in pieces of 16 bytes, go to tensor cores as 16-bit numbers do, and are asked for before the wait."""
    tile_rows, columns, stages = kernels._tile(rows)
    compiled = compile_for_hopper(
        kernels._int8_tile, {"rows": "i32", "words_OW": "*i16", "scale_O": "*fp32", "x_RI": "*fp16"}, 4, IN=4096,
        OUT=151_936, ALL_WORDS=2048, ROWS=tile_rows, COLUMNS=columns, STEP=WORDS, STAGES=stages, PTX=True,
        EARLY=True,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert all(word in ptx for word in ("wgmma", "cp.async.cg", "ldmatrix", "prmt.b32", "sub.rn.f16x2"))
    assert "and.b16" not in ptx  # Triton's own way to a byte
    assert "cp.async.ca" not in ptx
    before = before_the_wait(ptx)
    assert "prefetch.global.L2" in before
    assert not any(word in before for word in ("ld.global", "cp.async", "st.global"))
    assert compiled.metadata.shared < 113 << 10  # two programs of a multiprocessor


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,inputs,outputs", [(1, 576, 960), (15, 896, 151_936), (56, 4096, 32_000), (64, 1000, 999)]
)
def test_on_gpu(rows: int, inputs: int, outputs: int, dtype: torch.dtype):
    check(rows, inputs, outputs, dtype, "cuda", "triton")
