"""What the benchmark of savings leaves out can be left out: the names are there, and no token changes."""

from argparse import Namespace
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from benchmarks import savings
from benchmarks.savings import ALL, VARIANTS, Variant, _rows
from peagle.bench.report import read_result
from peagle.bench.stepping import Window
from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.sampling import SamplingParams
from tests.engine.tiny import random_prompts, tiny_parts

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def answers(variant: Variant) -> list[list[int]]:
    """With drafts kept by chance, which say the same whatever was left out on the way."""
    config = EngineConfig(block_size=4, max_num_seqs=4, kernels="torch", **variant.engine)
    with ExitStack() as stack:
        for name, function in variant.replaced.items():
            stack.enter_context(patch(name, function))
        llm = LLM.from_parts(
            *tiny_parts(), 3, config, pack=False, synthetic_rates=(0.9, 0.5, 0.5), savings=variant.savings
        )  # fmt: skip
        return [output.token_ids for output in llm.generate(random_prompts(3), PARAMS)]


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=lambda variant: variant.left_out)
def test_no_token_depends_on_a_saving(variant):
    assert answers(variant) == answers(VARIANTS[0])


def test_what_a_saving_is_worth_is_told_repeat_by_repeat():
    def windows(*ms):
        return [Window(1, 1e-3 * each, 1, 4, 100.0) for each in ms]

    whole, without = _rows("tiny", {(ALL, 1): windows(1.0, 2.0, 1.0), ("CUDA graphs", 1): windows(3.0, 5.0, 2.0)})
    assert (whole.ms_per_step, whole.times_all) == (1.0, 1.0)
    assert (without.times_all, without.times_all_lowest, without.times_all_highest) == (2.5, 2.0, 3.0)


@pytest.mark.parametrize("seconds,marks", [(None, [True, True, True, False]), (0.0, [True, False])])
def test_the_file_is_partial_until_the_last_shape_has_its_repeats_or_its_time_is_up(
    tmp_path, monkeypatch, seconds, marks
):
    monkeypatch.setattr(savings, "dummy_target", lambda *_: tiny_parts()[0])
    monkeypatch.setattr(savings, "dummy_drafter", lambda *_: None)
    monkeypatch.setattr(savings, "random_prompts", lambda *_: [[1]])
    monkeypatch.setattr(savings, "decode_window", lambda *_: Window(1, 1e-3, 1, 4, 100.0))
    args = Namespace(
        out=tmp_path / "savings.json", shapes=["a", "b"], concurrency=[1], repeats=2, output_tokens=8, seconds=seconds,
        dtype="auto", device="cpu",
    )  # fmt: skip
    bench, found = savings.Bench(args), []
    monkeypatch.setattr(bench, "_engine", lambda *_: None)
    monkeypatch.setattr(savings, "say_progress", lambda *_: found.append(read_result(args.out)["settings"]["partial"]))
    for shape in args.shapes:
        bench.measure(shape)
    assert found == marks
