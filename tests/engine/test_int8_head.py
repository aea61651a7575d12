"""The drafter's output layer with 8 bits a weight: what it computes, and that no answer depends on it."""

import json
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from peagle.bench import profiling
from peagle.bench.evaluate import run_eval
from peagle.bench.settings import EvalConfig
from peagle.config import EngineConfig, ProfileConfig, SpeculativeConfig
from peagle.engine import build
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.kernels.int8_linear import MOST_ROWS
from peagle.models.int8 import Int8Linear
from peagle.sampling import SamplingParams
from tests.engine.tiny import SHAPES, random_prompts, sized_llm, tiny_llm, tiny_parts
from tests.models.tiny import tiny_gguf
from tests.test_cli import write_head

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def layer(outputs: int, inputs: int, *, scale: float = 1.0, **kind: Any) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, **kind).requires_grad_(False)
    torch.manual_seed(outputs)
    linear.weight.normal_(std=scale)
    return linear


def check_layer(outputs: int, inputs: int, rows: int, dtype: torch.dtype, device: str) -> None:
    """Against its definition, in float64; rows of weights are of very different sizes."""
    linear = layer(outputs, inputs, scale=0.02, dtype=dtype, device=device)
    linear.weight.mul_(torch.logspace(-3, 3, outputs, dtype=dtype, device=device)[:, None])
    x_RI = torch.randn(rows, inputs, dtype=dtype, device=device)
    weight, x = linear.weight.double(), x_RI.double()
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).float()
    expected = x @ ((linear.weight.float() / scale).round().double() * scale.double()).T
    got = Int8Linear(linear)(x_RI)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 and device == "cpu" else 4e-3  # on a GPU inputs become float16
    assert ((got.double() - expected).abs() / (x.abs() @ weight.abs().T)).max() < tolerance
    lost = (expected - x @ weight.T).norm() / expected.norm()
    assert 1e-3 < lost < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(96, 32, 1), (17, 65, 5), (8192 + 31, 48, 8)])
def test_the_layer(outputs: int, inputs: int, rows: int, dtype: torch.dtype):
    check_layer(outputs, inputs, rows, dtype, "cpu")


def test_many_rows_are_computed_as_they_were():
    linear = layer(40, 24)
    x_RI = torch.randn(MOST_ROWS + 1, 24)
    assert torch.equal(Int8Linear(linear)(x_RI), linear(x_RI))
    assert not torch.equal(Int8Linear(linear)(x_RI[1:]), linear(x_RI[1:]))


def test_weights_of_any_size_stay_finite():
    for scale in (0.0, 1e-30, 1e30):
        out = Int8Linear(layer(32, 16, scale=scale))(torch.ones(2, 16))
        assert bool(out.isfinite().all())
        assert bool(out.any()) == (scale > 0)


def test_no_rows():
    assert Int8Linear(layer(32, 16))(torch.ones(0, 16)).shape == (0, 32)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_answer_depends_on_it(parallel: bool, temperature: float):
    prompts = random_prompts(8, seed=1)
    params = [SamplingParams(max_tokens=60, temperature=temperature, seed=i, show_drafts=True) for i in range(8)]
    own, eight = (
        tiny_llm(5, parallel=parallel, draft_lm_head=form).generate(prompts, params) for form in ("auto", "int8")
    )
    assert [o.token_ids for o in own] == [o.token_ids for o in eight]
    assert [o.trace for o in own] != [o.trace for o in eight]  # but drafts do


def test_the_head_is_only_read():
    target, drafter = tiny_parts(torch.float32, 0, True, None)
    before, of_target = drafter.lm_head, target.model.lm_head
    LLM.from_parts(target, drafter, 3, EngineConfig(draft_lm_head="int8", block_size=4), pack=False)
    assert drafter.lm_head is before
    assert target.model.lm_head is of_target


