"""Out of memory: the numbers of torch's message, and settings with their next values."""

from dataclasses import replace

import pytest
import torch

from peagle.config import TrainConfig
from peagle.errors import is_out_of_memory
from peagle.training.memory_advice import memory_advice, out_of_memory
from peagle.training.rows import RowLayout

LAYOUT = RowLayout(positions=8192, mask_rows=32768, num_depths=8, chunk_rows=8192)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 138.46 GiB memory in use."
)


def test_what_was_asked_for_and_what_to_turn():
    error = out_of_memory(torch.OutOfMemoryError(CUDA), 7, TrainConfig(), LAYOUT)
    assert str(error) == (
        "out of memory after 7 steps (2.50 GiB more were asked for, 1.25 GiB were free): lower --chunk-rows from 8192 "
        "to 4096, or add --checkpoint-activations, or lower --loss-chunk from 4096 to 2048; "
        "checkpoints are as they were"
    )


def test_a_message_without_numbers():
    assert "after 1 steps: lower" in str(out_of_memory(RuntimeError("?"), 1, TrainConfig(), LAYOUT))


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"partition": "flat"}, "use --partition prefix-once instead of flat"),
        ({"partition": "algorithm1", "segments": 4}, "raise --segments from 4 to 8"),
        ({"method": "eagle3"}, "add --checkpoint-activations"),
        ({"compile": True}, "lower --chunk-rows from 8192 to 4096"),
    ],
)
def test_the_first_advice_fits_the_settings(changes, first):
    assert memory_advice(TrainConfig(**changes), LAYOUT)[0] == first


def test_what_is_used_up_is_not_advised():
    config = TrainConfig(checkpoint_activations=True, loss_chunk=512, batch_positions=64, accumulate=3)
    layout = replace(LAYOUT, chunk_rows=7)
    assert memory_advice(config, layout) == [
        "lower --batch-positions from 64 to 32 with --accumulate 6, in another output directory"
    ]
    assert "add --checkpoint-activations in place of --compile" in memory_advice(TrainConfig(compile=True), layout)
    assert "use --no-cache-features" in memory_advice(replace(config, cache_features=True), layout)


@pytest.mark.parametrize(("chunk", "half"), [(8192, 4096), (1000, 384), (200, 100), (10, 7)])
def test_half_chunks_are_whole_blocks_that_hold_a_chain(chunk, half):
    advice = memory_advice(TrainConfig(), replace(LAYOUT, chunk_rows=chunk))
    assert advice[0] == f"lower --chunk-rows from {chunk} to {half}"


def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
