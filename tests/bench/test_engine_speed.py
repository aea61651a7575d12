"""The grid of the speed benchmark: what is measured first, and that random engines are made as set."""

import argparse
import json
import os
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.over_vllm import compare
from benchmarks.speed_shapes import (
    EAGLE3,
    P_EAGLE,
    P_EAGLE_32K,
    P_EAGLE_INT8,
    PLAIN,
    REAL_SHAPES,
    SHAPES,
    SYNTHETIC,
    EngineSpeedRow,
    Setup,
    drafter_config,
    geometric_rate,
    hf_config,
    plan,
)
from benchmarks.tables import render_block
from peagle.bench.report import read_result, write_result
from peagle.errors import PeagleError
from peagle.models.int8 import Int8Linear
from peagle.models.spec import spec_from_hf

ROW = EngineSpeedRow(
    shape="qwen3-8b",
    method="p-eagle",
    num_speculative_tokens=7,
    concurrency=8,
    acceptance="assumed",
    acceptance_length=3.94,
    acceptance_length_measured=3.9,
    ms_per_step=5.25,
    ms_per_step_lowest=5.2,
    ms_per_step_highest=5.3,
    tokens_per_second=6003.8,
    repeats=3,
    steps=390,
    mean_context=400.0,
    gpu_busy_ms=5.1,
    gpu_busy_share=0.97,
    times_floor=1.25,
)


def test_the_most_important_come_first():
    groups = plan(list(REAL_SHAPES), [P_EAGLE, EAGLE3, PLAIN], [1, 3, 5, 7], equal=True)
    assert [[(s.method, s.num_drafts) for s in group] for group in groups[:2]] == [
        [(P_EAGLE, 7), (PLAIN, 0), (EAGLE3, 3)]
    ] * 2
    assert [group[0].shape for group in groups[:5]] == [
        "smollm2-135m", "qwen3-8b", "qwen2.5-coder-0.5b", "qwen2.5-1.5b", "gpt-oss-20b",
    ]  # fmt: skip
    every = [setup for group in groups for setup in group]
    assert len(every) == len(set(every)) == len({setup.label for setup in every}) == 5 * 11
    assert all(len({setup.shape for setup in group}) == 1 for group in groups)


def test_a_smaller_vocabulary_is_measured_where_it_is_asked_for():
    methods = [P_EAGLE, P_EAGLE_32K, EAGLE3, PLAIN]
    _, second, *_ = plan(["qwen2.5-1.5b"], methods, [1, 3, 5, 7], equal=False)
    assert [(s.method, s.num_drafts) for s in second[:2]] == [(EAGLE3, 7), (P_EAGLE_32K, 7)]
    assert [s.method for s in second].count(P_EAGLE_32K) == 1
    (exact, int8), *_, last = plan(["qwen2.5-1.5b"], [P_EAGLE, P_EAGLE_INT8], [1, 3, 5, 7], equal=False)
    assert (exact, exact.draft_lm_head) == (Setup("qwen2.5-1.5b", P_EAGLE, 7), "auto")
    assert (int8, int8.draft_lm_head) == (Setup("qwen2.5-1.5b", P_EAGLE_INT8, 7), "int8")
    assert [(s.method, s.num_drafts) for s in last] == [(P_EAGLE, 1), (P_EAGLE_INT8, 3)]
    assert int8.acceptance_length == pytest.approx(0.996 * exact.acceptance_length, abs=5e-4)  # what it cost a head


def test_a_smaller_grid():
    assert plan(["tiny"], [PLAIN], [3], equal=True) == [[Setup("tiny", PLAIN, 0)]]
    assert plan(["tiny"], [EAGLE3], [3], equal=False) == [[Setup("tiny", EAGLE3, 3)]]


@pytest.mark.parametrize(("length", "drafts"), [(3.94, 7), (2.65, 3), (3.4, 7), (1.0, 3), (4.0, 3)])
def test_rates_have_the_length_that_is_set(length, drafts):
    rate = geometric_rate(length, drafts)
    assert 1 + sum(rate**i for i in range(1, drafts + 1)) == pytest.approx(length, abs=1e-9)


