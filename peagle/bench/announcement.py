"""Every figure of the P-EAGLE announcement.

Source: "P-EAGLE: Faster LLM inference with Parallel Speculative Decoding in vLLM", the announcement of P-EAGLE in vLLM:
GPT-OSS-20B on one NVIDIA B200, K = 3, 5, 7 at c = 1, 2, 4, 8, 16, 32, 64, against the public EAGLE-3 head. Speed-ups
are P-EAGLE's best K over EAGLE-3's best K. Of the curves in between it gives pictures only. Its acceptance lengths
count the token that the target supplies itself, as here: P-EAGLE's at K = 3 on HumanEval is above 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from peagle.bench.sweep_settings import EAGLE3, P_EAGLE

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
