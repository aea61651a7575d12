"""Top-k, top-p and min-p in the sampling kernels: they keep what the sort of the torch twin keeps."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.sample import sample
from peagle.sampling import RowSampling, filter_threshold, sample_tokens
from tests.kernels.hopper import compile_for_hopper
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


def sampling_with(temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float], device: str):
    """Rows of the given parameters."""
    values = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    tensors = {name: torch.tensor(numbers, device=device) for name, numbers in values.items()}
    rows = sampling_of(len(top_k), device)
    return replace(rows, top_k=torch.tensor(top_k, device=device), filtered=True, **tensors)


def wrong_thresholds(logits: Tensor, rows: RowSampling) -> list[int]:
    """Rows whose threshold is not the twin's bit for bit, where it is no less than every logit of the row."""
    scaled = logits.float() / rows.temperature[:, None]
    least = scaled.amin(1)
    expected = torch.maximum(filter_threshold(scaled, rows.top_k, rows.top_p, rows.min_p), least)
    got = torch.maximum(filter_threshold_triton(logits, rows), least)
    return (expected != got).nonzero()[:, 0].tolist()


def rows_of_all_kinds(vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """Peaked, normal, straight, flat, of two values, mostly forbidden, all but one forbidden, cold and hot rows."""
    g = torch.Generator().manual_seed(vocab)
    normal = torch.randn(8, vocab, generator=g)
    logits = torch.stack(
        (
            normal[0] * 6,
            normal[1],
            torch.linspace(-3.0, 5.0, vocab)[torch.randperm(vocab, generator=g)],
            torch.full((vocab,), -1.5),
            torch.where(normal[2] > 1.0, 2.0, -0.0),
            (normal[3] * 4).masked_fill(torch.rand(vocab, generator=g) > 12 / vocab, -torch.inf),
            (normal[4] * 4).masked_fill(torch.arange(vocab) != vocab // 2, -torch.inf),
            normal[5] * 1e-3,
            normal[6] * 300,
        )
    )
    return logits.to(device, dtype)


def check_every_path(vocab: int, dtype: torch.dtype, device: str, most: int) -> None:
    """All kinds of rows with all kinds of filters, at most `most` rows of each kind, and each of them alone."""
    rank, room = sample_filter_triton._GROUPS * 3 // 4, sample_filter_triton._ROOM
    top_k = (0, 1, 5, rank, rank + 1, room, room + 1, vocab - 1, vocab, vocab + 5)
    kinds = list(product(top_k, (1.0, 1e-6, 0.5, 0.9, 0.9999999), (0.0, 0.01, 1.0), (1e-5, 0.8, 100.0)))
    g = torch.Generator().manual_seed(vocab)
    for logits in rows_of_all_kinds(vocab, dtype, device):
        chosen = [kinds[i] for i in torch.randperm(len(kinds), generator=g)[:most].tolist()]
        k, p, min_p, temperature = (list(values) for values in zip(*chosen, strict=True))
        rows = sampling_with(temperature, k, p, min_p, device)
        assert [chosen[i] for i in wrong_thresholds(logits.repeat(len(chosen), 1), rows)] == []
    assert torch.equal(
        filter_threshold_triton(logits[None], rows_of(rows, slice(1))),
        filter_threshold_triton(logits.repeat(most, 1), rows)[:1],
    )


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
@pytest.mark.parametrize("blocks", ["large", "small"])
def test_interpreted_extremes(request, blocks: str):
    if blocks == "small":
        request.getfixturevalue("small")
    check_extremes(80, "cpu")
    check_nucleus_of_the_rest("cpu")


@pytest.fixture
def small(monkeypatch):
    """Few groups and little room, so that short rows take every path."""
    for name, value in {"_BLOCK": 64, "_GROUPS": 32, "_ROOM": 64, "_PROGRAMS": 6}.items():
        monkeypatch.setattr(sample_filter_triton, name, value)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_interpreted_every_path(dtype: torch.dtype):
    check_every_path(203, dtype, "cpu", most=3)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "small")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    logits=st.lists(st.one_of(st.just(-torch.inf), st.floats(-30, 30, width=16)), min_size=1, max_size=120),
    repeats=st.integers(1, 3),
    top_k=st.integers(0, 130),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    temperature=st.floats(0.01, 10.0),
)
def test_interpreted_any_row(logits, repeats, top_k, top_p, min_p, temperature):
    rows = sampling_with([temperature], [top_k], [top_p], [min_p], "cpu")
    row = torch.tensor([[*logits, 30.0] * repeats])
    assert wrong_thresholds(row, rows) == []
    assert wrong_thresholds(row, replace(rows, min_p=None)) == []


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_usual_rows_are_read_twice(monkeypatch):
    """No row is searched as a whole if its likely tokens are few, top-k is small, or a grammar leaves few tokens."""
    searched = []
    weigh = sample_filter_triton._weigh
    monkeypatch.setattr(sample_filter_triton, "_weigh", lambda *args: searched.append(1) or weigh(*args))
    peaked, normal, straight, flat, _two, forbidden, single, *_others = rows_of_all_kinds(5000, torch.bfloat16, "cpu")
    logits = torch.stack((peaked, peaked, normal, straight, forbidden, forbidden, single, flat, flat))
    rows = sampling_with(
        [0.8] * 9, [50, 0, 50, 1536, 50, 0, 50, 0, 0], [0.9, 0.95, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.5, 0.0], "cpu",
    )  # fmt: skip
    assert wrong_thresholds(logits, rows) == []
    assert not searched
    assert wrong_thresholds(flat[None], sampling_with([1.0], [0], [0.9], [0.0], "cpu")) == []
    assert searched


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("dtype,shift", [("*bf16", 16), ("*fp32", 0)])
@pytest.mark.parametrize("parts", [1, 64])
def test_compiles_for_hopper_without_a_gpu(dtype: str, shift: int, parts: int):
    """Nothing lives in local memory, programs share a multiprocessor, and only places to write to are atomic."""
    floats = ("maxima_RG", "collected_RC", "bounds_R2", "threshold_R", "temperature_R", "top_p_R", "log_min_p_R")
    kinds = dict.fromkeys(floats, "*fp32") | {"top_k_R": "*i64", "mass_R": "*i64", "count_R": "*i32", "vocab": "i32"}
    constants = {
        "MIN_P": True,
        "GROUPS": min(1024 * parts, 2048),
        "RANK": 768,
        "ROOM": 4096,
        "SHIFT": shift,
        "PARTS": parts,
        "BLOCK": 1024,
    }
    kernels = sample_filter_triton
    for kernel, warps, atomics in (
        (kernels._maxima_of_groups, 4, 0),
        (kernels._collect, 4, 2),
        (kernels._narrow, 8, 0),
    ):
        named = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compiled = compile_for_hopper(kernel, kinds | {"logits_RV": dtype}, warps, **named)
        assert ".local" not in compiled.asm["ptx"]
        assert compiled.asm["ptx"].count("atom.") == atomics
        assert compiled.metadata.shared < 16 << 10


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "small")
@pytest.mark.parametrize("programs", [1, 12, 100])
def test_interpreted_any_split(monkeypatch, programs: int):
    """From a program per row to one per block of columns: not a bit of the threshold changes."""
    logits, rows = peaked_logits(6, 500, torch.bfloat16, "cpu"), filtered_sampling(6, 500, "cpu")
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
    if vocab > 1:
        check_every_path(vocab, dtype, "cuda", most=40)
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
