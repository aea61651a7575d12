"""The target model: a pre-norm decoder of the Llama, Qwen2, dense Qwen3 and gpt-oss families over flat rows.

No cache, no batch dimension, no sampling: rows of any number of sequences go in side by side, and the `attend` that is
passed in decides which of them see each other. Serving, training and tests differ only in that function. Where a spec
has sliding windows or attention sinks, they are the `attend`'s to apply.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from peagle.models.layers import Attend, DecoderLayer, RMSNorm, Rope, project
from peagle.models.moe import MoE
from peagle.models.spec import ModelSpec


class TargetModel(nn.Module):
    """Embedding, decoder layers, final norm and language-model head described by a `ModelSpec`."""

    kernels: str = "torch"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        s = self.spec = spec
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                i, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads, s.head_dim, s.rms_norm_eps,
                qkv_bias=s.qkv_bias, o_bias=s.o_bias, mlp_bias=s.mlp_bias, qk_norm=s.qk_norm, sinks=s.sinks,
                mlp=None if s.moe is None else MoE(s.hidden_size, s.intermediate_size, s.moe),
            )
            for i in range(s.num_layers)
        )  # fmt: skip
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        self.rope = Rope(s.rope)
        self._tie()

    def forward(
        self, input_ids_R: Tensor, positions_R: Tensor, attend: Attend, tap_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Final-normed hidden states [R, H] and the taps [R, len(tap_ids) * H] in the order of `tap_ids`.

        Tap k is the residual stream entering layer k; k == num_layers is the stream after the last layer, before the
        final norm. Without tap ids the second value is None.
        """
        x_RH = self.embed_tokens(input_ids_R)
        cos_R1D, sin_R1D = self.rope(positions_R, x_RH.dtype)
        streams: dict[int, Tensor] = {}
        delta: Tensor | None = None  # what is still to be added to the stream: each norm adds before it norms
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]  # all of them, typed
        fused = all(layer.fuses(x_RH) for layer in layers)
        for i, layer in enumerate(layers):
            if fused:
                if i in tap_ids:
                    streams[i] = x_RH
                x_RH = layer.fused(x_RH, cos_R1D, sin_R1D, attend)
                continue
            x_RH, normed_RH = _add_norm(layer.input_layernorm, x_RH, delta)
            if i in tap_ids:
                streams[i] = x_RH
            x_RH, delta = layer.parts(x_RH, normed_RH, cos_R1D, sin_R1D, attend)
        x_RH, normed_RH = _add_norm(self.norm, x_RH, delta)
        streams[len(layers)] = x_RH
        taps_RC = torch.cat([streams[k] for k in tap_ids], dim=-1) if tap_ids else None
        return normed_RH, taps_RC

    @property
    def sinks(self) -> tuple[Tensor | None, ...]:
        """Each layer's attention sinks [N], which the `attend` has to count in."""
        return tuple(layer.self_attn.sinks for layer in self.layers if isinstance(layer, DecoderLayer))

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits over the vocabulary, [R, V], of final-normed hidden states."""
        return project(self.lm_head, hidden_RH, self.kernels)

    def _tie(self) -> None:
        # A head swapped for a packed one (models/packing.py) has no weight to share.
        if self.spec.tie_word_embeddings and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.embed_tokens.weight

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        """Behind `.to()` and `.to_empty()`: tied embeddings stay one Parameter."""
        super()._apply(fn, recurse)
        self._tie()
        return self


def _add_norm(norm: RMSNorm, x_RH: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    return (x_RH, norm(x_RH)) if delta is None else norm.add(x_RH, delta)
