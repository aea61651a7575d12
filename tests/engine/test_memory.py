"""How many KV cache blocks fit, by made-up devices; and what an engine then takes of a GPU."""

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import DrafterConfig
from peagle.engine.engine import LLM
from peagle.engine.memory import DeviceMemory, EngineLoad, plan_memory
from peagle.engine.warm_up import WarmUp
from peagle.errors import PeagleError
from peagle.kernels.logprobs import scratch_bytes
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec, MoESpec
from peagle.sampling import SamplingParams
from tests.engine.tiny import sized_llm, tiny_llm

GIB = 2**30
CUDA = torch.device("cuda")
SPEC = ModelSpec(
    family="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6, head_dim=128),
    max_position_embeddings=40960, qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=False,
    bos_token_id=None, eos_token_ids=(1,), qk_norm=True,
)  # fmt: skip
HEAD = DrafterConfig(
    hidden_size=4096, intermediate_size=12288, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6, head_dim=128), max_position_embeddings=40960, vocab_size=151936,
    draft_vocab_size=32000, target_hidden_size=4096, tap_ids=(2, 18, 33), mask_token_id=7,
)  # fmt: skip
PER_TOKEN = 40 * 2 * 8 * 128 * 2  # layers, keys and values, heads, width, bytes


def load(spec=SPEC, head=HEAD, drafts=5, **settings):
    return EngineLoad(EngineConfig(**settings), spec, head, drafts, torch.bfloat16)


def plan(total=80, free=62, drafts=5, device=CUDA, **settings):
    memory = DeviceMemory(int(total * GIB), int(free * GIB))
    return plan_memory(load(drafts=drafts, **settings), device, memory=memory)


def test_blocks_fill_what_the_share_of_the_whole_leaves():
    report = plan()
    assert report.kv_bytes_per_token == PER_TOKEN
    assert report.budget == 72 * GIB
    assert report.in_use == 18 * GIB
    left = report.budget - report.in_use - report.activations - report.graphs
    assert left - 16 * PER_TOKEN < report.kv_bytes <= left  # the null block is paid for too
    assert report.num_tokens == report.num_blocks * 16
    assert report.max_model_len == 40960
    for part in (f"{report.num_tokens:,} tokens", "18.00 GiB in use", "of 72.00 GiB out of 80.00 GiB"):
        assert part in report.describe()


def test_a_larger_share_is_that_much_more():
    more = plan(gpu_memory_utilization=0.95).num_tokens - plan(gpu_memory_utilization=0.9).num_tokens
    assert more * PER_TOKEN == pytest.approx(0.05 * 80 * GIB, rel=1e-3)


def test_penalties_and_masks_of_all_slots_are_planned():
    engine = load(max_num_seqs=64)
    assert engine.slot_bytes() == 65 * (9 * 151936 + 16) + 65 * 6 * 4748 * 4
    assert plan(max_num_seqs=64).activations == engine.activation_bytes() + engine.slot_bytes()


def test_without_graphs_their_reserve_is_for_the_cache():
    eager, graphs = plan(graphs=False), plan()
    assert eager.graphs == 0 < graphs.graphs
    assert eager.num_blocks > graphs.num_blocks


def test_no_more_than_all_requests_at_full_length_use():
    report = plan(max_num_seqs=2, max_model_len=1000)
    assert report.num_blocks == 2 * 63
    assert plan(num_kv_blocks=70, max_model_len=1000).num_blocks == 70


@pytest.mark.parametrize(("free", "says"), [(8, "raise gpu_memory_utilization, or lower"), (9, "no memory for")])
def test_no_room_at_all_names_the_numbers(free, says):
    with pytest.raises(PeagleError, match=says) as caught:
        plan(free=free)
    assert f"90% of the GPU's 80.00 GiB are 72.00 GiB; {80 - free}.00 GiB are in use" in str(caught.value)


def test_an_asked_length_that_does_not_fit_is_refused_and_the_models_own_is_lowered():
    settings = dict(free=12.5, max_num_seqs=4, max_num_batched_tokens=512, graphs=False)
    lowered = plan(**settings)
    assert 0 < lowered.num_tokens == lowered.max_model_len < 40960
    assert lowered.is_limit
    with pytest.raises(PeagleError, match=f"lower max_model_len to {lowered.num_tokens} or raise gpu_memory"):
        plan(**settings, max_model_len=40960)
    assert plan(**settings, max_model_len=lowered.num_tokens).max_model_len == lowered.num_tokens
    with pytest.raises(PeagleError, match="or raise num_kv_blocks"):
        plan(num_kv_blocks=3, max_model_len=49)


def test_a_cache_that_limits_requests_is_named(caplog):
    """Once at the start, and to whom it refuses; an answer that it cuts ends as by any other limit."""
    llm = tiny_llm(3, num_kv_blocks=5)
    assert [record.message for record in caplog.records] == [
        "the KV cache limits a prompt and its answer to 20 tokens, of the model's context of 128: for longer ones "
        "raise num_kv_blocks"
    ]
    told = "prompt 0 has 30 tokens: the KV cache of 20 leaves no room for an answer; shorten it or raise num_kv_blocks"
    with pytest.raises(PeagleError, match=told):
        llm.make_request([5] * 30, SamplingParams())
    (cut,) = llm.generate([[5, 6]], SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True))
    assert (len(cut.token_ids), cut.finish_reason) == (18, "length")
    caplog.clear()
    asked = tiny_llm(3, num_kv_blocks=5, max_model_len=20)
    assert not caplog.records
    with pytest.raises(PeagleError, match=r"the context of 20 leaves no room for an answer; shorten it$"):
        asked.make_request([5] * 30, SamplingParams())


