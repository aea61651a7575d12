"""Penalties and logit bias of the target's rows, from what each request has said so far, its drafts included.

The history of a request is two rows of device tables: which tokens its prompt holds, and how often it emitted each.
Row j of a verification sees drafts 0..j-1 as if they were emitted, so that speculation changes no token. Applying and
adding are device work of static shapes: both can be captured in a CUDA graph. Suffixes: S slots, B requests, U rows,
K drafts, V tokens of the vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.sampling import SamplingParams


class TokenHistory:
    """What each slot has said, and what its request's penalties and bias make of that.

    Make it when the first request comes that needs it: it takes `num_bytes` of device memory. Slots that nobody
    started, among them one more at the end for padding, leave logits as they are. The bias is a dense table: one read
    beside the count's, and no limit on the number of entries.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        rows = (num_slots + 1, vocab_size)
        self.prompt_SV = torch.zeros(rows, dtype=torch.bool, device=device)
        self.counts_SV = torch.zeros(rows, dtype=torch.int32, device=device)
        self.bias_SV = torch.zeros(rows, dtype=torch.float32, device=device)
        # repetition, frequency, presence, and 1 where the slot's row of the bias is to be read
        self.factors_S4 = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(num_slots + 1, 1).to(device)
        self._changed: set[int] = set()  # slots with other factors than these

    @staticmethod
    def num_bytes(num_slots: int, vocab_size: int) -> int:
        """Device memory that a history takes."""
        return (num_slots + 1) * (9 * vocab_size + 16)

    def start(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Give a slot to a request, `output_ids` where it emitted tokens before. Waits for nothing on the device.

        Also for requests without penalties: the slot may hold those of the request before.
        """
        if not params.penalised and slot not in self._changed:
            return
        self._changed.add(slot)
        bias = params.logit_bias or {}
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty, float(bool(bias)))
        self.factors_S4[slot] = self._upload(factors, torch.float32)
        if not params.penalised:
            self._changed.remove(slot)
            return
        self.prompt_SV[slot].zero_().index_fill_(0, self._upload(prompt_ids, torch.int64), True)
        output_O = self._upload(output_ids, torch.int64)
        self.counts_SV[slot].zero_().scatter_add_(0, output_O, torch.ones_like(output_O, dtype=torch.int32))
        if bias:
            tokens, values = self._upload(list(bias), torch.int64), self._upload(list(bias.values()), torch.float32)
            self.bias_SV[slot].zero_().scatter_(0, tokens, values)

    def apply(self, logits_UV: Tensor, slot_B: Tensor, drafts_BK: Tensor, *, backend: str = "auto") -> Tensor:
        """The logits, float32 [U, V], after bias and penalties; `logits_UV` stays as it is.

        Row b * (K + 1) + j belongs to request b and sees its drafts 0..j-1; K may be 0. A draft of -1 is none, and rows
        of slot -1, padding, keep their values. `backend` "auto" is Triton on CUDA.
        """
        form = penalise_ref
        if use_triton(backend, logits_UV.device):
            from peagle.kernels.penalties_triton import penalise_triton as form
        return form(self, logits_UV, slot_B, drafts_BK)

    def add(self, slot_B: Tensor, emitted_BV: Tensor) -> None:
        """Count emitted tokens [B, up to K+1]; tokens of -1 and those of slot -1, padding, are not counted."""
        vocab = self.counts_SV.shape[1]
        counted_BV = (emitted_BV >= 0) & (slot_B >= 0)[:, None]
        cell_BV = (slot_B[:, None] * vocab + emitted_BV).masked_fill(~counted_BV, 0)
        self.counts_SV.view(-1).scatter_add_(0, cell_BV.flatten(), counted_BV.flatten().to(torch.int32))

    def _upload(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Values as a device tensor; the copy from pinned memory is queued, not waited for."""
        host = torch.tensor(values, dtype=dtype)
        device = self.counts_SV.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def penalise_ref(history: TokenHistory, logits_UV: Tensor, slot_B: Tensor, drafts_BK: Tensor) -> Tensor:
    """The torch form of `TokenHistory.apply`."""
    rows, (batch, num_drafts) = drafts_BK.shape[1] + 1, drafts_BK.shape
    slot_B = torch.where(slot_B < 0, len(history.counts_SV) - 1, slot_B)
    slot_U = slot_B.repeat_interleave(rows, output_size=batch * rows)
    count_UV = history.counts_SV[slot_U]
    count_BJV = count_UV.view(batch, rows, -1)
    is_draft_BK = (drafts_BK >= 0).to(torch.int32)
    for i in range(num_drafts):
        later_BJ1 = (batch, num_drafts - i, 1)
        draft_BJ1 = drafts_BK[:, i].clamp(min=0)[:, None, None].expand(later_BJ1)
        count_BJV[:, i + 1 :].scatter_add_(2, draft_BJ1, is_draft_BK[:, i][:, None, None].expand(later_BJ1))

    repetition_U1, frequency_U1, presence_U1, biased_U1 = history.factors_S4[slot_U].split(1, dim=1)
    bias_UV = history.bias_SV[slot_U]
    logits_UV = logits_UV.float()
    logits_UV = torch.where((biased_U1 != 0) & (bias_UV != 0), logits_UV + bias_UV, logits_UV)
    seen_UV = history.prompt_SV[slot_U] | (count_UV > 0)
    repeated_UV = torch.where(logits_UV > 0, logits_UV / repetition_U1, logits_UV * repetition_U1)
    logits_UV = torch.where(seen_UV, repeated_UV, logits_UV)
    return logits_UV - frequency_U1 * count_UV - presence_U1 * (count_UV > 0)
