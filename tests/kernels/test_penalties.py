"""Penalties and logit bias: the formula token by token, drafts counted as if emitted, both forms alike."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from peagle.kernels.penalties import TokenHistory
from peagle.sampling import SamplingParams
from tests.kernels.interpreter import INTERPRETED, run_interpreted

interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

# Every kind of request: plain ones between them, and one with all there is.
KINDS: tuple[dict, ...] = (
    {"repetition_penalty": 1.3}, {}, {"frequency_penalty": 0.7}, {"presence_penalty": -1.1},
    {"repetition_penalty": 0.4}, {"logit_bias": {0: -100.0, 3: 2.5}}, {},
    {"repetition_penalty": 1.9, "frequency_penalty": -0.3, "presence_penalty": 0.6, "logit_bias": {1: 4.0, 2: -0.5}},
)  # fmt: skip


def penalised_by_hand(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The definition, one token after the other."""
    result = []
    for token, x in enumerate(logits):
        x += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty if token in output else 0.0
        result.append(x)
    return result


class Case:
    """Random requests in random slots with a history each, padding, drafts of K tokens and logits of all rows."""

    def __init__(self, vocab: int, num_drafts: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        g = torch.Generator().manual_seed(100 * vocab + num_drafts)
        draw = lambda most: torch.randint(vocab, (int(torch.randint(most, (), generator=g)),), generator=g).tolist()  # noqa: E731
        self.params = [SamplingParams(**kind) for kind in KINDS]
        self.prompts, self.outputs = [[draw(9) for _ in KINDS] for _ in range(2)]
        self.slots = torch.randperm(len(KINDS) + 3, generator=g)[: len(KINDS)].tolist()
        self.history = TokenHistory(len(KINDS) + 3, vocab, torch.device(device))
        for i, params in enumerate(self.params):
            self.history.start(self.slots[i], SamplingParams(**KINDS[-1]), [0, 1, 2], [1])  # the request before
            self.history.start(self.slots[i], params, self.prompts[i], self.outputs[i])
        batch, padding = len(KINDS) + 2, [-1, len(KINDS) + 3]
        drafts = torch.randint(min(vocab, 5), (batch, num_drafts + 2), generator=g)
        drafts[::3, num_drafts // 2 : num_drafts] = -1
        self.drafts = drafts.to(device)[:, :num_drafts]  # a slice of wider rows
        self.slot = torch.tensor(self.slots + padding, device=device)
        self.logits = (torch.randn(batch * (num_drafts + 1), vocab, generator=g) * 5).to(device, dtype)
        self.logits[::4, ::3] = -0.0

    def apply(self, backend: str) -> Tensor:
        return self.history.apply(self.logits, self.slot, self.drafts, backend=backend)

    def by_hand(self) -> Tensor:
        """What row j of each request becomes, drafts 0..j-1 in its output."""
        rows, wide = self.drafts.shape[1] + 1, self.logits.double().tolist()
        for u in range(len(self.params) * rows):
            i, place = divmod(u, rows)
            drafts = [token for token in self.drafts[i, :place].tolist() if token >= 0]
            wide[u] = penalised_by_hand(wide[u], self.params[i], self.prompts[i], self.outputs[i] + drafts)
        return torch.tensor(wide, dtype=torch.float64)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_formula(vocab: int, num_drafts: int, device: str, backend: str) -> None:
    """The definition up to float32's rounding; not a bit of plain and padding rows, nor of the input, changes."""
    case = Case(vocab, num_drafts, device)
    before, got = case.logits.clone(), case.apply(backend)
    torch.testing.assert_close(got.cpu().double(), case.by_hand(), rtol=1e-5, atol=1e-5)
    plain = [not params.penalised for params in case.params] + [True, True]
    plain = torch.tensor(plain, device=device).repeat_interleave(num_drafts + 1)
    assert same_bits(got[plain], before[plain])
    assert same_bits(case.logits, before)
    assert not torch.equal(got, before)


def check_twin(vocab: int, num_drafts: int, device: str, dtype: torch.dtype) -> None:
    """Both forms agree to the bit, with NaNs and infinities in their places."""
    case = Case(vocab, num_drafts, device, dtype)
    case.logits[::5, 1], case.logits[1::5, 0], case.logits[2::5, 2] = torch.inf, -torch.inf, torch.nan
    expected, got = case.apply("torch"), case.apply("triton")
    assert got.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def check_drafts_count_as_emitted(num_drafts: int, device: str, backend: str) -> None:
    """Row j with drafts is row 0 of a history that has emitted the j drafts before it."""
    case = Case(40, num_drafts, device)
    verified = case.apply(backend)
    rows = num_drafts + 1
    for j in range(rows):
        alone = case.history.apply(case.logits[j::rows], case.slot, case.drafts[:, :0], backend=backend)
        assert same_bits(alone, verified[j::rows])
        if j < num_drafts:
            case.history.add(case.slot, case.drafts[:, j : j + 1])


@pytest.mark.parametrize("num_drafts", range(8))
def test_formula(num_drafts: int):
    check_formula(23, num_drafts, "cpu", "torch")


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_drafts_count_as_emitted(num_drafts: int):
    check_drafts_count_as_emitted(num_drafts, "cpu", "torch")


def test_add_counts_what_was_emitted():
    """Repeats within a row and across slots count each; -1, padding slots and the last, padding row do not."""
    history = TokenHistory(3, 6, torch.device("cpu"))
    history.start(1, SamplingParams(presence_penalty=1.0), [5], [2, 2])
    history.add(torch.tensor([1, -1, 0]), torch.tensor([[2, 4, 4, -1], [3, 3, 3, 3], [0, -1, -1, -1]]))
    expected = torch.zeros(4, 6, dtype=torch.int32)
    expected[1, 2], expected[1, 4], expected[0, 0] = 3, 2, 1
    assert torch.equal(history.counts_SV, expected)
    history.start(1, SamplingParams(presence_penalty=1.0), [])
    assert not history.counts_SV[1].any()
    assert not history.prompt_SV[1].any()


def test_a_slot_forgets_the_penalties_of_the_request_before():
    """And a request without penalties costs nothing where there were none."""
    history, logits = TokenHistory(3, 6, torch.device("cpu")), torch.randn(1, 6)
    slot, no_drafts = torch.tensor([1]), torch.zeros((1, 0), dtype=torch.int64)
    written: list[object] = []
    upload, history._upload = history._upload, lambda *args: written.append(args) or upload(*args)  # type: ignore
    for _ in range(2):
        history.start(1, SamplingParams(), [2])
        assert not written
        history.start(1, SamplingParams(repetition_penalty=2.0, logit_bias={3: 5.0}), [2])
        assert not torch.equal(history.apply(logits, slot, no_drafts), logits)
        history.start(1, SamplingParams(), [2])
        assert torch.equal(history.apply(logits, slot, no_drafts), logits)
        written.clear()


def test_size_is_as_announced():
    history = TokenHistory(7, 100, torch.device("cpu"))
    tables = (history.prompt_SV, history.counts_SV, history.bias_SV, history.factors_S4)
    assert sum(table.nbytes for table in tables) == TokenHistory.num_bytes(7, 100)


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab,num_drafts", [(5, 0), (37, 3), (2100, 7)])
def test_interpreted(vocab: int, num_drafts: int, dtype: torch.dtype):
    check_twin(vocab, num_drafts, "cpu", dtype)


@interpreter
def test_interpreted_formula():
    check_formula(23, 5, "cpu", "triton")
    check_drafts_count_as_emitted(3, "cpu", "triton")


@interpreter
def test_interpreted_without_rows():
    history, slot = TokenHistory(2, 7, torch.device("cpu")), torch.empty(0, dtype=torch.int64)
    assert history.apply(torch.empty(0, 7), slot, slot.view(0, 0), backend="triton").shape == (0, 7)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_drafts", [0, 1, 5, 7])
@pytest.mark.parametrize("vocab", [5, 1000, 151_937])
def test_on_gpu(vocab: int, num_drafts: int, dtype: torch.dtype):
    check_twin(vocab, num_drafts, "cuda", dtype)
    check_drafts_count_as_emitted(num_drafts, "cuda", "triton")
    if vocab < 2000:
        check_formula(max(vocab, 20), num_drafts, "cuda", "triton")


@gpu
@pytest.mark.gpu
def test_in_a_graph_on_gpu():
    """A step, applying and counting, captured once: replays see what was started and emitted since."""
    case = Case(1000, 3, "cuda")
    emitted = torch.tensor([[5, 6, -1, -1]], device="cuda").repeat(len(case.slot), 1)
    case.apply("triton")
    case.history.add(case.slot, emitted * 0 - 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.apply("triton")
        case.history.add(case.slot, emitted)
    for i in range(3):
        graph.replay()
        torch.testing.assert_close(got.cpu().double(), case.by_hand(), rtol=1e-5, atol=1e-5)
        case.outputs = [[*output, 5, 6] for output in case.outputs]
        case.history.start(case.slots[0], case.params[0], case.prompts[0], [i])
        case.outputs[0] = [i]
