"""Metrics: vLLM's names, and numbers that add up."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.sampling import SamplingParams
from peagle.server.activity import Finished, Snapshot
from peagle.server.metrics import Metrics
from tests.engine.tiny import random_prompts, tiny_llm
from tests.server.test_engine_thread import LONG, begin, running, slow_steps

MODEL = 'ORG/"odd" name'


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and its labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
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
    metrics.watch(lambda: Snapshot(num_running=2, num_waiting=7, kv_usage=0.25, preemptions=4))
    found = values(metrics)
    assert [found[f"vllm:{name}"] for name in names] == [2, 7, 0.25]
    assert found["vllm:num_preemptions_total"] == 4


def test_histograms(served):
    found, outputs = served
    assert found["vllm:time_to_first_token_seconds_count"] == len(outputs)
    assert found["vllm:time_to_first_token_seconds_sum"] > 0
    for name in ("e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert found[f"vllm:{name}_seconds_count"] == len(outputs) - 1
    assert found["vllm:request_generation_tokens_sum"] == 20 * (len(outputs) - 1)
    assert found["vllm:request_generation_tokens_bucket[10.0]"] == 0
    assert found["vllm:request_generation_tokens_bucket[20.0]"] == len(outputs) - 1
    assert found["vllm:request_prompt_tokens_sum"] == sum(len(o.prompt_token_ids) for o in outputs[:-1])
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
    one.record_finished(Finished("a", 3, 1, "stop", 0.1, 0.2, 0.2, 0.2, 1.0))
    assert values(one)["vllm:request_success_total[stop]"] == 1
    assert values(other)["vllm:request_success_total[stop]"] == 0
    assert values(one)["vllm:request_time_per_output_token_seconds_count"] == 0  # one token has no pace
