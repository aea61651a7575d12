"""All that requests may ask for in one batch: grammar, log-probabilities, shown drafts, penalties, no drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from peagle.engine.request import RequestOutput
from peagle.sampling import SamplingParams
from peagle.structured.outputs import StructuredOutputs
from tests.engine.tiny import force_drafts, random_prompts
from tests.structured.tiny_json import json_llm

pytest.importorskip("xgrammar")

FORMS = (StructuredOutputs(regex="[a-c]{1,30}x"), StructuredOutputs(regex="(ab|abc|[0-9]{2}){1,12};"), None)


def asked(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests that want any of it, each by chance; prompts share beginnings, so that some are found in the cache."""
    rng = np.random.default_rng(seed)
    prompts = [[5] * 9 + prompt for prompt in random_prompts(count, seed, longest=12)]
    params = [
        SamplingParams(
            max_tokens=30,
            seed=i,
            temperature=float(rng.choice([0.0, 0.9])),
            top_p=float(rng.choice([1.0, 0.8])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            structured_outputs=FORMS[rng.integers(3)],
            logprobs=int(rng.integers(4)) if rng.random() < 0.5 else None,
            prompt_logprobs=2 if rng.random() < 0.3 else None,
            show_drafts=bool(rng.random() < 0.5),
            drafts=bool(rng.random() < 0.7),
        )
        for i in range(count)
    ]
    return prompts, params


def check_told(output: RequestOutput, plain: RequestOutput, params: SamplingParams) -> None:
    """What a request is told beside its tokens is what plain decoding tells, and the rounds are those that were."""
    for told, known in ((output.logprobs, plain.logprobs), (output.prompt_logprobs, plain.prompt_logprobs)):
        assert (told is None) == (known is None)
        if told is not None and known is not None:
            assert [t.logprob for t in told] == pytest.approx([t.logprob for t in known], abs=1e-3)
            assert [len(t.top) for t in told] == [len(t.top) for t in known]
    assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
    if not params.show_drafts:
        assert output.trace == []
        return
    shown = [(r.first_index, r.accepted) for r in output.trace]
    assert set(shown) <= set(output.rounds)
    for r in output.trace:
        assert output.token_ids[r.first_index :][: r.accepted] == r.drafts[: r.accepted]
        assert r.drafts  # a round whose grammar allowed no draft is not shown
    assert sum(len(r.drafts) for r in output.trace) == output.stats.num_draft_tokens


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("engine", [{}, {"num_kv_blocks": 44, "max_num_batched_tokens": 12, "max_num_seqs": 6}])
def test_all_in_one_batch_while_k_changes(engine: dict[str, int], ahead: int):
    prompts, params = asked(3, 30)
    plain = json_llm(0, max_num_seqs=30).generate(prompts, params)
    llm, rng = json_llm(5, **engine), np.random.default_rng(1)
    llm.core._steps_ahead = ahead
    llm.core.policy.choose = lambda *_: int(rng.integers(0, 6))  # 0 too, after which old drafts are verified
    force_drafts(llm, plain, seed=2, right=0.8)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for output, alone, each in zip(outputs, plain, params, strict=True):
        check_told(output, alone, each)
    assert sum(o.stats.num_accepted_tokens for o in outputs) > 100
    assert not engine or llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_without_drafts_alone_and_then_not(ahead: int):
    """A request alone that wants no drafts gets none under a grammar either, until another one shares its steps."""
    llm = json_llm(4)
    llm.core._steps_ahead = ahead
    wants_none = SamplingParams(max_tokens=25, seed=1, temperature=0.9, structured_outputs=FORMS[0], drafts=False)
    alone = llm.generate([[4, 5]], wants_none)[0]
    assert alone.rounds == []
    drafted = llm.generate([[4, 5]], replace(wants_none, drafts=True))[0]
    assert drafted.rounds
    first, second = (llm.make_request([4, 5], p) for p in (wants_none, replace(wants_none, drafts=True, seed=2)))
    llm.core.add(first)
    for _ in range(4):
        llm.core.step()
    assert first.stats.num_rounds == 0
    llm.core.add(second)
    while llm.core.has_work:
        llm.core.step()
    assert first.output_ids == alone.token_ids == drafted.token_ids
    assert first.stats.num_rounds > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
def test_all_in_one_batch_on_gpu(graphs: bool):
    prompts, params = asked(3, 30)
    plain = json_llm(0, max_num_seqs=30, device="cuda", graphs=False).generate(prompts, params)
    llm, rng = json_llm(5, max_num_seqs=6, num_kv_blocks=60, device="cuda", graphs=graphs), np.random.default_rng(1)
    llm.core.policy.choose = lambda *_: int(rng.choice([0, 2, 5]))
    force_drafts(llm, plain, seed=2, right=0.8)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for output, alone, each in zip(outputs, plain, params, strict=True):
        check_told(output, alone, each)
