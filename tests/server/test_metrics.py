"""Metrics: vLLM's names, and numbers that add up."""

import json
import re
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.engine.block_pool import BlockPool
from peagle.sampling import SamplingParams
from peagle.server.activity import Finished, Snapshot
from peagle.server.metrics import Metrics
from tests.engine.tiny import random_prompts, tiny_llm
from tests.server.test_engine_thread import LONG, begin, running, slow_steps

ROOT = Path(__file__).resolve().parents[2]
MODEL = 'ORG/"odd" name'
# What dashboards for vLLM ask for: name -> (type, labels besides model_name and engine).
VLLM = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "kv_cache_usage_perc": ("gauge", ()),
    "gpu_cache_usage_perc": ("gauge", ()),
    "cache_config_info": ("gauge", ("block_size", "enable_prefix_caching", "num_gpu_blocks")),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "spec_decode_num_drafts": ("counter", ()),
    "spec_decode_num_draft_tokens": ("counter", ()),
    "spec_decode_num_accepted_tokens": ("counter", ()),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", ("position",)),
    **dict.fromkeys(
        (
            "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
            "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
            "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
            "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
            "request_params_max_tokens", "iteration_tokens_total",
        ),
        ("histogram", ("le",)),
    ),
}  # fmt: skip


def families(metrics: Metrics) -> list:
    """The engine's own, without those of the process."""
    every = text_string_to_metric_families(metrics.render().decode())
    return [family for family in every if not family.name.startswith("process_")]


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and its labels but the model's and the engine's."""
    found = {}
    for family in families(metrics):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            assert labels.pop("engine") == "0"
            found[sample.name + "".join(f"[{value}]" for value in labels.values())] = sample.value
    return found


@pytest.fixture(scope="module")
def served() -> tuple[dict[str, float], list]:
    metrics = Metrics(MODEL)
    with running(tiny_llm(3), observer=metrics) as engine:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        outputs = [r.finish() for r in [begin(engine, p, params)[1] for p in random_prompts(12, seed=2)]]
        with slow_steps(engine):
            request, reader = begin(engine, [5], LONG)
            assert reader.began.wait(60)
            engine.abort(request)
            outputs.append(reader.finish())
    return values(metrics), outputs


def test_counters(served):
    found, outputs = served
    finished = outputs[:-1]
    assert found["vllm:generation_tokens_total"] == sum(len(o.token_ids) for o in outputs)
    assert found["vllm:prompt_tokens_total"] == sum(len(o.prompt_token_ids) for o in outputs)
    reasons = [found[f"vllm:request_success_total[{reason}]"] for reason in ("stop", "length", "abort")]
    assert reasons == [0, len(finished), 1]
    assert found["vllm:num_preemptions_total"] == 0
    assert found["vllm:spec_decode_num_drafts_total"] == sum(o.stats.num_rounds for o in outputs)
    assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(o.stats.num_draft_tokens for o in outputs)
    accepted = sum(o.stats.num_accepted_tokens for o in outputs)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    at = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(3)]
    assert sum(at) == accepted
    assert at == sorted(at, reverse=True)


def test_gauges(served):
    found, _ = served
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [found[f"vllm:{name}"] for name in names] == [0, 0, 0]
    metrics = Metrics(MODEL)
    now = Snapshot(num_running=2, num_waiting=7, kv_usage=0.25, preemptions=4, prefix_queries=30, prefix_hits=8)
    metrics.watch(lambda: now, BlockPool(10, 16, prefix_caching=False))
    found = values(metrics)
    assert [found[f"vllm:{name}"] for name in names] == [2, 7, 0.25]
    assert found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 4
    assert found["vllm:prefix_cache_queries_total"] == 30
    assert found["vllm:prefix_cache_hits_total"] == 8
    (info,) = [family for family in families(metrics) if family.name == "vllm:cache_config_info"]
    about = {"block_size": "16", "num_gpu_blocks": "10", "enable_prefix_caching": "False"}
    assert [(sample.labels.items() >= about.items(), sample.value) for sample in info.samples] == [(True, 1)]


def test_names_types_and_labels_are_vllms():
    metrics = Metrics(MODEL)
    metrics.watch(lambda: Snapshot(accepted_per_position=(3, 1)), BlockPool(10, 16))
    metrics.record_finished(Finished("a", 3, 5, 9, "stop", 0.1, 0.2, 0.3, 0.3, 1.0))
    found = {}
    for family in families(metrics):
        labels = {name for sample in family.samples for name in sample.labels} - {"model_name", "engine"}
        found[family.name] = (family.type, tuple(sorted(labels)))
    assert found == {f"vllm:{name}": about for name, about in VLLM.items()}
    assert b"process_resident_memory_bytes" in metrics.render() or not sys.platform.startswith("linux")


def test_the_dashboard_asks_for_what_there_is():
    text = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    asked = set(re.findall(r"vllm:(\w+)", text))
    series = {
        f"{name}{end}"
        for name, (kind, _) in VLLM.items()
        for end in {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[kind]
    }
    assert asked
    assert asked <= series
    assert all(target["expr"].count("(") == target["expr"].count(")") for p in panels for target in p["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_prefix_cache_is_counted():
    metrics, prompt = Metrics(MODEL), list(range(2, 22))
    with running(tiny_llm(3), observer=metrics) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for _ in range(2):
            begin(engine, prompt, params)[1].finish()
    found = values(metrics)
    assert found["vllm:prefix_cache_queries_total"] == 1 + 40  # with the warm-up's
    assert found["vllm:prefix_cache_hits_total"] == 16  # four whole blocks: a token at least is left to compute


def test_histograms(served):
    found, outputs = served
    assert found["vllm:time_to_first_token_seconds_count"] == len(outputs)
    assert found["vllm:time_to_first_token_seconds_sum"] > 0
    parts = ("request_prefill_time", "request_decode_time")
    for name in ("e2e_request_latency", "request_queue_time", "request_time_per_output_token", *parts):
        assert found[f"vllm:{name}_seconds_count"] == len(outputs) - 1
    assert found["vllm:request_generation_tokens_sum"] == 20 * (len(outputs) - 1)
    assert found["vllm:request_generation_tokens_bucket[10.0]"] == 0
    assert found["vllm:request_generation_tokens_bucket[20.0]"] == len(outputs) - 1
    assert found["vllm:request_prompt_tokens_sum"] == sum(len(o.prompt_token_ids) for o in outputs[:-1])
    ran = found["vllm:request_inference_time_seconds_sum"]
    assert ran == pytest.approx(sum(found[f"vllm:{name}_seconds_sum"] for name in parts))
    assert ran <= found["vllm:e2e_request_latency_seconds_sum"]
    assert found["vllm:request_params_max_tokens_sum"] == 20 * (len(outputs) - 1)
    tokens = found["vllm:prompt_tokens_total"] + found["vllm:generation_tokens_total"]
    assert found["vllm:iteration_tokens_total_sum"] == tokens
    gaps = found["vllm:inter_token_latency_seconds_count"]
    assert gaps == found["vllm:time_per_output_token_seconds_count"]
    rounds = sum(o.stats.num_rounds for o in outputs)
    assert gaps == rounds  # the first token comes from the prompt, each round adds one gap
    for name in {key.split("_bucket[")[0] for key in found if "_bucket[" in key}:
        buckets = [value for key, value in found.items() if key.startswith(f"{name}_bucket[")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == found[f"{name}_count"]


def test_a_value_on_a_bound_is_in_its_bucket():
    metrics = Metrics(MODEL)
    for seconds in (0.0, 0.001, 0.0011, 1e9):
        metrics.record_first_token(seconds)
    found = values(metrics)
    name = "vllm:time_to_first_token_seconds_bucket"
    assert [found[f"{name}[0.001]"], found[f"{name}[0.005]"], found[f"{name}[+Inf]"]] == [2, 3, 4]


def test_two_registries_are_apart():
    one, other = Metrics(MODEL), Metrics(MODEL)
    one.record_finished(Finished("a", 3, 1, 9, "stop", 0.1, 0.2, 0.2, 0.2, 1.0))
    assert values(one)["vllm:request_success_total[stop]"] == 1
    assert values(other)["vllm:request_success_total[stop]"] == 0
    assert values(one)["vllm:request_time_per_output_token_seconds_count"] == 0  # one token has no pace
