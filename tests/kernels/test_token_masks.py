"""Masks of grammars: bit by bit, both forms alike."""

from importlib.util import find_spec

import pytest
import torch

from peagle.kernels.sample import sample
from peagle.kernels.token_masks import TokenMasks, num_words
from peagle.sampling import RowSampling
from tests.kernels.interpreter import INTERPRETED, run_interpreted

interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
SLOTS, ROWS = 5, 4


def check(vocab: int, rows: int, backend: str, device: str, dtype: torch.dtype) -> None:
    """Slots 1 and 3 have masks, 0 had one and is free again, the others never had; padding between them."""
    g = torch.Generator().manual_seed(vocab + rows)
    masks = TokenMasks(SLOTS, ROWS, vocab, torch.device(device))
    bits = torch.randint(-(2**31), 2**31, (3, rows, num_words(vocab)), generator=g).to(torch.int32)
    masks.write([3, 0, 1], bits)
    masks.clear(torch.tensor([0], device=device))
    slots = [1, -1, 0, 3, 4]
    logits = torch.randn(len(slots) * rows, vocab + 3, generator=g).to(dtype)[:, :vocab]
    given = logits.to(device)
    got = masks.apply(given, torch.tensor(slots, device=device), backend=backend).cpu()
    assert got.dtype == dtype
    assert torch.equal(given.cpu(), logits)
    written = {3: bits[0], 1: bits[2]}
    for i, slot in enumerate(slots):
        for row in range(rows):
            for token in range(vocab):
                allowed = slot not in written or int(written[slot][row, token // 32]) >> (token % 32) & 1
                want = logits[i * rows + row, token] if allowed else torch.tensor(-torch.inf)
                assert got[i * rows + row, token] == want


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("vocab, rows", [(96, 1), (70, 4), (31, 2)])
def test_torch(vocab: int, rows: int):
    check(vocab, rows, "torch", "cpu", torch.float32)
    check(vocab, rows, "torch", "cpu", torch.bfloat16)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("vocab, rows", [(96, 1), (70, 4), (31, 2)])
def test_interpreted(vocab: int, rows: int):
    check(vocab, rows, "triton", "cpu", torch.float32)


def check_sampling(device: str) -> None:
    """Rows that are mostly forbidden, one of them but for a token, are sampled as in torch."""
    g, vocab = torch.Generator().manual_seed(3), 300
    logits = torch.randn(8, vocab, generator=g) * 3
    logits[torch.rand(8, vocab, generator=g) < 0.95] = -torch.inf
    logits[5] = -torch.inf
    logits[5, 77] = -4.0
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1.0, 0.7, 1.5])
    for filtered in (False, True):
        rows = RowSampling(
            temperature=temperature.to(device),
            top_k=torch.tensor([0, 3, 50, 0, 1, 9, 0, 40]).to(device),
            top_p=torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 0.3, 1.0, 0.95]).to(device),
            seed=torch.arange(8).to(device),
            indices=torch.arange(8).to(device),
            filtered=filtered,
            min_p=torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0, 0.05]).to(device),
        )
        got = sample(logits.to(device), rows, backend="triton").cpu()
        assert torch.equal(got, sample(logits.to(device), rows, backend="torch").cpu())
        assert torch.isfinite(logits[torch.arange(8), got]).all()
    assert got[5] == 77


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_sampling_of_masked_rows():
    check_sampling("cpu")


@gpu
@pytest.mark.gpu
def test_sampling_of_masked_rows_on_gpu():
    check_sampling("cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("vocab, rows", [(96, 1), (5000, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpu(vocab: int, rows: int, dtype: torch.dtype):
    check(vocab, rows, "triton", "cuda", dtype)
