"""What the clients of `benchmarks.soak` send, and how an answer is read and compared with the one that was expected."""

import json
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.common import SUITES, first_turns

Body = dict[str, Any]
JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_STOPS = (["\n\n"], [". ", "!"], ["the"], "\n", [" a ", "0"])
_SHIFT = 16  # characters that must agree again for an answer to count as shifted


class Unexpected(Exception):
    """An answer that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can be sent many times and always has the same answers."""

    path: str
    body: Body

    @property
    def choices(self) -> int:
        """Answers it asks for."""
        return int(self.body.get("n", 1))

    def alone(self) -> list["Job"]:
        """A job for each answer, so that a reference never shares a batch."""
        body = {key: value for key, value in self.body.items() if key != "n"}
        return [Job(self.path, {**body, "seed": self.body["seed"] + choice}) for choice in range(self.choices)]


@dataclass(slots=True)
class Answer:
    """What came back for one job."""

    texts: list[str]
    reasons: list[str | None]
    tokens: int | None = None  # of all choices; None where the server was not asked to say
    finished: set[int] = field(default_factory=set)


def make_jobs(count: int, longest: int, seed: int) -> list[Job]:
    """Different requests over the bundled prompts: both endpoints, greedy and drawn, filters, penalties, stop strings,
    several answers; up to `longest` tokens each."""
    rng = random.Random(seed)
    prompts = [turn[-1]["content"][:600] for suite in SUITES for turn in first_turns(suite, count)]
    return [_job(rng, rng.choice(prompts), longest, number) for number in range(count)]


def _job(rng: random.Random, prompt: str, longest: int, seed: int) -> Job:
    body: Body = {
        "max_tokens": rng.randint(1, longest), "seed": seed * 1000, "temperature": rng.choice([0, 0, 0.7, 1.0])
    }  # fmt: skip
    options: Sequence[tuple[float, Body]] = (
        (0.3, {"stop": rng.choice(_STOPS)}), (0.3, {"ignore_eos": True}), (0.2, {"n": rng.randint(2, 4)}),
        (0.2, {"top_p": 0.9}), (0.2, {"top_k": 40}), (0.1, {"min_p": 0.05}), (0.1, {"repetition_penalty": 1.1}),
        (0.1, {"presence_penalty": 0.5, "frequency_penalty": 0.2}), (0.1, {"logit_bias": {"11": -5, "198": 2.5}}),
    )  # fmt: skip
    for chance, fields in options:
        if rng.random() < chance:
            body |= fields
    if rng.random() < 0.5:
        return Job(CHAT, body | {"messages": [{"role": "user", "content": prompt}]})
    return Job(COMPLETIONS, body | {"prompt": prompt})


def read_whole(document: Mapping[str, Any]) -> Answer:
    """An answer that was not streamed."""
    choices = sorted(document["choices"], key=lambda choice: choice["index"])
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return Answer(texts, [choice["finish_reason"] for choice in choices], document["usage"]["completion_tokens"])


async def read_stream(lines: AsyncIterator[str], choices: int) -> Answer:
    """An answer in events. Raises Unexpected unless every choice ends once, nothing follows an end, and all ends with
    [DONE]."""
    answer, is_done = Answer([""] * choices, [None] * choices), False
    async for line in lines:
        if not line:
            continue
        if is_done or not line.startswith("data: "):
            raise Unexpected(f"line {line[:100]!r} in a stream" + " after its end" * is_done)
        if line == "data: [DONE]":
            is_done = True
        else:
            _take(answer, json.loads(line.removeprefix("data: ")))
    if not is_done or len(answer.finished) != choices:
        raise Unexpected(f"a stream ended {'with' if is_done else 'without'} [DONE], {answer.reasons}")
    return answer


def _take(answer: Answer, event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise Unexpected(f"error in a stream: {event['error']['message']}")
    for choice in event["choices"]:
        index = choice["index"]
        if index in answer.finished:
            raise Unexpected(f"a chunk after the end of choice {index}: {choice}")
        answer.texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if choice["finish_reason"] is not None:
            answer.reasons[index] = choice["finish_reason"]
            answer.finished.add(index)
    if event.get("usage") is not None:
        answer.tokens = event["usage"]["completion_tokens"]


def differences(got: Answer, wanted: Answer) -> list[str]:
    """What of an answer is not as it was expected."""
    found = []
    for index, (one, other) in enumerate(zip(got.texts, wanted.texts, strict=True)):
        if one != other:
            at = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
            kind = "shifted" if is_shifted(one, other, at) else "different"
            found.append(
                f"{kind} at character {at} of choice {index}: {one[at : at + 40]!r}, not {other[at : at + 40]!r}"
            )
        elif got.reasons[index] != wanted.reasons[index]:
            found.append(f"choice {index} ended by {got.reasons[index]}, not {wanted.reasons[index]}")
    if not found and got.tokens not in (None, wanted.tokens):
        found.append(f"{got.tokens} tokens, not {wanted.tokens}")
    return found


def is_shifted(got: str, wanted: str, at: int) -> bool:
    """Whether two texts that part at `at` run on alike after some characters are left out or said twice: tokens were
    lost or doubled. Where the model chose otherwise, they do not."""
    one, other = got[at:], wanted[at:]
    if not one or not other:
        return True  # one is a beginning of the other
    return any(
        long[skip : skip + _SHIFT] == short[:_SHIFT]
        for long, short in ((one, other), (other, one))
        if len(short) >= _SHIFT
        for skip in range(1, len(long) - _SHIFT + 1)
    )


def rubbish() -> list[tuple[str, str, dict[str, str], bytes]]:
    """(method, path, headers, content) of requests that must be refused with a 4xx in OpenAI's form."""
    bodies: Iterable[bytes] = (
        b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 20_000, b'{"prompt": "x", "max_tokens": 1e999}',
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "made_up": 1}', b'{"prompt": [[1], "x"]}',
        b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "model": "other"}',
        b'{"prompt": "x", "n": 1000}', b'{"prompt": [-5]}', b'{"prompt": "x", "stop": [""]}',
        b'{"prompt": "x", "seed": 99999999999999999999999999}', b'{"prompt": "' + b"x" * 2_000_000 + b'"}',
        b'{"prompt": "x", "logit_bias": {"999999999": 1}}', b'{"messages": [{"role": "nobody", "content": "x"}]}',
    )  # fmt: skip
    made = [("POST", path, JSON, body) for path in (CHAT, COMPLETIONS) for body in bodies]
    made += [("POST", "/tokenize", JSON, body) for body in (b"{", b"{}", b'{"prompt": 5}')]
    made += [("POST", COMPLETIONS, {"content-type": kind}, b'{"prompt": "x"}') for kind in ("text/plain", "a/b; c")]
    return [*made, ("GET", CHAT, {}, b""), ("DELETE", "/v1/models", {}, b""), ("GET", "/etc/passwd", {}, b"")]


def check_refusal(response: httpx.Response) -> str | None:
    """What is wrong with the answer to rubbish; None if nothing is."""
    if not 400 <= response.status_code < 500:
        return f"status {response.status_code} for rubbish"
    try:
        error = response.json()["error"]
        return None if error["message"] else "a refusal without a message"
    except (ValueError, KeyError, TypeError):
        return f"a refusal in another form: {response.text[:100]!r}"
