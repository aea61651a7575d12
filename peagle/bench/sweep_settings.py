"""Settings of `peagle bench sweep`: the only source of their defaults."""

from dataclasses import dataclass

from peagle.checks import check_at_least, check_between, check_positive
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import PeagleError

P_EAGLE, EAGLE3, PLAIN = "p-eagle", "eagle3", "none"
METHODS = (P_EAGLE, EAGLE3, PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """A grid of methods, K and concurrency over prompt sets, measured `repeats` times in turns.

    `methods` None is every one there is a head or a server for. A cell answers `num_prompts` prompts, or
    `prompts_per_client` x concurrency if that is less, but no fewer than `min_prompts`: cells of few requests at once
    take longest, and need enough prompts for an interval. A set with fewer prompts begins again. `max_tokens` is per
    answer. After `seconds` no cell is begun any more. `prompt_graphs` is `EngineConfig`'s.
    """

    datasets: tuple[str, ...] = ("mt-bench", "humaneval", "gsm8k")
    methods: tuple[str, ...] | None = None
    k: tuple[int, ...] = (3, 5, 7)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    num_prompts: int = 80
    prompts_per_client: int | None = None
    min_prompts: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    repeats: int = 3
    seconds: float | None = None
    seed: int = 0
    prompt_graphs: bool = True
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_prompts", "prompts_per_client", "min_prompts", "max_tokens", "repeats")
        check_positive(self, "seconds")
        check_between(self, 0, 100, "temperature")
        check_between(self, 0, 2**31 - 1, "seed")
        for name in ("datasets", "methods", "k", "concurrency"):
            self._check_list(name)
        for method in self.methods or ():
            if method not in METHODS:
                raise PeagleError(f"methods has {method!r}: choose among {', '.join(METHODS)}")
        outside = [k for k in self.k if not 1 <= k <= MAX_SPECULATIVE_TOKENS]
        if outside:
            raise PeagleError(
                f"k has {outside[0]}: K is 1 to {MAX_SPECULATIVE_TOKENS}; for decoding without drafts add the method "
                f"{PLAIN}"
            )
        low = [c for c in self.concurrency if c < 1]
        if low:
            raise PeagleError(f"concurrency has {low[0]}: at least 1 request is in flight")
        if self.num_prompts < max(self.concurrency):
            raise PeagleError(
                f"num_prompts is {self.num_prompts}: fewer than the {max(self.concurrency)} requests that are to be in "
                "flight; raise it or lower concurrency"
            )
        if self.min_prompts > self.num_prompts:
            raise PeagleError(
                f"min_prompts is {self.min_prompts}: more than the {self.num_prompts} of num_prompts, which no cell "
                "exceeds; raise num_prompts or lower it"
            )

    def _check_list(self, name: str) -> None:
        values = getattr(self, name)
        if values is None:
            return
        if not values:
            raise PeagleError(f"{name} is empty: give at least one")
        twice = [value for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise PeagleError(f"{name} has {twice[0]!r} twice: give each once")

    def prompts_of(self, concurrency: int) -> int:
        """How many requests a cell of so many in flight answers."""
        share = (self.prompts_per_client or self.num_prompts) * concurrency
        return min(self.num_prompts, max(self.min_prompts, share))
