"""Loss, argmax and in-place gradient of both forms against autograd on the formula, in float64.

Triton decides at import whether it interprets, so the CPU tests of the kernel run in a process of their own.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.draft_loss import HardLabels, Labels, LossMix, SoftLabels, draft_loss, row_summary
from tests.kernels.interpreter import INTERPRETED, run_interpreted

has_triton = find_spec("triton") is not None
interpreter = pytest.mark.skipif(not INTERPRETED or not has_triton, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(
    INTERPRETED or not has_triton or not torch.cuda.is_available(), reason="needs a CUDA device and triton"
)
KINDS = pytest.mark.parametrize("kind", ["soft", "hard"])
TV_WEIGHTS = pytest.mark.parametrize("tv_weight", [0.0, 0.9, 1.0])

ROWS, TARGETS = 23, 9
# Relative error of the whole gradient (2-norm) and of the losses: gradients are rounded to the logits' type.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-3}


def make(kind: str, vocab: int, dtype: torch.dtype, device: str, spread: float = 3.0) -> tuple[Tensor, Tensor, Labels]:
    """(logits, scale, labels). Rows 2 and 7 have scale 0 and hold NaN, as does what they should predict."""
    g = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(ROWS, vocab, generator=g, dtype=torch.float64)
    scale = torch.rand(ROWS, generator=g) + 0.1
    target = spread * torch.randn(TARGETS, vocab, generator=g, dtype=torch.float64)
    index = torch.randint(0, TARGETS - 1, (ROWS,), generator=g).sort().values
    token = torch.randint(0, vocab, (ROWS,), generator=g)
    token[5] = -1
    logits[2], logits[7], scale[[2, 7]], index[[2, 7]] = torch.nan, torch.inf, 0.0, TARGETS - 1
    target[-1] = torch.nan
    # The same numbers everywhere: the reference sees what rounding left of them.
    logits, target = logits.to(device, dtype), target.to(device, dtype)
    if kind == "hard":
        return logits, scale.to(device), HardLabels(token.to(device))
    lse = target.to(torch.promote_types(dtype, torch.float32)).logsumexp(-1)
    return logits, scale.to(device), SoftLabels(target, lse, index.to(device))


def expect(logits: Tensor, scale: Tensor, labels: Labels, tv_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, argmax, gradient) by autograd in float64."""
    z = logits.double().masked_fill((scale == 0)[:, None], 0.0).requires_grad_()
    if isinstance(labels, HardLabels):
        p, live = F.one_hot(labels.token_C.clamp(min=0), z.shape[1]).double(), (scale != 0) & (labels.token_C >= 0)
    else:
        p, live = labels.logits_TU.double().softmax(-1).nan_to_num(0.5)[labels.index_C], scale != 0
    ce = z.logsumexp(-1) - (p * z).sum(-1)
    loss = torch.where(live, (1 - tv_weight) * ce + tv_weight * 0.5 * (p - z.softmax(-1)).abs().sum(-1), 0.0)
    (gradient,) = torch.autograd.grad((loss * scale).sum(), z)
    return loss.detach(), z.argmax(-1).where(scale != 0, -1), gradient


def check(
    kind: str, vocab: int, dtype: torch.dtype, device: str, backend: str, tv_weight: float, spread: float = 3.0
) -> None:
    """Compare loss, argmax and gradient with `expect`, for a block inside of a larger buffer of NaN."""
    logits, scale, labels = make(kind, vocab, dtype, device, spread)
    loss, top, gradient = expect(logits, scale, labels, tv_weight)
    buffer = torch.full((ROWS + 2, vocab), torch.nan, dtype=dtype, device=device)
    block = buffer[1:-1]
    block.copy_(logits)
    quiet = draft_loss(block, scale, labels, LossMix(tv_weight), want_grad=False, backend=backend)
    torch.testing.assert_close(block, logits, rtol=0, atol=0, equal_nan=True)
    result = draft_loss(block, scale, labels, LossMix(tv_weight), backend=backend)
    tolerance = TOLERANCE[dtype] * max(1.0, spread / 3)  # the exponent of exp is rounded
    assert (result.top_C == top).all()
    assert (quiet.top_C == top).all()
    assert (quiet.loss_C == result.loss_C).all()
    assert (result.loss_C - loss).norm() <= min(tolerance, 1e-5) * loss.norm() + 1e-6
    assert (block - gradient).norm() <= tolerance * gradient.norm() + 1e-12
    assert not block[[2, 7]].any()
    if kind == "hard":
        assert not block[5].any()
    assert buffer[[0, -1]].isnan().all()


