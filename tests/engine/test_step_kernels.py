"""The engine with `kernels="triton"`, in Triton's interpreter or on a GPU, says what it says with torch."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_parts
from tests.kernels.conftest import numpy_scalars, wide_tiles  # noqa: F401, fixtures
from tests.kernels.interpreter import INTERPRETED, run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS: dict[str, dict[str, Any]] = {"p-eagle": {"draft_ids": range(3, 80, 2)}, "eagle-3": {"parallel": False}}
WAYS = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2})


def tiny_llm(head: str, kernels: str, device: str, attention: str = "auto") -> LLM:
    """K = 3; prompts arrive in chunks of at most 8 rows a step."""
    layers = 2 if INTERPRETED else 4
    target, drafter = tiny_parts(**HEADS[head], layers=layers, head_dim=16)  # which attention's kernels take
    target.model.to(device)
    config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=8, kernels=kernels, attention=attention)
    return LLM.from_parts(target, drafter.to(device), 3, config, pack=False)


def check(head: str, device: str, prompts: int, max_tokens: int, **filters: Any) -> None:
    """Greedy and drawn requests side by side: plain, with the head's own drafts, and with right and wrong ones."""
    texts = random_prompts(prompts, longest=12)
    params = [SamplingParams(max_tokens=max_tokens, seed=i, **WAYS[i % 3], **filters) for i in range(prompts)]
    plain = tiny_llm(head, "torch", device)
    plain.set_speculation(False)
    expected = plain.generate(texts, params)
    # Interpreted, the target's invariant layers are test_invariant's; the drafter has no others than "triton".
    for kernels in ("torch", "triton", *(() if INTERPRETED else ("invariant",))):
        llm = tiny_llm(head, kernels, device)
        own = llm.generate(texts, params)
        llm = tiny_llm(head, kernels, device)  # a captured step would go on drafting by itself
        force_drafts(llm, expected, seed=1)
        forced = llm.generate(texts, params)
        for outputs in (own, forced):
            assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert sum(o.stats.num_accepted_tokens for o in forced) > 1


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles")
@pytest.mark.parametrize("head,filters", [("p-eagle", {"top_k": 9, "top_p": 0.8}), ("eagle-3", {})])
def test_interpreted(head: str, filters: dict[str, Any]):
    check(head, "cpu", prompts=2, max_tokens=3, **filters)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "wide_tiles")
def test_interpreted_attention_in_torch_decodes_in_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("peagle.kernels.paged_decode_triton.paged_decode_triton", None)
    llm = tiny_llm("p-eagle", "triton", "cpu", attention="torch")
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
def test_on_gpu(head: str):
    check(head, "cuda", prompts=16, max_tokens=60)
    check(head, "cuda", prompts=16, max_tokens=60, top_k=20, top_p=0.9)
