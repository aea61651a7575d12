"""The EAGLE-3 drafter: fc over the target's taps, a fusion layer, plain layers, an own norm and output head.

Architecture after vLLM's `llama_eagle3`. A row is an (embedding, feature) pair: token x_{i+1} with fc(taps of token i).
Drafting one token at a time, the rows after the newest real one carry the drafted token and, for want of taps, the
drafter's own residual stream of the row before. Used by training and serving alike; `attend` decides what a row sees.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peagle.errors import PeagleError
from peagle.models.layers import Attend, Attention, DecoderLayer, RMSNorm, Rope, RopeSpec, SwiGLU, project

FULL, SLIDING = "full_attention", "sliding_attention"  # Hugging Face's names of a layer's attention


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Everything that shapes a head. `tap_ids`: id k is the target's residual stream entering layer k.

    A head with a mask token is a P-EAGLE head and drafts in parallel; one without is an EAGLE-3 head.
    `layer_types` says which layers see only the last `sliding_window` positions, their own included (None: none do).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tap_ids: tuple[int, ...]
    mask_token_id: int | None
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Raises PeagleError for layer types that cannot be followed."""
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_layers or not {FULL, SLIDING} >= set(self.layer_types):
            raise PeagleError(
                f"layer_types is {list(self.layer_types)}: expected {FULL!r} or {SLIDING!r} for each of the "
                f"{self.num_layers} layers"
            )
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 2):
            raise PeagleError(f"sliding_window is {self.sliding_window}: layers that slide need one of at least 2")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, in positions; None sees everything before it."""
        types = self.layer_types or (FULL,) * self.num_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in types)

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps, the input of fc."""
        return self.target_hidden_size * len(self.tap_ids)

    @property
    def parallel(self) -> bool:
        """Whether one pass drafts K tokens (P-EAGLE) or one (EAGLE-3)."""
        return self.mask_token_id is not None

    @property
    def kind(self) -> str:
        """What users call a head of this config."""
        return "P-EAGLE" if self.parallel else "EAGLE-3"


class SampledRows(NamedTuple):
    """The rows of a pass whose output is used, and the last layer's attention: it gets the keys and values of all rows
    and the queries of these."""

    rows_U: Tensor
    attend: Attend


class FusionLayer(nn.Module):
    """Layer 0: attention reads [norm(embedding) ; norm(feature)], the residual stream carries the feature."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = config
        self.norm_before_residual = c.norm_before_residual
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            0, 2 * c.hidden_size, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, qkv_bias=c.attention_bias
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)

    def forward(
        self,
        embeds_RH: Tensor,
        features_RH: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        attend: Attend,
        rows_U: Tensor | None = None,
    ) -> Tensor:
        """The stream after this layer [R, H]; with `rows_U`, that of these rows [U, H], as in `Attention`."""
        residual_RH, fused = self._fuse(embeds_RH, features_RH)
        if rows_U is not None:
            residual_RH = residual_RH[rows_U]
        if self.mlp.fuses(residual_RH) and self.self_attn.fuses():
            x_RH = self.self_attn.add(fused, None, residual_RH, cos_R1D, sin_R1D, attend, rows_U)
            return self.mlp.add(x_RH, self.post_attention_layernorm)
        return self._finish(residual_RH, self.self_attn.parts(fused, cos_R1D, sin_R1D, attend, rows_U))

    def project(self, embeds_RH: Tensor, features_RH: Tensor) -> tuple[Tensor, Tensor]:
        """All that does not depend on where a row stands: its residual stream [R, H] and its merged projections."""
        residual_RH, fused = self._fuse(embeds_RH, features_RH)
        return residual_RH, project(self.self_attn.qkv_proj, fused, self.self_attn.kernels)

    def of_projected(
        self,
        residual_RH: Tensor,
        qkv_RA: Tensor,
        cos_R1D: Tensor,
        sin_R1D: Tensor,
        attend: Attend,
        rows_U: Tensor | None = None,
    ) -> Tensor:
        """`forward` of what `project` made; the projections may be overwritten.

        With `rows_U`, the residual is that of these rows.
        """
        if self.mlp.fuses(residual_RH) and self.self_attn.fuses():
            x_RH = self.self_attn.add_projected(qkv_RA, residual_RH, cos_R1D, sin_R1D, attend, rows_U)
            return self.mlp.add(x_RH, self.post_attention_layernorm)
        return self._finish(residual_RH, self.self_attn.parts_of_projected(qkv_RA, cos_R1D, sin_R1D, attend, rows_U))

    def _fuse(self, embeds_RH: Tensor, features_RH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the projections read."""
        normed_RH = self.hidden_norm(features_RH)
        residual_RH = normed_RH if self.norm_before_residual else features_RH
        return residual_RH, torch.cat((self.input_layernorm(embeds_RH), normed_RH), dim=-1)

    def _finish(self, residual_RH: Tensor, attended: Tensor) -> Tensor:
        x_RH, normed_RH = self.post_attention_layernorm.add(residual_RH, attended)
        return x_RH + self.mlp(normed_RH)


