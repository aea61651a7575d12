"""A fresh head for a target, ready to train.

With target initialisation the head starts as a shortened copy of the target: its layers are the target's last ones,
fed from the last tap, with room to learn what the embeddings and the other taps add. Default initialisation keeps only
the target's embedding and output rows.

Heads do not norm their query and key heads. From a target that does (Qwen3), a copied layer takes values, output
projection, feed-forward and norms, but its queries and keys start at their default: the norms depend on each row, so no
scaling of the target's weights comes to the same. The default's scores are small: such a layer starts by averaging the
values that the target's would have chosen from.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peagle.drafters.checkpoint import check_compatible
from peagle.drafters.eagle3 import FULL, SLIDING, DrafterConfig, Eagle3Drafter
from peagle.drafters.head_config import default_tap_ids
from peagle.drafters.p_eagle import PEagleDrafter, drafter_for
from peagle.drafters.vocab import offsets, target_ids
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from peagle.models.layers import Attention, DecoderLayer, FeedForward, SwiGLU
from peagle.models.spec import ModelSpec

EMBEDDING_HALF_SCALE = 0.5  # of the default initialisation: the target's own layers never read the embedding
FC_NOISE_SCALE = 0.1


def new_drafter(
    target: TargetModel,
    *,
    num_layers: int,
    mask_token_id: int | None,
    seed: int,
    target_init: bool,
    tap_ids: Sequence[int] | None = None,
    draft_ids: Tensor | None = None,
    norm_before_fc: bool = True,
    sliding_window: int | None = None,
    sliding_layers: Sequence[int] | None = None,
) -> Eagle3Drafter:
    """A float32 head on the CPU that shares no storage with `target`, the same for the same `seed`.

    With `mask_token_id` a `PEagleDrafter`, with None an EAGLE-3 head, the same in all that both have.
    `draft_ids` are ascending target ids (None: the whole vocabulary), `tap_ids` None means (2, n//2, n-3).
    `sliding_layers` (None: all) see no further back than `sliding_window`, if there is one. Raises PeagleError for
    settings the target rules out.
    """
    config = _config(target.spec, num_layers, tap_ids, mask_token_id, draft_ids, norm_before_fc, target_init)
    config = replace(config, **_sliding(num_layers, sliding_window, sliding_layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_for(config)
    with torch.no_grad():
        if draft_ids is not None:
            drafter.d2t.copy_(offsets(draft_ids))
        drafter.embed_tokens.weight.copy_(target.embed_tokens.weight)
        if isinstance(drafter, PEagleDrafter):
            drafter.mask_embedding.copy_(target.embed_tokens.weight[drafter.mask_token_id])
        head_ids = target_ids(drafter.d2t).to(target.lm_head.weight.device)
        drafter.lm_head.weight.copy_(target.lm_head.weight[head_ids])
        if target_init:
            _start_as_target(drafter, target)
    return drafter.train()


def _config(
    spec: ModelSpec,
    num_layers: int,
    tap_ids: Sequence[int] | None,
    mask_token_id: int | None,
    draft_ids: Tensor | None,
    norm_before_fc: bool,
    target_init: bool,
) -> DrafterConfig:
    if not 1 <= num_layers <= spec.num_layers:
        raise PeagleError(f"{num_layers} drafter layers: expected 1 to {spec.num_layers}, the depth of the target")
    if draft_ids is not None and (draft_ids.numel() == 0 or bool((draft_ids.diff() <= 0).any())):
        raise PeagleError("draft ids must be distinct and ascending, and at least one; sort them")
    if draft_ids is not None and (int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= spec.vocab_size):
        raise PeagleError(
            f"draft ids reach {int(draft_ids[-1])}, expected 0 to {spec.vocab_size - 1}; check the vocabulary"
        )
    config = DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=spec.rope,
        max_position_embeddings=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size if draft_ids is None else draft_ids.numel(),
        target_hidden_size=spec.hidden_size,
        tap_ids=default_tap_ids(spec.num_layers) if tap_ids is None else tuple(tap_ids),
        mask_token_id=mask_token_id,
        norm_before_fc=norm_before_fc,
        attention_bias=spec.qkv_bias
        and target_init,  # q/k biases of a copied layer carry much of its attention pattern
    )
    check_compatible(config, spec, where="the new head")
    return config


def _sliding(num_layers: int, window: int | None, layers: Sequence[int] | None) -> dict[str, Any]:
    """`layer_types` and `sliding_window` of a config."""
    if window is None:
        return {}
    chosen = set(range(num_layers) if layers is None else layers)
    if not chosen <= set(range(num_layers)):
        raise PeagleError(f"sliding layers {sorted(chosen)}: expected numbers from 0 to {num_layers - 1}")
    types = tuple(SLIDING if layer in chosen else FULL for layer in range(num_layers))
    return {"layer_types": types, "sliding_window": window}


def _start_as_target(drafter: Eagle3Drafter, target: TargetModel) -> None:
    """Copy the target's last layers, its final norm, and feed them from the last tap."""
    size = drafter.config.hidden_size
    source, *rest = _layers(target)[-drafter.config.num_layers :]
    fusion = drafter.fusion
    fused = fusion.self_attn.qkv_proj.weight  # [q + k + v, embedding half | hidden half]
    fused[:, :size] *= EMBEDDING_HALF_SCALE
    _copy_attention(fusion.self_attn, source.self_attn, fused[:, size:])
    fusion.hidden_norm.weight.copy_(source.input_layernorm.weight)
    fusion.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    _copy_mlp(fusion.mlp, source.mlp)
    for layer, original in zip(_layers(drafter), rest, strict=True):
        _copy_layer(layer, original)
    drafter.norm.weight.copy_(target.norm.weight)
    drafter.fc.weight *= FC_NOISE_SCALE
    drafter.fc.weight[:, -size:] += torch.eye(size)


def _copy_layer(layer: DecoderLayer, source: DecoderLayer) -> None:
    _copy_attention(layer.self_attn, source.self_attn, layer.self_attn.qkv_proj.weight)
    layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    _copy_mlp(layer.mlp, source.mlp)


def _copy_attention(own: Attention, source: Attention, weight: Tensor) -> None:
    """Copy the projections; `weight` are the columns of the own merged one that read the hidden state."""
    projection, original = own.qkv_proj, source.qkv_proj
    first = 0 if source.q_norm is None else sum(projection.splits[:2])  # queries and keys are nothing without the norms
    weight[first:].copy_(original.weight[first:])
    # Heads have no other biases: those a target has on o_proj and in its feed-forward layers are left out.
    if projection.bias is not None and original.bias is not None:
        projection.bias[first:].copy_(original.bias[first:])
    own.o_proj.weight.copy_(source.o_proj.weight)


def _copy_mlp(mlp: FeedForward, source: FeedForward) -> None:
    if not isinstance(mlp, SwiGLU) or not isinstance(source, SwiGLU):
        raise PeagleError("layers of a mixture of experts cannot become a head's: use default initialisation")
    mlp.gate_up_proj.weight.copy_(source.gate_up_proj.weight)
    mlp.down_proj.weight.copy_(source.down_proj.weight)


def _layers(model: TargetModel | Eagle3Drafter) -> list[DecoderLayer]:
    """The plain decoder layers, typed (a ModuleList promises no more than modules)."""
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
