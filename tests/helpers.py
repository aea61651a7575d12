"""Small things that several test packages need."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peagle.models.layers import Attend, RMSNorm
from peagle.models.moe import PackedExperts


def causal_attend(lengths: Sequence[int]) -> Attend:
    """Plain causal attention over flat rows of several sequences laid end to end, written as the formula says.

    `lengths` are the sequences' row counts. Works for any float dtype and for fewer key/value than query heads.
    """
    sequence_R = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order_R = torch.arange(len(sequence_R))
    visible_RR = (sequence_R[:, None] == sequence_R[None]) & (order_R[:, None] >= order_R[None])

    def attend(layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        group = q_RND.shape[1] // k_RMD.shape[1]
        k_RND, v_RND = (x.repeat_interleave(group, dim=1) for x in (k_RMD, v_RMD))
        scores_NRR = torch.einsum("qnd,knd->nqk", q_RND, k_RND) * q_RND.shape[-1] ** -0.5
        weights_NRR = scores_NRR.masked_fill(~visible_RR.to(q_RND.device), float("-inf")).softmax(dim=-1)
        return torch.einsum("nqk,knd->qnd", weights_NRR, v_RND)

    return attend


@torch.no_grad()
def random_weights(model: nn.Module, seed: int) -> None:
    """Fill all parameters with small random values that keep activations near unit size."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.draw(module.inputs**-0.5, generator)
        for parameter in module.parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                noise *= parameter.shape[-1] ** -0.5
            else:  # norms and biases vary too, so that a test notices when one is left out
                noise = 0.1 * noise + (1.0 if isinstance(module, RMSNorm) else 0.0)
            parameter.copy_(noise)
