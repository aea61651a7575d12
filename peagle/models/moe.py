"""The mixture of experts that stands in the place of a feed-forward layer (gpt-oss)."""

import torch
from torch import Tensor, nn

from peagle.kernels.moe import ExpertWeights, moe
from peagle.models.layers import FeedForward
from peagle.models.spec import MoESpec


class Experts(nn.Module):
    """The weights of all experts, laid out and named as transformers does: inputs before outputs, and the columns of
    gate and up in turn."""

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, hidden, 2 * intermediate))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * intermediate))
        self.down_proj = nn.Parameter(torch.zeros(experts, intermediate, hidden))
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden))


class MoE(FeedForward):
    """Each row goes through the few experts its router prefers, weighted by the softmax over these."""

    def __init__(self, hidden: int, intermediate: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Linear(hidden, spec.num_experts)
        self.experts = Experts(hidden, intermediate, spec.num_experts)

    def forward(self, x_RH: Tensor) -> Tensor:
        e, s = self.experts, self.spec
        weights = ExpertWeights(e.gate_up_proj, e.gate_up_proj_bias, e.down_proj, e.down_proj_bias)
        return moe(
            x_RH, self.router(x_RH), weights, top_k=s.experts_per_token, alpha=s.gate_alpha, limit=s.gate_limit,
            backend=self.kernels,
        )  # fmt: skip
