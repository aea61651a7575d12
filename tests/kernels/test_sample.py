"""The sampling kernel picks the tokens of its torch twin: greedy, drawn, in a draft vocabulary, with ties and NaN."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from peagle.kernels.sample import sample
from peagle.sampling import RowSampling, gumbel_noise
from tests.kernels.interpreter import INTERPRETED, run_interpreted

if find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from peagle.kernels import sample_triton
    from peagle.kernels.sample_triton import _gumbel, _noise_keys

    @triton.jit
    def write_noise(
        noise_RV: tl.tensor, seed_R: tl.tensor, index_R: tl.tensor, columns: tl.int32, BLOCK: tl.constexpr
    ) -> None:
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        first_key, second_key = _noise_keys(tl.load(seed_R + row), tl.load(index_R + row))
        noise = _gumbel(column.to(tl.uint32), first_key, second_key)
        tl.store(noise_RV + row * columns + column, noise, mask=column < columns)


pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


def sampling_of(rows: int, device: str, greedy_every: int = 0, seed: int = 0) -> RowSampling:
    """Temperatures from cold to hot, seeds of all 63 bits; every `greedy_every`-th row is greedy."""
    g = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=g) * 1.9 + 0.1
    if greedy_every:
        temperature[::greedy_every] = 0.0
    return RowSampling(
        temperature=temperature.to(device),
        top_k=torch.zeros(rows, dtype=torch.int64, device=device),
        top_p=torch.ones(rows, device=device),
        seed=torch.randint(0, 2**63 - 1, (rows,), generator=g).to(device),
        indices=torch.randint(0, 2**20, (rows,), generator=g).to(device),
        filtered=False,
    )


def peaked_logits(rows: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Rows from flat to so peaked that the noise cannot change the token."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=g) * 8
    return (torch.randn(rows, vocab, generator=g) * spread).to(device, dtype)


def differing(logits: Tensor, rows: RowSampling | None, token_ids: Tensor | None = None) -> int:
    """Rows whose token is not the twin's."""
    expected, got = (sample(logits, rows, token_ids, backend=backend) for backend in ("torch", "triton"))
    assert got.dtype == torch.int64
    return int((expected != got).sum())


def kernel_noise(rows: RowSampling, columns: int) -> Tensor:
    """The kernel's noise itself, [R, columns]."""
    noise = torch.full((len(rows.seed), columns), torch.nan, device=rows.seed.device)
    write_noise[(len(noise),)](noise, rows.seed, rows.indices, columns, BLOCK=triton.next_power_of_2(columns))
    return noise


def check(vocab: int, dtype: torch.dtype, device: str, count: int) -> None:
    """All kinds of rows, contiguous and as a slice of wider rows, in the target's and in a draft vocabulary."""
    wide = peaked_logits(count, vocab + 5, dtype, device, seed=vocab)
    ids = torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(vocab))[:vocab].sort().values.to(device)
    for logits in (wide[:, :vocab], wide[:, 3 : vocab + 3].contiguous()):
        for rows in (None, sampling_of(count, device, greedy_every=3)):
            assert differing(logits, rows) == 0
            assert differing(logits, rows, ids) == 0


