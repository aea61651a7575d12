import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafters.vocab import membership, offsets, select_draft_ids, target_ids
from peagle.errors import PeagleError


def test_worked_example():
    counts = torch.tensor([0, 9, 0, 4, 4, 1, 7])
    ids = select_draft_ids(counts, 4, special_ids=[0])
    assert ids.tolist() == [0, 1, 3, 6]  # special 0; then 9, 7 and the lower of the two 4s
    assert offsets(ids).tolist() == [0, 0, 1, 3]
    assert membership(ids, 7).tolist() == [True, True, False, True, False, False, True]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_maps_agree_and_the_most_frequent_are_kept(counts_list, data):
    counts = torch.tensor(counts_list)
    size = data.draw(st.integers(1, len(counts_list)))
    ids = select_draft_ids(counts, size)
    assert ids.dtype == torch.int64
    assert bool((ids.diff() > 0).all())
    assert target_ids(offsets(ids)).equal(ids)
    assert membership(ids, len(counts)).nonzero()[:, 0].equal(ids)
    assert int(counts[ids].sum()) == sum(sorted(counts_list, reverse=True)[:size])


@pytest.mark.parametrize(("size", "specials"), [(0, []), (6, []), (1, [0, 1]), (3, [9])])
def test_impossible_choices_are_refused(size, specials):
    with pytest.raises(PeagleError):
        select_draft_ids(torch.ones(5, dtype=torch.int64), size, specials)
