"""The table of targets: judged by what was measured, not by what is left of it after rounding."""

import pytest

from benchmarks import common
from benchmarks.engine_tables import engines_of
from benchmarks.speed_shapes import EAGLE3, P_EAGLE, P_EAGLE_32K
from benchmarks.target_tables import Figure, _floor_ms, targets
from peagle.bench.report import read_result


@pytest.mark.parametrize(
    ("figure", "shown", "verdict"),
    [
        (Figure("a", 1.3, 1.3), "1.30", "yes"),
        (Figure("a", 1.29986, 1.3), "1.2999", "**no**"),
        (Figure("a", 1.234, 1.3), "1.23", "**no**"),
        (Figure("a", 1.3004, 1.3, is_most=True), "1.3004", "**no**"),
        (Figure("a", 94.999, 95.0, unit=" %"), "94.999 %", "**no**"),
        (Figure("a", 1.3 - 1e-9, 1.3), "1.300000", "**no**"),
        (Figure("a", 2.5), "2.50", "yes"),
        (Figure("a", None, 2.0), "not measured", "–"),
        (Figure("a", 1.29986, 1.3, floors=1.3), "1.2999 (floors: 1.30)", "**no**"),
    ],
)
def test_a_miss_reads_as_one(figure, shown, verdict):
    assert (figure.shown, figure.verdict) == (shown, verdict)


def engine(method, k, ms, concurrency=1, **changes):
    row = {"shape": "qwen3-8b", "method": method, "num_speculative_tokens": k, "concurrency": concurrency}
    row |= {"acceptance": "assumed", "ms_per_step": ms, "drafting_ms": None, "gpu_busy_share": None}
    return row | changes


def sweep(dataset, speed, gain, **changes):
    row = {"dataset": dataset, "method": "p-eagle", "concurrency": 1, "tokens_per_second": speed}
    return row | {"speedup_over_none": gain} | changes


def auto(policy, times, concurrency=1):
    return {"shape": "tiny", "policy": policy, "times_plain": times, "concurrency": concurrency}


def over(concurrency, ours, theirs):
    return {
        "shape": "qwen3-8b", "concurrency": concurrency, "ours_tokens_per_second": ours,
        "theirs_tokens_per_second": theirs, "ratio": 9.0,
    }  # fmt: skip


RESULTS = {
    "engine-speed-qwen3-8b-h200": [
        engine("p-eagle", 7, 2.0, drafting_ms=0.5, gpu_busy_share=0.96),
        engine("p-eagle", 7, 4.0, 64, drafting_ms=2.0),
        engine("p-eagle", 1, 1.5, drafting_ms=0.4, gpu_busy_share=0.94),
        engine("p-eagle", 1, 1.5, 64, drafting_ms=1.0),
        engine("eagle3", 7, 2.4, acceptance="equal"),
        engine("eagle3", 7, 2.8),
    ],
    "engine-speed-qwen2.5-1.5b-h200": [
        engine("p-eagle", 7, 2.0, shape="qwen2.5-1.5b"),
        engine("p-eagle-32k", 7, 1.6, shape="qwen2.5-1.5b"),
        engine("eagle3", 7, 2.4, shape="qwen2.5-1.5b"),
    ],
    "sweep-qwen2.5-coder-0.5b-h200": [
        sweep("mt-bench", 300.0, 2.5),
        sweep("mt-bench", 200.0, 3.0),  # another K, slower
        sweep("gsm8k", 300.0, 1.9),
        sweep("gsm8k", 900.0, 3.0, method="eagle3"),
        sweep("gsm8k", 900.0, 3.0, concurrency=8),
    ],
    "over-vllm-h200": [over(1, 120.0, 100.0), over(8, 119.0, 100.0)],
    "auto-k-h200": [
        auto("auto", 0.99), auto("auto, first batch", 0.96), auto("K=7", 0.5), auto("none", 1.0), auto("auto", 0.98, 8),
    ],
}  # fmt: skip


def line(text, beginning, of):
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {beginning}") and f"| {of} |" in row]
    return [cell.strip() for cell in found.split("|")[3:-2]]


