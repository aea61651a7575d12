"""The mixture of experts that stands in the place of a feed-forward layer (gpt-oss)."""

import torch
from torch import Tensor, nn

from peagle.kernels.moe import ExpertWeights, moe
from peagle.kernels.packed_experts import WORDS, PackedMatrix, draw, num_groups
from peagle.models.layers import FeedForward
from peagle.models.spec import MoESpec


class PackedExperts(nn.Module):
    """A matrix of each expert in four bits a number. Buffers, not parameters: no dtype and no gradient is theirs."""

    words: Tensor
    scales: Tensor

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.register_buffer("words", torch.zeros(experts, num_groups(inputs), outputs, WORDS, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(experts, num_groups(inputs), outputs, dtype=torch.int32))

    @property
    def matrix(self) -> PackedMatrix:
        """What the kernel reads."""
        return PackedMatrix(self.words, self.scales, self.inputs)

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Random numbers of that standard deviation."""
        draw(self.words, self.scales, std, generator)


class Experts(nn.Module):
    """The weights of all experts, laid out and named as transformers does: inputs before outputs, and the columns of
    gate and up in turn; `packed` matrices as the kernel wants them."""

    def __init__(self, hidden: int, intermediate: int, experts: int, *, packed: bool) -> None:
        super().__init__()
        self.gate_up_proj = _matrices(experts, hidden, 2 * intermediate, packed)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * intermediate))
        self.down_proj = _matrices(experts, intermediate, hidden, packed)
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden))

    @property
    def weights(self) -> ExpertWeights:
        """What the kernel reads."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return ExpertWeights(
            gate_up.matrix if isinstance(gate_up, PackedExperts) else gate_up, self.gate_up_proj_bias,
            down.matrix if isinstance(down, PackedExperts) else down, self.down_proj_bias,
        )  # fmt: skip


def _matrices(experts: int, inputs: int, outputs: int, packed: bool) -> nn.Parameter | PackedExperts:
    if packed:
        return PackedExperts(experts, inputs, outputs)
    return nn.Parameter(torch.zeros(experts, inputs, outputs))


class MoE(FeedForward):
    """Each row goes through the few experts its router prefers, weighted by the softmax over these."""

    def __init__(self, hidden: int, intermediate: int, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Linear(hidden, spec.num_experts)
        self.experts = Experts(hidden, intermediate, spec.num_experts, packed=spec.packed)

    def forward(self, x_RH: Tensor) -> Tensor:
        s = self.spec
        return moe(
            x_RH, self.router(x_RH), self.experts.weights, top_k=s.experts_per_token, alpha=s.gate_alpha,
            limit=s.gate_limit, backend=self.kernels,
        )  # fmt: skip