def check_summary(vocab: int, dtype: torch.dtype, device: str, backend: str) -> None:
    logits = make("hard", vocab, dtype, device)[0][8:]
    z = logits.double()
    summary = row_summary(logits, backend=backend)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(summary.lse_T.double(), z.logsumexp(-1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(summary.entropy_T.double(), entropy, rtol=tolerance, atol=tolerance)
    assert (summary.top_T == z.argmax(-1)).all()


def check_ties(vocab: int, device: str, backend: str) -> None:
    """The first of equal logits wins, within a block and across blocks; the gradient of p = q is 0."""
    logits = torch.zeros(4, vocab, device=device)
    logits[1, [vocab - 1, vocab // 2]] = 1.0
    logits[2, vocab - 1] = 1.0
    logits[3, 3::5] = 2.0
    expected = [0, vocab // 2, vocab - 1, 3]
    assert row_summary(logits, backend=backend).top_T.tolist() == expected
    labels = SoftLabels(logits.clone(), logits.logsumexp(-1), torch.arange(4, device=device))
    result = draft_loss(logits, torch.ones(4, device=device), labels, LossMix(1.0), backend=backend)
    assert result.top_C.tolist() == expected
    assert result.loss_C.max() < 1e-5
    assert logits.abs().max() < 0.6  # at most q: rounding decides the sign of q - p


@KINDS
@TV_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_twin(kind: str, tv_weight: float, dtype: torch.dtype):
    check(kind, 37, dtype, "cpu", "torch", tv_weight)
    check_summary(37, dtype, "cpu", "torch")


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_twin_is_its_own_gradient(kind: str):
    """Central differences of the loss itself, which know nothing of the formula of the gradient."""
    logits, scale, labels = make(kind, 11, torch.float64, "cpu")
    logits[scale == 0] = 0.0
    gradient = logits.clone()
    draft_loss(gradient, scale, labels, LossMix(0.4), backend="torch")
    for column in range(11):
        step = torch.zeros_like(logits)
        step[:, column] = 1e-6
        up, down = (
            draft_loss(logits + sign * step, scale, labels, LossMix(0.4), want_grad=False, backend="torch").loss_C
            for sign in (1, -1)
        )
        torch.testing.assert_close(scale * (up - down) / 2e-6, gradient[:, column], rtol=1e-6, atol=1e-8)


def test_twin_ties():
    check_ties(64, "cpu", "torch")


def test_a_mixture_of_nothing():
    """No rows; and "auto" on the CPU is the twin."""
    empty = torch.empty(0, 7)
    result = draft_loss(empty, torch.empty(0), HardLabels(torch.empty(0, dtype=torch.int64)), LossMix(0.5))
    assert len(result.loss_C) == len(result.top_C) == len(row_summary(empty).lse_T) == 0


@pytest.mark.skipif(INTERPRETED or not has_triton, reason="this is the process it starts, or no triton")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@KINDS
@TV_WEIGHTS
@pytest.mark.parametrize("vocab", [1, 37, 128, 9001])
def test_interpreted(kind: str, tv_weight: float, vocab: int):
    check(kind, vocab, torch.float32, "cpu", "triton", tv_weight)


@interpreter
@KINDS
def test_interpreted_in_bfloat16_and_with_large_logits(kind: str):
    check(kind, 5003, torch.bfloat16, "cpu", "triton", 0.5)
    check(kind, 5003, torch.float32, "cpu", "triton", 0.5, spread=40.0)


@interpreter
@pytest.mark.parametrize("vocab", [1, 128, 9001])
def test_interpreted_summary(vocab: int):
    check_summary(vocab, torch.float32, "cpu", "triton")
    check_summary(vocab, torch.bfloat16, "cpu", "triton")


@interpreter
def test_interpreted_ties_and_empty_blocks():
    check_ties(64, "cpu", "triton")
    check_ties(9001, "cpu", "triton")
    empty = torch.empty(0, 7)
    labels = HardLabels(torch.empty(0, dtype=torch.int64))
    assert len(draft_loss(empty, torch.empty(0), labels, LossMix(), backend="triton").loss_C) == 0
    assert len(row_summary(empty, backend="triton").lse_T) == 0


@gpu
@pytest.mark.gpu
@KINDS
@TV_WEIGHTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 1000, 49_152, 151_936, 151_937, 201_088])
def test_on_gpu(kind: str, tv_weight: float, dtype: torch.dtype, vocab: int):
    check(kind, vocab, dtype, "cuda", "triton", tv_weight)
    check_summary(vocab, dtype, "cuda", "triton")
    check_ties(max(vocab, 64), "cuda", "triton")


@gpu
@pytest.mark.gpu
def test_offsets_beyond_32_bits_on_gpu():
    """The last rows of a block of more than 2^31 logits, against the same rows on their own."""
    rows, vocab = 10_900, 201_088
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = 3 * torch.randn(2, vocab, device="cuda").bfloat16()
    scale = torch.zeros(rows, device="cuda")
    scale[-2:] = torch.tensor([1.0, 2.0])
    labels = HardLabels(torch.arange(rows, device="cuda"))
    alone = logits[-2:].clone()
    own = draft_loss(alone, scale[-2:], HardLabels(labels.token_C[-2:]), LossMix(0.5))
    result = draft_loss(logits, scale, labels, LossMix(0.5))
    assert (result.loss_C[-2:] == own.loss_C).all()
    assert (result.top_C[-2:] == own.top_C).all()
    assert (logits[-2:] == alone).all()
    assert not logits[:-2].any()
