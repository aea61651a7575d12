"""A drafter and packs whose gradients take several forward and backward passes, reading parameters outside forward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafters.p_eagle import DrafterConfig, PEagleDrafter
from peagle.models.layers import RopeSpec
from peagle.training.gradients import GradientBuffer

VOCAB = 51  # odd: rows that two ranks cannot share evenly
POSITIONS = 10


def small_drafter(dtype: torch.dtype = torch.float64, device: str = "cpu") -> PEagleDrafter:
    torch.manual_seed(1)
    drafter = PEagleDrafter(
        DrafterConfig(
            hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
            rms_norm_eps=1e-5, rope=RopeSpec(theta=10000.0, head_dim=8), max_position_embeddings=128,
            vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=12, tap_ids=(1, 2, 3), mask_token_id=3,
            norm_before_fc=True,
        )
    )  # fmt: skip
    torch.nn.init.normal_(drafter.mask_embedding)
    drafter.fusion.hidden_norm.requires_grad_(False)  # what is frozen must survive as well
    return drafter.to(device, dtype)


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def run_pack(drafter: PEagleDrafter, number: int, gradients: GradientBuffer | None) -> None:
    """Pack `number`: 1 + number % 3 chunks, each with a backward pass of its own; adds its totals to `gradients`."""
    random = torch.Generator().manual_seed(number)
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    chunks = 1 + number % 3
    for _ in range(chunks):
        ids, labels = torch.randint(VOCAB, (2, POSITIONS), generator=random).to(device)
        taps = torch.randn(POSITIONS, drafter.config.feature_size, generator=random, dtype=torch.float64).to(
            device, dtype
        )
        weights = torch.rand(POSITIONS, generator=random, dtype=torch.float64)
        total, weights = float(weights.sum()), weights.to(device, dtype)
        embeds = torch.cat((drafter.embed_tokens(ids[:7]), drafter.mask_embedding.expand(3, -1)))
        features = torch.cat((drafter.combine(taps[:7]), drafter.mask_feature().expand(3, -1)))
        hidden = drafter(embeds, features, torch.arange(POSITIONS, device=device), causal)
        loss = (weights * F.cross_entropy(F.linear(hidden, drafter.lm_head.weight), labels, reduction="none")).sum()
        loss.backward()
        if gradients is not None:
            table = torch.ones(2, 2, dtype=torch.int64, device=device)
            gradients.add_totals(loss, torch.tensor([total, POSITIONS], device=device), table)
