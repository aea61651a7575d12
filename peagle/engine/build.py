"""From a loaded target and head to an `EngineCore`: sizes, memory, caches, kernels."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from peagle.config import EngineConfig
from peagle.drafters.draft_pass import DraftSavings
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.batch import PassTiles, heads_per_kv
from peagle.engine.block_pool import BlockPool
from peagle.engine.core import EngineCore
from peagle.engine.graphs import GraphPool, bucket_sizes
from peagle.engine.kv_cache import PagedCache
from peagle.engine.memory import EngineLoad, plan_memory
from peagle.engine.outputs import StepOutput
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.prompt_rows import PaddedPrompts, prompt_shapes
from peagle.engine.scheduler import Scheduler
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SamplingMode, SlotState
from peagle.engine.speculation import draft_counts
from peagle.engine.step import DraftSide, SpeculativeStep
from peagle.errors import PeagleError
from peagle.kernels.backend import (
    INVARIANT,
    LEAST_GENERATION,
    LIBRARY,
    can_run_triton,
    cuda_generation,
    use_triton,
)
from peagle.kernels.paged_attention import can_tile
from peagle.kernels.synthetic_acceptance import SyntheticLengths
from peagle.kernels.whole_attention import LEAST_ROWS
from peagle.models.int8 import Int8Linear
from peagle.models.layers import use_kernels
from peagle.models.packing import pack_linears
from peagle.models.spec import ModelSpec
from peagle.models.target import Target

_log = logging.getLogger(__name__)
_MODES = 3  # that may have graphs of every size and K. A server needs the first three of `COMMON_MODES`
# Weights of a layer times rows of prompts, in the time that the host takes to launch the layer: 0.7 ms for SmolLM2's,
# in which an H200 does twice as many products. Half, as padding and short passes cost some. Not measured elsewhere.
_LAYER_PRODUCTS = 75_000_000_000
_SINGLES = 4  # graphs of one request that is traced, as the server's page asks for


def build_core(
    target: Target,
    drafter: Eagle3Drafter | None,
    most_drafts: int,
    config: EngineConfig,
    *,
    pack: bool = True,
    synthetic_rates: Sequence[float] | None = None,
    savings: DraftSavings | None = None,
) -> EngineCore:
    """Allocate the caches on the models' device and join everything, for up to `most_drafts` drafts a round.

    `pack` replaces linear layers by packed ones on the CPU; `savings` None is all of them. Raises PeagleError for
    settings that do not fit the model, the head or the memory.
    """
    weight = target.model.embed_tokens.weight
    device, spec = weight.device, target.spec
    asked = resolve_kernels(config, device)
    kernels = "triton" if asked == INVARIANT else asked
    check_max_model_len(config.max_model_len, spec)
    if asked == INVARIANT:
        _check_invariant(config, spec)
    kept = int8_head = None
    if drafter is not None and config.draft_lm_head == "int8":  # before what is free is counted
        kept = drafter.lm_head  # not packed, for the next engine of this head copies it as well
        int8_head = Int8Linear(kept, kernels)
    for module, form, keep in ((target.model, asked, None), (drafter, kernels, kept)):
        if module is not None:
            use_kernels(module, form)
            if pack and device.type == "cpu":
                pack_linears(module, keep)
    load = EngineLoad(config, spec, drafter.config if drafter else None, most_drafts, weight.dtype)
    on_cuda = device.type == "cuda"
    num_graphs = len(bucket_sizes(config.max_num_seqs)) * len(draft_counts(most_drafts)) * _MODES + _SINGLES
    memory = plan_memory(load, device, num_graphs=num_graphs)
    _log.info("%s", memory.describe())
    if memory.is_limit:
        _log.warning(
            "the KV cache limits a prompt and its answer to %d tokens, of the model's context of %d: for longer ones "
            "%s", memory.max_model_len, memory.context, memory.remedy,
        )  # fmt: skip
    sizes = EngineSizes(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        max_model_len=memory.max_model_len,
        context_remedy=memory.remedy if memory.is_limit else "",
    )
    num_slots = (memory.num_blocks + 1) * config.block_size  # block 0 is the null block
    cache = partial(PagedCache, num_slots=num_slots, dtype=weight.dtype, device=device, kernels=kernels)
    step = SpeculativeStep(
        target.model,
        cache(spec, windows=spec.windows, sinks=target.model.sinks),
        None if drafter is None else _draft_side(drafter, cache, most_drafts, savings, int8_head),
        SlotState(sizes.max_num_seqs, most_drafts, sizes.blocks_for(sizes.max_model_len), device),
        sizes=sizes,
        attention=INVARIANT if asked == INVARIANT else _attention(config.attention, spec),
        kernels=kernels,
        synthetic=None if synthetic_rates is None else SyntheticLengths(synthetic_rates, device),
    )
    pool = BlockPool(memory.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    captures = config.graphs and on_cuda and kernels == "triton"
    graph_pool = GraphPool(device)
    captures_prompts = captures and config.prompt_graphs and _has_tiles(load, device)
    return EngineCore(
        step,
        Scheduler(pool, sizes, shares_answers=asked != INVARIANT),  # decoding attends in another form than prompts do
        most_drafts,
        sizes=sizes,
        device=device,
        kernels=kernels,
        graphs=captures,
        max_graphs=num_graphs,
        steps_ahead=int(config.async_scheduling and on_cuda),
        has_drafter=drafter is not None,
        prompt_graphs=prompt_graphs(step, load, sizes, graph_pool) if captures_prompts else None,
        pool=graph_pool,
    )


def prompt_graphs(step: SpeculativeStep, load: EngineLoad, sizes: EngineSizes, pool: GraphPool) -> PromptGraphs:
    """Graphs of the passes over prompts that `step` makes, with as many drafts as it may be asked for."""
    passes = [PassTiles(heads_per_kv(load.spec), 0)]
    if load.drafter is not None:
        passes.append(PassTiles(heads_per_kv(load.drafter), load.num_drafts - 1 if load.drafter.parallel else 0))

    def body(padded: PaddedPrompts, mode: SamplingMode) -> StepOutput:
        return step.run(padded.rows(step.state, sizes, "triton"), load.num_drafts, mode)

    shapes, device = prompt_shapes(sizes.max_num_batched_tokens), step.state.tables.device
    return PromptGraphs(body, shapes, dict.fromkeys(passes), device, pool, most_to_split(load.spec))


def most_to_split(spec: ModelSpec) -> int:
    """Rows of prompts up to which a pass waits for its launches rather than for its products. A mixture of experts
    would read all of its weights in every pass."""
    if spec.moe is not None:
        return 0
    heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return _LAYER_PRODUCTS // (spec.hidden_size * (heads + 3 * spec.intermediate_size))


def _attention(asked: str, spec: ModelSpec) -> str:
    """The form that runs. "auto" is a library's for long prompts where these wait for products, at the least of them
    too: its launches take the host longer than the tiles'."""
    return LIBRARY if asked == "auto" and 4 * most_to_split(spec) <= LEAST_ROWS else asked


