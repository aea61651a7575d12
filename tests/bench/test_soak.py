"""The soak notices what it is for: lost and doubled tokens, streams without an end, and what piles up."""

import argparse
import asyncio
import json
import time

import pytest

from benchmarks import soak
from benchmarks.soak_requests import (
    Answer,
    Job,
    Unexpected,
    differences,
    is_shifted,
    make_jobs,
    read_stream,
)
from benchmarks.soak_server import Held, Server, Watch, slope
from benchmarks.tables import render_block
from peagle.bench.report import read_result, write_result
from tests.server.serving import chat_llm, serving

TEXT = "The capital of France is Paris, which lies on the river Seine and is known for its cafes."


def of(text, reason="stop", tokens=20):
    return Answer([text], [reason], tokens)


def test_a_lost_and_a_doubled_token_are_told_from_another_choice():
    assert differences(of(TEXT), of(TEXT)) == []
    for got in (TEXT.replace(" France", ""), TEXT.replace(" France", " France France"), TEXT[:40], TEXT + " And"):
        assert differences(of(got), of(TEXT))[0].startswith("shifted")
    other = TEXT[:24] + " Spain would be Madrid, of course, and not this."
    assert differences(of(other), of(TEXT))[0].startswith("different at character 25")
    assert not is_shifted(other, TEXT, 25)
    assert "ended by length" in differences(of(TEXT, "length"), of(TEXT))[0]
    assert differences(of(TEXT, tokens=19), of(TEXT)) == ["19 tokens, not 20"]
    assert differences(of(TEXT, tokens=None), of(TEXT)) == []


def event(index=0, text="", reason=None, **more):
    choice = {"index": index, "text": text, "finish_reason": reason}
    return "data: " + json.dumps({"choices": [choice], **more})


def read(*lines, choices=1):
    async def each():
        for line in lines:
            yield line

    return asyncio.run(read_stream(each(), choices))


def test_streams():
    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    answer = read(event(text="a"), "", event(1, "x"), event(text="b", reason="stop"), event(1, "", "length"), usage,
                  "data: [DONE]", choices=2)  # fmt: skip
    assert (answer.texts, answer.reasons, answer.tokens) == (["ab", "x"], ["stop", "length"], 3)
    for broken in (
        [event(text="a"), "data: [DONE]"], [event(reason="stop")], [event(reason="stop"), event(text="b")],
        [event(reason="stop"), "data: [DONE]", event()], ['data: {"error": {"message": "no"}}'], ["hello"],
    ):  # fmt: skip
        with pytest.raises(Unexpected):
            read(*broken)


def test_requests_are_different_and_the_same_every_time():
    jobs = make_jobs(40, 64, seed=3)
    assert jobs == make_jobs(40, 64, seed=3)
    assert jobs != make_jobs(40, 64, seed=4)
    assert {job.path for job in jobs} == {"/v1/chat/completions", "/v1/completions"}
    for name in ("stop", "n", "ignore_eos", "top_p", "repetition_penalty", "logit_bias"):
        assert 0 < sum(name in job.body for job in jobs) < 40
    several = next(job for job in jobs if job.choices > 1)
    assert [job.body["seed"] - several.body["seed"] for job in several.alone()] == [*range(several.choices)]


def test_slopes():
    assert slope([(float(x), 500.0 if x < 50 else 2.0 * x) for x in range(100)]) == pytest.approx(120.0)
    assert slope([]) is None
    assert slope([(0.0, 1.0), (1.0, 2.0)]) is None


ARGUMENTS = argparse.Namespace(concurrency=6)


def soaked(served, jobs, seconds=4.0):
    """(row, tally) of a short soak of a server in this process."""
    server = Server(served.url, None, time.perf_counter())
    references = [(job, soak._reference(server, "tiny", job)) for job in jobs]
    before, load = server.wait_idle(), soak.Load(server, references, "tiny", seed=1)
    with Watch(server, 1.0) as watch:
        asyncio.run(load.run(ARGUMENTS.concurrency, seconds))
    row = soak._row(
        ARGUMENTS, load.tally, seconds / 60, before, server.wait_idle(), watch.samples, server.held(), None, None
    )
    return row, load.tally


def tiny_jobs():
    made = [Job("/v1/completions", {"prompt": [5 + i, 7], "max_tokens": 5 + 3 * i, "seed": 100 * i}) for i in range(6)]
    made += [Job("/v1/completions", {"prompt": [9], "max_tokens": 30, "seed": 7, "n": 3, "stop": ["q", "BB"]})]
    return [*made, Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
                                                "seed": 1, "temperature": 0})]  # fmt: skip


def test_a_soak_of_the_tiny_server(tmp_path):
    with serving(chat_llm()) as served:
        row, tally = soaked(served, tiny_jobs())
    assert tally.problems == []
    assert row.passed
    assert row.requests > 10
    assert row.left > 0
    assert row.answers_accounted
    write_result(tmp_path / "r.json", "soak-x", {}, {"rows": [row]})
    text = render_block("soak-x", read_result(tmp_path / "r.json"))
    assert f"| 6 | 0.1 | {row.requests} |" in text
    assert "| **0** | **0** | **0** | 0 % | – | – |" in text


def test_a_soak_notices_a_lost_token():
    llm = chat_llm()
    with serving(llm) as served:
        advance, count = served.engine._advance, 0

        def lose(live, now):
            nonlocal count
            delta, count = advance(live, now), count + 1
            if count % 50 == 0 and count > 150 and delta.output is None:
                object.__setattr__(delta, "text", delta.text[1:])
            return delta

        served.engine._advance = lose
        row, tally = soaked(served, tiny_jobs())
    assert not row.passed
    assert row.different > 0
    assert any("streamed" in problem for problem in tally.problems)


def test_what_is_left_fails_the_soak():
    clean = {"vllm:request_success_total": 0.0, "vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0,
             "vllm:kv_cache_usage_perc": 0.0, "vllm:num_preemptions_total": 0.0}  # fmt: skip

    def row(after=(), grows=0.0, files=7, status=0):
        samples = [Held(float(60 * t), 900 + grows * t, None, 5, 7) for t in range(20)]
        rest, last = samples[0], Held(1200.0, samples[-1].rss_mib, None, 5, files)
        return soak._row(ARGUMENTS, soak.Tally(), 20.0, clean, clean | dict(after), samples, rest, last, status)

    assert row().passed
    assert row().rss_mib_per_minute == 0
    assert not row({"vllm:kv_cache_usage_perc": 0.01}).passed
    assert not row({"vllm:num_requests_running": 1.0}).passed
    assert not row({"vllm:request_success_total": 1.0}).passed
    assert not row(grows=5.0).passed
    assert not row(files=30).passed
    assert not row(status=1).passed
