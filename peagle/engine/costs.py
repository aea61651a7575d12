"""What decode steps cost on this device: the table that K is chosen by."""

import time
from collections.abc import Sequence

import torch

from peagle.engine.core import EngineCore
from peagle.engine.speculation import CostTable

_REPEATS = 5  # of which the fastest counts: whatever else the machine does only ever adds


def measure_costs(core: EngineCore, draft_counts: Sequence[int]) -> CostTable:
    """Seconds of a decode step for batch sizes up to the most requests there can be, and for every K.

    Steps run on padding, which costs what requests with short contexts cost. An idle engine is left as it was.
    """
    factor = 2 if core.device.type == "cuda" else 4  # a host is slow, and its costs nearly follow the rows
    sizes = [core.max_num_seqs]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // factor, 1))
    return {(size, k): _seconds(core, size, k) for size in reversed(sizes) for k in draft_counts}


def _seconds(core: EngineCore, size: int, num_drafts: int) -> float:
    best = float("inf")
    core.run_padding(size, num_drafts)  # compiles, captures
    for _ in range(_REPEATS):
        _synchronize(core.device)
        begin = time.perf_counter()
        core.run_padding(size, num_drafts)
        _synchronize(core.device)
        best = min(best, time.perf_counter() - begin)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
