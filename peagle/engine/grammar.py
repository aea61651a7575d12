"""Requests whose text must follow a grammar: the masks of their rows, made by the host before each of their steps.

Row v of a verification may say what the grammar allows after the output and drafts 0..v-1. The target's own token is
picked under that mask, so a draft that the grammar forbids is never accepted, and the output is the same with drafts
and without. The price: such a step cannot start before the host has read the one before it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from peagle.engine.request import Request
from peagle.engine.slots import SlotState
from peagle.structured.matcher import Matcher


def fill_rows(matcher: Matcher, drafts: Sequence[int], rows_RW: np.ndarray) -> int:
    """Fill the masks of a request's rows, row v after `drafts[:v]`; how many drafts the grammar allows.

    Rows after the first forbidden draft stay as they are: nothing of them can be accepted.
    """
    allowed = 0
    matcher.fill(rows_RW[0])
    for draft in drafts:
        is_set = int(rows_RW[allowed, draft // 32]) >> (draft % 32) & 1
        if not is_set or not matcher.accept(draft):
            break
        allowed += 1
        matcher.fill(rows_RW[allowed])
    matcher.rollback(allowed)
    return allowed


def must_wait(running: Sequence[Request]) -> bool:
    """Whether what is in flight decides about the masks of the next step."""
    return any(request.matcher is not None and request.in_flight for request in running)


def write_masks(state: SlotState, requests: Sequence[Request], num_drafts: int) -> dict[Request, int]:
    """Put the masks of the next pass on the device; how many of its drafts each structured request proposes.

    Everything launched for these requests must have been read.
    """
    structured = [request for request in requests if request.matcher is not None]
    if not structured:
        return {}
    masks = state.needed_masks
    bits_NRW = torch.full((len(structured), num_drafts + 1, masks.bits_SRW.shape[2]), -1, dtype=torch.int32)
    proposed = {
        request: fill_rows(request.matcher, request.drafts[:num_drafts], rows_RW)
        for request, rows_RW in zip(structured, bits_NRW.numpy(), strict=True)
        if request.matcher is not None
    }
    masks.write([request.slot for request in structured], bits_NRW)
    return proposed
