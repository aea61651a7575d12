"""Measure a head with the engine that serves it: acceptance length, per position, with and without looping text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from peagle.acceptance import AcceptanceStats
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.models.tokenizer import chat_prompt
from peagle.sampling import SamplingParams

LOOP_NGRAM = 12  # tokens; a token that ends a repeated n-gram of this length is looping text

Suites = Mapping[str, Sequence[list[dict[str, str]]]]


@dataclass(frozen=True, slots=True)
class RequestRounds:
    """The verification rounds of one request: at which length of prompt and answer each began, and what it accepted."""

    contexts: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(slots=True)
class SuiteAcceptance:
    """Acceptance over one prompt set. `fresh` leaves out the rounds that began in looping text; `requests` are in the
    order of the set."""

    prompts: int = 0
    tokens: int = 0
    looping_tokens: int = 0
    every: AcceptanceStats = field(default_factory=AcceptanceStats)
    fresh: AcceptanceStats = field(default_factory=AcceptanceStats)
    requests: list[RequestRounds] = field(default_factory=list)

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
        self.requests.append(
            RequestRounds(
                contexts=tuple(len(output.prompt_token_ids) + index for index, _ in output.rounds),
                accepted=tuple(accepted for _, accepted in output.rounds),
            )
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


class SuiteAnswers:
    """Answers to the conversations of all suites, made as one batch. When that is cut short, by Ctrl-C for example, the
    suites that were finished by then are still here.

    The seed of a conversation is `seed` plus its place in its suite, whatever other suites there are.
    """

    def __init__(self, suites: Suites) -> None:
        self._suites = suites
        self._places = [(name, place) for name, asked in suites.items() for place in range(len(asked))]
        self._outputs: dict[tuple[str, int], RequestOutput] = {}

    def run(
        self,
        llm: LLM,
        *,
        max_tokens: int,
        temperature: float,
        seed: int = 0,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Answer everything; drafts as the engine has them."""

        def keep(index: int, output: RequestOutput) -> None:
            self._outputs[self._places[index]] = output
            if on_finish is not None:
                on_finish(output)

        prompts = [chat_prompt(llm.tokenizer, messages) for messages in chain.from_iterable(self._suites.values())]
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + place)
            for _, place in self._places
        ]
        llm.generate(prompts, params, on_finish=keep)

    def finished(self) -> dict[str, list[RequestOutput]]:
        """The answers of every suite that has all of them: those of a part would be its short ones."""
        places = {name: [(name, place) for place in range(len(asked))] for name, asked in self._suites.items()}
        whole = {name: keys for name, keys in places.items() if all(key in self._outputs for key in keys)}
        return {name: [self._outputs[key] for key in keys] for name, keys in whole.items()}

    def acceptance(self, num_drafts: int) -> dict[str, SuiteAcceptance]:
        """What was accepted in every suite that is finished."""
        results = {name: SuiteAcceptance() for name in self.finished()}
        for name, outputs in self.finished().items():
            for output in outputs:
                results[name].add(output, num_drafts)
        return results