def test_acceptance_lengths():
    assert Setup("qwen3-8b", P_EAGLE, 7).acceptance_length == 3.94
    assert Setup("smollm2-135m", P_EAGLE, 7).acceptance_length == 3.40
    assert Setup("qwen3-8b", EAGLE3, 3).acceptance_length == 2.65
    assert Setup("qwen3-8b", EAGLE3, 7, "equal").acceptance_length == 3.94
    assert Setup("qwen3-8b", P_EAGLE_32K, 7).acceptance_length == 3.94
    assert Setup("smollm2-135m", P_EAGLE_32K, 7).acceptance_length == 3.40
    assert Setup("qwen3-8b", PLAIN, 0).acceptance_length == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_targets_this_engine_computes(shape):
    spec = spec_from_hf(hf_config(shape))
    parallel, serial = drafter_config(spec, P_EAGLE), drafter_config(spec, EAGLE3)
    assert (parallel.num_layers, serial.num_layers) == (4, 1)
    assert parallel.parallel
    assert not serial.parallel
    assert parallel.draft_vocab_size == spec.vocab_size
    assert serial.draft_vocab_size == (160 if shape.startswith("tiny") else 32_000)
    small = drafter_config(spec, P_EAGLE_32K)
    assert small == replace(parallel, draft_vocab_size=serial.draft_vocab_size)
    assert drafter_config(spec, P_EAGLE_INT8) == parallel
    assert parallel.intermediate_size == (3 * spec.hidden_size if spec.moe else spec.intermediate_size)


