"""How many KV cache blocks there is memory for: what the device has, less what everything else takes."""

import os
from dataclasses import dataclass
from typing import Self

import torch

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import DrafterConfig
from peagle.engine.kv_cache import PagedCache
from peagle.engine.prompt_graphs import MODES
from peagle.engine.prompt_rows import prompt_shapes
from peagle.errors import PeagleError
from peagle.kernels.logprobs import scratch_bytes
from peagle.kernels.paged_decode import most_scratch_bytes
from peagle.kernels.penalties import TokenHistory
from peagle.kernels.token_masks import TokenMasks
from peagle.models.spec import LayerSizes, ModelSpec

_SHARE_OF_HOST = 0.25
_SAFETY = 1.2  # on shapes: blocks that an allocator rounds up, temporaries of single operations
_WORKSPACE = 512 * 2**20  # of matrix libraries and of attention that splits its keys
# Per logit, beside the logit itself: float32 copies with penalties and under a grammar's mask; in torch also what
# noise and filters take.
_SAMPLING_BYTES = {"triton": 8, "torch": 40}
_GRAPH_BYTES_PER_LAYER = 128 * 2**10  # of one captured graph: some sixteen kernels with their parameters


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, and those that nobody uses: measure it once the weights are loaded."""

    total: int
    free: int

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """What there is now. A host counts as empty: its memory can be had from others."""
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps but does not use is free
            free, total = torch.cuda.mem_get_info(device)
            return cls(total, free)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(total, total)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Where the memory goes, in bytes. `num_blocks` are those that requests can have: the cache holds one more, the
    null block. `max_model_len` is the asked or the target's own, lowered to what the cache holds if it was not asked.
    """

    total: int
    budget: int  # that may be in use once the engine stands
    in_use: int  # before the KV cache: weights, and whatever other processes hold
    activations: int
    graphs: int
    kv_bytes_per_token: int
    num_blocks: int
    block_size: int
    max_model_len: int
    context: int  # max_model_len before it was lowered
    remedy: str  # what makes for a larger cache

    @property
    def is_limit(self) -> bool:
        """Whether the cache, not the target or the user, says how long a request can be."""
        return self.max_model_len < self.context

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Of the whole cache, target's and drafter's."""
        return (self.num_blocks + 1) * self.block_size * self.kv_bytes_per_token

    def describe(self) -> str:
        """One line for a log."""
        return (
            f"KV cache of {self.num_tokens:,} tokens ({self.num_blocks:,} blocks, {_gib(self.kv_bytes)}, "
            f"{self.kv_bytes_per_token / 1024:.1f} KiB a token) beside {_gib(self.in_use)} in use, "
            f"{_gib(self.activations)} for activations and {_gib(self.graphs)} for graphs, of {_gib(self.budget)} out "
            f"of {_gib(self.total)}; requests of up to {self.max_model_len:,} tokens"
        )


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine runs and how, as far as memory depends on it. `num_drafts` is the largest K."""

    config: EngineConfig
    spec: ModelSpec
    drafter: DrafterConfig | None
    num_drafts: int
    dtype: torch.dtype

    @property
    def heads(self) -> tuple[LayerSizes, ...]:
        """The models that run, the target first."""
        return (self.spec,) if self.drafter is None else (self.spec, self.drafter)

    @property
    def context(self) -> int:
        """The `max_model_len` asked for, or the target's own."""
        return self.config.max_model_len or self.spec.max_position_embeddings

    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, the target's and the drafter's."""
        return sum(PagedCache.bytes_per_slot(sizes, self.dtype) for sizes in self.heads)

    def activation_bytes(self) -> int:
        """Most memory that a step takes beside weights and caches: a pass over prompts or a decode step, whichever is
        larger, with a margin."""
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        prompts = min(seqs, tokens)  # whose chunks end in the pass
        return int(_SAFETY * max(self._step_bytes(tokens, prompts, prompts), self._decode_bytes())) + _WORKSPACE

    def slot_bytes(self) -> int:
        """What is kept for each slot once a request has penalties or a grammar, which any may have."""
        slots, vocab = self.config.max_num_seqs, self.spec.vocab_size
        return TokenHistory.num_bytes(slots, vocab) + TokenMasks.num_bytes(slots, self.num_drafts + 1, vocab)

    def graph_bytes(self, num_graphs: int) -> int:
        """Memory of captured passes, `num_graphs` decode steps among them. Their activations lie in a pool that only
        graphs use and all of them share, as large as the largest takes, what attention splits its keys into included;
        each graph adds its kernels' parameters."""
        layers = self.spec.num_layers
        if self.drafter is not None:
            layers += self.drafter.num_layers * (1 if self.drafter.parallel else self.num_drafts)
        largest = self._decode_bytes()
        if self.config.prompt_graphs:
            shapes = prompt_shapes(self.config.max_num_batched_tokens)
            num_graphs += len(shapes) * len(MODES)
            largest = max([largest, *(self._step_bytes(s.rows, s.requests, s.requests) for s in shapes)])
        own = num_graphs * layers * _GRAPH_BYTES_PER_LAYER
        return int(_SAFETY * largest) + most_scratch_bytes(self.context, self.spec.head_dim) + own

    def _decode_bytes(self) -> int:
        rows = self.config.max_num_seqs * (self.num_drafts + 1)
        return self._step_bytes(rows, rows, self.config.max_num_seqs)

    def _step_bytes(self, rows: int, logit_rows: int, requests: int) -> int:
        """Peak of a step's phases, which follow each other: target, its logits, drafter, its logits. Taps outlive the
        first, and stand twice where they are joined."""
        spec, drafter, item = self.spec, self.drafter, self.dtype.itemsize
        per_logit = item + _SAMPLING_BYTES["torch" if self.config.kernels == "torch" else "triton"]
        target = _layer_bytes(spec, rows, item)
        logits = rows * spec.hidden_size * item + logit_rows * spec.vocab_size * per_logit
        logits += scratch_bytes(rows, spec.vocab_size, item)  # any step may be asked for log-probabilities
        if drafter is None or self.num_drafts == 0:
            return max(target, logits)
        taps = rows * drafter.feature_size * item
        draft_rows = rows + requests * (self.num_drafts - 1 if drafter.parallel else 0)
        inputs = 6 * draft_rows * drafter.hidden_size * item  # embeddings and features, their norms, the two joined
        drafts = requests * (self.num_drafts if drafter.parallel else 1)
        draft_logits = drafts * drafter.draft_vocab_size * per_logit
        return max(
            2 * taps + target,
            taps + logits,
            taps + inputs + max(taps, _layer_bytes(drafter, draft_rows, item)),
            taps + inputs + draft_logits,
        )


