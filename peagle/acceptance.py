"""Acceptance length, defined once: 1 + accepted drafts / rounds. The token the target supplies itself counts."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class AcceptanceStats:
    """Counts over verification rounds, for one request or summed over many.

    `accepted_per_position[j]` counts the rounds in which draft j+1 was accepted, so its share of `num_rounds` is the
    unconditional acceptance at that position and the shares add up to `acceptance_length - 1`.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, accepted: int, drafted: int) -> None:
        """Count one round in which `accepted` of `drafted` tokens were accepted."""
        self.num_rounds += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self._widen(drafted)
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def add(self, other: "AcceptanceStats") -> None:
        """Add another request's counts to these."""
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self._widen(len(other.accepted_per_position))
        for position, count in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += count

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per round; 1.0 when nothing was verified."""
        return 1.0 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of rounds in which each draft position was accepted."""
        return [count / self.num_rounds for count in self.accepted_per_position] if self.num_rounds else []

    def _widen(self, size: int) -> None:
        self.accepted_per_position.extend([0] * (size - len(self.accepted_per_position)))