@pytest.mark.parametrize("shape", ["tiny", "tiny-gpt-oss"])
def test_a_random_drafter_shares_the_targets_tables(tmp_path, shape):
    from benchmarks.engine_speed import dummy_drafter
    from peagle.models.target import load_target

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    target = load_target(str(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"), load_format="dummy")
    for method in (P_EAGLE, P_EAGLE_32K, EAGLE3):
        drafter = dummy_drafter(target, method)
        assert drafter.embed_tokens is target.model.embed_tokens
        assert (drafter.lm_head is target.model.lm_head) == (method == P_EAGLE)
        assert all(bool(p.isfinite().all()) and p.dtype == torch.bfloat16 for p in drafter.parameters())
        assert bool(drafter.rope.inv_freq.isfinite().all())
        ids = drafter.to_target_ids(torch.arange(drafter.config.draft_vocab_size))
        assert int(ids.max()) < 320
        assert len(set(ids.tolist())) == drafter.config.draft_vocab_size


def test_the_table(tmp_path):
    plain = EngineSpeedRow(
        **asdict(ROW)
        | dict(method="none", num_speculative_tokens=0, acceptance_length=1.0, gpu_busy_share=None, times_floor=None)
    )
    other = EngineSpeedRow(**asdict(ROW) | dict(concurrency=64, ms_per_step=20.0, tokens_per_second=12608.0))
    for name in ("engine-speed-x", "peer-vllm-x"):
        write_result(tmp_path / "r.json", name, {}, {"rows": [ROW, other, plain]})
        text = render_block(name, read_result(tmp_path / "r.json"))
        drafting = "| qwen3-8b | p-eagle | 7 | 3.94 | 5.25, **6,004** | 20.00, **12,608** | – – | 97 % 97 % | 1.2 1.2 |"
        assert drafting in text
        assert "| qwen3-8b | none |  | 1.00 | 5.25, **6,004** |  | – – | – – | – – |" in text


@pytest.mark.parametrize("settings", [{}, {"acceptance": SYNTHETIC}])  # files of before the setting, and of now
def test_acceptance_by_chance_is_labelled(settings, tmp_path):
    over = compare([asdict(ROW)], [asdict(ROW)])
    for name, rows in (("engine-speed-x", [ROW]), ("peer-vllm-x", [ROW]), ("over-vllm-x", over)):
        write_result(tmp_path / "r.json", name, settings, {"rows": rows})
        text = render_block(name, read_result(tmp_path / "r.json"))
        assert text.startswith("SYNTHETIC acceptance: drafts are kept by chance")
        assert text.count("SYNTHETIC") == 1


def test_ratios_below_the_table(tmp_path):
    def row(method, k, concurrency=1, **changes):
        changes = dict(method=method, num_speculative_tokens=k, concurrency=concurrency) | changes
        return EngineSpeedRow(**asdict(ROW) | changes)

    rows = [
        row("p-eagle", 7, ms_per_step=2.0, drafting_ms=0.3, tokens_per_second=300.0),
        row("p-eagle", 7, 8, ms_per_step=4.0),
        row("eagle3", 7, ms_per_step=3.0),
        row("p-eagle-32k", 7, ms_per_step=1.5),
        row("p-eagle-int8", 7, ms_per_step=1.6),
        row("p-eagle", 1, drafting_ms=0.25),
        row("none", 0, tokens_per_second=100.0),
    ]
    write_result(tmp_path / "r.json", "engine-speed-x", {}, {"rows": rows})
    text = render_block("engine-speed-x", read_result(tmp_path / "r.json"))
    assert "- qwen3-8b: P-EAGLE over EAGLE-3 at equal acceptance, K = 7: **1.50** at c = 1\n" in text
    assert "- qwen3-8b: the same where both draft from 32,000 tokens, K = 7: **2.00** at c = 1\n" in text
    assert "a step with the output layer of drafts in 16 bits over one in 8, K = 7: **1.25** at c = 1\n" in text
    assert "- qwen3-8b: drafting with K = 7 over drafting with K = 1: **1.20** at c = 1\n" in text
    assert "over no speculation, at the acceptance assumed: **3.00** at c = 1\n" in text


def test_the_best_engines_of_two_sides():
    from benchmarks.over_vllm import compare

    def row(method, speed, concurrency=1, acceptance="assumed"):
        changes = dict(method=method, tokens_per_second=speed, concurrency=concurrency, acceptance=acceptance)
        return asdict(ROW) | changes

    ours = [row("p-eagle", 5.0), row("eagle3", 6.0), row("eagle3", 9.0, acceptance="equal"), row("p-eagle", 1.0, 8)]
    (best,) = compare(ours, [row("none", 2.0), row("p-eagle", 3.0)])
    assert (best.ours, best.theirs, best.ratio) == ("eagle3 K=7", "p-eagle K=7", 2.0)


def test_the_tables_of_savings_and_of_the_choice_of_k(tmp_path):
    def block(name, rows):
        write_result(tmp_path / "r.json", name, {}, {"rows": rows})
        return render_block(name, read_result(tmp_path / "r.json"))

    saving = dict(shape="tiny", concurrency=1, repeats=3)
    rows = [saving | dict(left_out="nothing", ms_per_step=1.0, times_all=1.0)]
    rows.append(saving | dict(left_out="CUDA graphs", ms_per_step=9.5, times_all=9.6))
    assert "| tiny | nothing | 1.000 |\n| tiny | CUDA graphs | 9.500, **+860.0 %** |" in block("savings-x", rows)
    policies = [("none", 1.0, 0), ("K=3", 1.8, 3), ("K=7", 2.5, 7), ("auto, first batch", 2.2, 6.0), ("auto", 2.4, 6.5)]
    rows = [
        dict(shape="tiny", acceptance_length=3.4, concurrency=8, policy=name, times_plain=times, mean_drafts=k)
        for name, times, k in policies
    ]
    assert "| tiny | 3.40 | **2.40x** (2.20x), mean K 6.5 | 2.50x, K=7 |" in block("auto-k-x", rows)


def test_the_tables_of_kernels(tmp_path):
    def block(name, rows):
        write_result(tmp_path / "r.json", name, {}, {"rows": rows})
        return render_block(name, read_result(tmp_path / "r.json"))

    step = dict(shape="S", kernel="accept", batch=8, floor_us=0.04)
    rows = [step | dict(backend="triton", us=2.0), step | dict(backend="torch", us=20.25)]
    assert "| S | accept | **2.0**, 20.2, 0.04 |" in block("step-kernels-x", rows)
    layer = dict(shape="S", operation="rms_norm", requests=1, rows=8, keys=0, floor_ms=0.001)
    rows = [layer | dict(backend="triton", ms=0.002, times_floor=2.0)]
    assert "| S | rms_norm | 1 x 8 |  | 2.0 | – | 1.00 | **2.0** |" in block("model-kernels-x", rows)


def test_the_table_of_a_profile(tmp_path):
    row = dict(group="matmul", calls_per_step=120.0, ms_per_step=1.5, share=0.625)
    write_result(tmp_path / "r.json", "profile-x", {}, {"rows": [row]})
    assert "| matmul | 120 | 1.500 | 62 % |" in render_block("profile-x", read_result(tmp_path / "r.json"))


def test_a_row_of_windows_and_a_profile():
    from benchmarks.engine_process import Models
    from benchmarks.engine_speed import Engine, _row
    from peagle.bench.profile import Event, summarise
    from peagle.bench.stepping import Window

    spec = spec_from_hf(hf_config("tiny"))
    measured = SimpleNamespace(models=lambda: Models(spec, drafter_config(spec, P_EAGLE)))
    windows = [Window(2, seconds, 10, 70, 300.0) for seconds in (0.05, 0.04, 0.09)]
    engine = Engine(Setup("tiny", P_EAGLE, 7), measured, {2: windows})
    row = _row(engine, 2, 1e9, torch.bfloat16)
    assert (row.ms_per_step, row.ms_per_step_lowest, row.ms_per_step_highest) == (5.0, 4.0, 9.0)
    assert row.tokens_per_second == pytest.approx(3.94 * 2 / 0.005)
    assert (row.acceptance_length_measured, row.steps, row.gpu_busy_ms) == (3.5, 30, None)
    engine.profiles[2] = (summarise([Event("gemm", 0, 8000, "kernel")], steps=4), engine.windows[2][0])
    assert _row(engine, 2, 1e9, torch.bfloat16).gpu_busy_share == 0.4


def test_engines_in_processes_of_their_own_measure_the_same_rows(tmp_path):
    from benchmarks.engine_speed import _arguments, _measure_shapes

    flags = "--device cpu --shapes tiny --methods p-eagle none --k 3 --concurrency 1 --repeats 1 --output-tokens 40"
    rows = {}
    for own in (False, True):
        args = _arguments([*flags.split(), "--profile-steps", "2", "--out", str(tmp_path / f"{own}.json")])
        args.one_process = not own  # what a GPU would have
        _measure_shapes(args)
        result = read_result(tmp_path / f"{own}.json")
        rows[own] = [(r["method"], r["steps"], r["acceptance_length_measured"]) for r in result["results"]["rows"]]
    assert rows[True] == rows[False]
    assert {method for method, *_ in rows[True]} == {"p-eagle", "none"}


def test_eight_bits_are_the_engine_s_and_the_floor_s(tmp_path):
    from benchmarks.engine_speed import _arguments, _measure_shapes

    flags = "--device cpu --methods p-eagle p-eagle-int8 --k 7 --concurrency 1 --repeats 1 --profile-steps 2"
    args = _arguments([*flags.split(), "--no-equal", "--out", str(tmp_path / "r.json")])
    made = []
    with patch("peagle.engine.build.Int8Linear", lambda layer, form: made.append(form) or Int8Linear(layer, form)):
        _measure_shapes(args)
    assert len(made) == 1
    rows = {row["method"]: row for row in read_result(tmp_path / "r.json")["results"]["rows"]}
    saved = rows["p-eagle"]["mbytes_per_step"] - rows["p-eagle-int8"]["mbytes_per_step"]
    assert saved == pytest.approx(3 * 320 * 48 / 1e6, abs=2e-3)  # of float32, whose byte for each stays


def _no_engine(args: Any, setup: Setup) -> Any:
    raise PeagleError("there is none")


def _no_process(args: Any, setup: Setup) -> Any:
    os._exit(7)


@pytest.mark.parametrize(("make", "says"), [(_no_engine, "p-eagle.*: there is none"), (_no_process, "status 7")])
def test_an_engine_that_cannot_be_made_is_said(make: Any, says: str):
    from benchmarks.engine_process import OwnEngine

    process = OwnEngine(make, argparse.Namespace(), Setup("tiny", P_EAGLE, 3))
    try:
        with pytest.raises(PeagleError, match=says):
            process.ready()
    finally:
        process.close()
