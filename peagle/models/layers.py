"""Building blocks shared by the target models and the drafter: RMSNorm, RoPE, merged projections, SwiGLU, attention.

Shape suffixes used in this package: R rows (flat tokens of all sequences), H hidden size, F feed-forward size,
N query heads, M key/value heads, D head size, V vocabulary, C concatenated taps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from peagle.kernels.rms_norm import add_rms_norm, rms_norm
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.swiglu import silu_mul

# (layer index, q_RND, k_RMD, v_RMD) -> o_RND. The model computes rotated q, k and v; whoever calls the model decides
# what a row may see: a paged cache when serving, the (anchor, depth) relation when training.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding. `scaling` is None or the `llama3` rule's four numbers."""

    theta: float
    head_dim: int
    scaling: "Llama3Scaling | None" = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent context extension (HF `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def rope_inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Per-pair angular frequencies, float32 [D/2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    inv_freq = 1.0 / spec.theta**exponents
    if spec.scaling is None:
        return inv_freq
    s = spec.scaling
    wavelength = 2 * math.pi / inv_freq
    turns = s.original_max_position_embeddings / wavelength  # full rotations within the original context
    # 0 keeps only the stretched frequency, 1 only the original, in between a linear blend.
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / s.factor + blend * inv_freq


class Rope(nn.Module):
    """Rotary tables for given positions.

    The frequencies stay float32 when the model is converted: rounded to bfloat16 they turn far positions by radians.
    """

    inv_freq: Tensor
    kernels: str = "torch"

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("inv_freq", rope_inverse_frequencies(spec), persistent=False)

    def forward(self, positions_R: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [R, 1, D] in `dtype`, as `rope_tables` lays them out."""
        return rope_tables(positions_R, self.inv_freq, dtype, backend=self.kernels)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Behind `.to()` and `.to_empty()`: follow the device, keep the dtype, get values when leaving meta."""
        super()._apply(fn, recurse)
        self.inv_freq = rope_inverse_frequencies(self.spec).to(self.inv_freq.device)
        return self


class RMSNorm(nn.Module):
    """y = w * x / rms(x), the mean square in float32."""

    kernels: str = "torch"

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, backend=self.kernels)

    def add(self, stream: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """stream + delta, and that normed."""
        return add_rms_norm(delta, stream, self.weight, self.eps, backend=self.kernels)


class MergedLinear(nn.Linear):
    """Several projections of one input as a single matmul, side by side in the output.

    `splits` are their output sizes, in order: checkpoints and the optimiser treat the projections one by one.
    """

    def __init__(self, in_features: int, splits: Sequence[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(splits), bias=bias)
        self.splits = tuple(splits)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    kernels: str = "torch"

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden, (intermediate, intermediate), bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x), backend=self.kernels))


class Attention(nn.Module):
    """Grouped-query attention around an `Attend`: projections, head norms and RoPE here, the visibility rule outside.

    With `head_norm_eps`, each query and key head passes through an RMSNorm before RoPE (Qwen3).
    """

    kernels: str = "torch"

    def __init__(
        self,
        layer: int,
        in_features: int,
        out_features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        head_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        splits = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = MergedLinear(in_features, splits, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, out_features, bias=o_bias)
        self.q_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.k_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)

    def forward(self, x: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend) -> Tensor:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = rope_qkv(
            self.qkv_proj(x), cos_R1D, sin_R1D, self.heads, self.kv_heads, norms, backend=self.kernels
        )  # fmt: skip
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then + mlp(norm(.))."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            layer, hidden, hidden, heads, kv_heads, head_dim,
            qkv_bias=qkv_bias, o_bias=o_bias, head_norm_eps=eps if qk_norm else None,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, intermediate, bias=mlp_bias)

    def forward(self, x_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend) -> Tensor:
        x_RH, delta_RH = self.parts(x_RH, self.input_layernorm(x_RH), cos_R1D, sin_R1D, attend)
        return x_RH + delta_RH

    def parts(
        self, x_RH: Tensor, normed_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and what the feed-forward part adds to it: the next norm can do that itself.

        `normed_RH` is the input norm of the stream `x_RH`.
        """
        x_RH, normed_RH = self.post_attention_layernorm.add(x_RH, self.self_attn(normed_RH, cos_R1D, sin_R1D, attend))
        return x_RH, self.mlp(normed_RH)


def use_kernels(module: nn.Module, kernels: str) -> None:
    """Choose the form of every norm, rotation and gate below `module`: "torch", as they are made, "triton" or "auto".

    The Triton forms have no gradients.
    """
    for part in module.modules():
        if isinstance(part, RMSNorm | Rope | SwiGLU | Attention):
            part.kernels = kernels
