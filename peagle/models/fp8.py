"""A linear layer of 8-bit floats: half the bytes of a layer that is bound by reading its weights, for drafts alone.

Weights are scaled so that the largest becomes the format's largest number. Inputs are not: they are normed, and what a
float of 8 bits loses, up to 6 %, does not depend on its size. That may change a draft, never an answer.
"""

import torch
from torch import Tensor, nn

from peagle.errors import PeagleError

_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max
_ROWS_AT_ONCE = 8192  # to convert
_MULTIPLE = 16  # of both sizes: cuBLAS's
_LEAST_CAPABILITY = (8, 9)


class Fp8Linear(nn.Module):
    """`linear` without a bias, whose weight [O, I] is copied into 8-bit floats."""

    weight_OI: Tensor
    scale: Tensor  # of all weights
    one: Tensor

    def __init__(self, linear: nn.Module) -> None:
        """Raises PeagleError for a layer, or a GPU, that cuBLAS has no such product for."""
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise PeagleError("draft_lm_head is 'fp8', and another engine has packed this head: load it anew")
        weight_OI = linear.weight.detach()
        _check(weight_OI)
        largest = torch.maximum(weight_OI.amax(), -weight_OI.amin()).float()
        self.register_buffer("scale", largest.clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST)
        self.register_buffer("one", torch.ones_like(self.scale))
        self.register_buffer("weight_OI", torch.empty_like(weight_OI, dtype=_FORMAT))
        for rows_RI, copy_RI in zip(weight_OI.split(_ROWS_AT_ONCE), self.weight_OI.split(_ROWS_AT_ONCE), strict=True):
            copy_RI.copy_((rows_RI.float() / self.scale).clamp(-_LARGEST, _LARGEST))

    def forward(self, x_RI: Tensor) -> Tensor:
        """x W^T, [R, O], of inputs rounded to 8 bits too."""
        rounded_RI = x_RI.clamp(-_LARGEST, _LARGEST).to(_FORMAT)
        return torch._scaled_mm(rounded_RI, self.weight_OI.T, self.one, self.scale, out_dtype=x_RI.dtype)


def _check(weight_OI: Tensor) -> None:
    if any(size % _MULTIPLE for size in weight_OI.shape):
        outputs, inputs = weight_OI.shape
        raise PeagleError(
            f"draft_lm_head is 'fp8', and the head's output layer has {outputs} tokens of {inputs} numbers: both must "
            f"be multiples of {_MULTIPLE}; use auto"
        )
    device = weight_OI.device
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        raise PeagleError(
            f"draft_lm_head is 'fp8', and {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, capability))}: 8-bit floats need {'.'.join(map(str, _LEAST_CAPABILITY))}; use auto"
        )
