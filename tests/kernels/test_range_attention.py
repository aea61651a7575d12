"""Range attention: the torch twin against the formula, the Triton form against the twin, gradients included.

Triton decides at import whether it interprets, so its CPU tests run in a process of their own.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels.range_attention import KeyRanges, range_attention, range_attention_ref
from tests.kernels.interpreter import INTERPRETED, run_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

# Relative error (2-norm) of the output and of each gradient.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """Ranges of R rows over P context and C chain keys; `chain` is None where there is one source only."""

    context: KeyRanges
    context_keys: int
    chain: KeyRanges | None = None
    chain_keys: int = 0

    @property
    def rows(self) -> int:
        return len(self.context.lo_R)


def _ranges(lo: list[int] | Tensor, hi: list[int] | Tensor) -> KeyRanges:
    return KeyRanges(torch.as_tensor(lo, dtype=torch.int32), torch.as_tensor(hi, dtype=torch.int32))


def causal_case(documents: list[int], padding: int) -> Case:
    """Depth-0 rows of packed documents: causal within each, then padding rows (which are unseen keys too)."""
    length = sum(documents) + padding
    start = torch.repeat_interleave(torch.tensor([0, *documents]).cumsum(0)[:-1], torch.tensor(documents))
    lo, hi = torch.full((length,), length), torch.full((length,), length)
    lo[: sum(documents)], hi[: sum(documents)] = start, torch.arange(1, sum(documents) + 1)
    return Case(_ranges(lo, hi), length)


def mask_row_case(documents: list[int], depths: int, padding: int, window: int | None = None, seed: int = 0) -> Case:
    """Mask rows of packed documents: each anchor keeps a random number of depths; `padding` rows and 3 unseen keys."""
    rng = torch.Generator().manual_seed(seed)
    lo, hi, chain_lo, chain_hi, start = [], [], [], [], 0
    for length in documents:
        for anchor in range(start, start + length - 1):
            kept = int(torch.randint(0, depths, (1,), generator=rng))
            for depth in range(1, min(kept, start + length - 1 - anchor) + 1):
                row = len(lo)
                lo.append(start if window is None else max(start, anchor + depth - window + 1))
                hi.append(anchor + 1)
                chain_lo.append(row - depth + 1)
                chain_hi.append(row + 1)
        start += length
    keys, rows = start + 3, len(lo) + padding
    context = _ranges(lo + [keys] * padding, hi + [keys] * padding)
    return Case(context, keys, _ranges(chain_lo + [rows] * padding, chain_hi + [rows] * padding), rows)


def random_case(rows: int, context_keys: int, chain_keys: int, seed: int = 0) -> Case:
    """No order at all: any range, a third of them empty, lo > hi included."""
    rng = torch.Generator().manual_seed(seed)
    edges = [torch.randint(0, n + 1, (rows,), generator=rng) for n in (context_keys, context_keys)]
    chain_edges = [torch.randint(0, n + 1, (rows,), generator=rng) for n in (chain_keys, chain_keys)]
    return Case(_ranges(*edges), context_keys, _ranges(*chain_edges), chain_keys)


CASES = {
    "one row": Case(_ranges([0], [1]), 1),
    "documents": causal_case([40, 1, 23], padding=9),
    "causal": causal_case([110], padding=0),
    "mask rows": mask_row_case([40, 17], 5, padding=7),
    "window": mask_row_case([60], 4, padding=0, window=12),
    "unordered": random_case(55, 61, 40),
    "a chain alone": Case(
        _ranges([0] * 20, [61] * 7 + [0] + [61] * 12), 61, _ranges([*range(20)], [*range(1, 21)]), 20
    ),
    "no keys": Case(_ranges([0] * 5, [0] * 5), 4),
}


def _visible(ranges: KeyRanges, keys: int) -> Tensor:
    return torch.tensor([[lo <= key < hi for key in range(keys)] for lo, hi in zip(*_lists(ranges))]).view(-1, keys)


def _lists(ranges: KeyRanges) -> tuple[list[int], list[int]]:
    return ranges.lo_R.tolist(), ranges.hi_R.tolist()


def _outside(visible: Tensor) -> Tensor:
    seen = visible.any(0).int()
    return (seen.cumsum(0) == 0) | (seen.flip(0).cumsum(0).flip(0) == 0)


def make_inputs(case: Case, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v (slices of one wide projection), k, v, and the gradient of the output.

    What may be NaN is: q and gradient of blind rows, keys and values before the first and after the last seen one.
    """
    width = heads + 2 * kv_heads
    rows = max(case.rows, case.context_keys)
    wide, chain = torch.randn(rows, width, dim), torch.randn(case.chain_keys, 2 * kv_heads, dim)
    dout = torch.randn(case.rows, heads, dim)
    seen_context = _visible(case.context, case.context_keys)
    blind = ~seen_context.any(1)
    if case.chain is not None:
        seen_chain = _visible(case.chain, case.chain_keys)
        blind &= ~seen_chain.any(1)
        chain[_outside(seen_chain)] = torch.nan
    wide[: case.rows, :heads][blind] = torch.nan
    dout[blind] = torch.nan
    wide[: case.context_keys, heads:][_outside(seen_context)] = torch.nan
    wide, chain, dout = (x.to(device, dtype) for x in (wide, chain, dout))
    q = wide[: case.rows, :heads]
    k, v = wide[: case.context_keys, heads:].split(kv_heads, 1)
    sources = [k, v] if case.chain is None else [k, v, *chain.split(kv_heads, 1)]
    return [q, *sources, dout]


