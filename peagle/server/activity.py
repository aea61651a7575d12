"""What the engine is doing: its counts at one moment, a finished request's times, and the lines of the log."""

import logging
from dataclasses import dataclass
from typing import Any

from peagle.acceptance import AcceptanceStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State and totals since the start. They all stem from one moment, so they fit each other."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of the KV cache that requests hold, in [0, 1]
    preemptions: int = 0
    prompt_tokens: int = 0  # of requests that got their first token
    tokens_generated: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # and those that were found

    def stats_since(self, before: "Snapshot") -> AcceptanceStats:
        """What the rounds between two moments accepted."""
        was = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return AcceptanceStats(
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            [now - then for now, then in zip(self.accepted_per_position, was, strict=True)],
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended. The times are in seconds from its submission; None for what never came."""

    request_id: str
    num_prompt: int
    num_output: int
    max_output: int
    finish_reason: str  # "stop" | "length" | "abort"
    queued: float | None  # until it was first scheduled
    first_token: float | None
    last_token: float | None
    total: float
    acceptance_length: float

    @property
    def prefill(self) -> float | None:
        """Seconds from the first scheduled step to the first token."""
        return None if self.queued is None or self.first_token is None else self.first_token - self.queued

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        return None if self.first_token is None or self.last_token is None else self.last_token - self.first_token

    @property
    def per_token(self) -> float | None:
        """Mean seconds from one token to the next; None for fewer than two tokens."""
        return None if self.decode is None or self.num_output < 2 else self.decode / (self.num_output - 1)

    def log(self) -> None:
        """Its line in the log, with the same fields in `record.request` for a formatter that writes JSON."""
        if not _log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            "id": self.request_id,
            "prompt_tokens": self.num_prompt,
            "output_tokens": self.num_output,
            "finish_reason": self.finish_reason,
            "ttft_ms": None if self.first_token is None else round(self.first_token * 1e3, 1),
            "total_ms": round(self.total * 1e3, 1),
            "tokens_per_second": round(1 / self.per_token, 1) if self.per_token else None,
            "acceptance_length": round(self.acceptance_length, 2),
        }
        text = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        _log.info("request %s", text, extra={"request": fields})


class ActivityLog:
    """A line of throughput and acceptance length every `interval` seconds, while there is work."""

    def __init__(self, interval: float = 10.0) -> None:
        self._interval = interval
        self._since, self._before = float("-inf"), Snapshot()  # where the interval began
        self._last_step = float("-inf")

    def step(self, now: float, snapshot: Snapshot) -> None:
        """Note that the engine made a step; says so when it is time."""
        if now - self._last_step > self._interval:  # it was idle: the seconds without work are nobody's throughput
            self._since, self._before = now, snapshot
        self._last_step = now
        seconds = now - self._since
        if seconds < self._interval:
            return
        generated = snapshot.tokens_generated - self._before.tokens_generated
        prompts = snapshot.prompt_tokens - self._before.prompt_tokens
        _log.info(
            "running=%d waiting=%d kv_cache=%.1f%% prompt_tokens_per_second=%.1f tokens_per_second=%.1f "
            "acceptance_length=%.2f",
            snapshot.num_running,
            snapshot.num_waiting,
            100 * snapshot.kv_usage,
            prompts / seconds,
            generated / seconds,
            snapshot.stats_since(self._before).acceptance_length,
        )
        self._since, self._before = now, snapshot
