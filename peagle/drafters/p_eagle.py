"""The P-EAGLE drafter: an EAGLE-3 head that fills K-1 mask slots, so one pass drafts K tokens.

After arXiv 2602.01469 section 3. Depth-0 rows are those of EAGLE-3; mask rows pair one learned embedding with
fc(`mask_hidden`), the same for every depth, position and request.
"""

import torch
from torch import Tensor, nn

from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.errors import PeagleError


class PEagleDrafter(Eagle3Drafter):
    """An EAGLE-3 head and what its mask rows share."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.mask_token_id is None:
            raise PeagleError("a P-EAGLE head needs a mask token: set mask_token_id, or build an EAGLE-3 head")
        self.mask_token_id = config.mask_token_id
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.mask_hidden = nn.Parameter(torch.randn(config.feature_size))

    def mask_feature(self) -> Tensor:
        """The feature of every mask row, [H]. `mask_hidden` passes through the norm and fc like real taps do."""
        return self.combine(self.mask_hidden[None])[0]


def drafter_for(config: DrafterConfig) -> Eagle3Drafter:
    """An untrained head of the kind that `config` describes."""
    return PEagleDrafter(config) if config.parallel else Eagle3Drafter(config)
