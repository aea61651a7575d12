"""The least time a speculative step can take: what it must read, over how fast the machine reads.

A pass reads each of its matrices once, and the keys and values of every request once. Embedding rows, norms and
activations are left out: they are thousandths. EAGLE-3 passes once per draft over its layers and head; a head small
enough to stay in the GPU's cache from pass to pass can beat the figure. Of a mixture of experts those are read
that any row chooses: as many as if rows chose by chance, independently of each other.
"""

import time
from dataclasses import dataclass

import torch

from peagle.drafters.eagle3 import DrafterConfig
from peagle.kernels.packed_experts import PACKED_BYTES
from peagle.models.spec import LayerSizes, ModelSpec

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}  # far more than caches hold


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes that a step must read."""

    target_bytes: int
    drafter_bytes: int
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.target_bytes + self.drafter_bytes + self.kv_bytes

    def floor_ms(self, bandwidth: float) -> float:
        """Reading at `bandwidth` (bytes/s)."""
        return 1e3 * self.num_bytes / bandwidth


def step_cost(
    spec: ModelSpec,
    drafter: DrafterConfig | None,
    num_drafts: int,
    *,
    requests: int,
    context: float,
    dtype: torch.dtype,
    int8_head: bool = False,
) -> StepCost:
    """The cost of one step of `requests` requests that each have `context` tokens; without drafter a plain one.
    `int8_head`: the drafter's output layer has numbers of a byte."""
    rows = requests * (num_drafts + 1 if drafter else 1)
    table = spec.vocab_size * spec.hidden_size
    size, attention = dtype.itemsize, _layers(spec, 0)
    feed_forward = _layers(spec, touched_experts(spec, rows)) - attention
    packed = spec.moe is not None and spec.moe.packed
    target = size * (attention + table) + int((PACKED_BYTES if packed else size) * feed_forward)
    kv = sum(_visible(spec, context)) * _kv_per_token(spec) / spec.num_layers
    drafted = 0
    if drafter is not None:
        passes = 1 if drafter.parallel else num_drafts
        fc = drafter.feature_size * drafter.hidden_size
        layers, head = _layers(drafter, fused=True), drafter.draft_vocab_size * drafter.hidden_size
        drafted = size * (fc + passes * layers) + (1 if int8_head else size) * passes * head
        kv += passes * _kv_per_token(drafter) * context
    return StepCost(target, drafted, int(kv * requests) * size)


def touched_experts(spec: ModelSpec, rows: int) -> float:
    """How many feed-forward parts of a layer `rows` rows read, on average; 1 without experts."""
    if spec.moe is None:
        return 1
    share = spec.moe.experts_per_token / spec.moe.num_experts
    return spec.moe.num_experts * (1 - (1 - share) ** rows)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of copying a large tensor: the best of some tries.

    Needs 2 GiB on a GPU and gives them back: to be called before an engine takes the memory.
    """
    source = torch.ones(_COPY_BYTES["cuda" if device.type == "cuda" else "cpu"], dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        copy.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    num_bytes = 2 * source.numel()
    del source, copy
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _layers(sizes: LayerSizes, feed_forwards: float = 1, *, fused: bool = False) -> int:
    """Parameters of all layers, with so many feed-forward parts each; of a drafter the first reads embedding and
    feature side by side."""
    width = sizes.num_heads * sizes.head_dim
    projected = width + 2 * sizes.num_kv_heads * sizes.head_dim
    one = sizes.hidden_size * (projected + width + feed_forwards * 3 * sizes.intermediate_size)
    return int(sizes.num_layers * one) + (sizes.hidden_size * projected if fused else 0)


def _visible(spec: ModelSpec, context: float) -> list[float]:
    """Tokens that each layer's last row sees."""
    windows = spec.windows or (None,) * spec.num_layers
    return [context if window is None else min(window, context) for window in windows]


def _kv_per_token(sizes: LayerSizes) -> int:
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