def _has_tiles(load: EngineLoad, device: torch.device) -> bool:
    """Whether attention is cut into tiles, whose plan a graph can read; says so where not."""
    if use_triton(load.config.attention, device) and all(can_tile(heads.head_dim) for heads in load.heads):
        return True
    _log.info("attention runs in torch here, so passes over prompts run without CUDA graphs")
    return False


def resolve_kernels(config: EngineConfig, device: torch.device) -> str:
    """The form of the kernels that runs: "torch", "triton" or `INVARIANT`. Raises PeagleError where Triton is asked for
    and cannot run, and where "auto" means Triton and the GPU is too old for it."""
    for name in ("attention", "kernels"):
        if (form := getattr(config, name)) in ("triton", INVARIANT) and not can_run_triton(device):
            raise PeagleError(f"{name} is {form!r}: it needs CUDA and the triton package, not {device}; use auto")
        if form != "torch" and can_run_triton(device) and 0 < cuda_generation(device) < LEAST_GENERATION:
            major, minor = torch.cuda.get_device_capability(device)
            raise PeagleError(
                f"{name} is {form!r}, and {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: "
                f"Triton needs {LEAST_GENERATION}.0; use device cpu, or in Python kernels and attention torch"
            )
    if config.kernels == "auto":
        return "triton" if device.type == "cuda" and can_run_triton(device) else "torch"
    return config.kernels


def _check_invariant(config: EngineConfig, spec: ModelSpec) -> None:
    if spec.moe is not None:
        raise PeagleError("kernels is 'invariant': it is for dense targets, not for mixtures of experts; use auto")
    if config.attention == "torch":
        raise PeagleError("kernels is 'invariant' and attention 'torch', whose sums follow the batch: use auto for one")
    if not can_tile(spec.head_dim):
        raise PeagleError(
            f"kernels is 'invariant' and the target's heads have {spec.head_dim} dims: there its attention is torch's, "
            "whose sums follow the batch; use auto"
        )


def check_max_model_len(asked: int | None, spec: ModelSpec) -> None:
    """Raise PeagleError for a context longer than the target's."""
    context = spec.max_position_embeddings
    if asked is not None and asked > context:
        raise PeagleError(f"max_model_len is {asked}: it must be at most the target's context, {context} tokens")


def _draft_side(
    drafter: Eagle3Drafter,
    cache: Callable[..., PagedCache],
    most_drafts: int,
    savings: DraftSavings | None,
    int8_head: Int8Linear | None,
) -> DraftSide:
    windows = drafter.config.windows
    _check_windows(windows, most_drafts)
    return DraftSide.of(drafter, cache(drafter.config, windows=windows), savings, int8_head)


def _check_windows(windows: Sequence[int | None], num_drafts: int) -> None:
    """PeagleError when a row of a draft would not see all of its chain, as it did in training."""
    narrow = [window for window in windows if window is not None and window <= num_drafts]
    if narrow:
        raise PeagleError(
            f"num_speculative_tokens is {num_drafts}: the head's sliding window of {narrow[0]} positions allows at "
            f"most {narrow[0] - 1}"
        )
