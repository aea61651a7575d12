"""The least time a speculative step can take: what it must read and multiply, over how fast the machine does either.

A pass reads each of its matrices once, and the keys and values of every request once. Embedding rows, norms and
activations are left out: they are thousandths. EAGLE-3 passes once per draft over its layers and head; a head small
enough to stay in the GPU's cache from pass to pass can beat the figure. Of a mixture of experts those are read
that any row chooses: as many as if rows chose by chance, independently of each other. Products are those of matrices,
each with the rows that need it; attention's own are left out.
"""

import math
import time
from dataclasses import dataclass
from functools import partial

import torch

from peagle.drafters.eagle3 import DrafterConfig
from peagle.kernels.packed_experts import PACKED_BYTES
from peagle.models.spec import LayerSizes, ModelSpec

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}  # far more than caches hold


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a pass must do: bytes of weights and of keys and values to read, additions and multiplications."""

    weight_bytes: int
    kv_bytes: int
    flops: float

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    """The passes of a step: the target's, then the drafter's."""

    target: PassCost
    drafter: tuple[PassCost, ...]

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in (self.target, *self.drafter))

    def floor_ms(self, bandwidth: float, flops: float = math.inf) -> float:
        """Reading at `bandwidth` (bytes/s) or computing at `flops` (1/s), whichever takes a pass longer."""
        passes = (self.target, *self.drafter)
        return 1e3 * sum(max(one.num_bytes / bandwidth, one.flops / flops) for one in passes)


def step_cost(
    spec: ModelSpec,
    drafter: DrafterConfig | None,
    num_drafts: int,
    *,
    requests: int,
    context: float,
    dtype: torch.dtype,
    int8_head: bool = False,
    acceptance_length: float = 1.0,
) -> StepCost:
    """The cost of one step of `requests` requests that each have `context` tokens; without drafter a plain one.

    `int8_head`: the drafter's output layer has numbers of a byte. `acceptance_length` is how many tokens of a request
    are new to the drafter; they make no difference to the bytes.
    """
    rows, size = requests * (num_drafts + 1 if drafter else 1), dtype.itemsize
    dense = _layers(spec, 0) + spec.vocab_size * spec.hidden_size
    feed_forward = _layers(spec) - _layers(spec, 0)
    used = 1 if spec.moe is None else spec.moe.experts_per_token
    packed = PACKED_BYTES if spec.moe is not None and spec.moe.packed else size
    weights = size * dense + int(packed * touched_experts(spec, rows) * feed_forward)
    kv = int(sum(_visible(spec, context)) * _kv_per_token(spec) / spec.num_layers * requests) * size
    target = PassCost(weights, kv, 2.0 * rows * (dense + used * feed_forward))
    if drafter is None:
        return StepCost(target, ())
    cost = partial(
        _draft_pass, drafter, requests=requests, context=context, size=size, head_size=1 if int8_head else size
    )
    if drafter.parallel:
        return StepCost(target, (cost(new=acceptance_length, masks=num_drafts - 1),))
    first, other = cost(new=acceptance_length), cost(new=1, mapped=False)
    return StepCost(target, (first, *(other,) * (num_drafts - 1)))


def _draft_pass(drafter: DrafterConfig, *, requests: int, context: float, size: int, head_size: int, new: float,
                masks: int = 0, mapped: bool = True) -> PassCost:  # fmt: skip
    """One pass over `new` rows and `masks` mask rows of each request; `mapped`: fc makes the new rows' features.

    The first layer's queries, keys and values of mask rows are constants, and what follows the last layer's is for
    the newest row and the mask rows.
    """
    hidden = drafter.hidden_size
    projection = hidden * _projected(drafter)
    layers, head = _layers(drafter, fused=True), drafter.draft_vocab_size * hidden
    last = _layers(drafter) // drafter.num_layers - projection
    fc = drafter.feature_size * hidden if mapped else 0
    inner = layers - 2 * projection - last
    products = (fc + 2 * projection) * new + inner * (new + masks) + (last + head) * (1 + masks)
    kv = int(_kv_per_token(drafter) * context * requests) * size
    return PassCost(size * (fc + layers) + head_size * head, kv, 2.0 * requests * products)


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
    projected, width = _projected(sizes), sizes.num_heads * sizes.head_dim
    one = sizes.hidden_size * (projected + width + feed_forwards * 3 * sizes.intermediate_size)
    return int(sizes.num_layers * one) + (sizes.hidden_size * projected if fused else 0)


def _projected(sizes: LayerSizes) -> int:
    """Numbers in a row's queries, keys and values."""
    return (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim


def _visible(spec: ModelSpec, context: float) -> list[float]:
    """Tokens that each layer's last row sees."""
    windows = spec.windows or (None,) * spec.num_layers
    return [context if window is None else min(window, context) for window in windows]


def _kv_per_token(sizes: LayerSizes) -> int:
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
