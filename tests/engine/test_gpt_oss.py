"""Speculation over a mixture of experts with sinks and windows: it changes nothing, in any form of the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.bench.lossless import Judge
from peagle.config import EngineConfig
from peagle.drafters.init import new_drafter
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec, YarnScaling
from peagle.models.spec import ModelSpec, MoESpec
from peagle.models.target import Target
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_spec, tiny_tokenizer
from tests.helpers import random_weights
from tests.kernels.conftest import bfloat16_products, numpy_scalars, rounded_bfloat16, wide_tiles  # noqa: F401, fixtures
from tests.kernels.interpreter import INTERPRETED, run_interpreted

PROMPTS = random_prompts(8, longest=40)
YARN = YarnScaling(
    factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=32, attention_factor=1.2, truncate=False
)


def spec(*, packed: bool = False) -> ModelSpec:
    return tiny_spec(
        family="gpt_oss", num_layers=4, intermediate_size=64, head_dim=16, qkv_bias=True, o_bias=True,
        tie_word_embeddings=False, rope=RopeSpec(theta=1e4, head_dim=16, scaling=YARN), windows=(9, None, 9, None),
        sinks=True,
        moe=MoESpec(num_experts=6, experts_per_token=2, gate_alpha=1.702, gate_limit=1.0, packed=packed),
    )  # fmt: skip


def llm(
    k: int = 3, *, parallel: bool = True, dtype: torch.dtype = torch.float32, packed: bool = False, **engine: Any
) -> LLM:
    model = TargetModel(spec(packed=packed)).eval().requires_grad_(False)
    random_weights(model, 0)
    device = engine.get("device", "cpu")
    drafter = new_drafter(
        model, num_layers=2, tap_ids=(1, 2, 4), mask_token_id=95 if parallel else None, seed=1,
        target_init=False,
    ).to(device, dtype).eval().requires_grad_(False)  # fmt: skip
    target = Target("tiny", Path("tiny"), model.spec, model.to(device, dtype), tiny_tokenizer())
    return LLM.from_parts(target, drafter, k, EngineConfig(**{"block_size": 4, "max_num_seqs": 8, **engine}))


def sampled(temperature: float, tokens: int = 30) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens, temperature=temperature, seed=i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("parallel", "k", "engine"), [(True, 3, {}), (False, 2, {}), (True, 7, {"max_num_batched_tokens": 5})]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_nothing(parallel: bool, k: int, engine: dict[str, int], temperature: float):
    params = sampled(temperature)
    alone = llm()
    alone.set_speculation(False)
    plain = [alone.generate([prompt], p)[0] for prompt, p in zip(PROMPTS, params)]
    drafting = llm(k, parallel=parallel, **engine)
    assert [o.token_ids for o in drafting.generate(PROMPTS, params)] == [o.token_ids for o in plain]
    force_drafts(drafting, plain, seed=k)
    forced = drafting.generate(PROMPTS, params)
    assert [o.token_ids for o in forced] == [o.token_ids for o in plain]
    assert sum(o.stats.num_accepted_tokens for o in forced) > 50


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_who_judges_answers_knows_windows_and_sinks(rows: int):
    """Its logits put first what the engine says, at every place, in passes of any number of rows."""
    engine = llm()
    for output in engine.generate(PROMPTS[:4], sampled(0.0)[:4]):
        ids, said = [*output.prompt_token_ids, *output.token_ids], len(output.token_ids)
        logits = Judge(engine.target, engine.core.device).logits(ids[:-1], said, rows, "torch")
        assert logits.argmax(dim=-1).tolist() == output.token_ids


def test_experts_cannot_become_a_heads_layers():
    model = TargetModel(spec())
    with pytest.raises(PeagleError, match="mixture of experts"):
        new_drafter(model, num_layers=1, mask_token_id=95, seed=0, target_init=True)


def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("tests/engine/test_gpt_oss.py")


@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles", "bfloat16_products")
def test_interpreted_kernels_change_nothing():
    params = sampled(0.0, tokens=4)[:1]
    expected = llm(1, packed=True, kernels="torch", attention="torch").generate(PROMPTS[:1], params)
    outputs = llm(1, packed=True, kernels="triton", attention="triton").generate(PROMPTS[:1], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parallel", [True, False])
def test_graphs_and_speculation_change_nothing_on_gpu(parallel: bool, packed: bool):
    params = sampled(0.0)
    plain = llm(packed=packed)
    plain.set_speculation(False)
    expected = plain.generate(PROMPTS, params)
    drafting = llm(device="cuda", parallel=parallel, packed=packed)
    assert [o.token_ids for o in drafting.generate(PROMPTS, params)] == [o.token_ids for o in expected]
    force_drafts(drafting, expected, seed=0)
    assert [o.token_ids for o in drafting.generate(PROMPTS, params)] == [o.token_ids for o in expected]
