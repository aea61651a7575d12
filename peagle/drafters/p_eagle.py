"""The P-EAGLE drafter: an EAGLE-3 head that fills K-1 mask slots, so one pass drafts K tokens.

Architecture after arXiv 2602.01469 section 3 as vLLM's `llama_eagle3` runs it. A row is an (embedding, feature) pair:
depth-0 rows pair token x_{i+1} with fc(taps of token i); mask rows pair one learned embedding with fc(`mask_hidden`),
the same for every depth, position and request. Used by training and serving alike; `attend` decides what a row sees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peagle.models.layers import (
    Attend,
    Attention,
    DecoderLayer,
    RMSNorm,
    Rope,
    RopeSpec,
    SwiGLU,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Everything that shapes a head. `tap_ids`: id k is the target's residual stream entering layer k."""

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
    mask_token_id: int
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    attention_bias: bool = False

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps, the input of fc."""
        return self.target_hidden_size * len(self.tap_ids)


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
        self, embeds_RH: Tensor, features_RH: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, attend: Attend
    ) -> Tensor:
        normed_RH = self.hidden_norm(features_RH)
        residual_RH = normed_RH if self.norm_before_residual else features_RH
        fused = torch.cat((self.input_layernorm(embeds_RH), normed_RH), dim=-1)
        x_RH = residual_RH + self.self_attn(fused, cos_R1D, sin_R1D, attend)
        return x_RH + self.mlp(self.post_attention_layernorm(x_RH))


class PEagleDrafter(nn.Module):
    """fc over taps, one fusion layer, N-1 plain layers, own norm and head."""

    d2t: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))
        self.mask_hidden = nn.Parameter(torch.randn(c.feature_size))
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
        return self.fc(taps_RC if self.input_norm is None else self.input_norm(taps_RC))

    def mask_feature(self) -> Tensor:
        """The feature of every mask row, [H]. `mask_hidden` passes through the norm and fc like real taps do."""
        return self.combine(self.mask_hidden[None])[0]

    def forward(self, embeds_RH: Tensor, features_RH: Tensor, positions_R: Tensor, attend: Attend) -> Tensor:
        """Final-normed hidden states [R, H] of rows given as (embedding, feature) pairs at RoPE `positions_R`."""
        cos, sin = self.rope(positions_R, features_RH.dtype)
        x_RH = self.fusion(embeds_RH, features_RH, cos, sin, attend)
        for layer in self.layers:
            x_RH = layer(x_RH, cos, sin, attend)
        return self.norm(x_RH)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [R, draft_vocab_size]."""
        return self.lm_head(hidden_RH)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target ids."""
        return draft_ids + self.d2t[draft_ids]
