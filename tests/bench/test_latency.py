"""Figures of a load, against loads made by hand; acceptance from counters and from answers."""

import asyncio
import itertools
import math
import re
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peagle.acceptance import AcceptanceStats
from peagle.bench.client import Answer
from peagle.bench.counters import acceptance, parse_counters
from peagle.bench.latency import latencies, spread, summarise
from peagle.bench.load import Load, extra_fields, request_body, send_times
from peagle.bench.load_progress import LoadProgress
from peagle.bench.sets import LoadPrompt
from peagle.bench.settings import BenchServeConfig
from peagle.errors import PeagleError


def answer(*chunks, tokens=None, **rest):
    return Answer(id="x", start=10.0, chunks=[10.0 + at for at in chunks], output_tokens=tokens, **rest)


def test_figures_by_hand():
    whole = [answer(0.1, 0.2, 0.4, tokens=3, prompt_tokens=5), answer(0.3, tokens=1, prompt_tokens=7)]
    failed = [answer(0.001, failure="disconnect"), answer(failure="HTTP 500"), answer(failure="HTTP 500")]
    load = Load(answers=[*whole, *failed, answer(0.1, stopped=True)], asked=9, seconds=2.0, peak=4)
    row = summarise(load, BenchServeConfig(goodput="ttft:200 tpot:160"))
    counts = {"asked": 9, "completed": 2, "failed": 3, "unfinished": 1, "not_sent": 3, "peak_concurrency": 4}
    assert {name: row[name] for name in counts} == counts
    assert row["failures"] == {"disconnect": 1, "HTTP 500": 2}
    assert (row["output_tokens"], row["prompt_tokens"], row["total_tokens"]) == (4, 12, 16)
    assert (row["request_throughput"], row["output_throughput"], row["total_throughput"]) == (1.0, 2.0, 8.0)
    latency = row["latency_ms"]
    assert latency["ttft"]["mean"] == pytest.approx(200)  # the failed answer's 1 ms is not in it
    assert latency["tpot"]["mean"] == pytest.approx(150)
    assert latency["e2el"]["p50"] == pytest.approx(350)
    assert row["goodput"] == {"limits_ms": {"ttft": 200, "tpot": 160}, "good": 1, "per_second": 0.5}
    assert row["mean_concurrency"] == pytest.approx(0.35)


def test_nothing_completed():
    row = summarise(Load(answers=[answer(failure="timeout")], asked=1, seconds=1.0), BenchServeConfig())
    assert row["latency_ms"]["ttft"] is None
    assert row["tokens_from"] is row["tokens_per_chunk"] is None
    assert (row["completed"], row["failed"], row["output_throughput"]) == (0, 1, 0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 8)), min_size=1, max_size=20))
def test_gaps_between_tokens_add_up(chunks):
    """Chunks of several tokens: tokens - 1 gaps whose sum is the time after the first."""
    times, sizes = np.cumsum([gap for gap, _ in chunks]), [size for _, size in chunks]
    one = answer(*map(float, times), tokens=sum(sizes))
    found = latencies([one])
    assert len(found["itl"]) == sum(sizes) - 1
    assert len(found["chunk"]) == len(chunks) - 1
    assert sum(found["itl"]) == pytest.approx(1000 * (one.e2e - one.ttft), abs=1e-6)
    if one.tpot is not None:
        assert np.mean(found["itl"]) == pytest.approx(1000 * one.tpot, abs=1e-6)


