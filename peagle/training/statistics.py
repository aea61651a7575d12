"""Agreement of draft and target per depth, counted on the device.

Shape suffixes: R rows, A anchors, K depths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthReport:
    """Python numbers per depth 0..K-1."""

    counts: list[int]  # supervised rows
    accuracy: list[float]  # top-1 agreement with the target, each depth on its own
    prefix_accuracy: list[float]  # share of chains right at every depth up to this one
    acceptance_length: float  # implied estimate: 1 + sum of prefix_accuracy


@dataclass(frozen=True, slots=True)
class DepthStatistics:
    """Counts on the device, [4, K] int64: rows, matches, whole chains, chains right at every depth so far. Add steps
    up with `+`; `report` is the only place that waits for the GPU."""

    table_4K: Tensor

    def __add__(self, other: "DepthStatistics") -> "DepthStatistics":
        return DepthStatistics(self.table_4K + other.table_4K)

    def report(self) -> DepthReport:
        counts, matches, chains, right = self.table_4K.tolist()
        prefix = [hit / max(1, total) for hit, total in zip(right, chains, strict=True)]
        return DepthReport(
            counts=counts,
            accuracy=[hit / max(1, total) for hit, total in zip(matches, counts, strict=True)],
            prefix_accuracy=prefix,
            acceptance_length=1.0 + sum(prefix),
        )


@torch.no_grad()
def depth_statistics(
    anchor_R: Tensor, depth_R: Tensor, correct_R: Tensor, valid_R: Tensor, num_depths: int
) -> DepthStatistics:
    """Per-depth agreement of rows whose anchors are < R, without waiting for the GPU.

    The chain of an anchor is its own depth-0 row and its mask rows. It counts at depth d if all of its rows up to d
    are among the given rows and valid.
    """
    spare = len(anchor_R)  # all rows that do not count go to one extra anchor, which is cut off
    slot_R = torch.where(valid_R, anchor_R, spare) * num_depths + torch.where(valid_R, depth_R, 0)
    flags = torch.zeros(2, (spare + 1) * num_depths, dtype=torch.bool, device=anchor_R.device)
    flags[0, slot_R] = valid_R
    flags[1, slot_R] = correct_R & valid_R
    present_AK, right_AK = flags.unflatten(1, (-1, num_depths))[:, :spare].unbind()
    chain_AK, chain_right_AK = present_AK.long().cumprod(1), right_AK.long().cumprod(1)
    return DepthStatistics(
        torch.stack([part.long().sum(0) for part in (present_AK, right_AK, chain_AK, chain_right_AK)])
    )
