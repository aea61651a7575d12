"""The first and the last kernel of a decode step: small cases by hand, and the kernels against their torch twins.

Whatever no row may read holds values that would show: columns past K, table entries past the limit, the other slots.
"""

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.accept import accept
from peagle.kernels.commit import commit
from peagle.kernels.verify_rows import SlotRows, VerifyRows, verify_rows
from tests.kernels.interpreter import INTERPRETED, run_interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
once = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

BLOCK, LIMIT, SLOTS, MOST_DRAFTS = 4, 32, 9, 7


def random_state(device: str, width: int, limit: int = LIMIT) -> SlotRows:
    """Nine slots and the padding row; drafts and tables are slices of wider rows."""
    last_token = torch.randint(0, 2**40, (SLOTS + 1,))
    num_computed = torch.randint(0, limit + 3, (SLOTS + 1,))
    drafts = torch.randint(0, 2**40, (SLOTS + 1, MOST_DRAFTS + 2))
    tables = torch.randint(0, 2**31 - 1, (SLOTS + 1, width + 3), dtype=torch.int32)
    for part in (last_token, num_computed, drafts, tables):
        part[-1] = 0
    drafts, tables = drafts.to(device)[:, :MOST_DRAFTS], tables.to(device)[:, :width]
    return SlotRows(last_token.to(device), num_computed.to(device), drafts, tables)


def random_slots(batch: int, device: str) -> Tensor:
    """Distinct slots, a third of the requests padding; a slice that begins anywhere."""
    slots = torch.where(torch.rand(batch) < 0.3, -1, torch.randperm(SLOTS)[:batch])
    offset = int(torch.randint(0, 3, ()))
    return torch.cat((torch.zeros(offset, dtype=torch.int64), slots)).to(device)[offset:]


def test_verify_rows():
    """One request at the length limit, one well before it, padding; tables by hand."""
    tables = torch.tensor([[3, 1, 2], [7, 5, 6], [0, 0, 0]], dtype=torch.int32)
    state = torch.tensor([11, 22, 0]), torch.tensor([4, 0, 0]), torch.tensor([[12, 13, 9], [23, 24, 9], [0, 0, 0]])
    rows = verify_rows(SlotRows(*state, tables), torch.tensor([1, -1, 0]), 2, 2, 5, backend="torch")
    assert rows.ids_T.tolist() == [22, 23, 24, 0, 0, 0, 11, 12, 13]
    assert rows.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 4, 5, 6]
    assert rows.slots_T.tolist() == [14, 15, 10, -1, -1, -1, 4, -1, -1]
    assert rows.last_keys_T.tolist() == [0, 1, 2, -1, -1, -1, 4, 4, 4]
    assert rows.first_B.tolist() == [0, 0, 4]
    assert rows.drafts_BK.tolist() == [[23, 24], [-1, -1], [12, 13]]
    assert torch.equal(rows.tables_BN, tables[[1, 2, 0]])


def test_commit():
    """A request that kept one of two drafts, padding, and one that kept both."""
    state = torch.tensor([1, 2, 3, 0]), torch.tensor([10, 20, 30, 0]), torch.tensor([[5, 6, 7]] * 3 + [[0, 0, 0]])
    slots = torch.tensor([2, -1, 0])
    accepted = accept(
        torch.tensor([[40, 41, 42], [50, 51, 52], [60, 61, 62]]), torch.tensor([[40, 0], [50, 51], [60, 61]]), slots
    )
    out = commit(
        SlotRows(*state, state[2]), slots, torch.tensor([30, 0, 10]), accepted.count_B, accepted.next_token_B,
        accepted.emitted_BV, accepted.count_B, torch.tensor([[80, 81], [90, 91], [70, 71]]), backend="torch",
    )  # fmt: skip
    assert out.tolist() == [[40, 41, -1, 1], [-1, -1, -1, 0], [60, 61, 62, 2]]
    assert state[0].tolist() == [62, 2, 41, 0]
    assert state[1].tolist() == [13, 20, 32, 0]
    assert state[2].tolist() == [[70, 71, 7], [5, 6, 7], [80, 81, 7], [0, 0, 0]]


def compare_verify_rows(k: int, batch: int, seed: int, device: str, width: int = LIMIT // BLOCK) -> None:
    """Every field, of its type; the state is left alone."""
    torch.manual_seed(seed)
    state, slots = random_state(device, width, width * BLOCK), random_slots(batch, device)
    before = [part.clone() for part in state]
    expected, got = (
        verify_rows(state, slots, k, BLOCK, width * BLOCK - 1, backend=backend) for backend in ("torch", "triton")
    )
    for name, want, have in zip(VerifyRows._fields, expected, got, strict=True):
        assert want.dtype == have.dtype, name
        assert torch.equal(want, have), name
    assert all(torch.equal(*pair) for pair in zip(before, state))


def compare_commit(columns: int, k: int, batch: int, seed: int, device: str) -> None:
    """Result and state, of which only the live slots' first K drafts change; the new drafts are part of wider rows."""
    torch.manual_seed(seed)
    slots, new = random_slots(batch, device), torch.randint(0, 2**40, (batch, k + 2), device=device)[:, :k]
    state = random_state(device, 5)
    tokens = torch.randint(0, 2**40, (batch, columns), device=device)
    accepted = accept(tokens, tokens[:, :-1] + (torch.rand(batch, columns - 1, device=device) < 0.3), slots)
    first, kept = torch.randint(0, 2**33, (2, batch), device=device)
    after: list[list[Tensor]] = []
    for backend in ("torch", "triton"):
        copy = SlotRows(*(part.clone() for part in state))
        out = commit(
            copy, slots, first, kept, accepted.next_token_B, accepted.emitted_BV, accepted.count_B, new,
            backend=backend,
        )  # fmt: skip
        after.append([out, *copy])
    assert all(torch.equal(*pair) for pair in zip(*after, strict=True))
    idle = torch.ones(SLOTS + 1, dtype=torch.bool, device=device)
    idle[slots[slots >= 0]] = False
    assert all(torch.equal(new_part[idle], part[idle]) for new_part, part in zip(after[0][1:], state))
    assert torch.equal(after[0][3][:, k:], state[2][:, k:])


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@settings(once, max_examples=25)
@given(st.integers(0, MOST_DRAFTS), st.integers(1, SLOTS), st.integers(0, 2**31))
def test_interpreted_verify_rows(k: int, batch: int, seed: int):
    compare_verify_rows(k, batch, seed, "cpu")


@interpreter
def test_interpreted_verify_rows_of_wide_tables():
    """More blocks than one program copies."""
    compare_verify_rows(3, 4, 0, "cpu", width=2100)


@interpreter
@settings(once, max_examples=25)
@given(st.integers(1, 8), st.integers(0, MOST_DRAFTS), st.integers(1, SLOTS), st.integers(0, 2**31))
def test_interpreted_commit(columns: int, k: int, batch: int, seed: int):
    compare_commit(columns, k, batch, seed, "cpu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("k", range(MOST_DRAFTS + 1))
def test_on_gpu(k: int):
    for batch in (1, 4, SLOTS):
        compare_verify_rows(k, batch, k, "cuda")
        compare_verify_rows(k, batch, k, "cuda", width=2100)
        compare_commit(k + 1, k, batch, k, "cuda")
        compare_commit(1, k, batch, k, "cuda")  # the end of a prompt
