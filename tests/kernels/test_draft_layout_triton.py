"""The layout kernel equals its torch twin exactly, on random batches of decodes, prompt chunks and padding."""

from dataclasses import fields
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle.kernels.draft_layout import LayoutSizes, draft_layout, kv_slots
from tests.kernels.interpreter import INTERPRETED, run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
once = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Rows of a request, how many of them are kept, position of the first, and whether it is padding.
REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 11), st.integers(0, 60) | st.just(2**33), st.booleans()),
    min_size=1,
    max_size=5,
)


def compare(k: int, requests: list, seed: int, device: str, padded: bool = True) -> None:
    """Every field, integers of a slice that begins anywhere, tables of which only some columns count."""
    block, limit = 4, 48
    rng = np.random.default_rng(seed)
    rows = np.array([r for r, *_ in requests])
    start = np.concatenate(([0], np.cumsum(rows)))
    kept = np.array([min(kept, rows - 1) for rows, kept, *_ in requests])
    arrays = (
        rng.integers(0, 90, start[-1]),
        np.concatenate([first + np.arange(r) for r, _, first, _ in requests]),
        rng.integers(0, 90, len(requests)),
        start,
        start[:-1] + kept,
    )
    offset = int(rng.integers(0, 3))
    packed = torch.from_numpy(np.concatenate((np.zeros(offset, np.int64), *arrays))).to(device)
    inputs = packed[offset:].split([len(a) for a in arrays])
    tables = torch.from_numpy(rng.integers(0, 2**34, (len(requests), limit // block + 3)))[:, :-3].to(device)
    slots = torch.tensor([-1 if padding else i for i, (*_, padding) in enumerate(requests)], device=device)
    sizes = LayoutSizes(2**40, k, int(start[-1]) + len(requests) * (k - 1), block, limit)
    expected, got = (
        draft_layout(*inputs, tables, sizes, slots if padded else None, backend=backend)
        for backend in ("torch", "triton")
    )
    for field in fields(expected):
        want, have = getattr(expected, field.name), getattr(got, field.name)
        assert want.dtype == have.dtype, field.name
        assert torch.equal(want, have), field.name
    request = torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(rows)).to(device)
    arguments = (tables, request, inputs[1], block, limit)
    assert torch.equal(kv_slots(*arguments, backend="triton"), kv_slots(*arguments, backend="torch"))


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@settings(once, max_examples=120)
@given(st.integers(1, 8), REQUESTS, st.integers(0, 2**31), st.booleans())
def test_interpreted(k: int, requests: list, seed: int, padded: bool):
    compare(k, requests, seed, "cpu", padded)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("k", range(1, 9))
def test_interpreted_every_accept_pattern(k: int):
    """A request for every number of accepted drafts, one that ends at the length limit, and a long prompt's chunk."""
    decodes = [(k + 1, accepted, 48 - k - 1 + accepted, False) for accepted in range(k + 1)]
    compare(k, [*decodes, (70, 69, 0, False), (1100, 1099, 5, False)], k, "cpu")


def test_padding_is_dead_and_changes_nothing_else():
    """The same request with and without padding beside it; nothing of the padding is written or looked at."""

    def lay_out(count: int) -> dict:
        layout = draft_layout(
            torch.tensor([5, 6, 7] * count), torch.tensor([9, 10, 11] * count), torch.tensor([8] * count),
            torch.arange(count + 1) * 3, torch.arange(count) * 3 + 1, torch.arange(8).expand(count, 8),
            LayoutSizes(99, 3, 5 * count, 2, 16), torch.tensor([4, -1][:count]),
        )  # fmt: skip
        return {f.name: getattr(layout, f.name) for f in fields(layout)}

    alone, beside = lay_out(1), lay_out(2)
    for name, value in alone.items():
        assert torch.equal(beside[name][: len(value)], value), name
    assert beside["is_rejected"][5:].all()
    assert not beside["is_masked"][5:].any()
    assert beside["slots"][5:].eq(-1).all()
    assert beside["source_rows"][5:].eq(-1).all()
    assert beside["last_keys"][5:].eq(-1).all()
    for name in ("input_ids", "positions"):
        assert not beside[name][5:].any()
    assert beside["sample_rows"].tolist() == [1, 2, 3, 6, 7, 8]


@gpu
@pytest.mark.gpu
@settings(once, max_examples=500)
@given(st.integers(1, 8), REQUESTS, st.integers(0, 2**31), st.booleans())
def test_on_gpu(k: int, requests: list, seed: int, padded: bool):
    compare(k, requests, seed, "cuda", padded)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("k", range(1, 9))
def test_large_batches_on_gpu(k: int):
    decodes = [(k + 1, i % (k + 1), i, i % 7 == 0) for i in range(500)]
    compare(k, [*decodes, (8000, 7999, 0, False)], k, "cuda")
