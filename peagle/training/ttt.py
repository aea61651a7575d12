"""The training-time test of EAGLE-3: the K drafter passes of one drafting round, for every position of a pack at once.

Pass d computes the rows (a, d) of all anchors a. Row (a, 0) pairs token x_{a+1} with fc(taps of token a), as when
serving; row (a, d) pairs the true token x_{a+d+1} with the pre-norm stream of row (a, d-1), because serving has no taps
for tokens it has only drafted. It sits at RoPE position a + d and sees the depth-0 rows of its document up to a and its
own chain (a, 1), ..., (a, d), so its keys are what the engine's cache would hold. A position costs K rows, all of
them run; those outside their document see nothing and are never charged.

P positions, N query heads, M key/value heads, D head size, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.errors import PeagleError
from peagle.kernels.range_attention import KeyRanges, range_attention
from peagle.models.layers import Attend
from peagle.training.attention import Backend, Window, document_starts
from peagle.training.rows import Rows


def ttt_hidden(
    drafter: Eagle3Drafter, input_ids_P: Tensor, taps_PC: Tensor, rows: Rows, num_depths: int, backend: Backend
) -> Tensor:
    """Final-normed hidden states of all rows, [K P, H]: row (a, d) is number d P + a. Differentiable.

    Of `rows` only the positions are read. Raises PeagleError for the backend "flex".
    """
    positions = len(input_ids_P)
    position_P, doc_P = rows.position_R[:positions], rows.doc_R[:positions]
    attention = _UnrolledAttention(doc_P, drafter.config.windows, backend)
    feature_PH = drafter.combine(taps_PC)
    # Looked up once: each look-up would have a gradient of the whole table's size.
    embeds_PH = drafter.embed_tokens(input_ids_P).to(feature_PH.dtype)
    hidden = []
    for depth in range(num_depths):
        # The last rows wrap around to tokens of no meaning: they are outside their documents.
        shifted_PH = embeds_PH.roll(-depth, dims=0)
        feature_PH = drafter.stream(shifted_PH, feature_PH, position_P + depth, attention.attend(depth))
        hidden.append(drafter.norm(feature_PH))
    return torch.cat(hidden)


class _UnrolledAttention:
    """The attention of every pass, and the keys and values the passes leave for those that follow."""

    def __init__(self, doc_P: Tensor, windows: Sequence[Window], backend: Backend) -> None:
        if backend == "flex":
            raise PeagleError("attention backend 'flex' cannot train an EAGLE-3 head: use 'kernel' or 'reference'")
        self._doc_P, self._windows = doc_P, tuple(windows)
        self._start_P = document_starts(doc_P)
        self._backend = "torch" if backend == "reference" else "triton"
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: keys and values of every pass so far

    def attend(self, depth: int) -> Attend:
        """The attention of pass `depth`; passes must run in order."""
        context = {window: self._context_ranges(depth, window) for window in set(self._windows)}
        chain = self._chain_ranges(depth) if depth else None

        def attend(layer: int, q_PND: Tensor, k_PMD: Tensor, v_PMD: Tensor) -> Tensor:
            kept = self._kept.setdefault(layer, [])
            if len(kept) == depth:  # else a checkpointed layer runs again, on its way back
                kept.append((k_PMD, v_PMD))
            source, *passes = kept[: depth + 1]
            ranges = context[self._windows[layer]]
            if not passes:
                return range_attention(q_PND, *source, ranges, backend=self._backend)
            # Chain by chain, [P, d, M, D], so that a row's keys are neighbours.
            chain_k, chain_v = (torch.stack(each, dim=1).flatten(0, 1) for each in zip(*passes, strict=True))
            return range_attention(q_PND, *source, ranges, chain_k, chain_v, chain, backend=self._backend)

        return attend

    def _inside(self, depth: int) -> Tensor:
        """Whether position a + depth exists and is in a's document, bool [P]."""
        doc_P = self._doc_P
        exists_P = torch.arange(len(doc_P), device=doc_P.device) + depth < len(doc_P)
        return exists_P & (doc_P.roll(-depth) == doc_P) & (doc_P >= 0)

    def _context_ranges(self, depth: int, window: Window) -> KeyRanges:
        hi_P = torch.arange(1, len(self._doc_P) + 1, device=self._doc_P.device)
        lo_P = self._start_P if window is None else torch.maximum(self._start_P, hi_P + depth - window)
        return _ranges(torch.minimum(lo_P, hi_P), hi_P, self._inside(depth))

    def _chain_ranges(self, depth: int) -> KeyRanges:
        lo_P = torch.arange(len(self._doc_P), device=self._doc_P.device) * depth
        return _ranges(lo_P, lo_P + depth, self._inside(depth))


def _ranges(lo_P: Tensor, hi_P: Tensor, real_P: Tensor) -> KeyRanges:
    """Ranges [lo, hi), empty where a row is not real."""
    return KeyRanges(torch.where(real_P, lo_P, hi_P).int(), hi_P.int())
