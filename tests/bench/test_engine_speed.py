"""The grid of the speed benchmark: what is measured first, and that random engines are made as set."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed_shapes import (
    EAGLE3,
    P_EAGLE,
    PLAIN,
    REAL_SHAPES,
    SHAPES,
    EngineSpeedRow,
    Setup,
    drafter_config,
    geometric_rate,
    hf_config,
    plan,
)
from peagle.bench.report import read_result, write_result
from peagle.bench.tables import render_block
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
    groups = plan(list(REAL_SHAPES), [P_EAGLE, EAGLE3, PLAIN], [3, 5, 7], equal=True)
    assert [[(s.method, s.num_drafts) for s in group] for group in groups[:2]] == [
        [(P_EAGLE, 7), (PLAIN, 0), (EAGLE3, 3)]
    ] * 2
    assert [group[0].shape for group in groups[:5]] == [
        "smollm2-135m", "qwen3-8b", "qwen2.5-coder-0.5b", "qwen2.5-1.5b", "gpt-oss-20b",
    ]  # fmt: skip
    every = [setup for group in groups for setup in group]
    assert len(every) == len(set(every)) == len({setup.label for setup in every}) == 5 * 10
    assert all(len({setup.shape for setup in group}) == 1 for group in groups)


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
    assert parallel.intermediate_size == (3 * spec.hidden_size if spec.moe else spec.intermediate_size)


@pytest.mark.parametrize("shape", ["tiny", "tiny-gpt-oss"])
def test_a_random_drafter_shares_the_targets_tables(tmp_path, shape):
    from benchmarks.engine_speed import dummy_drafter
    from peagle.models.target import load_target

    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    target = load_target(str(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"), load_format="dummy")
    for method in (P_EAGLE, EAGLE3):
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


def test_the_table_of_a_profile(tmp_path):
    row = dict(group="matmul", calls_per_step=120.0, ms_per_step=1.5, share=0.625)
    write_result(tmp_path / "r.json", "profile-x", {}, {"rows": [row]})
    assert "| matmul | 120 | 1.500 | 62 % |" in render_block("profile-x", read_result(tmp_path / "r.json"))


def test_a_row_of_windows_and_a_profile():
    from benchmarks.engine_speed import Engine, _row
    from peagle.bench.profile import Event, summarise
    from peagle.bench.stepping import Window

    spec = spec_from_hf(hf_config("tiny"))
    llm = SimpleNamespace(
        target=SimpleNamespace(spec=spec), drafter=SimpleNamespace(config=drafter_config(spec, P_EAGLE))
    )
    windows = [Window(2, seconds, 10, 70, 300.0) for seconds in (0.05, 0.04, 0.09)]
    engine = Engine(Setup("tiny", P_EAGLE, 7), llm, [], {2: windows})
    row = _row(engine, 2, 1e9, torch.bfloat16)
    assert (row.ms_per_step, row.ms_per_step_lowest, row.ms_per_step_highest) == (5.0, 4.0, 9.0)
    assert row.tokens_per_second == pytest.approx(3.94 * 2 / 0.005)
    assert (row.acceptance_length_measured, row.steps, row.gpu_busy_ms) == (3.5, 30, None)
    engine.profiles[2] = (summarise([Event("gemm", 0, 8000, "kernel")], steps=4), engine.windows[2][0])
    assert _row(engine, 2, 1e9, torch.bfloat16).gpu_busy_share == 0.4
