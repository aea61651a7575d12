"""Prompts padded to a few shapes: what the host sends covers every row once, and begins where kernels expect it."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.batch import PassTiles, PromptParts
from peagle.engine.prompt_rows import PaddedPrompts, PromptShape, prompt_shapes, shape_of
from peagle.engine.scheduler import Chunk
from peagle.engine.transfer import pack, to_device, unpack

CPU = torch.device("cpu")


def chunk(slot: int, first: int, num_rows: int, is_last: bool = True) -> Chunk:
    ids = np.random.default_rng(slot).integers(2, 90, first + num_rows + 1).tolist()
    request = SimpleNamespace(slot=slot, token_ids=ids if not is_last else ids[:-1])
    return Chunk(cast("object", request), first, num_rows, is_last)  # type: ignore[arg-type]


chunks_of = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 150), st.booleans()), max_size=7).map(
    lambda each: [chunk(slot, *numbers) for slot, numbers in enumerate(each)]
)


@given(st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), max_size=6))
def test_whatever_is_sent_arrives_and_begins_at_16_bytes(lists: list[list[int]]):
    arrays = [np.array(each, dtype=np.int64) for each in lists]
    packed = pack(arrays, CPU)
    for array, part, sent in zip(
        arrays, unpack(packed, [a.shape for a in arrays]), to_device(arrays, CPU), strict=True
    ):
        assert part.tolist() == sent.tolist() == array.tolist()
        assert part.numel() == 0 or (part.data_ptr() - packed.data_ptr()) % 16 == 0


def test_narrow_and_two_dimensional_arrays_are_sent():
    arrays = [np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)[::-1], np.array([7], dtype=np.uint8)]
    first, second = to_device(arrays, CPU)
    assert first.tolist() == [[5, 6], [3, 4], [1, 2]]
    assert second.tolist() == [7]
    assert first.dtype == second.dtype == torch.int64


@given(chunks_of, st.integers(1, 2000))
def test_a_shape_holds_its_chunks_and_one_request_of_padding(chunks: list[Chunk], most: int):
    shapes = prompt_shapes(most)
    total, shape = sum(c.num_rows for c in chunks), shape_of(chunks, shapes)
    assert all(s.rows <= most for s in shapes)
    if shape is None:
        assert not any(s.requests > len(chunks) and s.rows >= total + s.requests - len(chunks) for s in shapes)
        return
    spare = shape.requests - len(chunks)
    assert spare >= 1
    assert shape.rows - total >= spare


@given(chunks_of)
def test_parts_and_tiles_cover_every_row_once(chunks: list[Chunk]):
    shape = shape_of(chunks, prompt_shapes(1024))
    if shape is None:
        return
    kinds = (PassTiles(3, 0), PassTiles(2, 6), PassTiles(128, 0))
    padded = PaddedPrompts(shape, kinds, CPU)
    empty = [array.shape for array in padded._arrays(())]
    arrays = padded._arrays(chunks)
    assert [array.shape for array in arrays] == empty
    parts, tiles = PromptParts(*arrays[: len(PromptParts._fields)]), arrays[len(PromptParts._fields) :]
    real, count, total = PromptParts.of(chunks), len(chunks), sum(c.num_rows for c in chunks)
    assert parts.ids_T[:total].tolist() == real.ids_T.tolist()
    assert parts.positions_T[:total].tolist() == real.positions_T.tolist()
    assert parts.next_B[:count].tolist() == real.next_B.tolist()
    assert (parts.slot_B[count:] == -1).all()
    assert (parts.positions_T[total:] == 0).all()
    rows_B = np.diff(parts.start_B1)
    assert (rows_B >= 1).all()
    assert parts.start_B1[-1] == shape.rows
    assert parts.request_T.tolist() == np.repeat(np.arange(shape.requests), rows_B).tolist()
    for kind, tiles_W3 in zip(kinds, tiles, strict=True):
        lengths = rows_B + kind.extra
        start_B = np.cumsum(lengths) - lengths
        seen = np.zeros(lengths.sum(), dtype=int)
        for first, num_rows, request in tiles_W3.tolist():
            assert num_rows <= kind.rows
            seen[first : first + num_rows] += 1
            if num_rows:
                assert start_B[request] <= first
                assert first + num_rows <= start_B[request] + lengths[request]
        assert (seen == 1).all()


def test_what_was_filled_in_before_is_gone():
    padded = PaddedPrompts(PromptShape(64, 2), (PassTiles(2, 0),), CPU)
    nothing = padded._packed.clone()
    padded.fill([chunk(3, 5, 40)])
    assert not torch.equal(padded._packed, nothing)
    padded.fill(())
    assert torch.equal(padded._packed, nothing)


@pytest.mark.parametrize("most", [1, 63])
def test_no_shape_where_a_step_takes_few_tokens(most: int):
    assert prompt_shapes(most) == []
    assert shape_of([chunk(0, 0, 1)], []) is None
