"""What the benchmark of savings leaves out can be left out: the names are there, and no token changes."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest

from benchmarks.auto_k import Bench as AutoBench
from benchmarks.auto_k import Timed
from benchmarks.savings import ALL, VARIANTS, Variant, _rows
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


def test_a_choice_of_k_is_told_as_a_multiple_of_plain_decoding(tmp_path):
    from argparse import Namespace

    bench = AutoBench(Namespace(device="cpu", out=tmp_path / "r.json"))
    bench.found["tiny", 3.4, 1, "none"] = [Timed(100.0, 0), Timed(50.0, 0)]
    bench.found["tiny", 3.4, 1, "auto"] = [Timed(99.0, 1), Timed(100.0, 3)]
    plain, auto = bench.rows()
    assert (plain.times_plain, plain.tokens_per_second) == (1.0, 75.0)
    assert (auto.times_plain, auto.times_plain_lowest, auto.mean_drafts) == (1.495, 0.99, 2)