def test_an_end_without_text_is_a_token_if_one_is_missing():
    """The end of an answer is a token without text; a chunk that only says why an answer ended is none."""
    with_token, without = answer(0.1, 0.2, tokens=3, silent_end=10.3), answer(0.1, 0.2, tokens=2, silent_end=10.3)
    assert [one.e2e for one in (with_token, without)] == pytest.approx([0.3, 0.2])
    found = latencies([with_token])
    assert found["itl"] == pytest.approx([100, 100])
    assert found["chunk"] == pytest.approx([100])
    assert answer(tokens=1, silent_end=10.5).ttft == 0.5


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(monkeypatch, terminal):
    """Tokens of answers under way count: by chunks, and once an answer has ended, by what its chunks held."""
    said = StringIO()
    clock = itertools.chain([2.0], itertools.repeat(4.0))
    answers = [answer(0.1, 0.2), answer(0.1, 0.2, tokens=6), answer(failure="HTTP 500")]
    with LoadProgress(Console(file=said, force_terminal=terminal, width=120), "requests", 3) as progress:
        monkeypatch.setattr(progress, "_start", 0.0)
        monkeypatch.setattr("peagle.bench.load_progress.time.perf_counter", lambda: next(clock))
        progress.show(answers[:1])
        progress(answers[1])
        progress(answers[2])
        progress.show(answers)
    assert re.search(r"\b3 tok/s, 1 failed", said.getvalue())  # 6, and 2 chunks of 3, in 4 s
    if not terminal:
        assert "requests: 0 of 3, 1 tok/s, time left unknown yet\n" in said.getvalue()
        assert "requests: 2 of 3, 3 tok/s, 1 failed, about 2 s left\n" in said.getvalue()


def test_a_log_hears_of_a_load_whose_first_answer_takes_long(monkeypatch):
    said = StringIO()
    monkeypatch.setattr("peagle.bench.load_progress._LINE_SECONDS", 0.01)

    async def watched(progress):
        task = asyncio.ensure_future(progress.watch([answer(0.1)]))
        await asyncio.sleep(0.1)
        task.cancel()

    with LoadProgress(Console(file=said, width=120), "requests", 3) as progress:
        asyncio.run(watched(progress))
    assert said.getvalue().count("requests: 0 of 3, ") > 1


def test_tokens_without_usage_are_chunks():
    counted, told = answer(0.1, 0.2), answer(0.1, 0.2, tokens=6)
    rows = [
        summarise(Load(answers=list(a), asked=2, seconds=1.0), BenchServeConfig()) for a in ([counted], [counted, told])
    ]
    assert [row["tokens_from"] for row in rows] == ["chunks", "usage and chunks"]
    assert [row["output_tokens"] for row in rows] == [2, 8]


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(0).exponential(size=1000))
    found = spread(values, [50.0, 95.0, 99.9])
    assert found["p95"] == np.percentile(values, 95)
    assert set(found) == {"mean", "std", "p50", "p95", "p99.9"}


COUNTERS = """\
# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0e+01
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 4.0
"""


