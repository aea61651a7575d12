"""The scheduler under a simulated engine: nobody starves, no cell of the cache is read that holds something else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.request import Request
from peagle.engine.scheduler import Chunk
from tests.engine.simulated_engine import VOCAB, SimulatedEngine, expected_output, make_request

SIZES = dict(num_blocks=40, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def engine(**sizes) -> SimulatedEngine:
    return SimulatedEngine(**{**SIZES, **sizes})


def added(simulated: SimulatedEngine, *lengths: int, max_tokens: int = 12) -> list[Request]:
    """Requests of these prompt lengths with nothing in common, queued."""
    requests = [make_request(i, prompt_of(n, seed=i + 1), max_tokens) for i, n in enumerate(lengths)]
    assert all(simulated.add(request) for request in requests)
    return requests


def shares(chunks: list[Chunk]) -> list[tuple[int, int, int, bool]]:
    return [(chunk.request.index, chunk.first, chunk.num_rows, chunk.is_last) for chunk in chunks]


def test_a_prompt_is_cut_where_the_rows_end():
    simulated = engine()
    requests = added(simulated, 20, 30, 5)
    first = simulated.step()
    assert shares(first.chunks) == [(0, 0, 20, True), (1, 0, 12, False)]
    assert first.admitted == requests[:2]
    second = simulated.step()
    assert second.decodes == requests[:1]
    assert shares(second.chunks) == [(1, 12, 18, True), (2, 0, 5, True)]
    assert second.admitted == requests[2:]


def test_prompts_advance_beside_any_number_of_decodes():
    """A block of rows is left for them though decodes take all there are."""
    simulated = engine(max_num_batched_tokens=8, max_num_seqs=3)
    requests = added(simulated, 6, 2, 30)
    while not all(request.output_ids for request in requests[:2]):
        simulated.step()
    schedule = simulated.step()
    assert schedule.decodes == requests[:2]
    assert [chunk.num_rows for chunk in schedule.chunks] == [SIZES["block_size"]]


def test_no_more_rows_than_allowed_even_below_a_block():
    simulated = engine(max_num_batched_tokens=1)
    requests = added(simulated, 9, 7)
    simulated.run()
    assert all(request.output_ids == expected_output(request) for request in requests)


def test_a_request_that_is_ended_by_what_is_in_flight_does_not_decode():
    simulated = engine(depth=1)
    (request,) = added(simulated, 5, max_tokens=1)
    simulated.step()
    assert request.in_flight == 1
    assert simulated.step().decodes == []
    assert request.finish_reason == "length"


def test_the_youngest_gives_way_and_comes_back_first():
    simulated = engine(num_blocks=16, depth=0, max_num_seqs=3)
    requests = added(simulated, 12, 12, 12, max_tokens=40)
    for request in requests:
        request.cacheable = False
    evicted = None
    while evicted is None:
        running = list(simulated.scheduler.running)
        schedule = simulated.step()
        evicted = next((request for request in running if request.slot < 0 and not request.finish_reason), None)
    assert evicted is running[-1]
    assert simulated.scheduler.waiting[0] is evicted
    assert schedule.admitted == []
    assert evicted.num_computed == evicted.num_prefill == 0
    assert evicted.cacheable  # all of it is computed again
    simulated.run()
    assert simulated.scheduler.num_preemptions > 0
    assert all(request.output_ids == expected_output(request) for request in requests)
    simulated.check_all_free()


def test_all_results_are_read_before_a_preemption():
    """The simulated engine checks that nothing is in flight for whoever gives way."""
    simulated = engine(num_blocks=16, depth=1, max_num_seqs=2)
    requests = added(simulated, 12, 12, max_tokens=40)
    simulated.run()
    assert simulated.num_drains > 0
    assert simulated.scheduler.num_preemptions > 0
    assert all(request.output_ids == expected_output(request) for request in requests)


def test_later_requests_find_a_shared_beginning():
    simulated = engine(depth=0)
    shared = prompt_of(21)
    first = make_request(0, [*shared, 1, 2], 4)
    simulated.add(first)
    simulated.step()
    second, same = make_request(1, [*shared, 3], 4), make_request(2, [*shared, 1, 2], 4)
    simulated.add(second)
    simulated.add(same)
    assert shares(simulated.step().chunks) == [(1, 20, 2, True), (2, 20, 3, True)]
    assert second.blocks[:5] == first.blocks[:5] == same.blocks[:5]
    simulated.run()
    simulated.check_all_free()


def test_the_next_turn_finds_the_answer():
    simulated = engine(depth=1)
    first = make_request(0, prompt_of(8), 1)
    simulated.add(first)
    simulated.run()
    second = make_request(1, [*first.token_ids, 0], 2)  # the one token it emitted is the look-ahead of its last block
    simulated.add(second)
    assert shares(simulated.step().chunks) == [(1, 8, 2, True)]


def test_blocks_without_the_drafter_are_not_found():
    simulated = engine(num_drafts=(0, 0, 0, 3), depth=0, seed=1)
    first = make_request(0, prompt_of(20), 8)
    simulated.add(first)
    simulated.run()
    assert not first.cacheable
    simulated.add(make_request(1, prompt_of(20), 8))
    assert simulated.step().chunks[0].first == 0


@pytest.mark.parametrize("shares,found", [(True, 24), (False, 12)])
def test_what_was_decoded_is_found_if_it_may_be_shared(shares: bool, found: int):
    simulated = engine(depth=0, shares_answers=shares)
    first = make_request(0, prompt_of(13), 12)
    simulated.add(first)
    simulated.run()
    simulated.add(make_request(1, [*first.token_ids, 0], 2))
    assert simulated.step().chunks[0].first == found


def preempted(shares_answers: bool) -> tuple[SimulatedEngine, Request]:
    """An engine and a request of 13 tokens that lost its blocks when it had 12 more."""
    simulated = engine(depth=0, shares_answers=shares_answers, max_num_batched_tokens=11, num_blocks=40)
    request = make_request(0, prompt_of(13), 40)
    simulated.add(request)
    while len(request.output_ids) < 12:
        simulated.step()
    del request.output_ids[12:], request.token_ids[25:]
    simulated.scheduler.running.remove(request)
    simulated.scheduler._preempt(request)
    return simulated, request


@pytest.mark.parametrize("shares_answers,parts", [
    (True, [(24, 1, False)]),  # the rest is found
    (False, [(12, 1, False), (13, 8, True), (21, 4, True)]),  # in powers of two, apart from the prompt's rows
])  # fmt: skip
def test_an_answer_that_is_computed_again_is_decoded_again_unless_that_is_the_same(shares_answers: bool, parts: list):
    simulated, request = preempted(shares_answers)
    chunks = []
    while request.num_computed < 25:
        schedule = simulated.scheduler.schedule(3)
        for chunk in schedule.chunks:
            chunks.append((chunk.first, chunk.num_rows, chunk.decoded))
            request.num_computed += chunk.num_rows
            assert chunk.is_last == (request.num_computed == 25)
    assert chunks == parts


@pytest.mark.parametrize("shares_answers,first", [(True, 24), (False, 12)])
def test_an_answer_is_not_found_in_another_s_prompt_unless_that_is_the_same(shares_answers: bool, first: int):
    """Of the same tokens: one request decoded them, another has them in its prompt."""
    simulated, request = preempted(shares_answers)
    other = make_request(1, [*request.token_ids, 0], 2)
    simulated.scheduler.waiting.appendleft(other)
    other.arrival = 1
    while other.finish_reason is None:
        chunks = [c for c in simulated.scheduler.schedule(3).chunks if c.request is other]
        for chunk in chunks:
            other.num_computed += chunk.num_rows
            simulated.scheduler.computed(other)
        other.finish_reason = "stop" if other.num_computed == 26 else None
        if request.slot >= 0:
            simulated.scheduler.running.remove(request)
            simulated.scheduler._preempt(request)
    simulated.scheduler.finish(other)
    assert simulated.scheduler.schedule(3).chunks[0].first == first


def test_a_request_too_big_to_wait_for_is_admitted_once_its_prefix_is_there():
    """The head of the queue is not matched in every step, but when a block it lacks appears."""
    simulated = engine(num_blocks=16, depth=0, max_num_batched_tokens=64)
    shared = prompt_of(36)
    first, second = make_request(0, [*shared, 1], 12), make_request(1, [*shared, 2], 4)
    simulated.add(first)
    simulated.add(second)
    assert simulated.step().admitted == [first]
    assert shares(simulated.step().chunks) == [(1, 32, 5, True)]


@pytest.mark.parametrize("num_blocks, together", [(16, 1), (17, 2)])
def test_a_newcomer_leaves_the_running_a_block_each(num_blocks: int, together: int):
    """Otherwise it is computed, and preempted when one of them needs its next block."""
    simulated = engine(num_blocks=num_blocks, max_num_batched_tokens=64)
    requests = added(simulated, 25, 25)  # with K = 3, 32 positions each: 8 blocks
    assert simulated.step().admitted == requests[:together]


def test_waiting_costs_no_matching(monkeypatch: pytest.MonkeyPatch):
    simulated = engine(num_blocks=17, depth=0)
    added(simulated, 20, 30, max_tokens=30)
    calls = []
    match = simulated.pool.match
    monkeypatch.setattr(simulated.pool, "match", lambda ids: calls.append(1) or match(ids))
    steps = simulated.run()
    assert len(calls) < 8 < steps


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "finished"])
def test_abort_frees_at_once(when: str):
    simulated = engine(max_num_seqs=1, depth=1)
    requests = added(simulated, 40, 8)
    victim = requests[1] if when == "waiting" else requests[0]
    simulated.step()
    if when == "decode":
        for _ in range(3):
            simulated.step()
        assert victim.output_ids
    if when == "finished":
        simulated.run()
        simulated.scheduler.abort(victim)
        return simulated.check_all_free()
    simulated.abort(victim)
    assert victim.slot == -1
    assert victim.blocks == []
    simulated.run()
    simulated.check_all_free()
    other = requests[0] if when == "waiting" else requests[1]
    assert other.output_ids == expected_output(other)


def test_the_next_in_the_queue_takes_the_place_of_an_aborted_one():
    simulated = engine(num_blocks=16, max_num_batched_tokens=64)
    requests = added(simulated, 25, 30, 5)
    assert simulated.step().admitted == requests[:1]
    simulated.abort(requests[1])
    assert simulated.step().admitted == requests[2:]


def test_who_gave_way_waits_for_what_it_lacks_itself():
    """Not for what the one behind it, much longer, lacked."""
    simulated = engine(num_blocks=20, depth=0, prefix_caching=False)
    first, long, young, longest = added(simulated, 8, 24, 8, 48, max_tokens=16)
    while not simulated.scheduler.num_preemptions:
        simulated.step()
    assert simulated.scheduler.running == [first, long]
    assert list(simulated.scheduler.waiting) == [young, longest]
    simulated.abort(long)
    assert simulated.step().admitted == [young]


WORLDS = st.fixed_dictionaries(
    dict(
        block_size=st.sampled_from([1, 2, 4]),
        max_model_len=st.integers(8, 40),
        room=st.sampled_from([0, 0, 1, 3, 12]),  # blocks beyond what one longest request takes
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 40),
        num_drafts=st.sampled_from([(0,), (1,), (3,), (5,), (0, 3), (1, 2, 5), (0, 1, 5, 5)]),
        depth=st.integers(0, 2),
        prefix_caching=st.sampled_from([True, True, True, False]),
        shares_answers=st.booleans(),
        seed=st.integers(0, 2**16),
    )
)
# (which beginning, its length, tokens after it, max_tokens, whether token 0 stops it, step of arrival)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 30),
        st.integers(1, 6),
        st.integers(1, 30),
        st.booleans(),
        st.integers(0, 12),
    ),
    min_size=4,
    max_size=10,
)


@settings(max_examples=300, deadline=None)
@given(world=WORLDS, asked=REQUESTS, abort_share=st.sampled_from([0.0, 0.0, 0.02, 0.1]))
def test_every_request_ends_as_if_it_were_alone(world, asked, abort_share: float):
    world = dict(world)
    room, longest = world.pop("room"), -(-world["max_model_len"] // world["block_size"])
    simulated = SimulatedEngine(num_blocks=longest + room, **world)
    rng, step = random.Random(world["seed"]), 0
    arriving = sorted(enumerate(asked), key=lambda item: item[1][-1])
    requests: list[Request] = []
    while arriving or simulated.scheduler.running or simulated.scheduler.waiting:
        while arriving and arriving[0][1][-1] <= step:
            requests.append(submit(simulated, *arriving.pop(0)))
        for request in requests:
            if rng.random() < abort_share:
                simulated.abort(request)
        simulated.step()
        step += 1
        assert step < 3000
    for request in requests:
        whole = expected_output(request)
        ended = request.finish_reason != "abort"
        assert request.output_ids == (whole if ended else whole[: len(request.output_ids)])
        assert request.token_ids == request.prompt_ids + request.output_ids
    simulated.check_all_free()


def submit(simulated: SimulatedEngine, index: int, asked: tuple[int, int, int, int, bool, int]) -> Request:
    family, length, tail, max_tokens, stops, _ = asked
    longest = simulated.max_model_len - 1
    prompt_ids = (prompt_of(length, seed=family) + prompt_of(tail, seed=99 + index))[-longest:]
    room = simulated.max_model_len - len(prompt_ids)
    request = make_request(index, prompt_ids, min(max_tokens, room), frozenset([0]) if stops else frozenset())
    assert simulated.add(request)
    return request


def test_the_simulated_worlds_are_tight_enough():
    """Preemption and sharing do happen in worlds like those above."""
    simulated = engine(num_blocks=22, max_num_seqs=5, seed=3)
    requests = [make_request(i, prompt_of(16) + prompt_of(3, seed=i), 40) for i in range(12)]
    assert all(simulated.add(request) for request in requests)
    simulated.run()
    assert simulated.scheduler.num_preemptions > 3
    assert simulated.num_matched > 100
    assert all(request.output_ids == expected_output(request) for request in requests)
