"""Log-probabilities are the target's own, whatever shares the step, and asking for them changes no token."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.engine.outputs import Logprobs, scored_tokens
from peagle.engine.request import RequestOutput
from peagle.engine.text import MeasuredStream
from peagle.errors import PeagleError
from peagle.kernels import logprobs as logprobs_module
from peagle.kernels.logprobs import row_logprobs
from peagle.sampling import SamplingParams
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm, tiny_parts, tiny_tokenizer

PROMPTS = random_prompts(10, seed=4)
KINDS = [
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.9, "logprobs": 0, "top_k": 20},
    {"temperature": 0.9},
    {"temperature": 1.2, "logprobs": 20, "repetition_penalty": 1.4, "logit_bias": {7: 5.0}},
    {"temperature": 0.0, "prompt_logprobs": 20},
]


@cache
def transformers_llama() -> LlamaForCausalLM:
    """The tiny target, as transformers has it."""
    target, _ = tiny_parts()
    s, weights = target.spec, dict(target.model.state_dict())
    config = LlamaConfig(
        vocab_size=s.vocab_size, hidden_size=s.hidden_size, intermediate_size=s.intermediate_size,
        num_hidden_layers=s.num_layers, num_attention_heads=s.num_heads, num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim, rms_norm_eps=s.rms_norm_eps, tie_word_embeddings=True,
        max_position_embeddings=s.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": s.rope.theta},
    )  # fmt: skip
    queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    for name in list(weights):
        if "qkv_proj" in name:
            parts = zip("qkv", weights.pop(name).split([queries, keys, keys]), strict=True)
            weights |= {name.replace("qkv_proj", f"{which}_proj"): part for which, part in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), weights.pop(name).chunk(2), strict=True)
            weights |= {name.replace("gate_up_proj", f"{which}_proj"): part for which, part in parts}
    head = weights.pop("lm_head.weight")
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({f"model.{name}": weight for name, weight in weights.items()} | {"lm_head.weight": head})
    return model


@torch.inference_mode()
def expected(output: RequestOutput) -> Tensor:
    """Row i: log-probabilities of what follows token i of prompt and output."""
    ids = torch.tensor([output.prompt_token_ids + output.token_ids])
    return transformers_llama()(ids).logits[0].float().log_softmax(dim=-1)


def check(rows: Tensor, token_ids: list[int], told: Logprobs, count: int) -> None:
    """`told` belongs to `token_ids`, each of which follows one of `rows`."""
    assert len(told) == len(token_ids) == len(rows)
    for row, token_id, (logprob, top) in zip(rows, token_ids, told, strict=True):
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        best = row.topk(count).values.tolist()
        assert [value for _, value in top] == pytest.approx(best, abs=1e-4)
        assert [value for _, value in top] == pytest.approx([row[i].item() for i, _ in top], abs=1e-4)
        assert len({i for i, _ in top}) == count


def check_all(outputs: list[RequestOutput], params: list[SamplingParams]) -> None:
    for output, asked in zip(outputs, params, strict=True):
        rows, length = expected(output), len(output.prompt_token_ids)
        assert (output.logprobs is None) == (asked.logprobs is None)
        assert (output.prompt_logprobs is None) == (asked.prompt_logprobs is None)
        if output.logprobs is not None:
            check(rows[length - 1 : -1], output.token_ids, output.logprobs, asked.logprobs)
        if output.prompt_logprobs is not None:
            check(rows[: length - 1], output.prompt_token_ids[1:], output.prompt_logprobs, asked.prompt_logprobs)


def asking(max_tokens: int = 30) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, seed=i, **KINDS[i % len(KINDS)]) for i in range(len(PROMPTS))]


def not_asking(params: list[SamplingParams]) -> list[SamplingParams]:
    return [replace(p, logprobs=None, prompt_logprobs=None, show_drafts=False) for p in params]


@cache
def plain_outputs() -> list[RequestOutput]:
    """No drafts, nobody asks for anything, each prompt alone."""
    llm = tiny_llm()
    llm.set_speculation(False)
    return [llm.generate([p], s)[0] for p, s in zip(PROMPTS, not_asking(asking()), strict=True)]


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7, "parallel": False},
        {"num_kv_blocks": 30},
    ],
)
@pytest.mark.parametrize(("k", "ahead"), [(0, 0), (1, 1), (3, 0), (3, 1), (7, 2)])
def test_they_equal_a_plain_forward_pass(engine: dict[str, int], k: int, ahead: int):
    llm = tiny_llm(max(k, 1), **engine)
    llm.set_speculation(k > 0)
    llm.core._steps_ahead = ahead
    force_drafts(llm, plain_outputs(), seed=k)
    outputs = llm.generate(PROMPTS, asking())
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain_outputs()]
    check_all(outputs, asking())
    assert k == 0 or sum(o.stats.num_accepted_tokens for o in outputs) > 50
    assert "num_kv_blocks" not in engine or llm.core.scheduler.num_preemptions > 0
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


def test_a_prompt_that_begins_again_is_told_once():
    """Preempted between two of its chunks, with results of the first still unread."""
    for ahead in (0, 1):
        llm = tiny_llm(3, num_kv_blocks=30, max_num_batched_tokens=12)
        llm.core._steps_ahead = ahead
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, prompt_logprobs=4, ignore_eos=True)
        request = llm.make_request(list(range(5, 55)), params)
        llm.core.add(request)
        for _ in range(2):
            llm.core.step()
        assert request.in_prefill
        llm.core.scheduler.running.remove(request)
        llm.core.scheduler._preempt(request)
        while llm.core.has_work:
            llm.core.step()
        check_all([request.output(llm.tokenizer)], [params])


def test_what_a_cached_prefix_would_leave_out_is_computed():
    llm = tiny_llm(3)
    prompt = list(range(5, 45))
    asked = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=1, logprobs=1)
    before = llm.generate([prompt], not_asking([asked]))[0]
    for _ in range(2):
        output = llm.generate([prompt], asked)[0]
        check_all([output], [asked])
        assert output.token_ids == before.token_ids
    assert llm.core.scheduler.prefix_queries == len(prompt)  # of the first alone: nothing else was looked up
    again = llm.make_request(prompt, not_asking([asked])[0])
    llm.core.add(again)
    llm.core.step()
    assert again.num_registered > 0  # others still find it
    llm.core.abort_all()


@pytest.mark.parametrize("cut", [{"stop_token_ids": (0,)}, {"stop": ("x",)}, {"max_tokens": 11}])
def test_they_end_where_the_output_does(cut: dict):
    """Inside an accepted run too."""
    base = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
    llm = tiny_llm(7)
    llm.set_speculation(False)
    plain = llm.generate(PROMPTS[:4], base)
    llm.set_speculation(True)
    force_drafts(llm, plain, seed=0, right=0.97)
    params = []
    for output in plain:
        more = dict(cut)
        if "stop_token_ids" in cut:
            more["stop_token_ids"] = (output.token_ids[12],)
        if "stop" in cut:
            more["stop"] = (output.text[14:16],)
        params.append(replace(base, **more))
    outputs = llm.generate(PROMPTS[:4], params)
    check_all(outputs, params)
    for output, whole in zip(outputs, plain, strict=True):
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 40
        offsets = [token.offset for token in scored_tokens(output.token_ids, output.logprobs, output.text_ends)]
        words = [llm.tokenizer.decode([token], skip_special_tokens=True) for token in output.token_ids]
        assert offsets == [min(len("".join(words[:i])), len(output.text)) for i in range(len(words))]


def test_an_aborted_request_keeps_what_it_has():
    llm = tiny_llm(3)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    request = llm.make_request(PROMPTS[0], params)
    llm.core.add(request)
    for _ in range(5):
        llm.core.step()
    llm.core.abort(request)
    output = request.output(llm.tokenizer)
    assert 5 <= len(output.token_ids) < 40
    check_all([output], [params])


def test_steps_of_others_compute_nothing_for_it():
    llm = tiny_llm(3)
    outs = []
    run = llm.core._speculative.run

    def watched(*args):
        outs.append(run(*args))
        return outs[-1]

    llm.core._speculative.run = watched
    llm.generate(PROMPTS, not_asking(asking()))
    assert all(out[1:] == (None, None, None) for out in outs)


def test_few_rows_of_logits_are_held_at_once(monkeypatch):
    monkeypatch.setattr(logprobs_module, "_PIECE", 5 * 96)
    llm = tiny_llm(3)
    seen, logits = [], llm.target.model.logits
    monkeypatch.setattr(llm.target.model, "logits", lambda hidden: (seen.append(len(hidden)), logits(hidden))[1])
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3, logprobs=3)
    output = llm.generate([list(range(5, 57))], params)[0]
    check_all([output], [params])
    assert sum(seen) >= 52
    assert max(seen) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_row_logprobs(dtype: torch.dtype, rows: int, monkeypatch):
    monkeypatch.setattr(logprobs_module, "_PIECE", 200)
    logits = torch.randn(rows, 50, dtype=dtype) * 9
    logits[0, 3:] = -torch.inf
    chosen = torch.randint(0, 3, (rows,))
    values, ids = row_logprobs(logits, chosen, 60)
    want = logits.double().log_softmax(dim=1)
    assert values.shape == (rows, 51)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values[:, 0].double(), want.gather(1, chosen[:, None])[:, 0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(values[:, 1:].double(), want.gather(1, ids), rtol=1e-5, atol=1e-4)
    assert (values[:, 1:-1] >= values[:, 2:]).all()


def test_the_compact_form():
    told, whole = Logprobs(2), np.arange(12, dtype=np.float32).reshape(3, 4)
    for row in range(3):
        told.extend(whole[row : row + 1], np.array([[9, 8, 7]]) + row)
    assert told[1] == (4.0, [(10, 5.0), (9, 6.0)])
    assert told[-1] == told[2]
    assert told[1:] == [told[1], told[2]]
    assert [t.logprob for t in told] == [0.0, 4.0, 8.0]
    with pytest.raises(IndexError):
        told[3]
    bare = Logprobs(0)
    bare.extend(whole, np.zeros((3, 3)))
    assert bare[2] == (8.0, [])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "3"])
def test_bad_counts_are_refused(name: str, value: object):
    with pytest.raises(PeagleError, match=f"^{name} is"):
        SamplingParams(**{name: value})


def test_a_token_counts_as_shown_with_its_text():
    stream = MeasuredStream(tiny_tokenizer(), ("bcd",))
    ids = {c: tiny_tokenizer().encode(c)[0] for c in "abcd"}
    shown = []
    for token in (ids["a"], 1, ids["b"], ids["c"], ids["a"], 1):  # 1 is special and has no text
        assert not stream.push(token)
        shown.append((stream.take(), stream.num_shown))
    assert shown == [("a", 1), ("", 1), ("", 1), ("", 1), ("bca", 5), ("", 5)]
    assert stream.ends == [1, 1, 2, 3, 4, 4]
    for token, stopped in ((ids["b"], False), (ids["c"], False), (ids["d"], True)):
        assert stream.push(token) == stopped
    assert stream.ends == [1, 1, 2, 3, 4, 4, 4, 4, 4]