class Eagle3Drafter(nn.Module):
    """fc over taps, one fusion layer, N-1 plain layers, own norm and head."""

    d2t: Tensor
    kernels: str = "torch"

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.checkpoint_activations = False  # training: keep only each layer's input, compute the rest again backwards
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.input_norm = RMSNorm(c.feature_size, c.rms_norm_eps) if c.norm_before_fc else None
        self.fc = nn.Linear(c.feature_size, c.hidden_size, bias=False)
        self.fusion = FusionLayer(c)
        self.layers = nn.ModuleList(
            DecoderLayer(
                i, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps,
                qkv_bias=c.attention_bias,
            )
            for i in range(1, c.num_layers)
        )  # fmt: skip
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.rope = Rope(c.rope)
        # Offsets, vLLM's convention: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))

    def combine(self, taps_RC: Tensor) -> Tensor:
        """Project concatenated taps [R, C] to features [R, H]: the input norm, if the head has one, then fc."""
        return project(self.fc, taps_RC if self.input_norm is None else self.input_norm(taps_RC), self.kernels)

    def stream(
        self,
        embeds_RH: Tensor,
        features_RH: Tensor,
        positions_R: Tensor,
        attend: Attend,
        sampled: SampledRows | None = None,
    ) -> Tensor:
        """The residual stream after the last layer [R, H], before the final norm: the feature of an EAGLE-3 head's
        next row. With `sampled`, that of these rows only, [U, H]."""
        cos, sin = self.rope(positions_R, features_RH.dtype)
        x_RH = self._run(self.fusion, embeds_RH, features_RH, cos, sin, *self._asked(0, attend, sampled))
        return self._plain_layers(x_RH, cos, sin, attend, sampled)

    def stream_of_projected(
        self,
        residual_RH: Tensor,
        qkv_RA: Tensor,
        positions_R: Tensor,
        attend: Attend,
        sampled: SampledRows | None = None,
    ) -> Tensor:
        """`stream` of rows that went through `FusionLayer.project`; the projections may be overwritten.

        Of a head of one layer, the residual is that of the rows it returns.
        """
        cos, sin = self.rope(positions_R, qkv_RA.dtype)
        x_RH = self.fusion.of_projected(residual_RH, qkv_RA, cos, sin, *self._asked(0, attend, sampled))
        return self._plain_layers(x_RH, cos, sin, attend, sampled)

    def _plain_layers(
        self, x_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend, sampled: SampledRows | None
    ) -> Tensor:
        for i, layer in enumerate(self.layers, start=1):
            x_RH = self._run(layer, x_RH, cos_R1D, sin_R1D, *self._asked(i, attend, sampled))
        return x_RH

    def _asked(self, layer: int, attend: Attend, sampled: SampledRows | None) -> tuple[Attend, Tensor | None]:
        """The attention of a layer, and the rows it is asked for; None: all of them."""
        if sampled is None or layer < self.config.num_layers - 1:
            return attend, None
        return sampled.attend, sampled.rows_U

    def _run(self, layer: nn.Module, *inputs: Tensor | Attend | None) -> Tensor:
        if self.checkpoint_activations and torch.is_grad_enabled():
            # No layer draws random numbers, and a GPU's random state cannot be read while a graph is captured.
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*inputs)

    def forward(self, embeds_RH: Tensor, features_RH: Tensor, positions_R: Tensor, attend: Attend) -> Tensor:
        """Final-normed hidden states [R, H] of rows given as (embedding, feature) pairs at RoPE `positions_R`."""
        return self.norm(self.stream(embeds_RH, features_RH, positions_R, attend))

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [R, draft_vocab_size]."""
        return project(self.lm_head, hidden_RH, self.kernels)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids."""
        return draft_ids + self.d2t[draft_ids]
