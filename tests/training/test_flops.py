"""FLOPs from sizes against those that torch counts while tiny nets run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from peagle.drafters.p_eagle import PEagleDrafter
from peagle.models.decoder import TargetModel
from peagle.training.flops import PackCost, named_peak, peak_flops
from tests.drafters.conftest import CONFIG, SPEC

P, M = 12, 20  # positions and mask rows
SEEN = np.arange(1, P + M + 1)


def no_attention(layer, q, k, v):
    return q


def all_pairs(layer, q, k, v):
    """Every row sees every row, by two matmuls."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0)).softmax(-1)
    return torch.bmm(scores, v.transpose(0, 1)).transpose(0, 1)


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def train_step(config, attend, *, charged, targets, trains_head=True):
    """Forward and backward over P positions and M mask rows as the trainer's passes do them, loss matmuls included."""
    drafter = PEagleDrafter(config)
    head_UH, target_head_VH = drafter.lm_head.weight.detach(), torch.randn(SPEC.vocab_size, SPEC.hidden_size)
    embeds = torch.cat((drafter.embed_tokens(torch.zeros(P, dtype=torch.int64)), drafter.mask_embedding.expand(M, -1)))
    taps, target_hidden = torch.randn(P, config.feature_size), torch.randn(targets, SPEC.hidden_size)

    def run():
        features = torch.cat((drafter.combine(taps), drafter.mask_feature().expand(M, -1)))
        hidden = drafter(embeds, features, torch.arange(P + M), attend)
        torch.mm(target_hidden, target_head_VH.T)
        charged_CH = hidden.detach()[:charged]
        gradient_CU = torch.mm(charged_CH, head_UH.T)
        gradient_CH = torch.mm(gradient_CU, head_UH)
        if trains_head:
            torch.mm(gradient_CU.T, charged_CH)
        hidden.backward(torch.cat((gradient_CH, torch.zeros(P + M - charged, config.hidden_size))))

    return counted(run)


def cost(config, *, trains_head=True, runs_target=False):
    return PackCost(config, SPEC, trains_head=trains_head, runs_target=runs_target)


@pytest.mark.parametrize("norm_before_fc", [True, False])
@pytest.mark.parametrize("trains_head", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_matmuls_of_a_pack(norm_before_fc, trains_head, layers):
    config = replace(CONFIG, norm_before_fc=norm_before_fc, num_layers=layers, draft_vocab_size=23)
    numbers = {"charged": 9, "targets": 7}
    found = cost(config, trains_head=trains_head)(np.zeros(P + M, np.int64), positions=P, **numbers)
    torch_says = train_step(config, no_attention, trains_head=trains_head, **numbers)
    # The gradient of `mask_hidden`, one row of fc, is the one matmul that is not counted.
    missing = 0 if norm_before_fc else 2 * config.feature_size * config.hidden_size
    assert found == torch_says - missing


def test_attention_counts_pairs():
    numbers = {"charged": 1, "targets": 1}
    pairs = np.full(P + M, P + M)  # each row sees all
    difference = cost(CONFIG)(pairs, positions=P, **numbers) - cost(CONFIG)(0 * pairs, positions=P, **numbers)
    assert difference == train_step(CONFIG, all_pairs, **numbers) - train_step(CONFIG, no_attention, **numbers)


def test_sliding_layers_see_a_window():
    config = replace(CONFIG, layer_types=("sliding_attention", "full_attention", "sliding_attention"), sliding_window=5)
    numbers = {"positions": P, "charged": 1, "targets": 1}
    difference = cost(CONFIG)(SEEN, **numbers) - cost(config)(SEEN, **numbers)
    unseen = np.maximum(SEEN - 5, 0).sum()
    assert difference == 3 * 2 * 4 * CONFIG.num_heads * CONFIG.head_dim * unseen


def test_the_target_runs_over_its_stream():
    """Two documents of 5 and 7 positions: streams of 6 and 8 tokens."""
    target = TargetModel(SPEC).requires_grad_(False)
    seen = np.array([*range(1, 6), *range(1, 8)])
    numbers = {"positions": 12, "charged": 1, "targets": 1}
    found = cost(CONFIG, runs_target=True)(seen, **numbers) - cost(CONFIG)(seen, **numbers)
    ids = torch.zeros(14, dtype=torch.int64)
    matmuls = counted(lambda: target(ids, torch.arange(14), no_attention, (1,)))
    pairs = 6 * 7 // 2 + 8 * 9 // 2
    assert found == matmuls + SPEC.num_layers * 4 * SPEC.num_heads * SPEC.head_dim * pairs


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert named_peak(name) == peak


def test_no_peak_without_a_gpu():
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