def test_engines_of_one_head():
    """One after the other, as `peagle eval` has them; what one packs another cannot copy."""
    target, drafter = tiny_parts(torch.float32, 0, True, None)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    answers = []
    for k, form in ((3, "int8"), (5, "int8"), (5, "auto")):
        llm = LLM.from_parts(target, drafter, k, EngineConfig(draft_lm_head=form, block_size=4))
        answers.append([output.token_ids for output in llm.generate(random_prompts(3), params)])
    assert answers[0] == answers[1] == answers[2]
    if not isinstance(drafter.lm_head, nn.Linear):  # packed: not everywhere
        with pytest.raises(PeagleError, match="another engine has packed this head: load it anew"):
            LLM.from_parts(target, drafter, 3, EngineConfig(draft_lm_head="int8", block_size=4))


def test_without_a_head_it_says_nothing():
    target, _ = tiny_parts(torch.float32, 0, True, None)
    llm = LLM.from_parts(target, None, 0, EngineConfig(draft_lm_head="int8", block_size=4))
    assert llm.generate(random_prompts(1), SamplingParams(max_tokens=3))[0].token_ids


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """(GGUF file, head, prompts file) of a random model."""
    folder = tmp_path_factory.mktemp("int8")
    prompts = folder / "chats.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": "hello"}) + "\n" for i in range(2)))
    return tiny_gguf(folder / "tiny.gguf"), write_head(folder / "head"), prompts


@pytest.mark.parametrize("by", ["engine", "eval", "profile"])
def test_who_asks_for_it_gets_it(by: str, on_disk, tmp_path, monkeypatch):
    """Once for each engine, in the form that kernels are asked for, and with the bytes that a step then reads."""
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    model, head, prompts = map(str, on_disk)
    made, costs = [], []
    monkeypatch.setattr(build, "Int8Linear", lambda layer, form: made.append(form) or Int8Linear(layer, form))
    cost = profiling.step_cost
    monkeypatch.setattr(profiling, "step_cost", lambda *args, **sizes: costs.append(sizes) or cost(*args, **sizes))
    asked = SpeculativeConfig.from_mapping({"model": head, "num_speculative_tokens": 2})
    common = {"draft_lm_head": "int8", "device": "cpu"}
    if by == "engine":
        LLM(model, speculative_config=asked, max_num_seqs=2, **common)
    elif by == "eval":
        config = EvalConfig(sets=(prompts,), k=(2, 3), temperatures=(0.0,), max_tokens=4, lossless_prompts=0, **common)
        run_eval(head, model, config, Console(stderr=True), out=tmp_path / "eval.json")
    else:
        profiling.run_profile(model, asked, ProfileConfig(steps=2, prompt_tokens=4, **common), Console(stderr=True))
    assert made == ["torch"] * (2 if by == "eval" else 1)  # what "auto" is on a CPU
    assert [sizes["int8_head"] for sizes in costs] == [True] * (by == "profile")


def test_a_form_that_does_not_exist():
    with pytest.raises(PeagleError, match=r"draft_lm_head.*'int4'.*auto.*int8"):
        EngineConfig(draft_lm_head="int4")


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("outputs", "inputs", "rows"), [(32_000, 4096, 1), (49_157, 577, 56), (151_936, 896, 64)])
    def test_the_layer(self, outputs: int, inputs: int, rows: int, dtype: torch.dtype):
        check_layer(outputs, inputs, rows, dtype, "cuda")

    @pytest.mark.parametrize("parallel", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_a_captured_step_drafts_as_the_eager_one(self, shape: str, parallel: bool):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, show_drafts=True)
        traces = []
        for graphs in (True, False):
            llm = sized_llm(shape, 5, parallel=parallel, max_num_seqs=8, num_kv_blocks=200, graphs=graphs,
                            draft_lm_head="int8")  # fmt: skip
            traces.append([output.trace for output in llm.generate(random_prompts(5, seed=2), params)])
        assert traces[0] == traces[1]
