"""EOS, stop strings, stop ids and max_tokens end a request at the exact token, inside an accepted run too."""

import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from peagle.config import EngineConfig
from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.engine.text import MeasuredStream, TextStream
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import EOS, force_drafts, random_prompts, tiny_llm, tiny_parts, tiny_tokenizer

PROMPTS = random_prompts(6, seed=9)
LONG = SamplingParams(max_tokens=60, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm_and_plain():
    llm = tiny_llm(7)
    llm.set_speculation(False)
    plain = llm.generate(PROMPTS, LONG)
    llm.set_speculation(True)
    force_drafts(llm, plain, seed=0, right=0.97)  # nearly every stop falls inside an accepted run
    return llm, plain


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 23])
def test_max_tokens(llm_and_plain, max_tokens: int):
    llm, plain = llm_and_plain
    params = SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=5, ignore_eos=True)
    for output, whole in zip(llm.generate(PROMPTS, params), plain, strict=True):
        assert output.token_ids == whole.token_ids[:max_tokens]
        assert output.finish_reason == "length"
        emitted = output.stats.num_accepted_tokens + output.stats.num_rounds + 1
        assert max_tokens <= emitted <= max_tokens + 1  # the last round may end on a draft, without its bonus token


@pytest.mark.parametrize("at", [0, 1, 5, 12, 30])
def test_stop_token_ids_and_eos(llm_and_plain, at: int):
    llm, plain = llm_and_plain
    for i, whole in enumerate(plain):
        stop = whole.token_ids[at]
        first = whole.token_ids.index(stop)
        params = SamplingParams(max_tokens=60, temperature=0.9, seed=5, ignore_eos=True, stop_token_ids=(stop,))
        prompts = [PROMPTS[i]] if i else PROMPTS[:1]
        saved = plain[0]
        plain[0] = whole  # a lone request has index 0
        output = llm.generate(prompts, params)[0]
        plain[0] = saved
        assert output.token_ids == whole.token_ids[: first + 1]
        assert output.finish_reason == "stop"


def test_eos_ends_a_request_unless_ignored(llm_and_plain):
    llm, plain = llm_and_plain
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=5)
    for output, whole in zip(llm.generate(PROMPTS, params), plain, strict=True):
        if EOS in whole.token_ids:
            assert output.token_ids == whole.token_ids[: whole.token_ids.index(EOS) + 1]
            assert output.finish_reason == "stop"
        else:
            assert output.token_ids == whole.token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 3, 20])
def test_stop_strings(llm_and_plain, start: int, length: int):
    llm, plain = llm_and_plain
    text = plain[0].text
    stop = text[start : start + length]
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=5, ignore_eos=True, stop=(stop, "never-there"))
    pieces: list[str] = []
    output = llm.generate(PROMPTS[:1], params, on_delta=lambda _, piece: pieces.append(piece))[0]
    assert output.text == text[: text.index(stop)]
    assert "".join(pieces) == output.text
    assert output.finish_reason == "stop"
    decoded = llm.tokenizer.decode(output.token_ids)
    assert stop in decoded
    assert stop not in llm.tokenizer.decode(output.token_ids[:-1])


def test_streamed_pieces_add_up(llm_and_plain):
    llm, plain = llm_and_plain
    pieces: dict[int, str] = dict.fromkeys(range(len(PROMPTS)), "")

    def collect(index: int, piece: str) -> None:
        pieces[index] += piece

    llm.generate(PROMPTS, LONG, on_delta=collect)
    assert [pieces[i] for i in range(len(PROMPTS))] == [o.text for o in plain]


def test_an_exception_in_a_callback_frees_everything(llm_and_plain):
    llm, plain = llm_and_plain

    def interrupt(index: int, piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, on_delta=interrupt)
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks
    assert [o.token_ids for o in llm.generate(PROMPTS, LONG)] == [o.token_ids for o in plain]


def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A token for every byte, and one for each of `merges`."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_half_characters_are_held_back():
    fast = byte_tokenizer()
    text = "naïve – 東京 🦅!"
    ids = fast.encode(text)
    stream, shown = TextStream(fast, ("東🦅",)), []
    for token in ids:
        stream.push(token)
        shown.append(stream.take())
    shown.append(stream.take(final=True))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)
    cut = TextStream(fast, ())
    for token in ids[:-2]:  # ends inside the four bytes of the eagle
        cut.push(token)
    assert cut.finish(ids[:-2]) == text[:-2] + "\ufffd"


def test_a_stop_string_is_found_where_half_a_character_behind_it_ends_the_answer():
    fast = byte_tokenizer(("Ċ", "æ"))  # a line's end and the first byte of 東
    stream = MeasuredStream(fast, ("x\n",))
    params = SamplingParams(max_tokens=3, stop="x\n")
    request = Request(0, "", [0], params, seed=0, stop_ids=frozenset(), max_tokens=3, stream=stream)
    assert request.emit(fast.convert_tokens_to_ids(["a", "x", "Ċæ"])) == 3
    assert stream.take() == "a"
    output = request.output(fast)
    assert (output.text, output.finish_reason, output.text_ends) == ("a", "stop", [1, 1, 1])
    assert stream.take(final=True) == ""


