"""Measure a head with the engine that serves it: acceptance length, per position, with and without looping text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peagle.acceptance import AcceptanceStats
from peagle.bench.report import AcceptanceRow
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.sampling import SamplingParams

LOOP_NGRAM = 12  # tokens; a token that ends a repeated n-gram of this length is looping text


@dataclass(slots=True)
class SuiteAcceptance:
    """Acceptance over one prompt set. `fresh` leaves out the rounds that began in looping text."""

    prompts: int = 0
    tokens: int = 0
    looping_tokens: int = 0
    every: AcceptanceStats = field(default_factory=AcceptanceStats)
    fresh: AcceptanceStats = field(default_factory=AcceptanceStats)

    def add(self, output: RequestOutput, num_drafts: int) -> None:
        """Count one finished request."""
        looping = looping_tokens(output.token_ids)
        self.prompts += 1
        self.tokens += len(output.token_ids)
        self.looping_tokens += sum(looping)
        self.every.add(output.stats)
        for first_index, accepted in output.rounds:
            if not looping[first_index]:
                self.fresh.record(accepted, num_drafts)

    def row(self, suite: str, num_drafts: int, temperature: float, head: str | None = None) -> AcceptanceRow:
        """The suite as one row of a result file; `head` names the head where a file holds several."""
        return AcceptanceRow(
            head=head,
            suite=suite,
            num_speculative_tokens=num_drafts,
            temperature=temperature,
            acceptance_length=round(self.every.acceptance_length, 4),
            acceptance_length_without_loops=round(self.fresh.acceptance_length, 4),
            accepted_share_per_position=[round(s, 4) for s in self.every.acceptance_per_position],
            accepted_share_per_position_without_loops=[round(s, 4) for s in self.fresh.acceptance_per_position],
            looping_token_share=round(self.looping_tokens / max(self.tokens, 1), 4),
            prompts=self.prompts,
            rounds=self.every.num_rounds,
            tokens=self.tokens,
        )


def looping_tokens(token_ids: Sequence[int]) -> list[bool]:
    """For each token, whether the n-gram that ends there has occurred before in the same response."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for end in range(1, len(token_ids) + 1):
        ngram = tuple(token_ids[max(0, end - LOOP_NGRAM) : end])
        flags.append(len(ngram) == LOOP_NGRAM and ngram in seen)
        seen.add(ngram)
    return flags


def measure_acceptance(
    llm: LLM, suites: Mapping[str, Sequence[list[dict[str, str]]]], *, max_tokens: int, temperature: float
) -> dict[str, SuiteAcceptance]:
    """Answer the conversations of all suites as one batch with drafts on, and count per suite what was accepted.

    The seed of a conversation is its place in its suite, whatever other suites there are.
    """
    places = [(name, seed) for name, conversations in suites.items() for seed in range(len(conversations))]
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed) for _, seed in places]
    results = {name: SuiteAcceptance() for name in suites}
    for (name, _), output in zip(places, llm.chat([c for cs in suites.values() for c in cs], params), strict=True):
        results[name].add(output, llm.num_speculative_tokens)
    return results
