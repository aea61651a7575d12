"""Building blocks shared by the target models and the drafter: RMSNorm, RoPE, merged projections, SwiGLU, attention.

Shape suffixes used in this package: R rows (flat tokens of all sequences), H hidden size, F feed-forward size,
N query heads, M key/value heads, D head size, V vocabulary, C concatenated taps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.backend import INVARIANT, use_triton_for_inference
from peagle.kernels.fused_linear import linear_add, norm_gated_linear, norm_linear, prefers_fused
from peagle.kernels.norm_qkv_rope import NormedLinear
from peagle.kernels.rms_norm import add_rms_norm, rms_norm
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.stream_linear import gated_stream_linear, linear_parts, prefers_stream, stream_linear
from peagle.kernels.swiglu import silu_mul

# (layer index, q_RND, k_RMD, v_RMD) -> o_RND. The model computes rotated q, k and v; whoever calls the model decides
# what a row may see: a paged cache when serving, the (anchor, depth) relation when training.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@runtime_checkable
class CachedAttend(Protocol):
    """An `Attend` over a cache that can take the merged projections as they are, which saves a pass over them."""

    def __call__(self, layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor, /) -> Tensor: ...

    def write_rope(
        self, layer: int, qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, heads: int, norms: HeadNorms | None
    ) -> Tensor:
        """Write the rows' rotated keys and their values; return their rotated queries, q_RND."""

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

    def read(self, layer: int, q_RND: Tensor) -> Tensor:
        """o_RND over what the cache holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding. `scaling` is None or the numbers of the `llama3` or the `yarn` rule."""

    theta: float
    head_dim: int
    scaling: "Llama3Scaling | YarnScaling | None" = None

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by: YaRN sharpens attention that way."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent context extension (HF `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN's context extension (HF `rope_type: yarn`). `truncate` rounds the borders of the blend to whole pairs."""

    factor: float
    beta_fast: float  # pairs with more full rotations within the original context are kept
    beta_slow: float  # those with fewer are stretched
    original_max_position_embeddings: int
    attention_factor: float
    truncate: bool