def check_extremes(vocab: int, device: str) -> None:
    """The first of equal maxima; NaN beats all, the first one wins; -inf rows; both zeros are equal."""
    logits = torch.zeros(9, vocab, device=device)
    logits[1, [vocab - 1, vocab // 2]] = 1.0
    logits[2, [vocab // 3, vocab - 1]] = torch.nan
    logits[3] = -torch.inf
    logits[4] = torch.inf
    logits[5, 0], logits[5, vocab - 1] = torch.inf, torch.nan
    logits[6] = torch.nan
    logits[7] = -0.0
    logits[7, vocab - 1] = 0.0
    logits[8] = -torch.inf
    logits[8, vocab - 1] = -1e30
    expected = [0, vocab // 2, vocab // 3, 0, 0, vocab - 1, 0, 0, vocab - 1]
    assert sample(logits, None, backend="triton").tolist() == expected
    assert differing(logits, None) == 0
    assert differing(logits, sampling_of(9, device)) == 0
    assert sample(logits, sampling_of(9, device, greedy_every=1), backend="triton").tolist() == expected


def check_same_noise(device: str) -> None:
    """Equal logits leave the choice to the noise alone: a draft vocabulary sees the noise of the target's ids."""
    rows = sampling_of(20, device)
    ids = torch.arange(5, 3000, 7, device=device)
    flat = torch.zeros(20, 3000, device=device)
    hidden = flat.clone()
    hidden[:, ids] = 30.0 * rows.temperature[:, None]
    in_target = sample(hidden, rows, backend="triton")
    assert torch.equal(in_target, sample(flat[:, : len(ids)], rows, ids, backend="triton"))
    assert differing(flat, rows) == 0


def test_float64_goes_to_torch():
    """Whatever the backend: it does not need Triton to be able to run here."""
    logits = peaked_logits(4, 50, torch.float64, "cpu")
    assert torch.equal(sample(logits, None, backend="triton"), logits.argmax(-1))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 37, 2048, 5003])
def test_interpreted(vocab: int, dtype: torch.dtype):
    check(vocab, dtype, "cpu", count=5)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("vocab", [64, 9001])
def test_interpreted_extremes(vocab: int):
    check_extremes(vocab, "cpu")


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_draft_vocabularies_see_the_same_noise():
    check_same_noise("cpu")


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_noise():
    """The kernel's noise is that of the twin up to the last bits of two logarithms (log1p of the interpreter is not
    torch's), which decides none of 10^5 rows of 100 columns, from flat to peaked."""
    keys, columns = 100, 100_000
    rows = sampling_of(keys, "cpu")
    noise = kernel_noise(rows, columns)
    expected = gumbel_noise(rows.seed, rows.indices, torch.arange(columns))
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
    logits = peaked_logits(keys * columns // 100, 100, torch.float32, "cpu")
    logits /= sampling_of(len(logits), "cpu").temperature[:, None]
    assert torch.equal((logits + noise.view(-1, 100)).argmax(-1), (logits + expected.view(-1, 100)).argmax(-1))


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_interpreted_any_split(monkeypatch, parts: int):
    """From a program per row to one per block of columns."""
    monkeypatch.setattr(sample_triton, "_PROGRAMS", 6 * parts)
    assert differing(peaked_logits(6, 5000, torch.float32, "cpu"), sampling_of(6, "cpu", greedy_every=2)) == 0


@interpreter
def test_interpreted_without_rows():
    assert len(sample(torch.empty(0, 7), None, backend="triton")) == 0


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1000, 32_000, 49_152, 151_936, 151_937, 201_088])
def test_on_gpu(vocab: int, dtype: torch.dtype):
    check(vocab, dtype, "cuda", count=23)
    check(vocab, dtype, "cuda", count=600)
    check_extremes(max(vocab, 64), "cuda")
    check_same_noise("cuda")


@gpu
@pytest.mark.gpu
def test_noise_on_gpu():
    """The device's own logarithms: the same bits as torch's."""
    rows = sampling_of(1000, "cuda")
    expected = gumbel_noise(rows.seed, rows.indices, torch.arange(2048, device="cuda"))
    assert torch.equal(kernel_noise(rows, 2048), expected)


@gpu
@pytest.mark.gpu
def test_many_rows_on_gpu():
    """10^5 drawn rows, each from the device's own logarithms."""
    for part in range(10):
        logits = peaked_logits(10_000, 2000, torch.float32, "cuda", seed=part)
        assert differing(logits, sampling_of(10_000, "cuda", greedy_every=5, seed=part)) == 0


@gpu
@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_gpu():
    rows, vocab = 10_900, 201_088
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-1, 77] = 1.0
    assert sample(logits, None)[-2:].tolist() == [0, 77]
