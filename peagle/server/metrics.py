"""Prometheus metrics under vLLM's names, so that dashboards made for it work here."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from peagle.engine.block_pool import BlockPool
from peagle.server.activity import Finished, Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST

# vLLM's bounds. Between tokens they start at 10 ms, so three are added below: a round here is often faster.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_WHOLE_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_TOKENS_OF_A_STEP = tuple(float(2**power) for power in (0, *range(3, 15)))

_REASONS = ("stop", "length", "abort")


class _Histogram:
    """Counts by bucket. The client library's own takes a lock and ten times as long, for each token of each request."""

    def __init__(self, help_text: str, bounds: Sequence[float]) -> None:
        self.help_text = help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def record(self, value: float) -> None:
        """Count a value. One thread only; any may read."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, values up to it) of every bucket, and the sum of all values."""
        labels = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(labels, accumulate(self._counts), strict=True)), self._sum


class Metrics:
    """What the engine thread reports, as text for a scraper. It has a registry of its own: nothing here is global."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM numbers its engines; here is one
        self._snapshot: Callable[[], Snapshot] = Snapshot
        self._pool: BlockPool | None = None
        self._finished = dict.fromkeys(_REASONS, 0)
        self._first_token = _Histogram("Seconds to the first token.", _FIRST_TOKEN)
        # vLLM's two names for one thing. A round's tokens arrive together and count as one.
        self._gaps = _Histogram("Seconds from one output of a request to the next.", _BETWEEN_TOKENS)
        self._per_token = _Histogram("Mean seconds per token of a request, after the first.", _BETWEEN_TOKENS)
        self._total = _Histogram("Seconds from a request's arrival to its end.", _WHOLE_REQUEST)
        self._queued = _Histogram("Seconds that a request waited to be scheduled.", _WHOLE_REQUEST)
        self._prefill = _Histogram("Seconds from being scheduled to the first token.", _WHOLE_REQUEST)
        self._decode = _Histogram("Seconds from the first token to the last.", _WHOLE_REQUEST)
        self._ran = _Histogram("Seconds from being scheduled to the last token.", _WHOLE_REQUEST)
        self._in_step = _Histogram("Tokens of a step: generated, and of prompts that were finished.", _TOKENS_OF_A_STEP)
        self._max_tokens = _Histogram("Most tokens that a request may get.", _TOKENS)
        self._num_prompt = _Histogram("Prompt tokens of a request.", _TOKENS)
        self._num_output = _Histogram("Generated tokens of a request.", _TOKENS)
        self._histograms = {
            "vllm:time_to_first_token_seconds": self._first_token,
            "vllm:inter_token_latency_seconds": self._gaps,
            "vllm:time_per_output_token_seconds": self._gaps,
            "vllm:request_time_per_output_token_seconds": self._per_token,
            "vllm:e2e_request_latency_seconds": self._total,
            "vllm:request_queue_time_seconds": self._queued,
            "vllm:request_prefill_time_seconds": self._prefill,
            "vllm:request_decode_time_seconds": self._decode,
            "vllm:request_inference_time_seconds": self._ran,
            "vllm:request_prompt_tokens": self._num_prompt,
            # vLLM's second name is for the longest of n answers. Here each answer is a request.
            "vllm:request_generation_tokens": self._num_output,
            "vllm:request_max_num_generation_tokens": self._num_output,
            "vllm:request_params_max_tokens": self._max_tokens,
            "vllm:iteration_tokens_total": self._in_step,
        }
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU seconds and open files of the server

    def watch(self, snapshot: Callable[[], Snapshot], pool: BlockPool) -> None:
        """Take the engine's state and totals from here, and what its cache is."""
        self._snapshot, self._pool = snapshot, pool

    def record_first_token(self, seconds: float) -> None:
        """Count a request's time to its first token."""
        self._first_token.record(seconds)

    def record_step(self, gaps: Sequence[float], tokens: int) -> None:
        """Count a step's tokens and, for each request that it brought forward, the seconds since it last was."""
        for gap in gaps:
            self._gaps.record(gap)
        if tokens:
            self._in_step.record(tokens)

    def record_finished(self, request: Finished) -> None:
        """Count a request that has ended. Times and sizes of those cut short say nothing, and are left out."""
        self._finished[request.finish_reason] += 1
        if request.finish_reason == "abort":
            return
        self._total.record(request.total)
        self._num_prompt.record(request.num_prompt)
        self._num_output.record(request.num_output)
        self._max_tokens.record(request.max_output)
        times = (
            (self._queued, request.queued), (self._prefill, request.prefill), (self._decode, request.decode),
            (self._per_token, request.per_token),
        )  # fmt: skip
        for histogram, seconds in times:
            if seconds is not None:
                histogram.record(seconds)
        if request.prefill is not None and request.decode is not None:
            self._ran.record(request.prefill + request.decode)

    def render(self) -> bytes:
        """Everything in Prometheus' text format, of `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics of now; the registry calls this."""
        now = self._snapshot()
        yield self._gauge("num_requests_running", "Requests that have a slot.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", now.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", now.kv_usage)
        # The name that vLLM had for it first, for dashboards of that time.
        yield self._gauge("gpu_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", now.kv_usage)
        if self._pool is not None:
            yield self._cache_config(self._pool)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", now.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", now.prefix_hits)
        yield self._counter("num_preemptions", "Requests put back for want of memory.", now.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens computed or found in the cache.", now.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", now.tokens_generated)
        yield self._counter_by("request_success", "Requests that ended.", "finished_reason", self._finished)
        yield self._counter("spec_decode_num_drafts", "Rounds that verified drafts.", now.rounds)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted.", now.drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", now.accepted)
        positions = {str(position): count for position, count in enumerate(now.accepted_per_position)}
        accepted = "Rounds that accepted the draft at a position."
        yield self._counter_by("spec_decode_num_accepted_tokens_per_pos", accepted, "position", positions)
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(name, histogram.help_text, labels=list(self._labels))
            buckets, total = histogram.samples()
            family.add_metric(list(self._labels.values()), buckets, total)
            yield family

    def _cache_config(self, pool: BlockPool) -> Metric:
        about = {
            "block_size": str(pool.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "enable_prefix_caching": str(pool.prefix_caching),
        }
        labels = {**self._labels, **about}
        family = GaugeMetricFamily("vllm:cache_config_info", "What the KV cache is; always 1.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter_by(self, name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family
