"""A model's vocabulary as xgrammar sees it: what compiles a grammar, tries it out and follows it."""

import time
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from peagle.errors import NoMemory, PeagleError
from peagle.kernels.token_masks import num_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TRIAL_STEPS = 64
_SLOWEST_STEP = 0.1  # seconds


class Vocabulary:
    """`info` is xgrammar's TokenizerInfo, `stop_ids` are the tokens that end a text. From any thread: a compilation
    lets others run."""

    def __init__(self, info: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self.info, self.vocab_size, self.stop_ids = info, vocab_size, tuple(stop_ids)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast", vocab_size: int, eos_token_ids: Sequence[int]) -> Self:
        """Raises PeagleError without the extra, and for a model that could not end its text."""
        if find_spec("xgrammar") is None:
            raise PeagleError("structured_outputs needs the package xgrammar: pip install 'peagle[structured]'")
        if not eos_token_ids:
            raise PeagleError("structured_outputs needs a model with an end-of-text token: its config names none")
        stop_ids = sorted(eos_token_ids)
        return cls(_token_info(tokenizer, vocab_size, stop_ids), vocab_size, stop_ids)

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        return xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, form: str) -> Any:
        """The grammar of a structural format, JSON text; PeagleError that says what is wrong with the `kind`, NoMemory
        if that is what it runs out of."""
        tag = f'{{"type": "structural_tag", "format": {form}}}'
        try:
            return self._compiler.compile_structural_tag(tag)
        except (MemoryError, RuntimeError, ValueError) as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                raise NoMemory(f"no memory to compile {kind}: send the request later, or use a simpler one") from None
            raise PeagleError(f"{kind} is not usable ({_reason(error)}): correct it") from None

    def matcher(self, compiled: Any) -> "GrammarMatcher":
        """A fresh matcher at the beginning of a compiled grammar."""
        return GrammarMatcher(compiled, self.stop_ids, self.vocab_size)

    def try_out(self, compiled: Any, kind: str) -> None:
        """Follow a grammar for a few tokens, at random. PeagleError if it cannot even begin, or takes so long that all
        other requests of an engine would wait for it."""
        matcher = self.matcher(compiled)
        rng, row_W = np.random.default_rng(0), np.empty(num_words(self.vocab_size), dtype=np.int32)
        for step in range(_TRIAL_STEPS):
            began = time.thread_time()  # of this thread alone: the machine may be busy
            matcher.fill(row_W)
            bits_V = np.unpackbits(row_W.view(np.uint8), bitorder="little")[: self.vocab_size]
            bits_V[list(self.stop_ids)] = 0
            if not bits_V.any():
                if step:
                    return
                raise PeagleError(f"{kind} allows nothing that the tokens of this model can write: use another one")
            matcher.accept(int(rng.choice(np.flatnonzero(bits_V))))
            seconds = time.thread_time() - began
            if seconds > _SLOWEST_STEP:
                raise PeagleError(
                    f"{kind} can be read in too many ways: a step took {seconds:.2f} seconds, and it may take "
                    f"{_SLOWEST_STEP}; put fewer repetitions into each other"
                )


class GrammarMatcher:
    """`Matcher` over xgrammar's. Past the end, and where the vocabulary has no way on, the only way is to end the text,
    which may then be said again and again."""

    def __init__(self, compiled: Any, stop_ids: Sequence[int], vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._stop_ids = frozenset(stop_ids)
        self._only_stop_W = np.zeros(num_words(vocab_size), dtype=np.int32)
        bits_W = self._only_stop_W.view(np.uint32)
        for token in stop_ids:
            bits_W[token // 32] |= np.uint32(1 << token % 32)
        self._past_end = 0  # tokens taken after the end

    def fill(self, row_W: np.ndarray) -> None:
        """See `Matcher`."""
        if not self._fill(row_W):
            row_W[:] = self._only_stop_W

    def accept(self, token_id: int) -> bool:
        """See `Matcher`."""
        if not self._past_end and not self._matcher.is_terminated() and self._matcher.accept_token(token_id):
            return True
        if token_id not in self._stop_ids or self._fill(np.empty_like(self._only_stop_W)):
            return False
        self._past_end += 1
        return True

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        behind = min(count, self._past_end)
        self._past_end -= behind
        if count > behind:
            self._matcher.rollback(count - behind)

    def _fill(self, row_W: np.ndarray) -> bool:
        """Fill with what the grammar allows; False if that is nothing."""
        if self._past_end or self._matcher.is_terminated():
            return False
        row_W[:] = -1
        self._matcher.fill_next_token_bitmask(row_W[None])
        return bool(row_W.any())


def _token_info(tokenizer: "PreTrainedTokenizerFast", vocab_size: int, stop_ids: list[int]) -> Any:
    """xgrammar's view of the vocabulary. Tokens that no text shows are none that a grammar can use, but by their id:
    they are spelled with a byte that UTF-8 never has. Those that end the text need no spelling."""
    import xgrammar

    found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    hidden = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    words = [b""] * vocab_size
    for word, token in tokenizer.get_vocab().items():
        if token < vocab_size and token not in hidden:
            words[token] = word.encode()
    for token in hidden.difference(stop_ids):
        if token < vocab_size:
            is_mapped = found.vocab_type == xgrammar.VocabType.BYTE_LEVEL  # then each character stands for a byte
            words[token] = f"ÿ{token}".encode() if is_mapped else b"\xff%d" % token
    return xgrammar.TokenizerInfo(
        words, found.vocab_type, vocab_size=vocab_size, stop_token_ids=stop_ids, add_prefix_space=found.add_prefix_space
    )


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its source."""
    text = " ".join(str(error).split())
    return text.split(": ", 1)[-1] if ".cc:" in text else text
