"""What judges a difference between two answers knows, apart from any engine, what an engine says and by how much."""

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import lossless_gpu
from benchmarks.lossless_gpu import REFERENCE, SETTINGS, Lossless, Run, not_exercised
from peagle.bench.lossless import common_length
from peagle.sampling import SamplingParams
from tests.engine.tiny import random_prompts, tiny_llm, tiny_parts


@pytest.fixture
def bench(monkeypatch):
    target, drafter = tiny_parts()
    monkeypatch.setattr(lossless_gpu, "load_target", lambda *_, **__: target)
    monkeypatch.setattr(lossless_gpu, "load_drafter", lambda *_, **__: drafter)
    return Lossless(argparse.Namespace(device="cpu", model="", head="", prompts=4), "float32")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_difference_is_weighed(bench, temperature):
    llm, prompts = tiny_llm(enable_prefix_caching=False), random_prompts(3)

    def answers():
        params = [SamplingParams(max_tokens=8, temperature=temperature, seed=i, ignore_eos=True) for i in range(3)]
        return Run(llm.generate(prompts, params), 0, 0, 1.0)

    noise, mean = bench.judge.noise(answers().outputs)
    assert mean <= noise < 1e-4
    run, reference = answers(), answers()
    row, found = bench.compare(REFERENCE, temperature, run, reference, noise)
    assert (row.equal, row.tokens_compared, row.first_divergence, row.largest_gap) == (3, 24, None, None)
    assert (row.explained, found) == (True, [])

    for i, output in enumerate(reference.outputs):  # it says the very tokens that the engine drew
        prefix = [*output.prompt_token_ids, *output.token_ids[:4]]
        assert bench.judge.gap(prefix, [output.token_ids[4]] * 2, temperature, i) == pytest.approx(0, abs=1e-6)

    run.outputs[1].token_ids[5] = (run.outputs[1].token_ids[5] + 1) % 96
    run.outputs[2].token_ids[2:] = []
    row, found = bench.compare(REFERENCE, temperature, run, reference, noise)
    assert (row.equal, row.tokens_compared, row.first_divergence, row.explained) == (1, 8 + 6 + 3, 2, False)
    assert [(d.request, d.index, d.explained) for d in found] == [(1, 5, False), (2, 2, False)]
    assert found[0].gap > 2 * noise
    assert found[1].gap is None
    assert not_exercised([row]) == []
    named = [replace(row, setting=setting.name) for setting in SETTINGS]
    assert "preemption (nobody preempted)" in not_exercised(named)
    assert "prefix cache (nothing cached)" in not_exercised(named)
    loose, _ = bench.compare(REFERENCE, temperature, run, reference, noise=100.0)
    assert not loose.explained  # an answer that ends early is never rounding


def test_rows_are_the_same_in_any_number(bench):
    ids = random_prompts(1, seed=3)[0] * 2
    ways = [bench.judge.logits(ids, 5, rows, "torch") for rows in (1, 2, 5, len(ids))]
    for way in ways[1:]:
        torch.testing.assert_close(way, ways[0], rtol=1e-4, atol=1e-4)


def test_common_length():
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0
