"""Windows of steps in which all requests decode, counted on an engine that is none."""

from types import SimpleNamespace

import pytest

from peagle.bench import profiling
from peagle.bench.stepping import Decoding, Window, decode_window, profile_steps
from peagle.config import ProfileConfig
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams


class FakeCore:
    """Prefills one request a step, then gives every request `per_step` tokens a step."""

    def __init__(self, per_step):
        self.per_step, self.requests, self.steps = per_step, [], 0

    @property
    def has_work(self):
        return any(request.finish_reason is None for request in self.requests)

    def add(self, request):
        self.requests.append(request)

    def step(self):
        self.steps += 1
        waiting = [request for request in self.requests if not request.prefilled]
        for request in self.requests:
            if request.prefilled and request.finish_reason is None:
                request.output_ids += [0] * self.per_step
                if len(request.output_ids) >= request.max_tokens:
                    request.finish_reason = "length"
        if waiting:
            waiting[0].prefilled = True
        return []


class FakeEngine:
    def __init__(self, per_step=2):
        self.core = FakeCore(per_step)

    def make_request(self, prompt, params):
        return SimpleNamespace(output_ids=[], finish_reason=None, prefilled=False, max_tokens=params.max_tokens)


def params(tokens):
    return SamplingParams(max_tokens=tokens)


def clock_of(engine):
    return lambda: 0.5 * engine.core.steps


def test_only_steps_in_which_all_decode_are_counted():
    engine = FakeEngine(per_step=2)
    batch = Decoding(engine, [[1] * 10, [1] * 20], params(60), clock_of(engine))
    batch.settle(17)
    assert min(len(request.output_ids) for request in engine.core.requests) in (17, 18)
    window = batch.until_first_ends()
    assert window.requests == 2
    assert window.tokens == 4 * window.steps
    assert window.seconds == 0.5 * window.steps
    assert window.ms_per_step == 500
    assert window.acceptance_length == 2
    assert window.tokens_per_second == 8
    assert 15 + 17 < window.context < 15 + 60
    batch.drain()
    assert not engine.core.has_work


def test_so_many_steps():
    engine = FakeEngine()
    batch = Decoding(engine, [[1]], params(100), clock_of(engine))
    batch.settle()
    assert batch.advance(5).steps == 5
    with pytest.raises(PeagleError, match="ended within 50 steps"):
        batch.advance(50)


@pytest.mark.parametrize("tokens", [10, 18])
def test_answers_too_short_for_a_window(tokens):
    with pytest.raises(PeagleError, match="allow longer answers"):
        decode_window(FakeEngine(), [[1], [1]], params(tokens))


def test_windows_add_up():
    total = Window(2, 1.0, 10, 30, 100.0) + Window(2, 3.0, 30, 50, 200.0)
    assert total == Window(2, 4.0, 40, 80, 175.0)


def test_profiled_steps_may_not_be_the_last():
    batch = Decoding(FakeEngine(), [[1]], params(20))
    batch.settle()
    with pytest.raises(PeagleError, match="profiled steps"):
        profile_steps(batch, 8)


def test_the_trace_is_kept(tmp_path):
    import torch

    engine = FakeEngine()
    step, engine.core.step = engine.core.step, lambda: (torch.ones(3) + 1, step())
    batch = Decoding(engine, [[1]], params(100))
    batch.settle()
    profile = profile_steps(batch, 3, tmp_path / "new" / "trace.json")
    assert (profile.steps, profile.on_gpu) == (3, False)
    assert (tmp_path / "new" / "trace.json").is_file()


@pytest.mark.parametrize(("steps", "requests", "prompt"), [(1, 2, 128), (32, 2, 128), (8, 20, 8192)])
def test_a_profile_leaves_room_for_a_request_whose_drafts_are_all_kept_beside_one_that_keeps_none(
    steps: int, requests: int, prompt: int
):
    """The first has decoded long before the second has emitted what it takes to settle."""
    config, drafts = ProfileConfig(concurrency=requests, steps=steps, prompt_tokens=prompt), 5
    length = profiling._needed_length(config, SimpleNamespace(max_position_embeddings=1 << 20), drafts)
    engine = FakeEngine(per_step=1)
    batch = Decoding(engine, [[1] * prompt] * requests, params(length - config.prompt_tokens), clock_of(engine))
    lucky, step = engine.core.requests[0], engine.core.step

    def uneven():
        before = len(lucky.output_ids)
        step()
        if len(lucky.output_ids) > before:
            lucky.output_ids += [0] * drafts

    engine.core.step = uneven
    batch.settle()
    batch.advance(profiling._WARM_UP + 2 * steps)
    assert len(lucky.output_ids) > 6 * 17
