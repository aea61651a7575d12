"""Sampling parameters and the rule that makes speculation lossless at every temperature.

The token at sequence index i is argmax(filtered_logits_i / T + gumbel(seed, i)); plain argmax at T = 0. The noise is
counter-based: it depends on (request seed, index, token id) alone, so it is the same whether the row was verified as a
draft, decoded alone or batched with strangers. A draft is accepted iff it equals that token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import PeagleError

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5  # logits divided by less would overflow float32 before they differ from a greedy choice


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. Names and meanings follow vLLM.

    `top_k` 0 or -1 and `top_p` 1.0 are off; `seed` None draws a fresh one; `stop`, one string or several, is cut from
    the text; a temperature below 1e-5 is greedy.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise PeagleError(f"max_tokens is {self.max_tokens}: it must be at least 1")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise PeagleError(f"temperature is {self.temperature}: it must be 0 (greedy) to {MAX_TEMPERATURE:g}")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        if not 0.0 < self.top_p <= 1.0:
            raise PeagleError(f"top_p is {self.top_p}: it must be in (0, 1]; 1 turns it off")
        if not -1 <= self.top_k < 2**31:
            raise PeagleError(f"top_k is {self.top_k}: it must be 1 to 2^31 - 1; 0 or -1 turns it off")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise PeagleError(f"seed is {self.seed}: it must be in 0 .. 2^63 - 1")
        if not all(isinstance(text, str) and text for text in stop):
            raise PeagleError(f"stop is {self.stop!r}: every stop string needs at least one character")


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of R logit rows, each a tensor [R]; `indices` is the sequence index each row draws."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64, 0 = off
    top_p: Tensor  # float32
    seed: Tensor  # int64
    indices: Tensor  # int64
    filtered: bool  # whether any row has top-k or top-p on, known on the host


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


def filter_logits(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Set logits outside top-k, then outside the top-p nucleus of what is left, to -inf. At least one always stays."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    outside_k = (rank_V[None] >= top_k_R[:, None]) & (top_k_R[:, None] > 0)
    sorted_RV = sorted_RV.masked_fill(outside_k, -torch.inf)
    probs_RV = sorted_RV.softmax(dim=-1)
    mass_before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    outside_p = (mass_before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1.0)
    outside_p[:, 0] = False
    sorted_RV = sorted_RV.masked_fill(outside_p, -torch.inf)
    return torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)


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
        scaled_RV = filter_logits(scaled_RV, rows.top_k, rows.top_p)
    if token_ids_V is None:
        token_ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    drawn_R = scaled_RV.add_(gumbel_noise(rows.seed, rows.indices, token_ids_V)).argmax(dim=-1)
    return torch.where(greedy_R, logits_RV.argmax(dim=-1), drawn_R)
