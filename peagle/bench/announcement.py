"""Every figure of the P-EAGLE announcement, and the acceptance lengths between those that it gives.

Source: "P-EAGLE: Faster LLM inference with Parallel Speculative Decoding in vLLM", the announcement of P-EAGLE in vLLM:
GPT-OSS-20B on one NVIDIA B200, K = 3, 5, 7 at c = 1, 2, 4, 8, 16, 32, 64, against the public EAGLE-3 head. Speed-ups
are P-EAGLE's best K over EAGLE-3's best K. Of the curves in between it gives pictures only. Its acceptance lengths
count the token that the target supplies itself, as here: P-EAGLE's at K = 3 on HumanEval is above 3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from types import MappingProxyType

from peagle.bench.sweep_settings import EAGLE3, P_EAGLE

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (3, 5, 7)
DEPTH = max(DRAFTS)
BEST_DRAFTS: Mapping[str, int] = MappingProxyType({P_EAGLE: 7, EAGLE3: 3})  # EAGLE-3's moves at times
SPEEDUP_AT_64 = (1.05, 1.25)  # over the sets; which has which is not said


@dataclass(frozen=True, slots=True)
class Announced:
    """One prompt set: the speed-up at c = 1, and acceptance lengths by method and K, those that are given."""

    title: str
    speedup_at_1: float
    acceptance_length: Mapping[tuple[str, int], float]


ANNOUNCED: Mapping[str, Announced] = MappingProxyType(
    {
        "mt-bench": Announced("MT-Bench", 1.55, MappingProxyType({(P_EAGLE, 7): 3.70, (EAGLE3, 7): 3.27})),
        "humaneval": Announced(
            "HumanEval",
            1.55,
            MappingProxyType({(P_EAGLE, 3): 3.02, (P_EAGLE, 7): 3.94, (EAGLE3, 3): 2.65, (EAGLE3, 7): 3.03}),
        ),
        "speed-bench": Announced("SPEED-Bench", 1.69, MappingProxyType({(P_EAGLE, 7): 3.38, (EAGLE3, 7): 2.59})),
    }
)


def length_of(dataset: str, method: str, num_drafts: int) -> float:
    """The announced acceptance length, or, where it is not given, the one that follows from what is given: ASSUMED.

    A head keeps draft i with a chance that falls by the same factor from draft to draft. HumanEval gives the lengths of
    two K, hence each method's factor; the other sets give that of K = 7, hence their first chance.
    """
    lengths = ANNOUNCED[dataset].acceptance_length
    if (method, num_drafts) in lengths:
        return lengths[method, num_drafts]
    known = ANNOUNCED["humaneval"].acceptance_length
    longest = known[method, DEPTH]
    # The faster chances fall, the more of a given length comes from the first drafts.
    factor = _bisect(lambda f: _length(_rates(longest, f), 3) <= known[method, 3], 0.85, 1.0)
    return _length(_rates(lengths[method, DEPTH], factor), num_drafts)


def _length(rates: Sequence[float], num_drafts: int) -> float:
    """1 + the shares of rounds that keep draft 1, 2, ..."""
    return 1.0 + sum(accumulate(rates[:num_drafts], mul))


def _rates(length: float, factor: float) -> tuple[float, ...]:
    """Chances a, a f, a f f, ..., at most 1, whose acceptance length is the given one."""

    def chances(first: float) -> tuple[float, ...]:
        return tuple(min(first * factor**draft, 1.0) for draft in range(DEPTH))

    return chances(_bisect(lambda first: _length(chances(first), DEPTH) >= length, 0.0, 1.0))


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number in the range from which on `holds` does."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
