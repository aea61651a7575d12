"""The output layer of a drafter with a byte for each weight: its time is the way of its weights through memory.

A row of weights is scaled so that its largest is 127, inputs are as they are. That may change a draft, never an answer.
"""

import torch
from torch import Tensor, nn

from peagle.errors import PeagleError
from peagle.kernels.int8_linear import MOST_ROWS, int8_linear, pack_bytes

_LARGEST = 127
_ROWS_AT_ONCE = 8192  # to convert


class Int8Linear(nn.Module):
    """`linear`, without a bias, of up to `MOST_ROWS` rows by a copy in 8 bits. More rows are bound by their products
    and are computed as they were."""

    words_OW: Tensor
    scale_O: Tensor

    def __init__(self, linear: nn.Module, kernels: str = "auto") -> None:
        """`kernels` as the backend of `int8_linear`. Raises PeagleError for a layer whose weight is no longer there."""
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise PeagleError("draft_lm_head is 'int8', and another engine has packed this head: load it anew")
        self.linear, self.kernels, weight_OI = linear, kernels, linear.weight.detach()
        tiny = torch.finfo(torch.float32).tiny
        largest_O = torch.maximum(weight_OI.amax(dim=1), -weight_OI.amin(dim=1)).float()
        self.register_buffer("scale_O", (largest_O / _LARGEST).clamp(min=tiny))
        pieces = zip(weight_OI.split(_ROWS_AT_ONCE), self.scale_O.split(_ROWS_AT_ONCE), strict=True)
        words = [pack_bytes((rows_RI.float() / scale_R[:, None]).round_()) for rows_RI, scale_R in pieces]
        self.register_buffer("words_OW", torch.cat(words))

    def forward(self, x_RI: Tensor) -> Tensor:
        """x W^T, [R, O]."""
        if x_RI.shape[0] > MOST_ROWS:
            out: Tensor = self.linear(x_RI)
            return out
        return int8_linear(x_RI, self.words_OW, self.scale_O, backend=self.kernels)