def test_a_larger_cache_comes_of_what_limits_it():
    assert plan().remedy == "raise gpu_memory_utilization"
    assert plan(num_kv_blocks=70).remedy == "raise num_kv_blocks"
    assert plan(device=torch.device("cpu")).remedy == "use a machine with more memory"


def test_a_host_gives_a_quarter():
    report = plan(total=16, free=16, device=torch.device("cpu"))
    assert (report.activations, report.graphs) == (0, 0)
    assert 0 <= 4 * GIB - report.kv_bytes < 16 * PER_TOKEN


def test_activations_grow_with_what_they_are_made_of():
    def size(drafts=5, head=HEAD, **settings):
        return load(SPEC, head, drafts, **settings).activation_bytes()

    prompts = dict(max_num_batched_tokens=65536, max_num_seqs=8)
    assert size(**prompts) > 65536 * 2 * (3 * 12288 + 12288)  # gates and taps
    decodes = dict(max_num_batched_tokens=64, max_num_seqs=256)
    assert size(**decodes) > 256 * 6 * 151936 * 6  # logits, once more in float32
    assert size(**prompts) < size(**{**prompts, "max_num_batched_tokens": 2 * 65536})
    assert size(3, **decodes) < size(7, **decodes)
    assert size(**decodes) < size(**decodes, kernels="torch")
    assert size(0, **prompts) == size(head=None, **prompts) < size(**prompts)


def test_logits_fit_with_all_that_may_be_asked_of_them():
    """As they are, for log-probabilities; in float32 with penalties; again under a mask."""
    rows = 256 * 6
    logits = rows * SPEC.vocab_size * (2 + 4 + 4) + scratch_bytes(rows, SPEC.vocab_size, 2)
    engine = load(head=None, max_num_seqs=256, max_num_batched_tokens=64)
    assert engine.activation_bytes() > 1.2 * logits + 512 * 2**20


def test_experts_hold_a_row_as_often_as_it_is_chosen():
    def size(chosen):
        moe = MoESpec(num_experts=32, experts_per_token=chosen, gate_alpha=1.7, gate_limit=7.0)
        return load(replace(SPEC, moe=moe), None, 0).activation_bytes()

    # For each of 8192 rows a product and an output, in bfloat16, with a margin of a fifth.
    assert size(8) - size(7) == pytest.approx(1.2 * 8192 * 2 * (12288 + 4096))


def test_each_graph_costs_what_its_layers_do():
    def size(count, head, drafts=5):
        return load(SPEC, head, drafts).graph_bytes(count)

    in_turn = replace(HEAD, mask_token_id=None)  # five passes over its layers
    assert size(20, in_turn) - size(10, in_turn) == pytest.approx((size(20, HEAD) - size(10, HEAD)) * 56 / 40)


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"presence_penalty": 0.5, "logprobs": 20},
    {"show_drafts": True, "prompt_logprobs": 20},
]


def load_fully(llm: LLM) -> None:
    """A request of each kind in every slot, their prompts in the largest passes there are, two of them long."""
    rng, core, count = np.random.default_rng(0), llm.core, llm.core.max_num_seqs
    for i in range(count):
        ids = rng.integers(2, llm.target.spec.vocab_size, 20_000 if i < 2 else 600).tolist()
        params = SamplingParams(max_tokens=40, seed=i, ignore_eos=True, **KINDS[i % len(KINDS)])
        core.add(llm.make_request(ids, params, index=i))
    most = 0
    while core.has_work:
        core.step()
        most = max(most, sum(not request.in_prefill for request in core.scheduler.running))
    assert most == count


def used() -> int:
    """Bytes of the GPU that anyone holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_keeps_to_its_share_on_gpu():
    """Warmed up with all its graphs and fully loaded. What torch holds counts at its peak, the rest at the end."""
    gc.collect()  # engines of other tests
    torch.zeros(1, device="cuda")  # CUDA's own memory is there before, as that of other processes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total, before = torch.cuda.mem_get_info()[1], used()
    foreign, budget = before - torch.cuda.memory_reserved(), before + 6 * GIB
    llm = sized_llm(
        "small", 5, context=65536, vocab_size=49152, max_num_seqs=48, gpu_memory_utilization=budget / total
    )  # fmt: skip
    assert llm.core.scheduler.pool.num_blocks < 48 * 65536 // 16  # memory is what limits the cache
    WarmUp(llm, llm.make_request).run(lambda: False)
    load_fully(llm)
    peak = torch.cuda.max_memory_reserved()
    assert peak > before - foreign + 4 * GIB  # it was no small share of it
    assert foreign + peak <= budget
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the tests beside this one take memory too
        assert used() - torch.cuda.memory_reserved() + peak <= budget
