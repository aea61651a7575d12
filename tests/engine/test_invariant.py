"""`kernels="invariant"`: not a bit of the output says what shared a batch, drafts included, in bfloat16 too."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.kernels import stream_linear
from peagle.kernels.backend import INVARIANT
from peagle.kernels.paged_decode import DecodePlan
from peagle.kernels.stream_linear import prefers_stream
from peagle.models import layers
from peagle.models.decoder import TargetModel
from peagle.models.layers import use_kernels
from peagle.sampling import SamplingParams
from tests.engine.test_fuzz import alone
from tests.engine.tiny import SHAPES, force_drafts, random_prompts, sized_llm, tiny_llm, tiny_parts, tiny_spec
from tests.helpers import causal_attend, random_weights
from tests.kernels.conftest import numpy_scalars, wide_tiles  # noqa: F401, fixtures
from tests.kernels.interpreter import INTERPRETED, run_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles")
@pytest.mark.parametrize("rows", [1, 8, 40, 100])
def test_interpreted_linears_of_any_number_of_rows_have_one_form(rows: int, monkeypatch: pytest.MonkeyPatch):
    spec = tiny_spec(num_layers=2)
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, 0)
    use_kernels(model, "torch")
    ids, positions = torch.randint(2, 90, (rows,)), torch.arange(rows)
    expected = model.logits(model(ids, positions, causal_attend([rows]))[0])
    use_kernels(model, INVARIANT)
    monkeypatch.setattr(F, "linear", None)  # whose sums follow the number of rows
    for name in ("linear_parts", "linear_add", "norm_gated_linear"):
        monkeypatch.setattr(layers, name, None)
    torch.testing.assert_close(
        model.logits(model(ids, positions, causal_attend([rows]))[0]), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="there it can run")
def test_needs_triton():
    with pytest.raises(PeagleError, match="kernels is 'invariant': it needs CUDA and the triton package, not cpu"):
        tiny_llm(kernels="invariant")


@interpreter
@pytest.mark.parametrize("settings,reason", [
    ({}, "the target's heads have 8 dims"), ({"attention": "torch"}, "and attention 'torch', whose sums"),
])  # fmt: skip
def test_interpreted_what_has_no_such_form_is_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(PeagleError, match=reason):
        tiny_llm(kernels="invariant", **settings)


@interpreter
@pytest.mark.parametrize("kernels,shares", [("triton", True), (INVARIANT, False)])
def test_interpreted_answers_stay_out_of_its_prefix_cache(kernels: str, shares: bool):
    config = EngineConfig(block_size=4, max_num_seqs=2, kernels=kernels)
    llm = LLM.from_parts(*tiny_parts(head_dim=16), 3, config, pack=False)
    assert llm.core.scheduler._shares_answers == shares


@interpreter
def test_interpreted_only_the_target_s_attention_has_the_one_form():
    tables_BN, forms = torch.zeros(64, 40, dtype=torch.int64), {}
    for kernels in (INVARIANT, "triton"):
        config = EngineConfig(max_num_seqs=2, kernels=kernels)
        step = LLM.from_parts(*tiny_parts(head_dim=16), 3, config, pack=False).core._speculative
        forms[kernels, "target"] = step._plan(tables_BN, 8, None, step._target.spec).tile.size
        forms[kernels, "head"] = step._plan(tables_BN, 8, None, step._draft_side.drafter.config).tile.size
    assert forms[INVARIANT, "head"] == forms["triton", "head"]
    assert forms[INVARIANT, "target"] < forms["triton", "target"]


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles")
def test_interpreted_a_preempted_answer_is_decoded_again(monkeypatch: pytest.MonkeyPatch):
    config = EngineConfig(block_size=4, max_num_seqs=2, kernels=INVARIANT)
    llm = LLM.from_parts(*tiny_parts(layers=2, head_dim=16), 3, config, pack=False)
    prompt, params = [5, 6, 7, 8, 9], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = alone(llm, prompt, params)
    step, again = llm.core._speculative, []
    run = step.run

    def spy(rows: Any, num_drafts: int, mode: Any) -> Any:
        if rows.next_prompt_B is not None and rows.rows_per_request is not None:
            plan = step._plan(rows.tables_BN, rows.rows_per_request, rows.host, llm.target.spec)
            again.append((rows.positions_T.tolist(), isinstance(plan, DecodePlan) and plan.triton))
        return run(rows, num_drafts, mode)

    monkeypatch.setattr(step, "run", spy)
    output = alone(llm, prompt, params, preempt_at=range(6, 10))
    assert output.token_ids == expected.token_ids
    assert [5, 6, 7, 8] in [positions for positions, _ in again]
    assert all(in_decoding_s_form for _, in_decoding_s_form in again)


def engine(shape: str, drafts: int, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 24, "num_kv_blocks": 1200, "max_model_len": 512, "kernels": INVARIANT, **settings}
    return sized_llm(shape, drafts, **settings)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_shares_the_batch_on_gpu(shape: str):
    prompts = random_prompts(24, longest=200)
    params = [SamplingParams(max_tokens=96, temperature=i % 2 * 1.0, seed=i, ignore_eos=True) for i in range(24)]
    plain = engine(shape, 3)
    plain.set_speculation(False)
    expected = plain.generate(prompts, params)
    ways: dict[str, LLM] = {
        "K = 3": engine(shape, 3),
        "K = 7": engine(shape, 7),
        "eager, in small chunks, five at a time": engine(
            shape, 5, graphs=False, prompt_graphs=False, max_num_batched_tokens=40, max_num_seqs=5
        ),
    }
    for way, llm in ways.items():
        force_drafts(llm, expected, seed=1)
        answers = llm.generate(prompts, params)
        assert sum(answer.stats.num_accepted_tokens for answer in answers) > 500, way
        parted = [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.token_ids != b.token_ids]
        assert not parted, f"{way}: {len(parted)} of {len(prompts)}"


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("outputs,inputs", [(960, 576), (49152, 576), (2048, 8192), (24576, 4096), (151936, 1024)])
def test_rows_of_a_layer_alone_and_among_others_on_gpu(outputs: int, inputs: int):
    torch.manual_seed(5)
    x = torch.randn(600, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    whole = stream_linear.stream_linear(x, weight, backend=INVARIANT)
    for rows in (1, 4, 8, 33, 64, 65, 200):
        assert torch.equal(stream_linear.stream_linear(x[:rows], weight, backend=INVARIANT), whole[:rows]), rows
    assert not prefers_stream(x, weight, cut=False)  # or it would be no feat
