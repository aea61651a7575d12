"""Masks of structured requests: which tokens a grammar allows in each of a request's rows.

They lie on the device, a bit for each token, one line for every row of every slot, so that a captured step finds them
where it expects them. Suffixes: S slots, R rows of a slot, N slots written, B requests, U logit rows, V tokens of the
vocabulary, W words of 32 tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton


class TokenMasks:
    """The masks of all slots. A slot that nobody wrote, and padding's, allows every token.

    Make it when the first request with a grammar comes: it takes `num_bytes` of device memory.
    """

    def __init__(self, num_slots: int, num_rows: int, vocab_size: int, device: torch.device) -> None:
        shape = (num_slots + 1, num_rows, num_words(vocab_size))
        self.bits_SRW = torch.full(shape, -1, dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(num_slots: int, num_rows: int, vocab_size: int) -> int:
        """Device memory that the masks take."""
        return (num_slots + 1) * num_rows * num_words(vocab_size) * 4

    def clear(self, slot_B: Tensor) -> None:
        """Allow these slots everything: whoever had them before may have had a grammar."""
        self.bits_SRW.index_fill_(0, slot_B, -1)

    def write(self, slots: Sequence[int], bits_NRW: Tensor) -> None:
        """Set the first rows of slots, from the host; waits for nothing on the device."""
        slot_N = torch.tensor(slots, dtype=torch.int64)
        if self.bits_SRW.device.type == "cuda":
            slot_N, bits_NRW = (
                t.pin_memory().to(self.bits_SRW.device, non_blocking=True) for t in (slot_N, bits_NRW)
            )  # fmt: skip
        self.bits_SRW[:, : bits_NRW.shape[1]].index_copy_(0, slot_N, bits_NRW)

    def apply(self, logits_UV: Tensor, slot_B: Tensor, *, backend: str = "auto") -> Tensor:
        """The logits with -inf for every forbidden token; `logits_UV` stays as it is.

        Rows are those of the requests in turn, as many for each; row j of a request obeys line j of its slot. Rows of
        slot -1, padding, keep their values. `backend` "auto" is Triton on CUDA.
        """
        form = apply_masks_ref
        if use_triton(backend, logits_UV.device):
            from peagle.kernels.token_masks_triton import apply_masks_triton as form
        return form(self.bits_SRW, logits_UV, slot_B)


def num_words(vocab_size: int) -> int:
    """W: 32-bit words that hold a bit for each token."""
    return -(-vocab_size // 32)


def apply_masks_ref(bits_SRW: Tensor, logits_UV: Tensor, slot_B: Tensor) -> Tensor:
    """The torch form of `TokenMasks.apply`."""
    rows = len(logits_UV) // max(len(slot_B), 1)
    bits_UW = bits_SRW[slot_B, :rows].flatten(0, 1)  # slot -1 is the last line, which allows everything
    bit_32 = torch.arange(32, dtype=torch.int32, device=bits_UW.device)
    allowed_UV = ((bits_UW[:, :, None] >> bit_32) & 1).flatten(1)[:, : logits_UV.shape[1]]
    return logits_UV.masked_fill(allowed_UV == 0, -torch.inf)
