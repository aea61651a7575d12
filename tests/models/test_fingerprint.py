"""The fingerprint of weights: equal for copies, different for another size, name or value anywhere."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.errors import PeagleError
from peagle.models.fingerprint import BLOCK_BYTES, BLOCKS, _starts, weights_fingerprint


def model(folder, *, name="w", seed=0, rows=300):
    folder.mkdir()
    weight = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    save_file({name: weight}, folder / "model.safetensors")
    return folder


def test_copies_agree_and_others_do_not(tmp_path):
    prints = [
        weights_fingerprint(model(tmp_path / "a")),
        weights_fingerprint(model(tmp_path / "b", name="v")),
        weights_fingerprint(model(tmp_path / "c", seed=1)),
        weights_fingerprint(model(tmp_path / "d", rows=301)),
    ]
    assert len(set(prints)) == 4
    assert weights_fingerprint(model(tmp_path / "copy")) == prints[0]


def test_a_small_change_of_all_weights_is_seen(tmp_path):
    """As a fine-tuned copy differs: same names, shapes and size."""
    before = weights_fingerprint(model(tmp_path / "a"))
    file = tmp_path / "a" / "model.safetensors"
    save_file({name: tensor * 1.001 for name, tensor in load_file(file).items()}, file)
    assert weights_fingerprint(tmp_path / "a") != before


def test_shards_count_in_order(tmp_path):
    for number in (0, 1):
        model(tmp_path / str(number), name=f"w{number}", seed=number)
        (tmp_path / str(number) / "model.safetensors").rename(tmp_path / f"{number}.safetensors")
    index = {"weight_map": {"w0": "0.safetensors", "w1": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    one = weights_fingerprint(tmp_path)
    (tmp_path / "0.safetensors").rename(tmp_path / "x")
    with pytest.raises(PeagleError, match="lacks 1 of the 2 shards"):
        weights_fingerprint(tmp_path)
    (tmp_path / "1.safetensors").rename(tmp_path / "0.safetensors")
    (tmp_path / "x").rename(tmp_path / "1.safetensors")
    assert weights_fingerprint(tmp_path) != one


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, BLOCK_BYTES + 7, 10**12])
def test_blocks_reach_from_end_to_end(size):
    starts = _starts(size)
    assert starts[0] == 0
    assert size - BLOCK_BYTES <= starts[-1] <= max(0, size - BLOCK_BYTES)
    assert len(starts) <= BLOCKS


def test_no_weights(tmp_path):
    with pytest.raises(PeagleError, match="has no weights"):
        weights_fingerprint(tmp_path)
