"""First come, first served: which requests run in the next step, and with how many rows."""

from collections import deque
from dataclasses import dataclass

from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import Request


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step: `num_rows` prompt tokens, or 1 + K verify rows."""

    request: Request
    num_rows: int
    is_decode: bool


class Scheduler:
    """Admits requests while a slot and all the blocks they can ever need are free, so nothing is evicted later.

    Decodes go first; what is left of `max_num_batched_tokens` goes to prompts, in chunks where they do not fit.
    """

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, max_model_len: int
    ) -> None:
        self._pool = pool
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = block_size
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def blocks_needed(self, request: Request, reserve: int) -> int:
        """Blocks that hold a request to its end, with `reserve` positions beyond its last token."""
        positions = min(len(request.prompt_ids) + request.max_tokens + reserve, self._max_model_len)
        return -(-positions // self._block_size)

    def schedule(self, decode_rows: int, reserve: int) -> list[Scheduled]:
        """The next step's requests. `reserve` positions beyond the last token are kept for drafts."""
        decodes = [Scheduled(r, decode_rows, True) for r in self.running if not r.in_prompt]
        budget = max(self._max_num_batched_tokens - decode_rows * len(decodes), 0)
        prefills: list[Scheduled] = []
        for request in self.running:
            if request.in_prompt and budget > 0:
                budget -= self._take_chunk(request, budget, prefills)
        while budget > 0 and self.waiting and self._admit(self.waiting[0], reserve):
            request = self.waiting.popleft()
            self.running.append(request)
            budget -= self._take_chunk(request, budget, prefills)
        return decodes + prefills

    def release(self, request: Request) -> None:
        """Free what a finished or aborted request holds."""
        if request.slot >= 0:
            self._pool.release(request.blocks)
            self._free_slots.append(request.slot)
            request.slot, request.blocks = -1, []

    def drop_finished(self) -> None:
        """Release every request that has a finish reason."""
        for request in self.running:
            if request.finish_reason is not None:
                self.release(request)
        self.running = [r for r in self.running if r.finish_reason is None]

    def _take_chunk(self, request: Request, budget: int, prefills: list[Scheduled]) -> int:
        rows = min(len(request.prompt_ids) - request.num_computed, budget)
        prefills.append(Scheduled(request, rows, False))
        return rows

    def _admit(self, request: Request, reserve: int) -> bool:
        if not self._free_slots:
            return False
        blocks = self._pool.allocate(self.blocks_needed(request, reserve))
        if blocks is None:
            return False
        request.blocks, request.slot = blocks, self._free_slots.pop()
        return True
