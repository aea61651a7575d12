"""The comparison with vLLM, run against a package that only pretends to be it."""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import peer_vllm
from benchmarks.peer_vllm_worker import engine_arguments
from benchmarks.speed_shapes import EAGLE3, P_EAGLE, PLAIN, Setup
from benchmarks.tables import render_block
from peagle.bench.report import read_result

PRETENDER = """
import time
from types import SimpleNamespace as N

__version__ = "0.0.pretender"


class SamplingParams(N):
    pass


class LLM:
    def __init__(self, **arguments):
        if "no-start" in arguments["model"]:
            raise RuntimeError("Error: out of memory")
        self.k = arguments.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.llm_engine, self.requests, self.drafts, self.accepted = self, {}, 0, 0

    def add_request(self, name, prompt, params):
        self.requests[name] = [0, params.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        time.sleep(0.001)
        outputs = []
        for name, state in list(self.requests.items()):
            tokens = min(2 if self.k else 1, state[1] - state[0])
            state[0] += tokens
            self.drafts, self.accepted = self.drafts + bool(self.k), self.accepted + bool(self.k)
            done = state[0] >= state[1]
            outputs.append(N(request_id=name, finished=done, outputs=[N(token_ids=[7] * tokens)]))
            if done:
                del self.requests[name]
        return outputs

    def get_metrics(self):
        return [
            N(name="vllm:spec_decode_num_drafts", value=self.drafts),
            N(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted),
            N(name="vllm:other"),
        ]

    def start_profile(self):
        pass

    def stop_profile(self):
        pass
"""


@pytest.fixture
def kit(tmp_path):
    package = tmp_path / "kit" / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PRETENDER)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    (tmp_path / "kit" / "modelinfos").mkdir()
    (tmp_path / "kit" / "modelinfos" / "x.json").write_text("{}")
    return tmp_path / "kit"


def arguments(**changes):
    settings = dict(
        concurrency=[1, 2], output_tokens=64, repeats=2, profile=[1], runner="auto", work=Path("work"), target=None,
    )  # fmt: skip
    return Namespace(**{**settings, **changes})


def test_end_to_end(kit, tmp_path, monkeypatch, capsys):
    out = tmp_path / "peer-vllm-x.json"
    monkeypatch.setattr(
        sys, "argv",
        ["peer_vllm.py", "--kit", str(kit), "--work", str(tmp_path / "work"), "--out", str(out), "--shapes", "tiny",
         "--k", "3", "--methods", P_EAGLE, PLAIN, "--concurrency", "1", "2", "--repeats", "2", "--together", "2",
         "--output-tokens", "80"],
    )  # fmt: skip
    peer_vllm.main()
    result = read_result(out)
    assert result["settings"]["engine"] == "vLLM 0.0.pretender"
    assert result["settings"]["acceptance"].startswith("SYNTHETIC: ")
    rows = {(row["method"], row["concurrency"]): row for row in result["results"]["rows"]}
    assert set(rows) == {(PLAIN, 1), (PLAIN, 2), (P_EAGLE, 1), (P_EAGLE, 2)}
    for row in rows.values():
        assert row["acceptance_length_measured"] == (2.0 if row["method"] == P_EAGLE else 1.0)
        assert 1.0 <= row["ms_per_step"] < 50
        assert row["repeats"] == 2
        assert 128 < row["mean_context"] < 128 + 80
    assert "tiny" in render_block("peer-vllm-x", result)
    draft = json.loads((tmp_path / "work" / "models" / "tiny-p-eagle" / "config.json").read_text())
    assert draft["parallel_drafting"] is True
    assert list((tmp_path / "work" / "engines").glob("*/cache/modelinfos/x.json"))


def test_an_engine_that_does_not_start_is_left_out(kit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peer_vllm, "_target_dir", lambda args, shape: tmp_path / "no-start")
    args = arguments(kit=kit, work=tmp_path, python=sys.executable)
    assert list(peer_vllm._measure(args, [Setup("tiny", PLAIN, 0)], float("inf"))) == []
    said = capsys.readouterr().err
    assert "tiny none did not start" in said
    assert "out of memory" in said


def test_no_time_left(tmp_path):
    assert list(peer_vllm._measure(arguments(work=tmp_path), [Setup("tiny", PLAIN, 0)], 0.0)) == []


def test_what_an_engine_is_told(tmp_path):
    args = arguments(concurrency=[1, 3])
    job = peer_vllm.make_job(args, Setup("qwen3-8b", P_EAGLE, 7), tmp_path)
    assert job["rates"][0] > job["rates"][1] > job["rates"][6]
    assert 1 + sum(job["rates"]) == pytest.approx(3.94)
    assert job["runner"] is None
    assert len(job["batches"][3]) == 3
    assert job["kv_bytes"] > 40 * 2 * 8 * 128 * 2 * 3 * 192
    settings = engine_arguments(json.loads(json.dumps(job)))
    assert settings["speculative_config"]["rejection_sample_method"] == "synthetic"
    assert {3, 24, 42} <= set(settings["compilation_config"]["cudagraph_capture_sizes"])
    plain = peer_vllm.make_job(args, Setup("qwen3-8b", PLAIN, 0), tmp_path)
    assert (plain["draft"], plain["rates"], plain["runner"]) == (None, None, "1")
    assert "speculative_config" not in engine_arguments(plain)
    assert engine_arguments(plain)["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 3, 4, 8, 16, 32, 64]
    serial = peer_vllm.make_job(arguments(runner="v1"), Setup("qwen3-8b", EAGLE3, 3), tmp_path)
    assert (serial["parallel"], serial["runner"]) == (False, "0")


def test_time_of_a_step_is_that_of_a_round():
    # 2 requests, 20 rounds of 2 tokens each in 0.1 s, of which the window saw 10 of each request.
    window = dict(
        requests=2, rounds=40, accepted=40, tokens=40, seconds=0.05, first_token=34, all_tokens=80, prompt_tokens=256
    )
    slower = window | dict(seconds=0.07)
    row = peer_vllm.peer_row(Setup("tiny", P_EAGLE, 3), 2, [window, slower, window, window | dict(tokens=0)], None)
    assert row.ms_per_step == 5.0
    assert row.ms_per_step_highest == 7.0
    assert row.acceptance_length_measured == 2.0
    assert row.tokens_per_second == pytest.approx(3.02 * 2 / 0.005)
    assert row.mean_context == (256 + 34 + 20) / 2


def test_the_profile_of_an_engine(tmp_path):
    traces = tmp_path / "engines" / "tiny-none" / "traces"
    traces.mkdir(parents=True)
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 640.0}
    for i, events in enumerate([[], [kernel]]):  # a front end's trace has no kernels
        path = traces / f"{i}.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        os.utime(path, (i, i))
    seen = dict(rounds=0, all_tokens=64)
    found = peer_vllm._profiles(arguments(work=tmp_path), Setup("tiny", PLAIN, 0), {"profiled": {"1": seen}})
    assert found[1].busy_ms == pytest.approx(0.01)
