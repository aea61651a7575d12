"""The benchmark of K chosen by the engine: what it makes of its batches, and when its file is whole."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import auto_k
from benchmarks.engine_tables import auto_k as table
from peagle.bench.report import read_result


class Shape:
    """Engines whose speed is given: without a head 100 tokens a second, in the second repeat 200."""

    def __init__(self, args: Namespace, shape: str) -> None:
        self.repeat, self.seconds, self.costs = 0, 0.0, {(1, 0): 1e-3, (1, 7): 2e-3}

    def close(self) -> None:
        pass

    def batches(self, head: float, concurrency: int) -> dict[str, auto_k.Timed]:
        self.repeat += 1
        plain = 100.0 * self.repeat
        speeds = {
            "none": plain,
            "K=3": 2 * plain,
            "K=7": 1.5 * plain,
            auto_k.FIRST: 0.9 * plain,
            auto_k.AUTO: 1.9 * plain,
        }
        return {name: auto_k.Timed(speed, 2.0) for name, speed in speeds.items()}


@pytest.fixture
def bench(tmp_path, monkeypatch) -> auto_k.Bench:
    monkeypatch.setattr(auto_k, "Shape", Shape)
    args = Namespace(
        out=tmp_path / "auto-k.json", shapes=["a", "b"], heads=[3.4], concurrency=[1], repeats=2, output_tokens=64,
        seconds=None, dtype="auto", device="cpu",
    )  # fmt: skip
    return auto_k.Bench(args)


def partial_marks(bench: auto_k.Bench, monkeypatch) -> list[bool]:
    """Whether each file that was written said that it was cut."""
    marks, write = [], bench.write

    def noted() -> None:
        write()
        settings = read_result(Path(bench.args.out))["settings"]
        assert settings["acceptance"].startswith("SYNTHETIC: ")
        marks.append(settings["partial"])

    monkeypatch.setattr(bench, "write", noted)
    bench.run()
    return marks


def test_the_file_is_partial_until_the_last_repeat_of_the_last_shape(bench, monkeypatch):
    assert partial_marks(bench, monkeypatch) == [True, True, True, False]


def test_time_that_is_over_ends_each_shape_and_the_file_is_whole(bench, monkeypatch):
    bench.args.seconds = 0.0
    assert partial_marks(bench, monkeypatch) == [True, False]


def test_a_choice_of_k_is_told_as_a_multiple_of_plain_decoding_in_the_same_repeat(bench):
    bench.found["tiny", 3.4, 1, "none"] = [auto_k.Timed(100.0, 0), auto_k.Timed(50.0, 0)]
    bench.found["tiny", 3.4, 1, "auto"] = [auto_k.Timed(99.0, 1), auto_k.Timed(100.0, 3)]
    plain, auto = bench.rows()
    assert (plain.times_plain, plain.tokens_per_second) == (1.0, 75.0)
    assert (auto.times_plain, auto.times_plain_lowest, auto.mean_drafts) == (1.495, 0.99, 2)


def test_the_table_shows_the_first_batch_and_the_best_fixed_k(bench):
    bench.run()
    rows = read_result(Path(bench.args.out))["results"]["rows"]
    assert "**1.90x** (0.90x), mean K 2.0 | 2.00x, K=3" in table(rows)
