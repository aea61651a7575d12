"""The closed loop of a sweep: how many requests are in flight, what is counted, and who is freed."""

import pytest

from peagle.bench.closed_loop import Job, answer_all
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import random_prompts, tiny_llm

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def jobs(count, seed=0):
    return [Job(place, ids, place) for place, ids in enumerate(random_prompts(count, seed))]


def watched(llm):
    """Numbers of requests inside the engine at each step."""
    counts, step = [], llm.core.step

    def counting():
        counts.append(len(llm.core.scheduler.running) + len(llm.core.scheduler.waiting))
        return step()

    llm.core.step = counting
    return counts


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_exactly_so_many_are_in_flight_until_the_last_have_begun(concurrency):
    llm = tiny_llm(3)
    counts = watched(llm)
    run = answer_all(llm, jobs(13), PARAMS, concurrency)
    full = [count == concurrency for count in counts]
    ends = full.index(False) if False in full else len(full)
    assert all(full[:ends])
    assert counts[ends:] == sorted(counts[ends:], reverse=True)
    assert max(counts) == concurrency
    assert sorted(answer.prompt for answer in run.answers) == list(range(13))
    assert run.tokens == 13 * 12
    assert run.concurrency == concurrency
    assert not llm.core.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_the_engine_whatever_the_concurrency(temperature):
    llm = tiny_llm(3)
    params = SamplingParams(max_tokens=12, temperature=temperature)
    each = [SamplingParams(max_tokens=12, temperature=temperature, seed=job.seed) for job in jobs(6)]
    outputs = llm.generate([job.token_ids for job in jobs(6)], each)
    expected = {(i, len(o.token_ids), o.stats.num_rounds, o.stats.num_accepted_tokens) for i, o in enumerate(outputs)}
    for concurrency in (1, 4):
        run = answer_all(llm, jobs(6), params, concurrency)
        assert {(a.prompt, a.tokens, a.rounds, a.accepted) for a in run.answers} == expected
        assert run.rounds == sum(o.stats.num_rounds for o in outputs)
        assert sum(run.accepted_per_position) == run.accepted
        assert run.acceptance_length == pytest.approx(1 + run.accepted / run.rounds)


def test_times_are_those_of_the_clock():
    ticks = iter(range(10_000))
    run = answer_all(tiny_llm(3), jobs(2), PARAMS, 1, clock=lambda: float(next(ticks)))
    # One tick for the start, then one a step: nothing passes between an answer and the next request.
    assert run.seconds == sum(answer.seconds for answer in run.answers)
    assert run.tokens_per_second == pytest.approx(24 / run.seconds)
    assert run.decode_ms == 1e3
    assert run.steps == run.seconds


def test_request_seconds_fill_the_run_while_all_are_in_flight():
    ticks = iter(range(10_000))
    run = answer_all(tiny_llm(3), jobs(12), PARAMS, 4, clock=lambda: float(next(ticks)))
    in_flight = sum(answer.seconds for answer in run.answers) / run.seconds
    assert 3 < in_flight <= 4


@pytest.mark.parametrize("concurrency", [0, 9])
def test_a_concurrency_the_engine_does_not_run(concurrency):
    with pytest.raises(PeagleError, match=f"concurrency is {concurrency}: this engine runs 1 to 8"):
        answer_all(tiny_llm(3), jobs(3), PARAMS, concurrency)


def test_an_interruption_frees_the_requests():
    llm = tiny_llm(3)
    step, calls = llm.core.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    llm.core.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        answer_all(llm, jobs(5), PARAMS, 2)
    assert not llm.core.has_work
    llm.core.step = step
    assert answer_all(llm, jobs(5), PARAMS, 2).tokens == 60


def test_a_busy_engine_is_not_measured():
    llm = tiny_llm(3)
    llm.core.add(llm.make_request([3, 4], PARAMS))
    with pytest.raises(PeagleError, match="busy"):
        answer_all(llm, jobs(2), PARAMS, 1)


def test_without_prompts_nothing_is_measured():
    run = answer_all(tiny_llm(0), [], PARAMS, 1)
    assert (run.tokens, run.tokens_per_second, run.acceptance_length, run.decode_ms) == (0, 0.0, 1.0, None)
