"""What decode steps cost on this device: the table that K is chosen by."""

import logging
import time
from collections.abc import Iterable, Sequence

import torch

from peagle.engine.core import EngineCore
from peagle.engine.speculation import CostTable

_log = logging.getLogger(__name__)
_REPEATS = 5  # of which the fastest counts: whatever else the machine does only ever adds
_IN_A_ROW = 4  # steps of a GPU that are timed as one, as they follow each other in an engine
_CONTEXT = 512  # tokens of the requests that a GPU times, if there is room for these and what the steps add
_MOST_REQUESTS_CPU = 16  # larger batches of a host are judged by this one: they take seconds a step


def measure_costs(core: EngineCore, draft_counts: Sequence[int]) -> CostTable:
    """Seconds of a decode step for batch sizes up to the most requests there can be, and for every K.

    On a GPU, steps run on requests that only seem to be there, with contexts of 512 tokens: reading them costs more for
    some K than for others. Elsewhere they run on padding, as if contexts were short. An idle engine is left as it was.
    """
    on_gpu = core.device.type == "cuda"
    factor = 2 if on_gpu else 4  # a host is slow, and its costs nearly follow the rows
    sizes = [core.max_num_seqs if on_gpu else min(core.max_num_seqs, _MOST_REQUESTS_CPU)]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // factor, 1))
    repeats, in_a_row, context = (_REPEATS, _IN_A_ROW, _CONTEXT) if on_gpu else (1, 1, 0)
    _log.warning(
        "num_speculative_tokens is auto: running %d steps to measure what they cost, batches of %s requests "
        "with %s drafts%s; with a k_table in --speculative-config none would be needed",
        len(sizes) * len(draft_counts) * (1 + repeats * in_a_row),
        _listed(reversed(sizes)),
        _listed(draft_counts),
        "" if on_gpu else "; on a CPU this takes a while",
    )
    began = time.perf_counter()
    costs: dict[tuple[int, int], float] = {}
    for size in sizes:  # compiled and captured first: with more graphs there, each of them takes a little longer
        for k in draft_counts:
            core.run_padding(size, k)
    for size in reversed(sizes):
        costs |= {(size, k): _seconds(core, size, k, repeats, in_a_row, context) for k in draft_counts}
        _log.info("steps of %d requests: %s ms", size, _listed(f"{1e3 * costs[size, k]:.1f}" for k in draft_counts))
    _log.info("measured in %.1f s: K is chosen step by step from now on", time.perf_counter() - began)
    return costs


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _seconds(core: EngineCore, size: int, num_drafts: int, repeats: int, in_a_row: int, context: int) -> float:
    best = float("inf")
    context = max(0, min(context, core.max_model_len - (in_a_row + 2) * (num_drafts + 1)))
    for _ in range(repeats):
        with core.pretended(context):
            _synchronize(core.device)
            begin = time.perf_counter()
            for _ in range(in_a_row):
                core.run_padding(size, num_drafts, padding=context == 0)
            _synchronize(core.device)
            best = min(best, (time.perf_counter() - begin) / in_a_row)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
