"""How the rows of a pack are run and charged: the host's side of the three partition strategies.

flat         one forward pass over all rows: the oracle.
algorithm1   the paper's sequence partition (arXiv 2602.01469, Algorithm 1): S segments, each of which runs every
             position up to its end again and is charged for its own rows.
prefix-once  positions run once, mask rows chunk by chunk against their keys and values.

The EAGLE-3 baseline is "unrolled": K passes over the positions, all of them charged as one chunk.

A row's segment follows Algorithm 1 in closed form: positions by their place, all mask rows of a chain by the place
after their anchor, so no chain is ever cut.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.head_loss import LossRows, depth_weights, fixed_loss_rows, plan_loss_rows
from peagle.training.rows import ROW_BLOCK, IntArray, RowLayout, Rows, round_up

Partition = Literal["flat", "algorithm1", "prefix-once", "unrolled"]
DepthWeight = Literal["flat", "per-depth", "gamma"]
_TARGET_MARGIN = 1.5  # places for targets in a slab, over the usual number: rows of short answers share fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRule:
    """How packs are cut and their rows weighted; at most `loss_chunk` rows have logits at once."""

    partition: Partition
    segments: int  # of algorithm1
    depth_weight: DepthWeight
    gamma: float
    num_depths: int
    loss_chunk: int
    fixed: bool = False  # fill the charged rows up to one shape, where every pack is one chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Positions [first, last) and mask rows [start, stop), counted from the first mask row, that are run or charged
    together. `loss_rows` indexes them end to end; unrolled, row (a, d) is number d P + a instead."""

    first: int
    last: int
    start: int
    stop: int
    loss_rows: LossRows
    charged_L: Tensor  # int64: the charged rows among all rows of the step, in the order of `loss_rows`; R for filling


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every supervised row of a pack is charged in exactly one chunk."""

    chunks: tuple[Chunk, ...]
    weight: float  # sum of the weights of all rows
    charged_rows: int  # rows with loss
    targets: int  # distinct positions they predict
    fixed: bool  # every plan of the run that is fixed has the same shapes


def plan_pack(rows: Rows, layout: RowLayout, rule: PlanRule) -> Plan:
    """Cut the rows of one pack into chunks."""
    anchor_R, depth_R = rows.anchor_R.numpy(), rows.depth_R.numpy()
    charged_R = np.flatnonzero(rows.supervised_R.numpy())
    weight_R = np.zeros(len(anchor_R), np.float32)
    weight_R[charged_R] = depth_weights(
        depth_R[charged_R], kind=rule.depth_weight, gamma=rule.gamma, num_depths=rule.num_depths
    )
    target_R = rows.target_R.numpy()
    charged_R = charged_R[np.argsort(target_R[charged_R], kind="stable")]
    positions = layout.positions
    chunks = []
    for first, last, start, stop, charged_from in _spans(anchor_R[positions:], layout, rule):
        own = (charged_R >= charged_from) & (charged_R < last)
        own |= (charged_R >= positions + start) & (charged_R < positions + stop)
        mine_L = charged_R[own]
        if rule.partition == "unrolled":
            index_L = depth_R[mine_L] * positions + anchor_R[mine_L]
        else:
            index_L = np.where(mine_L < positions, mine_L - first, mine_L - positions - start + last - first)
        loss_rows = plan_loss_rows(index_L, target_R[mine_L], weight_R[mine_L], rule.loss_chunk)
        charged_L = torch.from_numpy(mine_L)
        chunks.append(Chunk(first=first, last=last, start=start, stop=stop, loss_rows=loss_rows, charged_L=charged_L))
    # A pack that is one chunk by chance stays as it is: a shape that few packs have is not worth capturing.
    one_shape = rule.fixed and layout.chunks == len(chunks) == 1
    filled = _filled(chunks[0], layout, rule, len(anchor_R)) if one_shape else None
    return Plan(
        chunks=tuple(chunks) if filled is None else (filled,),
        weight=float(weight_R.sum(dtype=np.float64)),
        charged_rows=len(charged_R),
        targets=len(np.unique(target_R[charged_R])),
        fixed=filled is not None,
    )


def _filled(chunk: Chunk, layout: RowLayout, rule: PlanRule, rows: int) -> Chunk | None:
    """The chunk with as many charged rows as any pack may have; None if too many targets meet in one slab."""
    most = layout.max_supervised + layout.mask_rows
    slabs = -(-most // rule.loss_chunk)
    slab_rows = round_up(-(-most // slabs), ROW_BLOCK)
    usual_targets = slab_rows * layout.max_supervised / most
    targets = min(slab_rows, round_up(int(_TARGET_MARGIN * usual_targets) + 1, ROW_BLOCK))
    loss_rows = fixed_loss_rows(chunk.loss_rows, slabs, slab_rows, targets)
    if loss_rows is None:
        return None
    padding = (0, slabs * slab_rows - len(chunk.charged_L))
    return replace(chunk, loss_rows=loss_rows, charged_L=F.pad(chunk.charged_L, padding, value=rows))


def _spans(anchor_M: IntArray, layout: RowLayout, rule: PlanRule) -> list[tuple[int, int, int, int, int]]:
    """(first, last, start, stop, first charged position) of each chunk."""
    positions = layout.positions
    if rule.partition == "prefix-once":
        size = layout.chunk_size
        starts = [c * size for c in range(layout.chunks) if c == 0 or (size and anchor_M[c * size] >= 0)]
        cuts = [0, *(int(anchor_M[start]) for start in starts[1:]), positions]
        return [(cuts[c], cuts[c + 1], start, start + size, cuts[c]) for c, start in enumerate(starts)]
    if rule.partition != "algorithm1" or rule.segments == 1:  # one segment with its padding: the same in every pack
        return [(0, positions, 0, len(anchor_M), 0)]
    ends = [positions * (s + 1) // rule.segments for s in range(rule.segments)]
    anchor_M = anchor_M[anchor_M >= 0]
    # Segment of a chain: that of the position after its anchor.
    stops = np.searchsorted(anchor_M + 1, ends)
    return [
        (0, end, int(stops[s - 1]) if s else 0, int(stops[s]), ends[s - 1] if s else 0) for s, end in enumerate(ends)
    ]