def test_a_stop_string_that_is_kept_holds_nothing_back():
    fast = byte_tokenizer()
    stream, shown = TextStream(fast, ("xyz",), keeps_stop=True), []
    for token in fast.encode("axyz"):
        stream.push(token)
        shown.append(stream.take())
    assert shown == ["a", "x", "y", "z"]
    assert (stream.text, stream.stop_string) == ("axyz", "xyz")


@pytest.mark.parametrize(("reason", "after"), [("length", "stop"), ("abort", "abort")])
def test_only_a_limit_gives_way_to_a_stop_string_found_at_the_end(reason: str, after: str):
    fast = byte_tokenizer(("Ċ", "æ"))
    params = SamplingParams(max_tokens=3, stop="x\n")
    request = Request(
        0, "", [0], params, seed=0, stop_ids=frozenset(), max_tokens=9, stream=MeasuredStream(fast, ("x\n",))
    )
    request.emit(fast.convert_tokens_to_ids(["a", "x", "Ċæ"]))
    request.finish_reason = reason
    output = request.output(fast)
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", after, "x\n")


def test_bad_prompts_are_named_before_any_work():
    llm = tiny_llm(3, max_model_len=32)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(PeagleError, match="prompt 1 has 32 tokens"):
        llm.generate([[2, 3], [5] * 32], params)
    with pytest.raises(PeagleError, match="prompt 0 is empty"):
        llm.generate([[]], params)
    with pytest.raises(PeagleError, match=r"outside 0 \.\. 95"):
        llm.generate([[96]], params)
    with pytest.raises(PeagleError, match="2 sampling params"):
        llm.generate([[2]], [params, params])
    with pytest.raises(PeagleError, match="max_model_len is 4096"):
        tiny_llm(3, max_model_len=4096)
    assert llm.generate([[5] * 31], params)[0].finish_reason == "length"


def test_tokenizer_of_the_tiny_engine_round_trips():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode("abcXYZ123", add_special_tokens=False)) == "abcXYZ123"
    assert torch.tensor(tokenizer.encode("ab")).max() < 96


def test_generate_refuses_what_it_cannot_do():
    llm = tiny_llm(3)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for prompts, says in (
        ([2, 3, 4], "prompt 0 is 2"),
        ([[2.5]], "whole numbers"),
        ([None], "None"),
    ):
        with pytest.raises(PeagleError, match=says):
            llm.generate(prompts, params)
    with pytest.raises(PeagleError, match="sampling params of prompt 0"):
        llm.generate([[2]], [None])
    lengths = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (2, 30)]
    with pytest.raises(PeagleError, match="while requests are running"):
        llm.generate([[2], [3]], lengths, on_finish=lambda *_: llm.generate([[3]], params))
    assert len(llm.generate([[2]], params)[0].token_ids) > 0
    assert [o.token_ids for o in llm.generate("abc", params)] == [o.token_ids for o in llm.generate(["abc"], params)]


def test_synthetic_acceptance_can_be_turned_off():
    target, drafter = tiny_parts()
    llm = LLM.from_parts(target, drafter, 3, EngineConfig(block_size=4), synthetic_rates=(0.9, 0.9, 0.9))
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert llm.generate([[5, 6]], params)[0].stats.acceptance_length > 2
    llm.set_speculation(False)
    output = llm.generate([[5, 6]], params)[0]
    assert output.stats.num_rounds == 0
    assert len(output.token_ids) == 40


def test_a_text_goes_on_after_a_token_the_decoder_chokes_on(monkeypatch: pytest.MonkeyPatch):
    class Choking:
        """Fails once, as the library does where a token changes the text before it."""

        def __init__(self, **settings: object) -> None:
            self.inner = DecodeStream(**settings)

        def step(self, tokenizer: object, token_id: int) -> str | None:
            if token_id == 7 and not failed:
                failed.append(token_id)
                raise Exception("Invalid prefix encountered while decoding stream")
            return self.inner.step(tokenizer, token_id)

    failed: list[int] = []
    monkeypatch.setattr("peagle.engine.text.DecodeStream", Choking)
    tokenizer = tiny_tokenizer()
    stream = TextStream(tokenizer, ())
    for token_id in (5, 6, 7, 8):
        stream.push(token_id)
    assert failed
    assert stream.finish([5, 6, 7, 8]) == tokenizer.decode([5, 6, 7, 8])


def test_a_request_is_queued_once_and_generate_runs_once_at_a_time():
    llm = tiny_llm(3)
    request = llm.make_request([5, 6], SamplingParams(max_tokens=3, temperature=0.0))
    llm.core.add(request)
    with pytest.raises(PeagleError, match="added before"):
        llm.core.add(request)
    while llm.core.has_work:
        llm.core.step()
    with pytest.raises(PeagleError, match="added before"):
        llm.core.add(request)
    params, errors = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), []
    expected = [o.token_ids for o in llm.generate(PROMPTS, params)]

    def run() -> None:
        try:
            assert [o.token_ids for o in llm.generate(PROMPTS, params)] == expected
        except PeagleError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("requests are running" in error for error in errors)
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks
