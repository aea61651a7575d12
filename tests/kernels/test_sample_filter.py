"""Top-k, top-p and min-p in the sampling kernels: they keep what the sort of the torch twin keeps."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from peagle.kernels.sample import sample
from peagle.sampling import RowSampling, filter_threshold, sample_tokens
from tests.kernels.interpreter import INTERPRETED, run_interpreted
from tests.kernels.test_sample import differing, peaked_logits, sampling_of

if find_spec("triton") is not None:
    from peagle.kernels import sample_filter_triton
    from peagle.kernels.sample_filter_triton import filter_threshold_triton

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


def filtered_sampling(count: int, vocab: int, device: str, seed: int = 0) -> RowSampling:
    """Rows with every combination of the three filters, strict and loose, and greedy ones among them."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(count)
    strict = torch.rand(count, generator=g) ** 3
    top_k = torch.where(row % 2 == 0, 1 + (strict * vocab * 1.1).long(), 0)
    top_p = torch.where(row // 2 % 2 == 0, 1e-6 + 0.999 * torch.rand(count, generator=g), 1.0)
    min_p = torch.where(row // 4 % 2 == 0, strict, 0.0)
    rows = sampling_of(count, device, greedy_every=9, seed=seed)
    top_k, top_p, min_p = (values.to(device) for values in (top_k, top_p, min_p))
    return replace(rows, top_k=top_k, top_p=top_p, min_p=min_p, filtered=True)


def kept_otherwise(logits: Tensor, rows: RowSampling) -> int:
    """Tokens of drawn rows that one form keeps and the other drops."""
    scaled = logits.float() / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    expected = scaled < filter_threshold(scaled, rows.top_k, rows.top_p, rows.min_p)[:, None]
    got = scaled < filter_threshold_triton(logits, rows)[:, None]
    return int((expected != got)[rows.temperature > 0].sum())


def check(vocab: int, dtype: torch.dtype, device: str, count: int) -> None:
    """The same tokens stay and the same one is drawn, of contiguous rows and of slices, in a draft vocabulary too."""
    wide, rows = peaked_logits(count, vocab + 5, dtype, device, seed=vocab), filtered_sampling(count, vocab, device)
    ids = torch.arange(vocab, device=device) * 3 + 1
    assert kept_otherwise(wide[:, :vocab], rows) == 0
    assert differing(wide[:, 3 : vocab + 3].contiguous(), rows, ids) == 0
    assert differing(wide[:, 3 : vocab + 3], replace(rows, min_p=None)) == 0


def check_extremes(vocab: int, device: str) -> None:
    """Ties everywhere, both zeros, huge and tiny logits, infinities and NaN."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-3, 3, (32, vocab), generator=g).float().to(device)
    logits[4:8] = 0.0
    logits[4:8, ::2] = -0.0
    logits[8:12] *= 1e30
    logits[12:16] *= 1e-40
    logits[16:20, vocab // 3] = torch.inf
    logits[20:24, ::3] = -torch.inf
    logits[24:28] = -torch.inf
    rows = filtered_sampling(32, vocab, device)
    finite = torch.arange(32, device=device) < 16
    ordinary = replace(rows, temperature=torch.where(finite, rows.temperature, 0.0))
    assert kept_otherwise(logits, ordinary) == 0
    logits[24:, [vocab // 2, vocab - 1]] = torch.nan
    assert differing(logits, rows) == 0
    logits[24:28] = -torch.inf
    assert sample(logits[24:], rows_of(rows, slice(24, 32)), backend="triton").tolist() == [0] * 4 + [vocab // 2] * 4


def rows_of(rows: RowSampling, part: slice) -> RowSampling:
    """Some of the rows."""
    tensors = {
        name: getattr(rows, name)[part] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "indices")
    }
    return RowSampling(**tensors, filtered=rows.filtered)


def check_nucleus_of_the_rest(device: str) -> None:
    """The nucleus is a share of what top-k and min-p keep: half of it here, of flat rows, is less than either."""
    logits = torch.linspace(1.0, 0.0, 200, device=device).repeat(3, 1)
    rows = replace(
        sampling_of(3, device),
        temperature=torch.ones(3, device=device),
        top_k=torch.tensor([20, 0, 60], device=device),
        top_p=torch.full((3,), 0.5, device=device),
        min_p=torch.tensor([0.0, 0.9, 0.8], device=device),
        filtered=True,
    )
    assert kept_otherwise(logits, rows) == 0
    kept = (logits >= filter_threshold_triton(logits, rows)[:, None]).sum(1)
    assert kept.tolist() == [10, 11, 22]


def test_the_twin_draws_what_the_rule_keeps():
    """Seen through `sample`, without Triton: dropped tokens never come, whatever the noise."""
    logits = peaked_logits(200, 60, torch.float32, "cpu")
    rows = filtered_sampling(200, 60, "cpu")
    token = sample(logits, rows, backend="torch")
    scaled = logits / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    threshold = filter_threshold(scaled, rows.top_k, rows.top_p, rows.min_p)
    drawn = rows.temperature > 0
    assert (scaled.gather(1, token[:, None])[:, 0] >= threshold)[drawn].all()
    assert torch.equal(token[~drawn], logits.argmax(-1)[~drawn])
    assert not torch.equal(token, sample_tokens(logits, replace(rows, filtered=False)))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 37, 1100])
def test_interpreted(vocab: int, dtype: torch.dtype):
    check(vocab, dtype, "cpu", count=8)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_extremes():
    check_extremes(80, "cpu")
    check_nucleus_of_the_rest("cpu")


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("programs", [1, 12, 100])
def test_interpreted_any_split(monkeypatch, programs: int):
    """From a program per row to one per block of columns: not a bit of the threshold changes."""
    logits, rows = peaked_logits(6, 1300, torch.float32, "cpu"), filtered_sampling(6, 1300, "cpu")
    expected = filter_threshold_triton(logits[:3], rows_of(rows, slice(3)))
    monkeypatch.setattr(sample_filter_triton, "_PROGRAMS", programs)
    assert torch.equal(filter_threshold_triton(logits, rows)[:3], expected)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1000, 32_000, 151_937, 201_088])
def test_on_gpu(vocab: int, dtype: torch.dtype):
    check(vocab, dtype, "cuda", count=6)
    check(vocab, dtype, "cuda", count=150)
    check_extremes(max(vocab, 64), "cuda")
    check_nucleus_of_the_rest("cuda")


@gpu
@pytest.mark.gpu
def test_in_a_graph_on_gpu():
    """Captured once, replayed with other logits and other parameters; alone and in a crowd a row gets the same."""
    logits, rows = peaked_logits(40, 50_000, torch.bfloat16, "cuda"), filtered_sampling(40, 50_000, "cuda")
    sample(logits, rows, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = sample(logits, rows, backend="triton")
    for seed in range(3):
        logits.copy_(peaked_logits(40, 50_000, torch.bfloat16, "cuda", seed=seed))
        fresh = filtered_sampling(40, 50_000, "cuda", seed=seed)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "indices"):
            getattr(rows, name).copy_(getattr(fresh, name))
        graph.replay()
        assert torch.equal(token, sample(logits, fresh, backend="torch"))
        assert torch.equal(token[5:6], sample(logits[5:6], rows_of(fresh, slice(5, 6)), backend="triton"))
