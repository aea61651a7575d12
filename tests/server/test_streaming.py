"""The way of a stream's news: those that wait become one, and are sent together."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from peagle.acceptance import AcceptanceStats
from peagle.engine.outputs import ScoredToken, ShownRound
from peagle.server.answers import Answers
from peagle.server.completions import _FORM as COMPLETION
from peagle.server.engine_thread import Delta, Outbox
from peagle.server.errors import ApiError, ClientGone
from peagle.server.logprobs import Echo
from peagle.server.responses import Reply


class FakeEngine:
    """Takes requests, and says what it is told to."""

    def __init__(self) -> None:
        self.failure, self.aborted, self.say = None, [], []

    def outbox(self, loop) -> Outbox:
        return Outbox(loop)

    def submit(self, request, on_delta, *, request_id) -> None:
        self.say.append(on_delta)

    def abort(self, request) -> None:
        self.aborted.append(request)


def ended(reason: str = "length"):
    return SimpleNamespace(finish_reason=reason, stop_reason=None, stats=AcceptanceStats(), token_ids=[1])


def test_joined_news_say_all_that_the_single_ones_say():
    scored = [ScoredToken(i, i, -1.0, []) for i in range(3)]
    shown = [ShownRound(0, [1], 1, 2), ShownRound(2, [3], 0, 4)]
    deltas = [
        Delta("a", [1, 2], None, shown[:1], scored[:1], "of the prompt"),
        Delta("", [3], None),
        Delta("bc", [4], "the end", shown[1:], scored[1:]),
    ]
    assert Delta.joined(deltas) == Delta("abc", [1, 2, 3, 4], "the end", shown, scored, "of the prompt")
    assert Delta.joined(deltas[1:2]) is deltas[1]


async def read(answers, heard) -> None:
    async for news in answers:
        heard += [(index, delta.text) for index, delta in news]


async def never():
    await asyncio.Event().wait()


def run(script, receive=never, count: int = 2):
    """Run `script(engine, answers)` and close the answers."""

    async def main():
        engine = FakeEngine()
        answers = Answers(engine, [f"request {i}" for i in range(count)], "name", receive, None)
        try:
            return await script(engine, answers)
        finally:
            answers.close()

    return asyncio.run(main())


def test_what_waits_comes_at_once_and_nothing_twice():
    async def script(engine, answers):
        first, second = engine.say
        first(Delta("a", [1], None))
        second(Delta("x", [7], None))
        first(Delta("b", [2, 3], None))
        heard = []
        async for news in answers:
            heard.append([(index, delta.text, delta.token_ids) for index, delta in news])
            if len(heard) == 1:
                second(Delta("y", [8], ended()))
                first(Delta("c", [4], ended()))
        return heard

    assert run(script) == [
        [(0, "ab", [1, 2, 3]), (1, "x", [7])],
        [(1, "y", [8]), (0, "c", [4])],
    ]


def test_an_engine_that_fails_is_an_error():
    async def script(engine, answers):
        engine.say[0](Delta("a", [1], None))
        engine.say[1](Delta("b", [2], ended("abort")))
        engine.failure = RuntimeError()
        with pytest.raises(ApiError, match="the engine has failed"):
            await read(answers, [])
        return answers.requests

    assert run(script)


def test_a_client_that_is_gone_ends_it_at_once():
    async def gone():
        return {"type": "http.disconnect"}

    async def script(engine, answers):
        engine.say[0](Delta("a", [1], None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ClientGone):
            await read(answers, [])
        return list(engine.aborted)

    assert run(script, gone) == ["request 0", "request 1"]


def test_a_batch_is_one_send_with_an_event_for_each_answer():
    async def script(engine, answers):
        for say, text in zip(engine.say, "ab", strict=True):
            say(Delta(text, [1], None))
            say(Delta("c", [2], ended()))
        reply = Reply(COMPLETION, "m", answers.requests, 1, [Echo()] * 2, False, None)
        return [chunk async for chunk in reply.events(answers)]

    both, done = run(script)
    events = [json.loads(line.removeprefix("data: ")) for line in both.split("\n\n") if line]
    assert [event["choices"][0]["text"] for event in events] == ["ac", "bc"]
    assert done == "data: [DONE]\n\n"
