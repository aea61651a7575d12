"""The engine thread: every token once, whoever submits, aborts or goes away, and a proper end in every case."""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from peagle.engine.engine import LLM
from peagle.engine.request import Request, RequestOutput
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from peagle.server.activity import ActivityLog, Snapshot
from peagle.server.engine_thread import Delta, Draining, EngineThread, Overloaded, stream
from tests.engine.tiny import force_drafts, random_prompts, tiny_llm

PATIENCE = 60.0
LONG = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)


def drawn(index: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=index, stop=("aQ", "7") if index % 3 else ())


class Reader:
    """What a client sees of its request."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ended, self.began = threading.Event(), threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.began.set()
        if delta.output is not None:
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def finish(self) -> RequestOutput:
        """The output, after a look at the deltas: exactly one is the last, and together they are the output."""
        assert self.ended.wait(PATIENCE)
        assert [delta.output is not None for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        output = self.deltas[-1].output
        assert self.token_ids == output.token_ids
        assert "".join(delta.text for delta in self.deltas) == output.text
        return output


@contextmanager
def running(llm: LLM, **settings) -> Iterator[EngineThread]:
    engine = EngineThread(llm, **settings)
    engine.start()
    try:
        wait_for(lambda: engine.is_ready)
        yield engine
    finally:
        engine.stop(0)
        assert not engine._thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


def begin(engine: EngineThread, prompt: list[int], params: SamplingParams, index: int = 0) -> tuple[Request, Reader]:
    request, reader = engine.make_request(prompt, params, index=index), Reader()
    engine.submit(request, reader)
    return request, reader


def assert_idle(engine: EngineThread) -> None:
    """No request holds anything."""
    now = engine.snapshot()
    assert (now.num_running, now.num_waiting, now.kv_usage) == (0, 0, 0.0)
    assert not engine._live
    assert len(engine.llm.core.scheduler._free_slots) == engine.llm.core.max_num_seqs


@contextmanager
def slow_steps(engine: EngineThread, seconds: float = 0.02) -> Iterator[None]:
    """Steps that last, so that a test can act before a request has ended."""
    core, step = engine.llm.core, engine.llm.core.step

    def slow() -> list[Request]:
        time.sleep(seconds)
        return step()

    core.step = slow  # type: ignore[method-assign]
    yield
    core.step = step  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(3)


@pytest.mark.parametrize("k", [0, 3])
def test_many_threads_get_what_generate_gives(k: int):
    llm, prompts = tiny_llm(k, num_kv_blocks=60), random_prompts(40, seed=1)  # too few blocks: some are preempted
    params = [drawn(i) for i in range(40)]
    plain = llm.generate(prompts, params)
    assert {output.finish_reason for output in plain} == {"stop", "length"}
    if k:
        force_drafts(llm, plain, seed=0, right=0.9)  # rounds of several tokens, some with a stop string in the middle
    readers: dict[int, Reader] = {}

    def submit(first: int) -> None:
        for i in range(first, 40, 5):
            readers[i] = begin(engine, prompts[i], params[i], i)[1]

    with running(llm) as engine:
        threads = [threading.Thread(target=submit, args=(first,)) for first in range(5)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for i, want in enumerate(plain):
            got = readers[i].finish()
            assert (got.token_ids, got.text) == (want.token_ids, want.text)
            assert got.finish_reason == want.finish_reason
        assert_idle(engine)
        now = engine.snapshot()
        outputs = [readers[i].finish() for i in range(40)]
        assert now.tokens_generated == sum(len(o.token_ids) for o in outputs)
        assert now.prompt_tokens == sum(len(p) for p in prompts)
        assert now.rounds == sum(o.stats.num_rounds for o in outputs)
        assert now.drafted == sum(o.stats.num_draft_tokens for o in outputs)
        assert now.accepted == sum(o.stats.num_accepted_tokens for o in outputs) == sum(now.accepted_per_position)
        assert len(now.accepted_per_position) == k
        assert now.preemptions > 0
        assert now.accepted > now.rounds or not k


def test_abort_frees_within_a_step(llm: LLM):
    with running(llm) as engine, slow_steps(engine):
        request, reader = begin(engine, [5, 6, 7], LONG)
        _, other = begin(engine, [8, 9], LONG)
        assert reader.began.wait(PATIENCE)
        assert engine.snapshot().num_running == 2
        before = engine.llm.core._step
        engine.abort(request)
        output = reader.finish()
        assert engine.llm.core._step <= before + 2
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 90
        assert request.slot < 0
        assert not request.blocks
        engine.abort(request)  # once more is nothing
        assert other.finish().token_ids == llm_tokens(engine.llm, [8, 9], LONG)
        reader.finish()  # it heard no more
        assert_idle(engine)


def llm_tokens(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """By an engine of its own: that of `llm` belongs to its thread."""
    return tiny_llm(llm.num_speculative_tokens).generate([prompt], params)[0].token_ids


def test_aborted_before_it_was_scheduled(llm: LLM):
    engine = EngineThread(llm)
    request, reader = begin(engine, [4, 5], LONG)
    engine.abort(request)
    _, other = begin(engine, [4, 5], LONG)
    engine.start()
    assert reader.finish().finish_reason == "abort"
    assert not reader.token_ids
    assert len(other.finish().token_ids) == 90
    assert_idle(engine)
    engine.stop(0)


def test_random_aborts_lose_and_double_nothing(llm: LLM):
    rng, count = random.Random(3), 60
    prompts, params = random_prompts(count, seed=4), [drawn(i, 60) for i in range(count)]
    plain = tiny_llm(3).generate(prompts, params)
    with running(llm) as engine, slow_steps(engine, 0.001):
        pairs = []
        for prompt, one in zip(prompts, params, strict=True):
            pairs.append(begin(engine, prompt, one))
            if rng.random() < 0.4:
                time.sleep(rng.random() * 0.01)
                engine.abort(rng.choice(pairs)[0])
        outputs = [reader.finish() for _, reader in pairs]
        for got, want in zip(outputs, plain, strict=True):
            if got.finish_reason == "abort":
                assert got.token_ids == want.token_ids[: len(got.token_ids)]
            else:
                assert (got.token_ids, got.text) == (want.token_ids, want.text)
        assert any(o.finish_reason == "abort" for o in outputs)
        assert any(o.finish_reason != "abort" for o in outputs)
        assert_idle(engine)


def test_consumer_of_a_stream(llm: LLM):
    async def read(engine: EngineThread, index: int) -> list[int]:
        request = engine.make_request([5 + index, 6], LONG)
        return [token async for delta in stream(engine, request) for token in delta.token_ids]

    async def go_away(engine: EngineThread, how: str) -> Request:
        request = engine.make_request([9, 9, 9], LONG)
        deltas, began = stream(engine, request), asyncio.Event()

        async def consume() -> None:
            async for _ in deltas:
                began.set()

        if how == "aclose":
            await anext(deltas)
            await deltas.aclose()
            return request
        task = asyncio.create_task(consume())
        if how == "cancelled":
            await began.wait()
        else:
            await asyncio.sleep(0)  # cancelled before the first delta
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return request

    async def main(engine: EngineThread) -> None:
        reads = [asyncio.create_task(read(engine, i)) for i in range(3)]
        for how in ("aclose", "cancelled", "at once"):
            request = await go_away(engine, how)
            async with asyncio.timeout(PATIENCE):
                while request.finish_reason is None:
                    await asyncio.sleep(0.002)
            assert request.finish_reason == "abort"
            assert len(request.output_ids) < 90
        for i, tokens in enumerate(await asyncio.gather(*reads)):
            assert tokens == expected[i]

    expected = [o.token_ids for o in tiny_llm(3).generate([[5 + i, 6] for i in range(3)], LONG)]
    with running(llm) as engine:
        with slow_steps(engine, 0.01):
            asyncio.run(main(engine))
        wait_for(lambda: engine.snapshot().num_running == 0)
        assert_idle(engine)


def test_a_stream_whose_loop_is_gone_is_aborted(llm: LLM, caplog: pytest.LogCaptureFixture):
    with running(llm) as engine, slow_steps(engine):
        requests = [engine.make_request([i, 9], LONG) for i in (3, 4)]
        loop = asyncio.new_event_loop()
        for request in requests:
            loop.run_until_complete(anext(stream(engine, request)))
        loop.close()
        wait_for(lambda: not engine._live)
        assert [r.finish_reason for r in requests] == ["abort"] * 2
        assert_idle(engine)
        assert len(asyncio.run(collect(engine, [5, 6]))) == 90  # a new loop, and the old one forgotten
        assert len(engine._outboxes) == 1


async def collect(engine: EngineThread, prompt: list[int]) -> list[int]:
    return [t async for d in stream(engine, engine.make_request(prompt, LONG)) for t in d.token_ids]


def test_overload(llm: LLM):
    with running(llm, max_waiting=3) as engine:
        with slow_steps(engine):
            readers = [begin(engine, [5 + i], LONG)[1] for i in range(8 + 3)]  # free slots are no waiting
            refused = engine.make_request([50], LONG)
            with pytest.raises(Overloaded, match="as many requests wait as may, 3") as caught:
                engine.submit(refused, Reader())
            assert caught.value.retry_after >= 1
            wait_for(lambda: engine.snapshot().num_running == 8)
            assert engine.snapshot().num_waiting == 3
            with pytest.raises(Overloaded):
                engine.submit(refused, Reader())
            assert isinstance(caught.value, PeagleError)
        [reader.finish() for reader in readers]
        assert begin(engine, [50], LONG)[1].finish().finish_reason == "length"
        assert_idle(engine)


@pytest.mark.parametrize("ago", [0, 8, 3000])
def test_when_to_come_back_goes_by_the_pace_of_late(llm: LLM, ago: int):
    """Two requests ended so many seconds ago, and from three to eleven wait. A slow machine has a slow pace."""
    with running(llm, max_waiting=3) as engine:
        [begin(engine, [5 + i], drawn(i))[1].finish() for i in range(2)]
        first, *_ = engine._finish_times = deque((at - ago for at in engine._finish_times), maxlen=32)
        with slow_steps(engine):
            [begin(engine, [5 + i], LONG) for i in range(8 + 3)]
            least = 3 * (time.perf_counter() - first) / 2
            with pytest.raises(Overloaded) as caught:
                begin(engine, [50], LONG)
        most = (8 + 3) * (time.perf_counter() - first) / 2 + 1 if ago < 60 else 1.0
        assert min(least, most, 60.0) <= caught.value.retry_after <= min(max(most, 1.0), 60.0)


def test_no_queue_at_all(llm: LLM):
    with running(llm, max_waiting=0) as engine:
        with slow_steps(engine):
            requests = [begin(engine, [5 + i], LONG)[0] for i in range(8)]
            with pytest.raises(Overloaded):
                begin(engine, [50], LONG)
            [engine.abort(request) for request in requests]
            wait_for(lambda: engine.snapshot().num_running + engine.snapshot().num_waiting == 0)
        assert begin(engine, [50], LONG)[1].finish().finish_reason == "length"


def test_room_after_the_queue_was_aborted(llm: LLM):
    with running(llm, max_waiting=1) as engine:
        with slow_steps(engine):
            requests = [begin(engine, [5 + i], LONG)[0] for i in range(9)]
            wait_for(lambda: engine._queue_formed)
            [engine.abort(request) for request in requests]
            wait_for(lambda: engine.snapshot().num_running + engine.snapshot().num_waiting == 0)
            again = [begin(engine, [5 + i], LONG)[1] for i in range(9)]
        [reader.finish() for reader in again]
        assert_idle(engine)


def test_graceful_stop_lets_requests_finish(llm: LLM):
    with running(llm) as engine:
        readers = [begin(engine, [5 + i], LONG)[1] for i in range(12)]
        stopping = threading.Thread(target=engine.stop, args=(PATIENCE,))
        stopping.start()
        wait_for(lambda: not engine.is_ready)
        with pytest.raises(Draining, match="shutting down"):
            begin(engine, [5], LONG)
        stopping.join(PATIENCE)
        assert not engine._thread.is_alive()
        assert [reader.finish().finish_reason for reader in readers] == ["length"] * 12
        assert_idle(engine)


def test_stop_cuts_what_does_not_finish(llm: LLM):
    with running(llm) as engine, slow_steps(engine):
        readers = [begin(engine, [5 + i], LONG)[1] for i in range(12)]
        assert readers[0].began.wait(PATIENCE)
        began = time.monotonic()
        engine.stop(0.1)
        assert time.monotonic() - began < 5
        outputs = [reader.finish() for reader in readers]
        assert [o.finish_reason for o in outputs] == ["abort"] * 12
        assert outputs[0].token_ids
        assert not outputs[-1].token_ids  # it was waiting
        assert engine.failure is None
        assert_idle(engine)
        engine.abort(Request(0, "", [1], LONG, 0, frozenset(), 1))  # after the end: nothing


def test_stop_without_a_start(llm: LLM):
    engine = EngineThread(llm)
    reader = begin(engine, [5], LONG)[1]
    engine.stop(1)
    assert reader.finish().finish_reason == "abort"
    with pytest.raises(Draining):
        begin(engine, [5], LONG)
    assert_idle(engine)


@pytest.mark.parametrize("at", [1, 4])
def test_a_failing_callback_costs_only_its_request(llm: LLM, at: int, caplog: pytest.LogCaptureFixture):
    calls: list[Delta] = []

    def broken(delta: Delta) -> None:
        calls.append(delta)
        if len(calls) >= at:
            raise ValueError("no reader")

    with running(llm) as engine:
        request = engine.make_request([7, 8], LONG)
        engine.submit(request, broken)
        other = begin(engine, [9], LONG)[1]
        assert other.finish().finish_reason == "length"
        assert request.finish_reason == "abort"
        assert [d.output is not None for d in calls] == [False] * at + [True]
        assert engine.failure is None
        assert "its callback failed" in caplog.text
        assert_idle(engine)


def test_a_failing_step_ends_every_request(caplog: pytest.LogCaptureFixture):
    llm = tiny_llm(3)
    with running(llm) as engine:
        step, steps = llm.core.step, iter(range(100))

        def fail() -> list[Request]:
            if next(steps) == 5:
                raise RuntimeError("device lost")
            return step()

        llm.core.step = fail  # type: ignore[method-assign]
        readers = [begin(engine, [5 + i], LONG)[1] for i in range(12)]
        assert [reader.finish().finish_reason for reader in readers] == ["abort"] * 12
        wait_for(lambda: engine._closed)
        assert isinstance(engine.failure, RuntimeError)
        assert not engine.is_ready
        with pytest.raises(Draining, match=r"failed \(device lost\)"):
            begin(engine, [5], LONG)
        engine._thread.join(PATIENCE)
        assert_idle(engine)
    assert "the engine failed" in caplog.text


def test_calls_behind_a_failing_one_are_not_lost(llm: LLM):
    engine = EngineThread(llm)
    request, first = begin(engine, [5], LONG)
    engine.abort(request)
    _, second = begin(engine, [6], LONG)
    abort, llm.core.abort = llm.core.abort, raises  # type: ignore[method-assign]
    engine.start()
    engine._thread.join(PATIENCE)
    llm.core.abort = abort  # type: ignore[method-assign]
    assert first.finish().finish_reason == second.finish().finish_reason == "abort"
    assert str(engine.failure) == "broken"
    llm.core.abort_all()


def raises(*_: object) -> None:
    raise RuntimeError("broken")


def test_a_failing_warm_up_is_a_failure():
    llm = tiny_llm(3)
    llm.core.step = raises  # type: ignore[method-assign, assignment]
    engine = EngineThread(llm)
    reader = begin(engine, [5], LONG)[1]
    engine.start()
    assert reader.finish().finish_reason == "abort"
    engine._thread.join(PATIENCE)
    assert str(engine.failure) == "broken"
    assert not engine.is_ready


def test_idle_costs_nothing_and_wakes_at_once(llm: LLM):
    with running(llm) as engine:
        begin(engine, [5], LONG)[1].finish()
        steps, began = llm.core._step, time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.1
        assert llm.core._step == steps
        began = time.monotonic()
        begin(engine, [6], SamplingParams(max_tokens=1))[1].finish()
        assert time.monotonic() - began < 2


def test_penalties_from_many_threads():
    """The first request with penalties makes room on the device, for all of them, whoever is first."""
    llm, prompts = tiny_llm(3), random_prompts(16, seed=7)
    params = SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    plain = tiny_llm(3).generate(prompts, params)
    readers: dict[int, Reader] = {}
    with running(llm) as engine:
        threads = [
            threading.Thread(target=lambda i=i: readers.update({i: begin(engine, prompts[i], params)[1]}))
            for i in range(16)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert [readers[i].finish().token_ids for i in range(16)] == [o.token_ids for o in plain]


def test_a_line_for_each_request(llm: LLM, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with running(llm) as engine:
        request, reader = engine.make_request([5, 6, 7], LONG), Reader()
        engine.submit(request, reader, request_id="cmpl-1")
        output = reader.finish()
    record = next(r for r in caplog.records if r.message.startswith("request id=cmpl-1 "))
    fields = record.request  # type: ignore[attr-defined]
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["finish_reason"]) == (3, 90, "length")
    assert fields["acceptance_length"] == round(output.stats.acceptance_length, 2)
    assert fields["ttft_ms"] > 0
    assert fields["tokens_per_second"] > 0


def test_a_line_now_and_then(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    log = ActivityLog(interval=10.0)

    def at(now: float, tokens: int, rounds: int) -> int:
        accepted = tokens - rounds
        log.step(now, Snapshot(3, 1, 0.5, 0, 40, tokens, rounds, 3 * rounds, accepted, (accepted, 0, 0)))
        return len(caplog.messages)

    assert at(1000.0, 0, 0) == 0
    assert at(1009.9, 50, 25) == 0
    assert at(1010.0, 100, 50) == 1
    assert "tokens_per_second=10.0 acceptance_length=2.00" in caplog.messages[0]
    assert "running=3 waiting=1 kv_cache=50.0%" in caplog.messages[0]
    assert at(1015.0, 160, 80) == 1
    assert at(1020.0, 200, 150) == 2
    assert "tokens_per_second=10.0 acceptance_length=1.00" in caplog.messages[1]
    assert at(5000.0, 210, 150) == 2  # an hour without work is not an hour of slow work
    assert at(5010.0, 310, 200) == 3
    assert "tokens_per_second=10.0 acceptance_length=2.00" in caplog.messages[2]