def rope_inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Per-pair angular frequencies, float32 [D/2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    inv_freq = 1.0 / spec.theta**exponents
    if spec.scaling is None:
        return inv_freq
    s = spec.scaling
    if isinstance(s, YarnScaling):
        blend = _yarn_blend(spec, s)
        return (1 - blend) / (s.factor * spec.theta**exponents) + blend * inv_freq
    wavelength = 2 * math.pi / inv_freq
    turns = s.original_max_position_embeddings / wavelength  # full rotations within the original context
    # 0 keeps only the stretched frequency, 1 only the original, in between a linear blend.
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / s.factor + blend * inv_freq


def _yarn_blend(spec: RopeSpec, s: YarnScaling) -> Tensor:
    """Of each pair: 1 keeps the original frequency, 0 only the stretched, in between linear in the pair's index."""
    whole = s.original_max_position_embeddings / (2 * math.pi)
    low, high = (
        spec.head_dim * math.log(whole / turns) / (2 * math.log(spec.theta)) for turns in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)


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
        return rope_tables(positions_R, self.inv_freq, dtype, self.spec.table_scale, backend=self.kernels)

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
        """stream + delta, and that normed; `delta` may come in parts (`project_parts`)."""
        return add_rms_norm(delta, stream, self.weight, self.eps, backend=self.kernels)


class MergedLinear(nn.Linear):
    """Several projections of one input as a single matmul, side by side in the output.

    `splits` are their output sizes, in order: checkpoints and the optimiser treat the projections one by one.
    """

    def __init__(self, in_features: int, splits: Sequence[int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(splits), bias=bias)
        self.splits = tuple(splits)


class FeedForward(nn.Module):
    """The second half of a decoder layer: rows in, what they add to the stream out."""

    kernels: str = "torch"

    def parts(self, x: Tensor) -> Tensor:
        """This layer of x for an `RMSNorm.add`."""
        return self(x)

    def fuses(self, x_RH: Tensor) -> bool:  # noqa: ARG002
        """Whether `add` is the faster way for these rows."""
        return False

    def add(self, x_RH: Tensor, norm: RMSNorm) -> Tensor:
        """x plus this layer of norm(x)."""
        return x_RH + self(norm(x_RH))


class SwiGLU(FeedForward):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden, (intermediate, intermediate), bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, self._gated(x), self.kernels)

    def parts(self, x: Tensor) -> Tensor:
        """`forward` for an `RMSNorm.add`."""
        return project_parts(self.down_proj, self._gated(x), self.kernels)

    def _gated(self, x: Tensor) -> Tensor:
        up = self.gate_up_proj
        if streams(up, x, self.kernels):
            return gated_stream_linear(x, up.weight, up.bias, backend=self.kernels)
        return silu_mul(up(x), backend=self.kernels)

    def fuses(self, x_RH: Tensor) -> bool:
        """Whether `add` is the faster way for these rows: few, on Triton, weights not packed."""
        return (
            use_triton_for_inference(self.kernels, x_RH.device)
            and self.kernels != INVARIANT
            and _are_plain(self.gate_up_proj, self.down_proj)
            and prefers_fused(x_RH.shape[0], self.gate_up_proj.weight)
        )

    def add(self, x_RH: Tensor, norm: RMSNorm) -> Tensor:
        """x + down(silu(gate(norm(x))) * up(norm(x))) in two launches."""
        up, down = self.gate_up_proj, self.down_proj
        gated_RF = norm_gated_linear(x_RH, norm.weight, norm.eps, up.weight, up.bias, backend=self.kernels)
        return linear_add(gated_RF, down.weight, down.bias, x_RH, backend=self.kernels)


class Attention(nn.Module):
    """Grouped-query attention around an `Attend`: projections, head norms and RoPE here, the visibility rule outside.

    With `head_norm_eps`, each query and key head passes through an RMSNorm before RoPE (Qwen3). `sinks` are learned
    logits, one per head, that take their share of the softmax (gpt-oss): whoever attends has to count them in.
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
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        splits = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = MergedLinear(in_features, splits, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, out_features, bias=o_bias)
        self.q_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.k_norm = None if head_norm_eps is None else RMSNorm(head_dim, head_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None

    def forward(
        self, x: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """Attention of every row [R, H]; with `rows_U`, of these rows [U, H]: `attend` gets the queries of these, and
        the keys and values of all."""
        return project(self.o_proj, self._project_and_attend(x, cos_R1D, sin_R1D, attend, rows_U), self.kernels)

    def parts(
        self, x: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """`forward` for an `RMSNorm.add`."""
        return project_parts(self.o_proj, self._project_and_attend(x, cos_R1D, sin_R1D, attend, rows_U), self.kernels)

    def parts_of_projected(
        self, qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """`parts` from the merged projections on, which it may overwrite."""
        return project_parts(self.o_proj, self._attend(qkv_RA, cos_R1D, sin_R1D, attend, rows_U), self.kernels)

    def fuses(self) -> bool:
        """Whether `add` can read these weights."""
        return _are_plain(self.qkv_proj, self.o_proj)

    def add(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        residual_RH: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        attend: Attend,
        rows_U: Tensor | None = None,
    ) -> Tensor:
        """residual + attention(norm(x)), norm and sum in the launches of the projections. `norm` None: x is normed.

        With `rows_U`, the residual and the result are of these rows.
        """
        if norm is None:
            o_RA = self._project_and_attend(x, cos_R1D, sin_R1D, attend, rows_U)
        else:
            o_RA = self._norm_and_attend(x, norm, cos_R1D, sin_R1D, attend, rows_U)
        return linear_add(o_RA, self.o_proj.weight, self.o_proj.bias, residual_RH, backend=self.kernels)

    def add_projected(
        self,
        qkv_RA: Tensor,
        residual_RH: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        attend: Attend,
        rows_U: Tensor | None = None,
    ) -> Tensor:
        """`add` from the merged projections on, which it may overwrite."""
        o_RA = self._attend(qkv_RA, cos_R1D, sin_R1D, attend, rows_U)
        return linear_add(o_RA, self.o_proj.weight, self.o_proj.bias, residual_RH, backend=self.kernels)

    def _project_and_attend(
        self, x: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None
    ) -> Tensor:
        # Packed weights cannot be cut. Where half of the rows ask, one matmul costs less than two and their gathers.
        if rows_U is None or 2 * rows_U.shape[0] >= x.shape[0] or not _are_plain(self.qkv_proj):
            return self._attend(project(self.qkv_proj, x, self.kernels), cos_R1D, sin_R1D, attend, rows_U)
        weight, bias, size = self.qkv_proj.weight, self.qkv_proj.bias, self.heads * self.head_dim
        q_bias, kv_bias = (None, None) if bias is None else (bias[:size], bias[size:])
        q_UA, kv_RA = F.linear(x[rows_U], weight[:size], q_bias), F.linear(x, weight[size:], kv_bias)
        norms, kernels = self._head_norms(), self.kernels
        q, _, _ = rope_qkv(q_UA, cos_R1D[rows_U], sin_R1D[rows_U], self.heads, 0, norms, backend=kernels)
        _, k, v = rope_qkv(kv_RA, cos_R1D, sin_R1D, 0, self.kv_heads, norms, backend=kernels)
        return attend(self.layer, q, k, v).flatten(-2)

    def _norm_and_attend(
        self, x: Tensor, norm: RMSNorm, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None
    ) -> Tensor:
        qkv = NormedLinear(norm.weight, norm.eps, self.qkv_proj.weight, self.qkv_proj.bias)
        if self.kernels == "torch" or not isinstance(attend, CachedAttend):
            return self._attend(norm_linear(x, *qkv, backend=self.kernels), cos_R1D, sin_R1D, attend, rows_U)
        norms = self._head_norms()
        q_RND = attend.project_and_write(self.layer, x, qkv, cos_R1D, sin_R1D, self.heads, norms)
        return attend.read(self.layer, q_RND if rows_U is None else q_RND[rows_U]).flatten(-2)

    def _attend(
        self, qkv_RA: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """What the heads make of the projections, side by side."""
        norms = self._head_norms()
        if self.kernels != "torch" and isinstance(attend, CachedAttend):
            q_RND = attend.write_rope(self.layer, qkv_RA, cos_R1D, sin_R1D, self.heads, norms)
            return attend.read(self.layer, q_RND if rows_U is None else q_RND[rows_U]).flatten(-2)
        q, k, v = rope_qkv(qkv_RA, cos_R1D, sin_R1D, self.heads, self.kv_heads, norms, backend=self.kernels)
        return attend(self.layer, q if rows_U is None else q[rows_U], k, v).flatten(-2)

    def _head_norms(self) -> HeadNorms | None:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return norms


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then + mlp(norm(.)); `mlp` None is a SwiGLU."""

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
        sinks: bool = False,
        mlp: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            layer, hidden, hidden, heads, kv_heads, head_dim,
            qkv_bias=qkv_bias, o_bias=o_bias, head_norm_eps=eps if qk_norm else None, sinks=sinks,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: FeedForward = SwiGLU(hidden, intermediate, bias=mlp_bias) if mlp is None else mlp

    def forward(
        self, x_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """The stream after this layer [R, H]; with `rows_U`, that of these rows [U, H], as in `Attention`."""
        if self.fuses(x_RH):
            return self.fused(x_RH, cos_R1D, sin_R1D, attend, rows_U)
        x_RH, normed_RH = self._attended(x_RH, self.input_layernorm(x_RH), cos_R1D, sin_R1D, attend, rows_U)
        return x_RH + self.mlp(normed_RH)

    def fuses(self, x_RH: Tensor) -> bool:
        """Whether `fused` is the faster way for these rows."""
        return self.mlp.fuses(x_RH) and self.self_attn.fuses()

    def fused(
        self, x_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None = None
    ) -> Tensor:
        """`forward` with norms, gate and sums in the launches of the projections."""
        residual_RH = x_RH if rows_U is None else x_RH[rows_U]
        x_RH = self.self_attn.add(x_RH, self.input_layernorm, residual_RH, cos_R1D, sin_R1D, attend, rows_U)
        return self.mlp.add(x_RH, self.post_attention_layernorm)

    def parts(
        self,
        x_RH: Tensor,
        normed_RH: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        attend: Attend,
        rows_U: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and what the feed-forward part adds to it, for an `RMSNorm.add`.

        `normed_RH` is the input norm of the stream `x_RH`.
        """
        x_RH, normed_RH = self._attended(x_RH, normed_RH, cos_R1D, sin_R1D, attend, rows_U)
        return x_RH, self.mlp.parts(normed_RH)

    def _attended(
        self, x_RH: Tensor, normed_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, rows_U: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stream after attention, and its norm."""
        attended = self.self_attn.parts(normed_RH, cos_R1D, sin_R1D, attend, rows_U)
        return self.post_attention_layernorm.add(x_RH if rows_U is None else x_RH[rows_U], attended)


def project(linear: nn.Module, x_RI: Tensor, kernels: str) -> Tensor:
    """linear(x), in the form that is fastest for these rows."""
    if streams(linear, x_RI, kernels):
        return stream_linear(x_RI, linear.weight, linear.bias, backend=kernels)
    return linear(x_RI)


def project_parts(linear: nn.Module, x_RI: Tensor, kernels: str) -> Tensor:
    """linear(x) for an `RMSNorm.add`: [R, O], or float32 parts of it [S, R, O], where that is faster."""
    if kernels == INVARIANT:  # few and many rows are not cut alike
        return project(linear, x_RI, kernels)
    if streams(linear, x_RI, kernels, cut=True):
        return linear_parts(x_RI, linear.weight, linear.bias, backend=kernels)
    return linear(x_RI)


def streams(linear: nn.Module, x_RI: Tensor, kernels: str, *, cut: bool = False) -> TypeGuard[nn.Linear]:
    """Whether a layer of these few rows, on Triton, its weight not packed, is one for `stream_linear`; for `INVARIANT`
    of however many."""
    return (
        use_triton_for_inference(kernels, x_RI.device)
        and isinstance(linear, nn.Linear)
        and (kernels == INVARIANT or prefers_stream(x_RI, linear.weight, cut=cut))
    )


def _are_plain(*linears: nn.Module) -> bool:
    """Whether the weights are there as they are, not packed."""
    return all(isinstance(linear, nn.Linear) for linear in linears)


@runtime_checkable
class _Choosable(Protocol):
    kernels: str


def use_kernels(module: nn.Module, kernels: str) -> None:
    """Choose the form of all parts below `module` that have several: "torch", as they are made, "triton", "auto", or
    `INVARIANT`.

    The Triton forms have no gradients.
    """
    for part in module.modules():
        if isinstance(part, _Choosable):
            part.kernels = kernels