def test_counters_of_vllm():
    found = parse_counters(COUNTERS)
    zero = parse_counters(
        "\n".join(f"vllm:spec_decode_{n} 0" for n in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    )
    figures = acceptance([answer(0.1)], zero, found)
    assert figures["source"] == "counters"
    assert figures["acceptance_length"] == 1 + 30 / 20
    assert figures["acceptance_rate"] == 0.5
    assert figures["per_position"] == [0.8, 0.5, 0.2]
    assert figures["per_position_conditional"] == [0.8, 10 / 16, 0.4]
    assert acceptance([], found, found)["acceptance_length"] is None  # nothing was drafted in between


def test_acceptance_that_is_not_reported():
    assert parse_counters("process_cpu_seconds_total 4\nvllm:num_requests_running 1\n") is None
    for number in ("1e", "+-", "1e999", "9" * 999, "NaN"):
        assert parse_counters(re.sub(r"(num_drafts\S*) \S+", rf"\1 {number}", COUNTERS)) is None
    assert max(parse_counters(COUNTERS.replace('position="0"', f'position="{"9" * 12}"')).per_position) < 999
    found = parse_counters(COUNTERS)
    assert acceptance([answer(0.1)], None, found) is None
    assert acceptance([answer(0.1)], found, None) is None
    assert (
        acceptance([answer(0.1)], found, parse_counters(COUNTERS.replace("60.0", "9.0").replace("1.0e+01", "1")))
        is None
    )


def test_what_answers_say_goes_before_counters():
    stats = AcceptanceStats(num_rounds=4, num_draft_tokens=12, num_accepted_tokens=6, accepted_per_position=[3, 2, 1])
    found = parse_counters(COUNTERS)
    figures = acceptance([answer(0.1, stats=stats), answer(failure="timeout")], found, found)
    assert (figures["source"], figures["acceptance_length"]) == ("requests", 2.5)
    assert figures["per_position"] == [0.75, 0.5, 0.25]
    assert acceptance([answer(0.1, stats=stats), answer(0.1)], None, None) is None  # not all said it


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals(burstiness):
    config = BenchServeConfig(request_rate=20.0, burstiness=burstiness, seed=3)
    times = send_times(config, 20_000)
    gaps = np.diff(times)
    assert times == send_times(config, 20_000)
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(0.05, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert send_times(BenchServeConfig(), 3) == [0.0] * 3


def test_bodies():
    prompt = LoadPrompt(id="p", output_len=9, messages=({"role": "user", "content": "hi"},))
    config = BenchServeConfig(
        top_p=0.9, top_k=5, min_p=0.1, ignore_eos=True, request_seeds=True, seed=4, temperature=0.7
    )
    body = request_body(config, "m", prompt, 3)
    assert body == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.7,
        "messages": [{"role": "user", "content": "hi"}], "top_p": 0.9, "top_k": 5, "min_p": 0.1, "ignore_eos": True,
        "seed": 7,
    }  # fmt: skip
    plain = request_body(BenchServeConfig(backend="openai", extra_body='{"stop": ["x"]}'), "m", prompt, 0)
    assert plain == {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9, "temperature": 0.0,
        "prompt": "hi", "stop": ["x"],
    }  # fmt: skip


def test_a_length_of_another_data_set_is_refused():
    for dataset, right in (
        ("mt-bench", "give --output-len"),
        ("custom", "or --custom-output-len"),
        ("random", "or --random-output-len"),
    ):
        with pytest.raises(PeagleError, match=f"hf_output_len is for the data set hf, not for {dataset}: .*{right}$"):
            BenchServeConfig(dataset_name=dataset, hf_output_len=4)
    with pytest.raises(PeagleError, match="endpoint is 'nope': it is a path and begins with /"):
        BenchServeConfig(dataset_name="hf", endpoint="nope")
    with pytest.raises(PeagleError, match="custom_output_len is for the data set custom"):
        BenchServeConfig(dataset_name="hf", custom_output_len=4)
    for name in ("hf", "custom", "sharegpt", "spec_bench", "speed_bench"):
        BenchServeConfig(dataset_name=name, **{f"{name}_output_len": 4})


@pytest.mark.parametrize("wrong", ["{", "[]", '{"prompt": "x"}'])
def test_extra_body_is_checked(wrong):
    with pytest.raises(PeagleError, match="extra_body"):
        extra_fields(BenchServeConfig(extra_body=wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset_name": "imagenet"}, {"backend": "tgi"}, {"port": 0}, {"num_prompts": 0}, {"request_rate": 0.0},
        {"request_rate": math.nan}, {"burstiness": 0.0}, {"custom_output_len": -2}, {"top_k": -2}, {"top_p": 0.0},
        {"goodput": "ttft"}, {"goodput": "itl:5"}, {"goodput": "ttft:x"}, {"goodput": "ttft:-1"}, {"timeout": 0.0},
        {"percentile_metrics": ("ttft", "speed")}, {"metric_percentiles": (101.0,)}, {"base_url": "localhost:8000"},
        {"temperature": -1.0}, {"max_concurrency": 0}, {"seed": -1},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(PeagleError, match=next(iter(wrong))):
        BenchServeConfig(**wrong)


def test_addresses(monkeypatch):
    assert BenchServeConfig(base_url="http://h:1/v1/").server == "http://h:1"
    assert BenchServeConfig(host="h", port=2).server == "http://h:2"
    assert BenchServeConfig(dataset_name="spec_bench").dataset_name == "spec-bench"
    assert BenchServeConfig().path == "/v1/chat/completions"
    assert BenchServeConfig(dataset_name="random").path == BenchServeConfig(backend="vllm").path == "/v1/completions"
    monkeypatch.setenv("OPENAI_API_KEY", "environment")
    assert BenchServeConfig().key == "environment"
    assert BenchServeConfig(api_key="given").key == "given"
