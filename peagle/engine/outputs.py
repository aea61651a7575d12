"""What a step shows the host: emitted tokens always, drafts and log-probabilities to those who ask.

A request asks with `SamplingParams.show_drafts`, `logprobs` and `prompt_logprobs`. The batch's `SamplingMode` then has
`shows_drafts` or `scores`, and the step is another graph than the one that shows tokens alone.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np
from torch import Tensor

from peagle.kernels.logprobs import RowLogprobs


class StepOutput(NamedTuple):
    """What a pass over B requests leaves for the host. Suffixes: V tokens emitted at most, K the most drafts ever.

    `drafts_BK` is what each slot holds after the pass: a step with n drafts verifies the first n of them. `logprobs`
    has a row for each emitted token, B x V, rows of tokens that were not emitted included; `prompt_logprobs` one for
    each row of `Rows.scored`. Those are None that nobody in the batch asks for.
    """

    tokens_BW: Tensor  # V emitted tokens, -1 after them; then how many drafts were accepted
    drafts_BK: Tensor | None = None
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None

    def only(self, *, drafts: bool, logprobs: bool) -> "StepOutput":
        """Without what nobody asks for: the step may have been one that does more."""
        return self._replace(drafts_BK=self.drafts_BK if drafts else None, logprobs=self.logprobs if logprobs else None)

    def each(self, move: Callable[[Tensor], Tensor]) -> "StepOutput":
        """A copy with every tensor moved."""
        both = [None if rows is None else RowLogprobs(*map(move, rows)) for rows in self[2:]]
        return StepOutput(move(self.tokens_BW), None if self.drafts_BK is None else move(self.drafts_BK), *both)


class ShownRound(NamedTuple):
    """One verification round of a request that shows its drafts."""

    first_index: int  # of its first token among the request's output tokens
    drafts: list[int]  # what was verified, in order
    accepted: int  # how many of them were kept; the output has them at `first_index` and after
    token: int | None  # the target's own one after those: the correction, or the bonus where all were kept; None: the
    # request ended before it


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities that the target gave before temperature, penalties, bias and filters."""

    logprob: float  # of the token itself
    top: list[tuple[int, float]]  # token id and logprob of the likeliest, in falling order


class ScoredToken(NamedTuple):
    """A token, where its text begins, and its log-probabilities."""

    token_id: int
    offset: int  # characters of the text before it
    logprob: float | None  # None: a prompt's first token, which follows nothing
    top: list[tuple[int, float]]  # as in `TokenLogprob`


class Logprobs(Sequence[TokenLogprob]):
    """Log-probabilities of consecutive tokens with the `count` likeliest at each. Compact, for prompts are long; other
    threads may read what is there while it grows."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chosen, self._top, self._ids = array("f"), array("f"), array("i")

    def extend(self, values_RN1: np.ndarray, top_ids_RN: np.ndarray) -> None:
        """Append rows as `RowLogprobs` has them."""
        self._count = min(self._count, top_ids_RN.shape[1])  # a vocabulary may have fewer
        self._top.frombytes(values_RN1[:, 1 : 1 + self._count].astype(np.float32).tobytes())
        self._ids.frombytes(top_ids_RN[:, : self._count].astype(np.int32).tobytes())
        self._chosen.frombytes(values_RN1[:, 0].astype(np.float32).tobytes())

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        top = slice(at * self._count, (at + 1) * self._count)
        return TokenLogprob(self._chosen[at], list(zip(self._ids[top], self._top[top], strict=True)))


def scored_tokens(
    token_ids: Sequence[int], logprobs: Logprobs, ends: Sequence[int], start: int = 0, stop: int | None = None
) -> list[ScoredToken]:
    """Tokens `start` .. `stop` - 1 of all these with their log-probabilities. `ends` says how much text there is after
    each, but maybe the last."""
    stop = len(token_ids) if stop is None else stop
    return [ScoredToken(token_ids[i], ends[i - 1] if i else 0, *logprobs[i]) for i in range(start, stop)]
