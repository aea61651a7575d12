"""The shipped head with its real target, on the CPU: what a fresh clone promises."""

from pathlib import Path

import pytest
import torch

from peagle.drafters.checkpoint import export_head, load_drafter
from peagle.drafters.inspect import inspect_head
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams

HEAD = Path(__file__).resolve().parents[2] / "heads" / "smollm2-135m-instruct-p-eagle"
PROMPTS = [
    [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}],
    [{"role": "user", "content": "Name three things to do in Paris."}],
    [{"role": "user", "content": "Natalia sold 48 clips in April and half as many in May. How many in all?"}],
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5, "parallel_drafting": True}
    return LLM("smollm2-135m", speculative_config=config, max_model_len=512, max_num_seqs=4)


def test_it_is_light_and_whole():
    assert sum(file.stat().st_size for file in HEAD.iterdir()) < 20_000_000
    report = inspect_head(HEAD)
    assert report.problems == []
    assert report.config is not None
    assert report.config.num_layers == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_the_same_with_and_without_drafts(llm: LLM, temperature: float):
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(len(PROMPTS))]
    together = llm.chat(PROMPTS, params)
    alone = llm.chat(PROMPTS[:1], params[:1])
    llm.set_speculation(False)
    plain = [llm.chat([prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    llm.set_speculation(True)
    assert [o.token_ids for o in together] == [o.token_ids for o in plain]
    assert [o.text for o in together] == [o.text for o in plain]
    assert alone[0].token_ids == plain[0].token_ids


def test_it_accepts_what_its_card_says(llm: LLM):
    """Far below the card's 3.1 to 3.6 at K = 5: three short answers are noisy; a broken tap or mask gives 1.1."""
    outputs = llm.chat(PROMPTS, SamplingParams(max_tokens=64, temperature=0.0))
    rounds = sum(o.stats.num_rounds for o in outputs)
    assert 1 + sum(o.stats.num_accepted_tokens for o in outputs) / rounds > 2.2


def test_the_exported_head_drafts_the_same(llm: LLM, tmp_path: Path):
    from peagle.models.target import load_target

    target = load_target("smollm2-135m", dtype=torch.bfloat16, device=torch.device("cpu"))
    export_head(HEAD, target.model, tmp_path / "full")
    load = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    full = load_drafter(tmp_path / "full", None, **load)
    compact = load_drafter(HEAD, target.model, **load)
    for name, value in compact.state_dict().items():
        other = full.state_dict()[name]
        if name == "embed_tokens.weight":  # the exported table holds the trained mask row
            keep = torch.arange(len(value)) != compact.config.mask_token_id
            value, other = value[keep], other[keep]
        assert torch.equal(value, other), name