def test_every_target_is_judged_by_its_files():
    def read(name):
        settings = {"partial": name == "over-vllm-h200"}
        return {"settings": settings, "results": {"rows": RESULTS[name]}} if name in RESULTS else None

    text = targets(read)
    assert line(text, "GPU busy", "qwen3-8b") == ["lowest of 2 engines: 94.00 %", "**no**"]
    assert line(text, "drafting", "qwen3-8b") == ["c = 1: 1.25, c = 64: 2.00", "yes"]
    over_eagle3 = ["c = 1: 1.20 (floors: 1.11), c = 64: not measured (floors: 0.97)", "c = 1: **no**, c = 64: –"]
    assert line(text, "P-EAGLE over EAGLE-3", "qwen3-8b") == over_eagle3  # at P-EAGLE's acceptance where there is one
    alike = ["c = 1: 1.50 (floors: 1.25), c = 64: not measured (floors: 1.03)", "c = 1: yes, c = 64: –"]
    assert line(text, "P-EAGLE over EAGLE-3", "qwen2.5-1.5b, both drafting from 32,000 tokens") == alike
    assert "qwen3-8b, both" not in text
    over_none = ["mt-bench: 2.50, gsm8k: 1.90", "mt-bench: yes, gsm8k: **no**"]
    assert line(text, "over no drafts", "Qwen2.5-Coder-0.5B, head of the sweep") == over_none
    over_vllm = ["c = 1: 1.20, c = 8: 1.19, c = 64: not measured", "c = 1: yes, c = 8: **no**, c = 64: –"]
    assert line(text, "over vLLM's best", "qwen3-8b") == over_vllm
    assert line(text, "auto K", "tiny") == ["c = 1: 0.96, c = 8: 0.98", "c = 1: **no**, c = 8: yes"]
    assert line(text, "over vLLM's best", "smollm2-135m") == ["not measured", "–"]
    assert "second run" not in text
    assert "[over-vllm](benchmarks/results/over-vllm-h200.json) (partial)" in text


def test_floors_stand_beside_the_steps_over_eagle3():
    rows = [
        engine("p-eagle", 7, 2.0),
        engine("eagle3", 7, 2.4),
        engine("p-eagle", 7, 4.0, 64),
        engine("eagle3", 7, 4.4, 64),
        engine("p-eagle", 1, 1.5),
    ]
    text = targets(lambda name: {"settings": {}, "results": {"rows": rows}} if "engine-speed-qwen3" in name else None)
    measured = "c = 1: 1.20 (floors: 1.11), c = 64: 1.10 (floors: 0.97)"
    assert line(text, "P-EAGLE over EAGLE-3", "qwen3-8b") == [measured, "c = 1: **no**, c = 64: yes"]


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-1.5b", "qwen3-8b"])
def test_floors_of_one_request_are_those_of_the_benchmark(shape: str):
    """There reading is all that counts, and is in the result files."""
    rows = read_result(common.RESULTS / f"engine-speed-{shape}-h200.json")["results"]["rows"]
    of = engines_of(shape, rows)
    for method in (EAGLE3, P_EAGLE):
        assert _floor_ms(shape, method, 1) == pytest.approx(of[method, 7, 1]["floor_ms"], rel=2e-3)
        assert _floor_ms(shape, method, 64) > of[method, 7, 64]["floor_ms"]


@pytest.mark.parametrize(
    ("shape", "ratios"),
    [("qwen2.5-coder-0.5b", (1.38, 1.08)), ("qwen2.5-1.5b", (1.25, 1.03)), ("qwen3-8b", (1.18, 1.01))],
)
def test_floors_where_both_draft_from_as_many_tokens(shape: str, ratios: tuple[float, float]):
    """What docs/results.md says of them, also where no step was measured."""
    floors = [_floor_ms(shape, EAGLE3, c) / _floor_ms(shape, P_EAGLE_32K, c) for c in (1, 64)]
    assert floors == pytest.approx(ratios, abs=0.0051)


def test_nothing_was_measured():
    text = targets(lambda name: None)
    assert text.count("| not measured | – |") == len(text.splitlines()) - 2
