"""Training time and rates: what a run has done since the last report, per second."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peagle.training.batches import Prefetcher
from peagle.training.train_state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Over the steps since the last report. `mfu` is None where the device's peak is not known."""

    positions_per_second: float
    rows_per_second: float  # supervised rows
    data_wait_share: float
    mfu: float | None


class Clock:
    """Training seconds over all parts of a run, and rates since the last lap."""

    def __init__(self, state: RunState, data: Prefetcher, peak_flops: float | None) -> None:
        self._data, self._peak = data, peak_flops
        self._start = time.perf_counter() - state.seconds
        self._paused_at: float | None = None
        self._lap_seconds, self._lap_state, self._lap_waited, self._lap_flops = state.seconds, state, 0.0, 0

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._start if self._paused_at is None else self._paused_at

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is no training: evaluations and checkpoints."""
        self._paused_at = self.seconds
        try:
            yield
        finally:
            self._start = time.perf_counter() - self._paused_at
            self._paused_at = None

    def lap(self, state: RunState, flops: int) -> Rates:
        """Rates since the last call; call it right after a wait for the device, or they mean nothing.

        `flops` is the work of this process so far.
        """
        seconds, waited = self.seconds, self._data.waited
        elapsed = max(seconds - self._lap_seconds, 1e-9)
        rates = Rates(
            positions_per_second=(state.positions - self._lap_state.positions) / elapsed,
            rows_per_second=(state.rows - self._lap_state.rows) / elapsed,
            data_wait_share=(waited - self._lap_waited) / elapsed,
            mfu=None if self._peak is None else (flops - self._lap_flops) / elapsed / self._peak,
        )
        self._lap_seconds, self._lap_state, self._lap_waited, self._lap_flops = seconds, state, waited, flops
        return rates
