"""Decode steps as CUDA graphs: one launch a step, whatever the number of layers.

A graph is captured for each (bucket of requests, K, sampling mode) when it is first needed, or ahead of time by
`warm_up`. A batch is padded to its bucket with slot -1, which computes and changes nothing that counts.

There are more modes than one would keep graphs of. A step that does more than it has to, sampling where all are greedy
or log-probabilities that nobody asks for, emits the same tokens: once all graphs are there that memory was planned for,
or after `settle`, a step without a graph of its own runs by one that does more, and eagerly where there is none. So
nothing has to be thrown away, and a server that is warm captures nothing amid traffic.
"""

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peagle.engine.outputs import StepOutput
from peagle.engine.slots import SamplingMode

_log = logging.getLogger(__name__)
_EAGER_CALLS = 2  # before a capture: kernels are compiled and the libraries' workspaces come about here

Body = Callable[[Tensor, int, SamplingMode], StepOutput]  # (slot_B, K, mode) -> out


EVERYTHING = SamplingMode(*(True for _ in SamplingMode._fields))  # stands in for every other mode
COMMON_MODES = (  # to be captured ahead of traffic, the most needed ones first
    SamplingMode(),
    SamplingMode(drawn=True),
    EVERYTHING,
    SamplingMode(drawn=True, filtered=True),
    SamplingMode(drawn=True, filtered=True, masked=True, shows_drafts=True),
)


class Key(NamedTuple):
    """What a captured step depends on."""

    bucket: int
    num_drafts: int
    mode: SamplingMode


class Captured(NamedTuple):
    """A captured pass, and where its output is after each replay."""

    graph: torch.cuda.CUDAGraph
    out: StepOutput


class GraphPool:
    """The memory and the stream that all graphs of an engine share: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(self, body: Callable[[], StepOutput], what: str) -> Captured | None:
        """Capture a body that may be run at will; None, and a word about `what`, where there is no memory for it."""
        try:
            for _ in range(_EAGER_CALLS):
                body()
            torch.cuda.synchronize(self._device)
            self._stream = self._stream or torch.cuda.Stream(self._device)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._pool, self._stream):
                out = body()
            self._pool = graph.pool()
            return Captured(graph, out)
        except RuntimeError as error:  # while a graph is made, running out of memory can be any kind of it
            if "out of memory" not in str(error).lower() and not isinstance(error, torch.OutOfMemoryError):
                raise
            torch.cuda.empty_cache()
            _log.warning(
                "no memory for the CUDA graph of %s: such steps run without one, slower; "
                "lower gpu_memory_utilization or max_num_seqs",
                what,
            )
            return None


class _LaunchesOn(TorchDispatchMode):
    """What torch launches goes to a stream that is not the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.cuda.stream(self._stream):
            return func(*args, **(kwargs or {}))


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is launched in here on `stream`, which must run nothing by itself.

    Once eight kernels have run on other streams, every graph of the process takes 0.2 to 0.3 us a kernel longer, for
    good (docs/decisions.md). Each capture of torch begins by filling two numbers for its random generator, on the
    stream of the capture; these go to the current stream.
    """
    current = torch.cuda.current_stream(stream.device)
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.stream(current), _nothing_collected(), ExitStack() as stack:
        with _LaunchesOn(current):
            stack.enter_context(capture)
        yield


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python may find an engine that is gone at any moment: to free its graphs would spoil the one being captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes that get a graph of their own: every power of two and its one and a half, and the largest batch.

    Padding costs a step at most a third of its rows; a graph costs capture time and a little memory.
    """
    sizes, size = {most}, 1
    while size < most:
        sizes |= {size, min(size + size // 2, most)}
        size *= 2
    return sorted(sizes)


class DecodeGraphs:
    """Runs `body` on batches of slots, captured where that works, as `max_graphs` graphs at most."""

    def __init__(
        self,
        body: Body,
        max_num_seqs: int,
        device: torch.device,
        *,
        enabled: bool,
        max_graphs: int = 64,
        pool: GraphPool | None = None,
    ) -> None:
        self._body, self._device, self._enabled = body, device, enabled
        self._buckets = bucket_sizes(max_num_seqs)
        self.max_graphs = max_graphs
        self._settled = False
        self._captured: dict[Key, Captured] = {}
        self._chosen: dict[Key, Captured | None] = {}  # what steps run by, their own graph or another's; None: eagerly
        self._slots: dict[int, Tensor] = {}  # what a bucket's graphs read, filled up with -1
        self._batches: dict[int, bytes] = {}  # the slots that are there now
        self._pool = GraphPool(device) if pool is None else pool

    def run(self, slots: np.ndarray, num_drafts: int, mode: SamplingMode) -> StepOutput:
        """The body's output for these slots, rows of padding included; good until the next run."""
        bucket = self._buckets[bisect_left(self._buckets, len(slots))]
        slot_B = self._fill(bucket, slots)
        if not self._enabled:
            return self._body(slot_B, num_drafts, mode)
        captured = self._graph(Key(bucket, num_drafts, mode))
        if captured is None:
            return self._body(slot_B, num_drafts, mode)
        captured.graph.replay()
        return captured.out

    @property
    def num_captured(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def settle(self) -> None:
        """From now on capture only steps that no graph can stand in for."""
        self._settled = True

    def _graph(self, key: Key) -> Captured | None:
        """What a step runs by."""
        if key not in self._chosen:
            is_full = len(self._captured) >= self.max_graphs
            found = self._wider(key) if self._settled or is_full else None
            if found is None and not is_full:
                found = self._capture(key)
                if found is not None:
                    self._captured[key] = found
            self._chosen[key] = found or self._wider(key)
            if is_full and found is None:
                _log.warning(
                    "%d steps are captured as CUDA graphs, as many as memory was planned for: those of %d requests "
                    "with %d drafts and %s run without one, slower",
                    self.max_graphs, key.bucket, key.num_drafts, key.mode.describe(),
                )  # fmt: skip
        return self._chosen[key]

    def _wider(self, key: Key) -> Captured | None:
        """The graph of the same size that does what `key` asks, and the least besides."""
        wider = [k for k in self._captured if k[:2] == key[:2] and k.mode.includes(key.mode)]
        return self._captured[min(wider, key=lambda k: sum(k.mode))] if wider else None

    def _fill(self, bucket: int, slots: np.ndarray) -> Tensor:
        """The bucket's slots on the device; copied only when they are not there from the step before."""
        if bucket not in self._slots:
            self._slots[bucket] = torch.full((bucket,), -1, dtype=torch.int64, device=self._device)
        slot_B, batch = self._slots[bucket], slots.tobytes()
        if self._batches.get(bucket) != batch:
            padded = torch.full((bucket,), -1, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            padded[: len(slots)] = torch.from_numpy(slots)
            slot_B.copy_(padded, non_blocking=True)
            self._batches[bucket] = batch
        return slot_B

    def _capture(self, key: Key) -> Captured | None:
        """Capture one step on padding alone; None, and a word about it, where there is no memory for it."""
        slot_B = self._slots[key.bucket]
        held = slot_B.clone()
        slot_B.fill_(-1)
        try:
            return self._pool.capture(
                lambda: self._body(slot_B, key.num_drafts, key.mode),
                f"{key.bucket} requests with {key.num_drafts} drafts",
            )
        finally:
            slot_B.copy_(held)
