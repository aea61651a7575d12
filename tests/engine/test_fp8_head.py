"""The drafter's output layer in 8-bit floats: what it computes, that no answer depends on it, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.fp8 import Fp8Linear
from peagle.sampling import SamplingParams
from tests.engine.tiny import SHAPES, random_prompts, sized_llm, tiny_llm, tiny_parts

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGEST = 448.0


def layer(outputs: int, inputs: int, *, scale: float = 1.0, **kind: Any) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, **kind).requires_grad_(False)
    torch.manual_seed(outputs)
    linear.weight.normal_(std=scale)
    return linear


def check_layer(outputs: int, inputs: int, rows: int, dtype: torch.dtype, device: str) -> None:
    """Against its definition, in float64: weights by the largest of them, inputs as they are, both to 8 bits."""
    linear = layer(outputs, inputs, scale=0.02, dtype=dtype, device=device)
    x_RI = torch.randn(rows, inputs, dtype=dtype, device=device)
    x_RI[0, 0] = 1e4  # is cut
    weight, x = linear.weight.double(), x_RI.double()
    scale = (weight.abs().max() / LARGEST).float().double()
    as_bytes = (weight / scale).float().to(torch.float8_e4m3fn).double()
    expected = x.clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn).double() @ as_bytes.T * scale
    got = Fp8Linear(linear)(x_RI)
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (2e-6 if dtype == torch.float32 and device == "cpu" else 4e-3)
    x_RI[0, 0] = 1.0
    whole = x_RI.double() @ weight.T
    lost = (Fp8Linear(linear)(x_RI).double() - whole).norm() / whole.norm()
    assert 0.01 < lost < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(96, 32, 1), (16, 64, 5), (8192 + 32, 48, 8)])
def test_the_layer(outputs: int, inputs: int, rows: int, dtype: torch.dtype):
    check_layer(outputs, inputs, rows, dtype, "cpu")


def test_weights_of_any_size_stay_finite():
    for scale in (0.0, 1e-30, 1e30):
        out = Fp8Linear(layer(32, 16, scale=scale))(torch.ones(2, 16))
        assert bool(out.isfinite().all())
        assert bool(out.any()) == (scale > 0)


def test_no_rows():
    assert Fp8Linear(layer(32, 16))(torch.ones(0, 16)).shape == (0, 32)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_answer_depends_on_it(parallel: bool, temperature: float):
    prompts = random_prompts(6, seed=1)
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=i, show_drafts=True) for i in range(6)]
    own, eight = (
        tiny_llm(5, parallel=parallel, draft_lm_head=form).generate(prompts, params) for form in ("auto", "fp8")
    )
    assert [o.token_ids for o in own] == [o.token_ids for o in eight]
    assert [o.trace for o in own] != [o.trace for o in eight]  # but drafts do


def test_the_head_is_only_read():
    target, drafter = tiny_parts(torch.float32, 0, True, None)
    before, of_target = drafter.lm_head, target.model.lm_head
    LLM.from_parts(target, drafter, 3, EngineConfig(draft_lm_head="fp8", block_size=4), pack=False)
    assert drafter.lm_head is before
    assert target.model.lm_head is of_target


def test_engines_of_one_head():
    """One after the other, as `peagle eval` has them; what one packs another cannot copy."""
    target, drafter = tiny_parts(torch.float32, 0, True, None)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    answers = []
    for k, form in ((3, "fp8"), (5, "fp8"), (5, "auto")):
        llm = LLM.from_parts(target, drafter, k, EngineConfig(draft_lm_head=form, block_size=4))
        answers.append([output.token_ids for output in llm.generate(random_prompts(3), params)])
    assert answers[0] == answers[1] == answers[2]
    if not isinstance(drafter.lm_head, nn.Linear):  # packed: not everywhere
        with pytest.raises(PeagleError, match="another engine has packed this head: load it anew"):
            LLM.from_parts(target, drafter, 3, EngineConfig(draft_lm_head="fp8", block_size=4))


def test_without_a_head_it_says_nothing():
    target, _ = tiny_parts(torch.float32, 0, True, None)
    llm = LLM.from_parts(target, None, 0, EngineConfig(draft_lm_head="fp8", block_size=4))
    assert llm.generate(random_prompts(1), SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("shape", [(50, 32), (64, 40)])
def test_sizes_that_cublas_does_not_take(shape: tuple[int, int]):
    with pytest.raises(PeagleError, match=rf"{shape[0]} tokens of {shape[1]} numbers: both must be multiples of 16"):
        Fp8Linear(layer(*shape))


def test_a_gpu_without_8_bit_floats(monkeypatch):
    class OnCuda(torch.Tensor):
        device = torch.device("cuda")

    linear = layer(32, 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    linear.weight = nn.Parameter(linear.weight.as_subclass(OnCuda), requires_grad=False)
    with pytest.raises(PeagleError, match=r"'fp8', and NVIDIA A100 has compute capability 8.0: .* need 8.9; use auto"):
        Fp8Linear(linear)


def test_a_form_that_does_not_exist():
    with pytest.raises(PeagleError, match=r"draft_lm_head.*'int4'.*auto.*fp8"):
        EngineConfig(draft_lm_head="int4")


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("outputs", "inputs", "rows"), [(32_000, 4096, 1), (49_152, 576, 56), (151_936, 896, 448)])
    def test_the_layer(self, outputs: int, inputs: int, rows: int, dtype: torch.dtype):
        check_layer(outputs, inputs, rows, dtype, "cuda")

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_captured_step_drafts_as_the_eager_one(self, shape: str, parallel: bool):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, show_drafts=True)
        traces = []
        for graphs in (True, False):
            llm = sized_llm(shape, 5, parallel=parallel, max_num_seqs=8, num_kv_blocks=200, graphs=graphs,
                            draft_lm_head="fp8")  # fmt: skip
            traces.append([output.trace for output in llm.generate(random_prompts(5, seed=2), params)])
        assert traces[0] == traces[1]
