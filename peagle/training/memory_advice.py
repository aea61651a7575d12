"""What to do when a step does not fit: which setting to change, from which value to which."""

import re

from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.training.rows import ROW_BLOCK, RowLayout

_LEAST_LOSS_CHUNK = 512  # below it, the loss's memory is not what fills a GPU
_NAMED = 3  # settings named at once


def out_of_memory(error: BaseException, step: int, config: TrainConfig, layout: RowLayout) -> PeagleError:
    """The error of a run that ran out of memory after `step` steps: what was asked for, what was free, what to turn."""
    text = str(error)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    free = re.search(r"of which ([\d.]+ \w+) is free", text)
    facts = [f"{asked[1]} more were asked for"] if asked else []
    facts += [f"{free[1]} were free"] if free else []
    known = f" ({', '.join(facts)})" if facts else ""
    remedies = ", or ".join(memory_advice(config, layout)[:_NAMED])
    return PeagleError(f"out of memory after {step} steps{known}: {remedies}; checkpoints are as they were")


def memory_advice(config: TrainConfig, layout: RowLayout) -> list[str]:
    """Settings that lower the memory of a step, the cheapest first, each with its present and its next value.

    All but the last are exact and may change when a run is resumed.
    """
    unrolled = config.method == "eagle3"
    advice = []
    if not unrolled and config.partition == "flat":
        advice.append("use --partition prefix-once instead of flat")
    if not unrolled and config.partition == "algorithm1":
        advice.append(f"raise --segments from {config.segments} to {2 * config.segments}")
    smaller = _half_chunk(layout)
    if not unrolled and config.partition == "prefix-once" and smaller < layout.chunk_size:
        advice.append(f"lower --chunk-rows from {layout.chunk_size} to {smaller}")
    if not config.checkpoint_activations:
        advice.append("add --checkpoint-activations" + (" in place of --compile" if config.compile else ""))
    if config.cache_features:
        advice.append("use --no-cache-features")
    if config.loss_chunk > _LEAST_LOSS_CHUNK:
        advice.append(
            f"lower --loss-chunk from {config.loss_chunk} to {max(_LEAST_LOSS_CHUNK, config.loss_chunk // 2)}"
        )
    advice.append(
        f"lower --batch-positions from {config.batch_positions} to {config.batch_positions // 2} with --accumulate "
        f"{2 * config.accumulate}, in another output directory"
    )
    return advice


def _half_chunk(layout: RowLayout) -> int:
    """Half a chunk in whole blocks, but room for one chain at least."""
    half = layout.chunk_size // 2
    half -= half % ROW_BLOCK if half > ROW_BLOCK else 0
    return max(half, layout.longest_chain)
