"""What the device knows of every running request, one row per slot.

The host writes block tables and sampling parameters; how far a request has come, its last token and its drafts are
written by the steps themselves, so a step can start before the host has seen the one before it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from peagle.engine.request import Request
from peagle.engine.transfer import to_device
from peagle.errors import NoMemory, PeagleError
from peagle.kernels.penalties import TokenHistory
from peagle.kernels.token_masks import TokenMasks
from peagle.kernels.verify_rows import SlotRows
from peagle.sampling import RowSampling


class SamplingMode(NamedTuple):
    """What a step has to do beyond an argmax, for any of its requests, and what it shows: its graph depends on it."""

    drawn: bool = False  # a temperature above 0
    filtered: bool = False  # top-k, top-p or min-p
    penalised: bool = False  # penalties or bias
    masked: bool = False  # a grammar, whose masks need the drafts
    shows_drafts: bool = False
    scores: bool = False  # log-probabilities of what is emitted

    def includes(self, other: "SamplingMode") -> bool:
        """Whether a step of this mode does all that one of the other does."""
        return all(mine or not theirs for mine, theirs in zip(self, other, strict=True))

    def describe(self) -> str:
        """For a log."""
        return ", ".join(name for name, on in zip(self._fields, self, strict=True) if on) or "greedy"

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Self:
        """The mode of a batch."""
        requests = list(requests)
        params = [request.params for request in requests]
        drawn = [p for p in params if p.temperature > 0]
        masked = any(request.matcher is not None for request in requests)
        return cls(
            drawn=bool(drawn),
            filtered=any(p.filtered for p in drawn),
            penalised=any(p.penalised for p in params),
            masked=masked,
            shows_drafts=masked or any(p.show_drafts for p in params),
            scores=any(p.logprobs is not None for p in params),
        )


class SlotState:
    """Device tensors of S slots and, last, one row that all padding of a batch shares: slot -1."""

    def __init__(self, max_num_seqs: int, num_drafts: int, max_blocks: int, device: torch.device) -> None:
        rows, self._device = max_num_seqs + 1, device
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(rows, dtype=torch.int64, device=device)  # also the last token's position
        self.drafts = torch.zeros((rows, num_drafts), dtype=torch.int64, device=device)
        self.tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)  # 0 is the null block
        self.rows = SlotRows(self.last_token, self.num_computed, self.drafts, self.tables)
        self.host_tables = np.zeros((rows, max_blocks), dtype=np.int32)
        self._written = np.zeros(rows, dtype=np.int64)  # table entries of a slot that are on the device
        self._params = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._rates = torch.zeros((rows, 3), dtype=torch.float32, device=device)
        self.history: TokenHistory | None = None  # made for the first request with penalties or a bias
        self.masks: TokenMasks | None = None  # made for the first request with a grammar

    def admit(self, requests: Sequence[Request]) -> None:
        """Take over the slots of requests that begin, or begin again."""
        slots = np.array([r.slot for r in requests], dtype=np.int64)
        self.host_tables[slots] = 0
        self._written[slots] = 0
        params = [(r.seed, max(r.params.top_k, 0)) for r in requests]
        rates = [(r.params.temperature, r.params.top_p, r.params.min_p) for r in requests]
        slot_B, params_B2, rates_B3 = to_device(
            (slots, np.array(params, dtype=np.int64), np.array(rates, dtype=np.float32).view(np.int32)), self._device
        )
        self.tables.index_fill_(0, slot_B, 0)
        self._params.index_copy_(0, slot_B, params_B2)
        self._rates.index_copy_(0, slot_B, rates_B3.to(torch.int32).view(torch.float32))

        if self.masks is not None:
            self.masks.clear(slot_B)
        if self.history is not None:
            for request in requests:
                self.history.start(request.slot, request.params, request.prompt_ids, request.output_ids)

    @property
    def needed_history(self) -> TokenHistory:
        """The history, for a step that cannot do without; PeagleError before `keep_history`."""
        if self.history is None:
            raise PeagleError("a step with penalties needs their history: add requests that `LLM.make_request` made")
        return self.history

    def keep_history(self, vocab_size: int) -> None:
        """Prepare for penalties and bias. Raises PeagleError where there is no memory for it."""
        slots = len(self.last_token) - 1
        if self.history is None:
            with _named_if_short("penalties and logit_bias", TokenHistory.num_bytes(slots, vocab_size), slots):
                self.history = TokenHistory(slots, vocab_size, self._device)

    @property
    def needed_masks(self) -> TokenMasks:
        """The masks, for a step that cannot do without; PeagleError before `keep_masks`."""
        if self.masks is None:
            raise PeagleError("a step with a grammar needs its masks: add requests that `LLM.make_request` made")
        return self.masks

    def keep_masks(self, vocab_size: int) -> None:
        """Prepare for grammars. Raises PeagleError where there is no memory for it."""
        slots, rows = len(self.last_token) - 1, self.drafts.shape[1] + 1
        if self.masks is None:
            with _named_if_short("structured outputs", TokenMasks.num_bytes(slots, rows, vocab_size), slots):
                self.masks = TokenMasks(slots, rows, vocab_size, self._device)

    def extend_tables(self, requests: Sequence[Request]) -> None:
        """Put the blocks that requests got since the last call into their tables."""
        grown = [r for r in requests if len(r.blocks) > self._written[r.slot]]
        if not grown:
            return
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for request in grown:
            slot, first = request.slot, int(self._written[request.slot])
            new = request.blocks[first:]
            self.host_tables[slot, first : first + len(new)] = new
            rows += [slot] * len(new)
            columns += range(first, first + len(new))
            blocks += new
            self._written[slot] = len(request.blocks)
        at_E, block_E = to_device(
            (np.array(rows) * self.tables.shape[1] + np.array(columns), np.array(blocks)), self._device
        )
        self.tables.view(-1).index_copy_(0, at_E, block_E.to(torch.int32))

    @contextmanager
    def pretended(self, context: int, block_size: int, num_blocks: int) -> Iterator[None]:
        """Between requests: all slots look like requests that have come so far. They read what happens to be in the
        cache, and what they write goes to the null block."""
        slots, blocks = len(self.last_token) - 1, context // block_size
        self.host_tables[:slots, :blocks] = 1 + np.arange(slots * blocks).reshape(slots, blocks) % num_blocks
        self.host_tables[:slots, blocks:] = 0  # of the slots' last requests, whose blocks others may find
        self.tables.copy_(torch.from_numpy(self.host_tables))
        self.num_computed[:slots] = blocks * block_size
        try:
            yield
        finally:
            self.host_tables[:slots] = 0
            for part in self.rows:
                part.zero_()

    def row_sampling(self, slot_B: Tensor, index_B: Tensor, count: int, mode: SamplingMode) -> RowSampling | None:
        """Sampling parameters of `count` logit rows for each slot, of which the first draws the token at `index`; None
        when `mode` says that all are greedy."""
        if not mode.drawn:
            return None
        slot_U = slot_B.repeat_interleave(count)
        indices_U = (index_B[:, None] + torch.arange(count, device=index_B.device)).flatten()
        rates_U3, params_U2 = self._rates[slot_U], self._params[slot_U]
        return RowSampling(
            temperature=rates_U3[:, 0].contiguous(),
            top_k=params_U2[:, 1].contiguous(),
            top_p=rates_U3[:, 1].contiguous(),
            min_p=rates_U3[:, 2].contiguous(),
            seed=params_U2[:, 0].contiguous(),
            indices=indices_U,
            filtered=mode.filtered,
        )

    def seeds(self, slot_B: Tensor) -> Tensor:
        """The seeds of slots."""
        return self._params[slot_B, 0]


@contextmanager
def _named_if_short(what: str, size: int, slots: int) -> Iterator[None]:
    """Where memory is allocated: NoMemory with the remedy if there is none."""
    try:
        yield
    except RuntimeError as error:  # out of memory is one, on CPU and CUDA
        raise NoMemory(
            f"no memory for {what}, which take {size / 2**30:.2f} GiB for {slots} requests: lower "
            "gpu_memory_utilization or max_num_seqs, or leave them out"
        ) from error
