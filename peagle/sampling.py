"""Sampling parameters and the rule that makes speculation lossless at every temperature.

The token at sequence index i is argmax(filtered_logits_i / T + gumbel(seed, i)); plain argmax at T = 0. The noise is
counter-based: it depends on (request seed, index, token id) alone, so it is the same whether the row was verified as a
draft, decoded alone or batched with strangers. A draft is accepted iff it equals that token.

What a filter keeps depends on the values of the logits alone: tokens of equal logits stay or go together, whatever
their ids and however a form of the filter finds them. `filter_logits` states the rule.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.structured.outputs import StructuredOutputs

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5  # logits divided by less would overflow float32 before they differ from a greedy choice
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0  # logits are divided by it
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_DIGITS = 18  # of a token id written as text
_WHOLE = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "show_drafts", "drafts")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# A token as likely as the likeliest weighs this much in a nucleus. Weights are integers so that their sum, and with it
# the nucleus, is the same in every order of adding; 2^18 tokens still fit in 63 bits with room to spare.
MASS_UNIT = 2.0**40


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. Names and meanings follow vLLM.

    `top_k` 0 or -1, `top_p` 1.0 and `min_p` 0.0 are off; `seed` None draws a fresh one; `stop`, one string or several,
    is cut from the text, or kept at its end with `include_stop_str_in_output`; a temperature below 1e-5 is greedy.
    Logits get `logit_bias` first (token id -> what to add), then `repetition_penalty` (tokens of prompt and output; 1.0
    is off), then `frequency_penalty` times a token's count and `presence_penalty` (tokens of the output; 0.0 is off),
    and the temperature after all of them. What `structured_outputs` forbid is no token to choose at all.

    What the output tells besides tokens, none of which changes one: with `logprobs` n, the log-probability of every
    output token and of the n likeliest there, 0 to 20, as the target gives them before all of the above;
    `prompt_logprobs` the same for the prompt's tokens but the first, which then takes nothing from the prefix cache and
    may have a `max_tokens` of 0; `show_drafts` what was drafted in every round. Without `drafts`, which change no token
    either, a request decodes plainly while it has the engine to itself, so that it can be timed; a batch drafts for all
    or for none.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    show_drafts: bool = False
    drafts: bool = True

    def __post_init__(self) -> None:
        self._settle_lists()
        self._settle_types()
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise PeagleError(f"structured_outputs is {_shown(self.structured_outputs)}: give a StructuredOutputs")
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens < least:
            only = "; 0 is for logprobs of a prompt alone" if self.max_tokens == 0 else ""
            raise PeagleError(f"max_tokens is {_shown(self.max_tokens)}: it must be at least {least}{only}")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise PeagleError(f"temperature is {self.temperature}: it must be 0 (greedy) to {MAX_TEMPERATURE:g}")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if not 0.0 < self.top_p <= 1.0:
            raise PeagleError(f"top_p is {self.top_p}: it must be in (0, 1]; 1 turns it off")
        if not -1 <= self.top_k < 2**31:
            raise PeagleError(f"top_k is {_shown(self.top_k)}: it must be 1 to 2^31 - 1; 0 or -1 turns it off")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise PeagleError(f"seed is {_shown(self.seed)}: it must be in 0 .. 2^63 - 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise PeagleError(f"min_p is {self.min_p}: it must be in 0 .. 1; 0 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                limits = f"{-MAX_PENALTY:g} .. {MAX_PENALTY:g}"
                raise PeagleError(f"{name} is {getattr(self, name)}: it must be in {limits}; 0 turns it off")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            limits = f"in {MIN_REPETITION_PENALTY:g} .. {MAX_REPETITION_PENALTY:g}"
            raise PeagleError(f"repetition_penalty is {self.repetition_penalty}: it must be {limits}; 1 turns it off")
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise PeagleError(f"{name} is {_shown(count)}: it must be 0 to {MAX_LOGPROBS}; None turns it off")

    def _settle_lists(self) -> None:
        """Whatever holds stop strings and token ids becomes a tuple."""
        stop: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence | Set | None) or isinstance(stop, bytes | bytearray):
            raise PeagleError(f"stop is {_shown(stop)}: give one string or a list of them")
        if not all(isinstance(text, str) and text for text in stop or ()):
            raise PeagleError(f"stop is {_shown(stop)}: every stop string needs at least one character")
        object.__setattr__(self, "stop", tuple(stop or ()))
        ids = self.stop_token_ids
        if not isinstance(ids, Iterable | None) or isinstance(ids, str | bytes | bytearray | Mapping):
            raise PeagleError(f"stop_token_ids is {_shown(ids)}: give a list of token ids")
        ids = () if ids is None else tuple(ids)
        for token in ids:
            if not _is_whole(token) or token < 0:
                raise PeagleError(f"stop_token_ids has {_shown(token)}: it must be a whole number, 0 or more")
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))

    def _settle_types(self) -> None:
        """Numbers of numpy and the like become Python's own, so that all that follows can rely on them."""
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name not in ("max_tokens", "top_k"):
                continue
            if not _is_whole(value):
                raise PeagleError(f"{name} is {_shown(value)}: it must be a whole number")
            object.__setattr__(self, name, int(value))
        for name in _NUMBERS:
            value = getattr(self, name)
            if not _is_number(value):
                raise PeagleError(f"{name} is {_shown(value)}: it must be a number")
            object.__setattr__(self, name, _float(value))
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise PeagleError(f"{name} is {_shown(value)}: it must be true or false")
            object.__setattr__(self, name, bool(value))

    @property
    def filtered(self) -> bool:
        """Whether any of top-k, top-p and min-p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits change before they are sampled: any penalty or bias is on."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or self.logit_bias is not None

    def check_vocabulary(self, vocab_size: int) -> None:
        """PeagleError when a setting names a token that the target does not have."""
        for name, tokens in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            outside = [token for token in tokens if token >= vocab_size]
            if outside:
                raise PeagleError(f"{name} has {_shown(outside[0])}: the target has tokens 0 .. {vocab_size - 1}")


def _read_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    """A copy with integer keys, which JSON can only write as strings; None where there is nothing to add."""
    if bias is not None and not isinstance(bias, Mapping):
        raise PeagleError(
            f"logit_bias is {_shown(bias)}: give a mapping from token ids to numbers, such as {{50: -1.5}}"
        )
    read: dict[int, float] = {}
    for token, value in (bias or {}).items():
        if not str(token).isdecimal() or len(str(token)) > MAX_DIGITS:
            raise PeagleError(f"logit_bias has the key {str(token)[:40]!r}: keys are token ids, 0 or more")
        if not (_is_number(value) and -MAX_BIAS <= _float(value) <= MAX_BIAS):
            limits = f"{-MAX_BIAS:g} .. {MAX_BIAS:g}"
            raise PeagleError(f"logit_bias of token {token} is {_shown(value)}: it must be in {limits}")
        read[int(token)] = _float(value)
    return read or None


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(value: Any) -> float:
    """Infinity for what a float cannot hold; every limit here is below that."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _shown(value: object) -> str:
    """A value as an error repeats it; a Python int of many digits has no text at all."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"a {type(value).__name__} that is too long to show"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of R logit rows, each a tensor [R]; `indices` is the sequence index each row draws."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64, 0 = off
    top_p: Tensor  # float32
    seed: Tensor  # int64
    indices: Tensor  # int64
    filtered: bool  # whether any row has top-k, top-p or min-p on, known on the host
    min_p: Tensor | None = None  # float32; None = off in all rows


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32, in place; int32 products wrap, which is what a hash wants."""
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(-2048144789)  # 0x85EBCA6B
    x.bitwise_xor_((x >> 13) & 0x7FFFF).mul_(-1028477387)  # 0xC2B2AE35
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 values as (signed) int32."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def uniform_noise(seeds_R: Tensor, indices_R: Tensor, token_ids_V: Tensor) -> Tensor:
    """Uniform noise in (0, 1), [R, V], float32, a pure function of (seed, index, token id) on every device."""
    index_key_R = _mix32(_low32(indices_R * 0x9E3779B1 + 0x7F4A7C15))
    first_key_R = _mix32(_low32(seeds_R) ^ index_key_R)
    second_key_R = _mix32(_low32(seeds_R >> 32) ^ _mix32(index_key_R + 0x3C6EF372))
    x_RV = (_low32(token_ids_V * 0x9E3779B1)[None] + first_key_R[:, None]).contiguous()
    x_RV = _mix32(_mix32(x_RV).bitwise_xor_(second_key_R[:, None]))
    # 31 random bits, fine near 0 where -log1p(-u), the exponential, must be fine.
    return x_RV.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def gumbel_noise(seeds_R: Tensor, indices_R: Tensor, token_ids_V: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V], float32: a function of `uniform_noise`."""
    return uniform_noise(seeds_R, indices_R, token_ids_V).neg_().log1p_().neg_().log_().neg_()


def filter_logits(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor | None = None) -> Tensor:
    """Set logits, divided by the temperature, to -inf unless all three filters keep them.

    min-p keeps a token whose probability is at least `min_p` times the highest; top-k one that fewer than k tokens are
    strictly likelier than; top-p one such that the strictly likelier ones, of those the other two keep, have less than
    `top_p` of the mass of all these. The likeliest always stays, and so does a NaN.
    """
    threshold_R = filter_threshold(scaled_RV, top_k_R, top_p_R, min_p_R)
    return scaled_RV.masked_fill(scaled_RV < threshold_R[:, None], -torch.inf)


def filter_threshold(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor | None = None) -> Tensor:
    """The least logit that `filter_logits` keeps of each row, or less where it keeps all, float32 [R]."""
    sorted_RV = scaled_RV.sort(dim=-1, descending=True).values
    highest_R = sorted_RV[:, 0]
    kth_R = sorted_RV.gather(1, (top_k_R - 1).clamp(0, sorted_RV.shape[1] - 1)[:, None])[:, 0]
    floor_R = torch.maximum(torch.where(top_k_R > 0, kth_R, -torch.inf), min_p_floor(highest_R, min_p_R))
    mass_RV = ((sorted_RV - highest_R[:, None]).exp() * MASS_UNIT).to(torch.int64)
    mass_RV = mass_RV.masked_fill(sorted_RV < floor_R[:, None], 0)
    likelier_RV = mass_RV.cumsum(dim=-1) - mass_RV
    goal_R = top_p_R.double() * mass_RV.sum(dim=-1).double()
    kept_R = (likelier_RV.double() < goal_R[:, None]).sum(dim=-1)
    crossing_R = sorted_RV.gather(1, (kept_R - 1).clamp(min=0)[:, None])[:, 0]
    return torch.maximum(floor_R, torch.where(top_p_R < 1.0, crossing_R, -torch.inf))


def min_p_floor(highest_R: Tensor, min_p_R: Tensor | None) -> Tensor:
    """The logit with `min_p` times the probability of the highest one; -inf where min-p is off."""
    return torch.full_like(highest_R, -torch.inf) if min_p_R is None else highest_R + min_p_R.log()


def sample_tokens(logits_RV: Tensor, rows: RowSampling | None, token_ids_V: Tensor | None = None) -> Tensor:
    """The columns the sampling rule picks, int64 [R].

    `rows` None means every row is greedy. `token_ids_V` gives the target id of each column when the columns are a draft
    vocabulary, so that a draft sees the very noise its verification will see.
    """
    if rows is None:
        return logits_RV.argmax(dim=-1)
    logits_RV = logits_RV.float()
    greedy_R = rows.temperature == 0
    scaled_RV = logits_RV / torch.where(greedy_R, 1.0, rows.temperature)[:, None]
    if rows.filtered:
        scaled_RV = filter_logits(scaled_RV, rows.top_k, rows.top_p, rows.min_p)
    if token_ids_V is None:
        token_ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    drawn_R = scaled_RV.add_(gumbel_noise(rows.seed, rows.indices, token_ids_V)).argmax(dim=-1)
    return torch.where(greedy_R, logits_RV.argmax(dim=-1), drawn_R)
