"""Figures of a load: latencies, throughput, goodput. What each word means is stated in `DEFINITIONS`, on every report.

Only whole answers are in the latencies and tokens. Requests that failed are counted by kind beside them, never in them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from peagle.bench.client import Answer
from peagle.bench.load import Load
from peagle.bench.settings import BenchServeConfig

ALWAYS = (50.0, 95.0, 99.0)  # percentiles that every result has
DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "time to first token: from writing a request to its (open) connection to the first chunk with text",
        "tpot": "time per output token: (e2el - ttft) / (tokens - 1) of a request",
        "itl": "inter-token latency: a chunk of n tokens counts as n tokens that arrive together, one after the gap "
        "before the chunk and n - 1 after 0 ms",
        "chunk": "gap from one chunk to the next, however many tokens it holds (what vLLM's benchmark calls ITL)",
        "e2el": "end-to-end latency: from writing a request to its last chunk",
        "tokens": "as the server counts them in `usage`; where it does not, one per chunk",
        "throughput": "of whole answers, over the time from the first request to the last answer",
        "goodput": "whole answers per second that keep every limit",
        "failures": "requests that failed are counted by kind and are in no other figure",
    }
)


def summarise(load: Load, config: BenchServeConfig) -> dict[str, Any]:
    """The figures of a load, times in ms. What nobody measured is None."""
    whole = [answer for answer in load.answers if answer.whole]
    failed = [answer for answer in load.answers if answer.failure is not None]
    seconds = load.seconds
    tokens, prompt_tokens = sum(a.tokens for a in whole), sum(a.prompt_tokens or 0 for a in whole)
    chunks = sum(len(answer.chunks) for answer in whole)
    shares = sorted({*ALWAYS, *config.metric_percentiles})
    return {
        "asked": load.asked,
        "completed": len(whole),
        "failed": len(failed),
        "failures": dict(Counter(answer.failure for answer in failed)),
        "failure_examples": {answer.failure: answer.detail for answer in reversed(failed)},  # the first of its kind
        "unfinished": sum(answer.stopped for answer in load.answers),
        "not_sent": load.asked - len(load.answers),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "total_tokens": tokens + prompt_tokens,
        "tokens_from": _token_source(whole),
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "request_throughput": len(whole) / seconds if seconds else None,
        "output_throughput": tokens / seconds if seconds else None,
        "total_throughput": (tokens + prompt_tokens) / seconds if seconds else None,
        "goodput": _goodput(whole, config.slos(), seconds),
        "peak_concurrency": load.peak,
        "mean_concurrency": sum(a.e2e for a in whole) / seconds if seconds else None,
        "latency_ms": {name: spread(values, shares) for name, values in latencies(whole).items()},
    }


def latencies(whole: Sequence[Answer]) -> dict[str, list[float]]:
    """All values of every latency, in ms."""
    arrivals = [answer.arrivals for answer in whole]
    # Which chunk held how many tokens does not matter: each token beyond a chunk's first came 0 ms after another.
    together = sum(max(0, answer.tokens - len(times)) for answer, times in zip(whole, arrivals, strict=True))
    seconds = {
        "ttft": [answer.ttft for answer in whole],
        "tpot": [answer.tpot for answer in whole if answer.tpot is not None],
        "itl": [gap for times in arrivals for gap in gaps(times)] + [0.0] * together,
        "chunk": [gap for answer in whole for gap in gaps(answer.chunks)],
        "e2el": [answer.e2e for answer in whole],
    }
    return {name: [1000 * value for value in values] for name, values in seconds.items()}


def gaps(times: Sequence[float]) -> list[float]:
    """From each to the next."""
    return [after - before for before, after in pairwise(times)]


def spread(values: Sequence[float], shares: Sequence[float]) -> dict[str, float] | None:
    """Mean, deviation and percentiles; None for no values."""
    import numpy as np

    if not values:
        return None
    points = np.percentile(values, shares)
    named = {f"p{share:g}": float(point) for share, point in zip(shares, points, strict=True)}
    return {"mean": float(np.mean(values)), "std": float(np.std(values)), **named}


def _token_source(whole: Sequence[Answer]) -> str | None:
    counted = sum(answer.output_tokens is not None for answer in whole)
    if not whole:
        return None
    return "usage" if counted == len(whole) else "usage and chunks" if counted else "chunks"


def _goodput(whole: Sequence[Answer], limits: Mapping[str, float], seconds: float) -> dict[str, Any] | None:
    """Answers within all limits. An answer of one token has no TPOT, and so keeps that limit."""
    if not limits:
        return None

    def is_good(answer: Answer) -> bool:
        taken = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2e}
        return all(1000 * taken[name] <= limit for name, limit in limits.items())

    good = sum(map(is_good, whole))
    return {"limits_ms": dict(limits), "good": good, "per_second": good / seconds if seconds else None}
