"""How many KV cache blocks to allocate."""

import os

import torch

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import DrafterConfig
from peagle.engine.kv_cache import PagedCache
from peagle.errors import PeagleError
from peagle.models.spec import ModelSpec

_SHARE_OF_FREE_CUDA = 0.5  # the rest is for activations: logits and gathered keys of large batches
_SHARE_OF_HOST = 0.25


def num_kv_blocks(
    config: EngineConfig,
    max_model_len: int,
    spec: ModelSpec,
    drafter: DrafterConfig | None,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Enough for `max_num_seqs` full-length requests, or what a share of the free memory holds if that is less."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    per_slot = PagedCache.bytes_per_slot(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    if drafter is not None:
        per_slot += PagedCache.bytes_per_slot(drafter.num_layers, drafter.num_kv_heads, drafter.head_dim, dtype)
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    budget = _memory_budget(device)
    affordable = int(budget // (per_slot * config.block_size))
    if affordable < 1:
        raise PeagleError(f"{budget / 2**20:.0f} MiB of memory for the KV cache hold no block: free memory first")
    return min(wanted, affordable)


def _memory_budget(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE_CUDA
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE_OF_HOST
