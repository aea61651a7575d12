"""Log-probabilities of chosen tokens and of the likeliest ones, without a sort of the vocabulary.

torch on every device: its `topk` selects, and everything here can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_PIECE = 2**24  # logits that are looked at together: 64 MiB of float32, held twice, whatever the number of rows


class RowLogprobs(NamedTuple):
    """Of R rows of logits: float32 log-probabilities, the chosen token's first, then the N highest in falling order;
    and the tokens these N belong to, int64."""

    values_RN1: Tensor
    top_ids_RN: Tensor


def rows_at_once(vocab_size: int) -> int:
    """How many rows of logits `row_logprobs` looks at together."""
    return max(1, _PIECE // vocab_size)


def scratch_bytes(rows: int, vocab_size: int, item: int) -> int:
    """Most memory that log-probabilities of so many rows take beside their logits, of `item` bytes, or with those where
    they too are made a few rows at a time."""
    return (8 + item) * min(rows, rows_at_once(vocab_size)) * vocab_size


def row_logprobs(logits_RV: Tensor, chosen_R: Tensor, count: int) -> RowLogprobs:
    """log_softmax of the rows at their chosen tokens and at the `count` likeliest, or at all where there are fewer."""
    rows = rows_at_once(logits_RV.shape[1])
    pairs = zip(logits_RV.split(rows), chosen_R.split(rows), strict=True)
    return join([_piece(logits, chosen, count) for logits, chosen in pairs])


def join(pieces: list[RowLogprobs]) -> RowLogprobs:
    """Rows after rows."""
    return RowLogprobs(torch.cat([p.values_RN1 for p in pieces]), torch.cat([p.top_ids_RN for p in pieces]))


def _piece(logits_RV: Tensor, chosen_R: Tensor, count: int) -> RowLogprobs:
    if logits_RV.dtype != torch.float64:
        logits_RV = logits_RV.float()
    top_RN, ids_RN = logits_RV.topk(min(count, logits_RV.shape[1]))
    picked_RN1 = torch.cat((logits_RV.gather(1, chosen_R[:, None]), top_RN), dim=1)
    return RowLogprobs((picked_RN1 - logits_RV.logsumexp(dim=1, keepdim=True)).float(), ids_RN)
