"""A tiny target and heads for it, random in every parameter."""

from dataclasses import replace

import pytest
import torch

from peagle.drafters.p_eagle import DrafterConfig, PEagleDrafter
from peagle.drafters.vocab import offsets
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from tests.helpers import random_weights

SPEC = ModelSpec(
    family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=6, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope=RopeSpec(theta=10000.0, head_dim=8), max_position_embeddings=128,
    qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
)  # fmt: skip
CONFIG = DrafterConfig(
    hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope=SPEC.rope, max_position_embeddings=128, vocab_size=61, draft_vocab_size=61, target_hidden_size=32,
    tap_ids=(2, 3, 5), mask_token_id=7, norm_before_fc=True,
)  # fmt: skip
DRAFT_IDS = torch.tensor([0, 1, 2, 5, 8, 13, 21, 34, 55, 60])


def make_target(spec: ModelSpec = SPEC, seed: int = 1) -> TargetModel:
    model = TargetModel(spec)
    random_weights(model, seed)
    return model.to(torch.bfloat16).to(torch.float32).eval().requires_grad_(False)  # as loaded from a bfloat16 file


def make_drafter(config: DrafterConfig = CONFIG, target: TargetModel | None = None) -> PEagleDrafter:
    """A random head; with `target`, its tables are the target's (a smaller draft vocabulary is DRAFT_IDS)."""
    drafter = PEagleDrafter(config)
    random_weights(drafter, seed=2)
    small = config.draft_vocab_size != config.vocab_size
    with torch.no_grad():
        drafter.mask_embedding.normal_()
        if small:
            drafter.d2t.copy_(offsets(DRAFT_IDS))
        if target is not None:
            drafter.embed_tokens.weight.copy_(target.embed_tokens.weight)
            drafter.lm_head.weight.copy_(target.lm_head.weight[DRAFT_IDS] if small else target.lm_head.weight)
    return drafter.eval()


@pytest.fixture
def target() -> TargetModel:
    return make_target()


@pytest.fixture
def drafter(target: TargetModel) -> PEagleDrafter:
    """A head whose embedding and output rows are the target's."""
    return make_drafter(target=target)


@pytest.fixture
def small_vocab_drafter(target: TargetModel) -> PEagleDrafter:
    return make_drafter(replace(CONFIG, draft_vocab_size=len(DRAFT_IDS)), target)