def plan_memory(
    load: EngineLoad, device: torch.device, num_graphs: int = 64, memory: DeviceMemory | None = None
) -> MemoryReport:
    """Blocks for `max_num_seqs` full-length requests, or as many as fit if that is less.

    Call it after the weights are loaded and before the caches are made; `num_graphs` is how many steps may be captured,
    `memory` stands in for the device's in tests. Raises PeagleError with the remedy when no block fits, or fewer tokens
    than a `max_model_len` that was asked for.
    """
    memory, config = memory or DeviceMemory.of(device), load.config
    on_gpu = device.type == "cuda"
    budget = int(memory.total * (config.gpu_memory_utilization if on_gpu else _SHARE_OF_HOST))
    in_use = memory.total - memory.free
    activations = load.activation_bytes() + load.slot_bytes() if on_gpu else 0
    graphs = load.graph_bytes(num_graphs) if on_gpu and config.graphs else 0
    per_token, size = load.kv_bytes_per_token(), config.block_size
    blocks = config.num_kv_blocks
    if blocks is None:
        room = budget - in_use - activations - graphs
        blocks = min(config.max_num_seqs * -(-load.context // size), room // (per_token * size) - 1)
    report = MemoryReport(
        total=memory.total,
        budget=budget,
        in_use=in_use,
        activations=activations,
        graphs=graphs,
        kv_bytes_per_token=per_token,
        num_blocks=blocks,
        block_size=size,
        max_model_len=min(load.context, max(blocks, 0) * size),
        context=load.context,
        remedy=_remedy(config, on_gpu=on_gpu),
    )
    _check_fits(report, config, on_gpu=on_gpu)
    return report


def _layer_bytes(sizes: ModelSpec | DrafterConfig, rows: int, item: int) -> int:
    """The residual stream, its norm and a sublayer's output; and the widest sublayer inside: attention (projections,
    rotated copies, output), feed-forward (two projections, their product), or experts (each one's product and output,
    and what says which)."""
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = 2 * (queries + 2 * keys) + queries
    feed_forward = 3 * sizes.intermediate_size
    if isinstance(sizes, ModelSpec) and sizes.moe is not None:
        feed_forward = sizes.moe.experts_per_token * (sizes.intermediate_size + sizes.hidden_size)
        feed_forward += 4 * sizes.moe.num_experts
    return rows * item * (3 * sizes.hidden_size + max(attention, feed_forward))


def _remedy(config: EngineConfig, *, on_gpu: bool) -> str:
    if config.num_kv_blocks is not None:
        return "raise num_kv_blocks"
    return "raise gpu_memory_utilization" if on_gpu else "use a machine with more memory"


def _check_fits(report: MemoryReport, config: EngineConfig, *, on_gpu: bool) -> None:
    r = report
    if r.num_blocks < 1:
        share = f"{config.gpu_memory_utilization:.0%} of the GPU's" if on_gpu else f"{_SHARE_OF_HOST:.0%} of the host's"
        remedy = (
            "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
            if on_gpu
            else "lower block_size or use a machine with more memory"
        )
        raise PeagleError(
            f"no memory for a KV cache: {share} {_gib(r.total)} are {_gib(r.budget)}; {_gib(r.in_use)} are in use, "
            f"activations take {_gib(r.activations)} and graphs {_gib(r.graphs)}: {remedy}"
        )
    if config.max_model_len is not None and r.num_tokens < config.max_model_len:
        raise PeagleError(
            f"max_model_len is {config.max_model_len} and the KV cache holds {r.num_tokens} tokens: lower "
            f"max_model_len to {r.num_tokens} or {r.remedy}"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
