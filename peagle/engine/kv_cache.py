"""Paged KV cache: target and drafter keep separate tensors but share blocks, so one block table serves both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.errors import PeagleError
from peagle.kernels.kv_write import kv_write
from peagle.kernels.norm_qkv_rope import NormedLinear, norm_qkv_rope
from peagle.kernels.paged_attention import AttentionPlan, WholePlan, paged_attention
from peagle.kernels.paged_decode import CacheView
from peagle.kernels.rope import HeadNorms
from peagle.kernels.rope_write import rope_write
from peagle.kernels.whole_attention import takes_whole, whole_attention
from peagle.models.spec import LayerSizes


class PagedCache:
    """Keys and values of one model's layers, each [layers, M, slots, D]; the last slot belongs to no block.

    `windows` are the layers' sliding windows; None where a row sees every key up to its own. `sinks` are the layers'
    attention sinks [N], if they have any. `kernels` writes keys and values.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
        sinks: Sequence[Tensor | None] | None = None,
        kernels: str = "torch",
    ) -> None:
        self.kernels = kernels
        self.windows = (None,) * sizes.num_layers if windows is None else tuple(windows)
        self.sinks = (None,) * sizes.num_layers if sinks is None else tuple(sinks)
        plain = all(extra is None for extra in (*self.windows, *self.sinks))
        self.takes_whole = plain and takes_whole(sizes.head_dim, dtype, device)  # prompts, by a library's attention
        self._qkv_heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
        shape = (sizes.num_layers, sizes.num_kv_heads, num_slots + 1, sizes.head_dim)
        try:
            # Zeroed, for a drafter that sat out some steps reads what it never wrote. Not on the host, which gets
            # zeroed pages anyway and pays only for those it touches.
            make = torch.zeros if device.type == "cuda" else torch.empty
            self.keys = make(shape, dtype=dtype, device=device)
            self.values = make(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # out of memory is one, on CPU and CUDA
            gib = 2 * np.prod(shape) * dtype.itemsize / 2**30
            raise PeagleError(
                f"no memory for a KV cache of {gib:.1f} GiB: lower max_num_seqs or max_model_len"
            ) from error

    @staticmethod
    def bytes_per_slot(sizes: LayerSizes, dtype: torch.dtype) -> int:
        """Bytes one token takes."""
        return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * dtype.itemsize

    def plan_whole(self, rows: int) -> None:
        """Have the library plan for a whole prompt of so many rows: the first of them would wait for that."""
        whole_attention(*(self.keys.new_zeros(rows, heads, self.keys.shape[-1]) for heads in self._qkv_heads))

    def attend(self, slots_R: Tensor, limit_R: Tensor, plan: AttentionPlan) -> "PagedAttend | WholeAttend":
        """An `Attend` that first writes the new rows' keys and values, then attends over the cache or, of a whole
        prompt, over these.

        Slots, limits and the plan must be there before the pass begins: attention may load them before the layers
        in front of it have ended.
        """
        if isinstance(plan, WholePlan) and self.takes_whole:
            return WholeAttend(self, slots_R)
        return PagedAttend(self, slots_R, limit_R, plan)


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """What `PagedCache.attend` makes, for one pass; also a `CachedAttend`."""

    cache: PagedCache
    slots_R: Tensor
    limit_R: Tensor
    plan: AttentionPlan

    def __call__(self, layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        c = self.cache
        kv_write(c.keys[layer], c.values[layer], self.slots_R, k_RMD, v_RMD, backend=c.kernels)
        return self.read(layer, q_RND)

    def write_rope(
        self, layer: int, qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, heads: int, norms: HeadNorms | None
    ) -> Tensor:
        """Write the rows' rotated keys and their values; return their rotated queries, [R, N, D]."""
        c = self.cache
        return rope_write(
            qkv_RA, cos_R1D, sin_R1D, heads, c.keys[layer], c.values[layer], self.slots_R, norms, backend=c.kernels
        )

    def project_and_write(
        self,
        layer: int,
        x_RH: Tensor,
        qkv: NormedLinear,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        heads: int,
        norms: HeadNorms | None,
    ) -> Tensor:
        """`write_rope` of the normed and projected stream."""
        c = self.cache
        keys, values = c.keys[layer], c.values[layer]
        return norm_qkv_rope(x_RH, qkv, cos_R1D, sin_R1D, heads, keys, values, self.slots_R, norms, backend=c.kernels)

    def read(self, layer: int, q_RND: Tensor) -> Tensor:
        """Attend over the cache."""
        c = self.cache
        view = CacheView(c.keys[layer], c.values[layer], self.limit_R, c.windows[layer], c.sinks[layer])
        return paged_attention(q_RND, view, self.plan)


@dataclass(frozen=True, slots=True)
class WholeAttend:
    """The same for a whole prompt. No `CachedAttend`: that would have the rotated keys in the cache alone."""

    cache: PagedCache
    slots_R: Tensor

    def __call__(self, layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        c = self.cache
        kv_write(c.keys[layer], c.values[layer], self.slots_R, k_RMD, v_RMD, backend=c.kernels)
        return whole_attention(q_RND, k_RMD, v_RMD)
