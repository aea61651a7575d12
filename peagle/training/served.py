"""The real decode loop on held-out prompts while training runs, and the head that did best in it.

The engine that serves heads answers the prompts with the weights of the moment. It only reads: the target's weights
are shared, the head is read in the precision it will be served in, and nothing random of the run is touched.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.acceptance import AcceptanceStats
from peagle.config import EngineConfig
from peagle.drafters import layout, storage
from peagle.drafters.checkpoint import PROVENANCE_KEY
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.layers import Rope
from peagle.models.target import Target
from peagle.sampling import SamplingParams
from peagle.training.rows import TokenDocument

MOST_PROMPTS = 64
BEST = "best"  # folder of the best head within the output directory
_PREFILL_TOKENS = 4096  # of one step: its activations have to fit beside the training state


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What greedy decoding accepted. `accepted_share_per_position` is unconditional, as everywhere."""

    prompts: int
    tokens: int
    rounds: int
    num_speculative_tokens: int
    acceptance_length: float
    accepted_share_per_position: list[float]


def held_out_prompts(
    documents: Sequence[TokenDocument], max_tokens: int, context: int, most: int = MOST_PROMPTS
) -> list[list[int]]:
    """What stands before the first supervised token of each document, every prompt once, the first `most` of them.

    Documents that begin with supervised tokens have no prompt; prompts that leave the target's `context` no room for
    `max_tokens` are left out.
    """
    prompts: dict[tuple[int, ...], None] = {}
    for document in documents:
        length = int(document.loss_mask.argmax()) if document.loss_mask.any() else 0
        if 0 < length <= context - max_tokens:
            prompts.setdefault(tuple(document.input_ids[:length].tolist()))
        if len(prompts) == most:
            break
    return [list(prompt) for prompt in prompts]


def serve(
    target: Target, drafter: Eagle3Drafter, prompts: Sequence[list[int]], num_drafts: int, max_tokens: int
) -> Served:
    """Answer the prompts (token ids, at least one) greedily with `num_drafts` drafts per round.

    Raises PeagleError where there is no memory for it. The target must be one that the engine can run.
    """
    weight = target.model.embed_tokens.weight
    config = EngineConfig(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=_PREFILL_TOKENS,
        kernels="torch",  # the target is shared with training, which must not change
        gpu_memory_utilization=1.0,  # training holds most of it
        graphs=False,  # too few steps to be worth a capture
        # Positions for the drafts of the last round too, so that they are drafted like all others.
        max_model_len=min(
            max(map(len, prompts)) + max_tokens + 2 * num_drafts, target.spec.max_position_embeddings
        ),
    )  # fmt: skip
    stats, tokens = AcceptanceStats(), 0
    with _returned_memory(weight.device):
        llm = LLM.from_parts(target, _serving_view(drafter, weight.dtype), num_drafts, config, pack=False)
        for output in llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)):
            stats.add(output.stats)
            tokens += len(output.token_ids)
        del llm
    return Served(
        prompts=len(prompts),
        tokens=tokens,
        rounds=stats.num_rounds,
        num_speculative_tokens=num_drafts,
        acceptance_length=stats.acceptance_length,
        accepted_share_per_position=stats.acceptance_per_position,
    )


def read_best(out: Path) -> float:
    """Served acceptance length of the head in OUT/best; 1, which every head has, where none can be read."""
    try:
        raw = storage.read_config(out / BEST)
        return float(raw[PROVENANCE_KEY]["served"]["acceptance_length"])
    except (PeagleError, KeyError, TypeError, ValueError):
        return 1.0


def _serving_view(drafter: Eagle3Drafter, dtype: torch.dtype) -> Eagle3Drafter:
    """The drafter in the precision it is served in, frozen; tensors that have it already are shared, not copied."""
    view = layout.meta_drafter(drafter.config)
    # Not drafter.state_dict(): it would spread a drafter that is gathered from several ranks over them again.
    tensors = dict(drafter.named_parameters()) | dict(drafter.named_buffers())
    state = {
        name: tensors[name].detach().to(dtype if tensors[name].is_floating_point() else None)
        for name in view.state_dict()
    }
    view.load_state_dict(state, assign=True)
    view.rope = Rope(drafter.config.rope).to(drafter.fc.weight.device)
    return view.requires_grad_(False).eval()


@contextmanager
def _returned_memory(device: torch.device) -> Iterator[None]:
    """Let the engine see all free memory of a GPU, and training have back what the engine held.

    Raises PeagleError instead of torch's out-of-memory error.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise PeagleError(f"no memory to decode the held-out prompts ({str(error).splitlines()[0]})") from None
    finally:
        gc.collect()  # requests and their engine refer to each other
        torch.cuda.empty_cache()
