"""The rows of an evaluation's result file (names `eval-*` and `accuracy-*`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from peagle.bench.acceptance import SuiteAcceptance
from peagle.bench.groups import Counts, figures, pack_requests
from peagle.bench.statistics import FEWEST_REQUESTS

DEFINITION = (
    "acceptance length (AL) = 1 + accepted drafts / rounds; share at position j = rounds that accepted draft j / "
    "rounds, so the shares add up to AL - 1; conditional share = rounds that accepted draft j / rounds that accepted "
    "draft j - 1"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """Acceptance of a set (`category` and `context` are None), of one category of it, or of the rounds of it that began
    in one bucket of context lengths, tokens of prompt and answer. An acceptance length is None where no draft was
    verified, as in answers of one token; there are no shares then.

    Every `..._interval` is [low, high] at 95 %, by a bootstrap over requests; None of fewer than 8 of them.
    `per_request` holds accepted drafts and rounds of every request in the order of the set, so that two runs can be
    compared request by request. Figures without loops leave out rounds that began in text repeating an earlier 12
    tokens; they, `tokens` and `per_request` are of whole sets. Of a part of a set, `prompts` are those that had a round
    in it.
    """

    suite: str
    category: str | None = None
    context: str | None = None
    num_speculative_tokens: int
    temperature: float
    acceptance_length: float | None
    acceptance_length_interval: Sequence[float] | None
    accepted_share_per_position: Sequence[float]
    accepted_share_per_position_interval: Sequence[Sequence[float]] | None
    conditional_share_per_position: Sequence[float]
    conditional_share_per_position_interval: Sequence[Sequence[float]] | None
    prompts: int
    rounds: int
    acceptance_length_without_loops: float | None = None
    looping_token_share: float | None = None
    tokens: int | None = None
    per_request: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow:
    """How many answers of a task were right, at one setting of drafts (0: none), and how many of those answers are the
    same tokens as the ones without drafts. The interval is Wilson's at 95 %. Of `outcomes`, "cut" are answers that
    reached the most tokens allowed and were not right by then."""

    task: str
    num_speculative_tokens: int
    temperature: float
    correct: int
    prompts: int
    accuracy: float
    accuracy_interval: Sequence[float]
    equal_answers: int
    outcomes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionRow:
    """One answer of a task: its question's id, and what became of it."""

    task: str
    id: str
    num_speculative_tokens: int
    outcome: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRow:
    """A figure of the head's card beside the one measured. `difference` is measured less card, its interval widened for
    the number of figures compared; `paired` when it was made request by request."""

    suite: str
    num_speculative_tokens: int
    temperature: float
    card: float
    measured: float
    difference_interval: Sequence[float]
    paired: bool
    verdict: str


class Asked(NamedTuple):
    """A prompt set at one K and temperature; `seed` is that of the intervals."""

    suite: str
    num_drafts: int
    temperature: float
    seed: int


def set_row(asked: Asked, result: SuiteAcceptance, table: Counts) -> GroupRow:
    """The row of a whole set."""
    return replace(
        group_row(asked, table),
        prompts=result.prompts,
        acceptance_length_without_loops=round(result.fresh.acceptance_length, 4) if result.fresh.num_rounds else None,
        looping_token_share=round(result.looping_tokens / max(result.tokens, 1), 4),
        tokens=result.tokens,
        per_request=pack_requests(table),
    )


def group_row(asked: Asked, table: Counts, *, category: str | None = None, context: str | None = None) -> GroupRow:
    """The row of any group of requests or rounds."""
    found = figures(table, seed=asked.seed)
    enough, length = found.requests >= FEWEST_REQUESTS, found.acceptance_length
    shares, conditional = found.share_per_position, found.conditional_per_position
    return GroupRow(
        suite=asked.suite,
        category=category,
        context=context,
        num_speculative_tokens=asked.num_drafts,
        temperature=asked.temperature,
        acceptance_length=None if length is None else round(length.value, 4),
        acceptance_length_interval=None if length is None or not enough else length.rounded(),
        accepted_share_per_position=[round(share.value, 4) for share in shares],
        accepted_share_per_position_interval=[share.rounded() for share in shares] if enough else None,
        conditional_share_per_position=[round(share.value, 4) for share in conditional],
        conditional_share_per_position_interval=[share.rounded() for share in conditional] if enough else None,
        prompts=found.requests,
        rounds=found.rounds,
    )
