"""`LLM` with heads of both kinds from disk: what the speculative config may say about them."""

import pytest
import torch

from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.engine import engine
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import drafts_of, random_prompts, tiny_llm, tiny_parts


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """Folders of a P-EAGLE and an EAGLE-3 head for the target that any model name loads."""
    for name, parallel in (("p-eagle", True), ("eagle3", False)):
        _, drafter = tiny_parts(parallel=parallel)
        save_drafter(drafter, tmp_path / name, compact=False, base_model="tiny", extra={}, dtype=torch.float32)
    monkeypatch.setattr(engine, "load_target", lambda *args, **settings: tiny_parts()[0])
    return tmp_path


def load(head, **speculative):
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, **speculative}
    return LLM("tiny", speculative_config=config, dtype="float32", device="cpu", max_num_seqs=4)


@pytest.mark.parametrize(
    ("name", "kind", "parallel"), [("p-eagle", PEagleDrafter, True), ("eagle3", Eagle3Drafter, False)]
)
def test_the_head_decides_how_to_draft(name, kind, parallel, heads):
    prompts, params = random_prompts(3), SamplingParams(max_tokens=12, temperature=0.0)
    llm = load(heads / name)
    assert type(llm.drafter) is kind
    outputs = llm.generate(prompts, params)
    assert sum(output.stats.num_rounds for output in outputs) > 0
    drafts = drafts_of(llm)
    same = load(heads / name, parallel_drafting=parallel)
    assert [o.token_ids for o in same.generate(prompts, params)] == [o.token_ids for o in outputs]
    assert (drafts_of(same) == drafts).all()


@pytest.mark.parametrize(
    ("name", "speculative", "says"),
    [
        ("eagle3", {"parallel_drafting": True}, "parallel_drafting is true.*EAGLE-3 head.*one token a pass"),
        ("p-eagle", {"parallel_drafting": False}, "parallel_drafting is false.*P-EAGLE head.*in one pass"),
        ("eagle3", {"method": "peagle"}, "method is 'peagle'.*EAGLE-3 head.*use 'eagle3'"),
    ],
)
def test_asking_for_the_other_way_is_an_error(name, speculative, says, heads):
    with pytest.raises(PeagleError, match=says) as caught:
        load(heads / name, **speculative)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parallel", [True, False])
def test_drafts_do_not_depend_on_the_batch(parallel):
    prompts, params = random_prompts(5, seed=8), SamplingParams(max_tokens=1, temperature=0.0)
    llm = tiny_llm(4, dtype=torch.float64, parallel=parallel)
    llm.generate(prompts, params)
    together = drafts_of(llm)[:5]
    for prompt, drafts in zip(prompts, together, strict=True):
        alone = tiny_llm(4, dtype=torch.float64, parallel=parallel)
        alone.generate([prompt], params)
        assert (drafts_of(alone)[0] == drafts).all()
