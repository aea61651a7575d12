"""The training layout computes exactly what serving computes."""

import numpy as np
import pytest
import torch

from peagle.training.rows import draw_rows
from tests.helpers import causal_attend
from tests.training.tiny_drafter import document, forward_rows, layout, pack_one, random_taps, tiny_drafter

K = 5


@pytest.mark.parametrize("anchor", [0, 1, 7, 15])
def test_a_chain_equals_a_causal_pass_with_mask_slots(anchor):
    """Rows (a, 0..K-1) against one plain causal pass over the real rows up to a, followed by K - 1 mask slots."""
    drafter = tiny_drafter(num_layers=3)
    packed = pack_one([document(22)], layout(20, K))
    rows = draw_rows(packed, layout(20, K), np.random.default_rng(0))
    taps = random_taps(drafter, 20)
    with torch.no_grad():
        hidden = forward_rows(drafter, packed, taps, rows)
        chain = [((rows.anchor_R == anchor) & (rows.depth_R == d)).nonzero().item() for d in range(K)]

        ids = torch.from_numpy(packed.input_ids_P)[: anchor + 1]
        embeds = torch.cat((drafter.embed_tokens(ids), drafter.mask_embedding.expand(K - 1, -1)))
        features = torch.cat((drafter.combine(taps[: anchor + 1]), drafter.mask_feature().expand(K - 1, -1)))
        total = anchor + K
        served = drafter(embeds, features, torch.arange(total), causal_attend([total]))[anchor:]
        torch.testing.assert_close(drafter.logits(hidden[chain]), drafter.logits(served), rtol=0, atol=1e-10)