def run(case: Case, inputs: list[Tensor], attend) -> list[Tensor]:
    """Output and gradients of q and of each source's keys and values."""
    *tensors, dout = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    device = dout.device
    context = KeyRanges(case.context.lo_R.to(device), case.context.hi_R.to(device))
    sources = [leaves[1], leaves[2], context]
    if case.chain is not None:
        sources += [*leaves[3:], KeyRanges(case.chain.lo_R.to(device), case.chain.hi_R.to(device))]
    out = attend(leaves[0], *sources)
    gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    return [out.detach(), *gradients]


def formula(q: Tensor, *sources) -> Tensor:
    """The two parts, each with its own softmax, merged by log-sum-exp; one row and head at a time."""
    out, group = q.masked_fill(torch.ones_like(q, dtype=torch.bool), 0), q.shape[1] // sources[0].shape[1]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            parts = []
            for k, v, ranges in zip(*(iter(sources),) * 3):
                seen = slice(int(ranges.lo_R[row]), max(int(ranges.lo_R[row]), int(ranges.hi_R[row])))
                scores = k[seen, head // group] @ q[row, head] * q.shape[2] ** -0.5
                if len(scores):
                    parts.append((scores.softmax(0) @ v[seen, head // group], scores.logsumexp(0)))
            if parts:
                total = torch.stack([lse for _, lse in parts]).logsumexp(0)
                out[row, head] = sum(part * (lse - total).exp() for part, lse in parts)
    return out


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, x, y in zip(("out", "dq", "dk", "dv", "dk chain", "dv chain"), actual, expected):
        assert x.isfinite().all(), name
        # A gradient may be zero: that of q in a row with a single key is.
        error = (x.double() - y.double()).norm() / y.double().norm().clamp(min=1)
        assert error <= tolerance, f"{name}: relative error {float(error)}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("heads,kv_heads,dim", [(6, 2, 8), (2, 2, 5)])
def test_twin_is_the_formula(case: Case, heads: int, kv_heads: int, dim: int):
    inputs = make_inputs(case, heads, kv_heads, dim, torch.float64, "cpu")
    actual = run(case, inputs, range_attention)
    assert_close(actual, run(case, inputs, formula), TOLERANCE[torch.float64])


def test_gradients_numerically():
    case = mask_row_case([7], 4, padding=0)
    q, k, v, chain_k, chain_v, _ = make_inputs(case, 2, 1, 4, torch.float64, "cpu")
    leaves = [x.nan_to_num().requires_grad_() for x in (q, k, v, chain_k, chain_v)]

    def attend(q, k, v, chain_k, chain_v):
        return range_attention_ref(q, k, v, case.context, chain_k, chain_v, case.chain)

    assert torch.autograd.gradcheck(attend, leaves)


def test_blind_rows_give_zero():
    case = causal_case([5], padding=4)
    out, dq, dk, dv = run(case, make_inputs(case, 2, 1, 8, torch.float32, "cpu"), range_attention)
    for x in (out, dq, dk, dv):
        assert (x[5:] == 0).all()
        assert (x[:5] != 0).any()


def test_no_rows_or_no_keys():
    empty = _ranges([], [])
    q, k = torch.randn(0, 2, 16), torch.randn(3, 1, 16)
    assert range_attention(q, k, k, empty).shape == (0, 2, 16)
    q, k = torch.randn(3, 2, 16), torch.randn(0, 1, 16)
    assert (range_attention(q, k, k, _ranges([0] * 3, [0] * 3)) == 0).all()


def test_wrong_backends_are_named():
    q, ranges = torch.randn(1, 1, 16), _ranges([0], [1])
    with pytest.raises(PeagleError, match="expected 'auto', 'torch' or 'triton'"):
        range_attention(q, q, q, ranges, backend="cuda")
    with pytest.raises(PeagleError, match="head dim 80"):
        range_attention(*(torch.randn(1, 1, 80),) * 3, ranges, backend="triton")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


def triton_form(*arguments) -> Tensor:
    return range_attention(*arguments, backend="triton")


def compare(case: Case, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """The Triton form against the twin in float64 on the same (rounded) inputs."""
    inputs = make_inputs(case, heads, kv_heads, dim, dtype, device)
    expected = run(case, [x.double() for x in inputs], range_attention_ref)
    assert_close(run(case, inputs, triton_form), expected, TOLERANCE[dtype])


def set_sizes(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    from peagle.kernels import range_attention_backward_triton, range_attention_triton

    sizes = range_attention_triton.LaunchSizes(rows, keys, 4, 2)
    for module in (range_attention_triton, range_attention_backward_triton):
        monkeypatch.setattr(module, "launch_sizes", lambda *_: sizes)
    monkeypatch.setattr(range_attention_backward_triton, "_SCANNED_ROWS", 32)  # several turns, even of few rows


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize(
    "name,rows,keys", [*((name, 16, 32) for name in CASES), ("causal", 32, 16), ("mask rows", 32, 16)]
)
def test_interpreted(monkeypatch, name: str, rows: int, keys: int):
    set_sizes(monkeypatch, rows, keys)
    compare(CASES[name], 2, 1, 16, torch.float32, "cpu")


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("heads,kv_heads,dim", [(3, 1, 32), (8, 1, 16), (2, 2, 64)])
def test_interpreted_heads(heads: int, kv_heads: int, dim: int):
    compare(mask_row_case([30], 4, padding=3), heads, kv_heads, dim, torch.float32, "cpu")
    compare(causal_case([40], padding=3), heads, kv_heads, dim, torch.float32, "cpu")


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_within_a_compiled_graph():
    case = mask_row_case([20], 4, padding=3)
    inputs = make_inputs(case, 2, 1, 16, torch.float32, "cpu")
    compiled = torch.compile(triton_form, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(run(case, inputs, compiled), run(case, inputs, triton_form), 0)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (4, 4, 128), (8, 1, 64), (8, 1, 128)])
@pytest.mark.parametrize(
    "case",
    [
        *CASES.values(),
        causal_case([700, 300, 1], padding=23),
        mask_row_case([400, 77], 8, padding=50),
        mask_row_case([500], 8, padding=0, window=130),
        random_case(300, 250, 280),
    ],
    ids=[*CASES, "long documents", "long mask rows", "long window", "long unordered"],
)
def test_on_gpu(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, case: Case):
    compare(case, heads, kv_heads, dim, dtype, "cuda")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_head_dims_on_gpu(dtype: torch.dtype, dim: int):
    compare(mask_row_case([200, 77], 8, padding=50), 4, 2, dim, dtype, "cuda")


@gpu
@pytest.mark.gpu
def test_offsets_past_two_billion_on_gpu():
    """The last rows of a tensor of more than 2^31 elements, against the same rows alone."""
    torch.manual_seed(0)
    heads, dim, rows, few = 64, 64, 530_000, 100
    q = torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device="cuda")
    dout = torch.zeros_like(q)
    q[-few:].normal_()
    dout[-few:].normal_()
    k, v = (x.requires_grad_() for x in torch.randn(2, 32, 8, dim, dtype=torch.bfloat16, device="cuda"))
    results = []
    for part in (slice(None), slice(-few, None)):
        q_part = q[part].requires_grad_()
        ranges = KeyRanges(*(torch.full((len(q_part),), x, dtype=torch.int32, device="cuda") for x in (0, 32)))
        out = range_attention(q_part, k, v, ranges)
        dq, dk, dv = torch.autograd.grad(out, (q_part, k, v), dout[part])
        results.append([out.detach()[-few:].float(), dq[-few:].float(), dk.float(), dv.float()])
    assert_close(*results, TOLERANCE[torch.bfloat16])


@gpu
@pytest.mark.gpu
def test_compiles_into_one_graph_on_gpu():
    case = mask_row_case([100], 8, padding=5)
    inputs = make_inputs(case, 4, 2, 64, torch.bfloat16, "cuda")

    def attend(*arguments):
        return range_attention(*arguments) * 2

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    assert_close(run(case, inputs, compiled), run(case, inputs, attend), TOLERANCE[torch.bfloat16])
