"""Continuous batching: which requests decode in the next step, and which prompt rows are computed beside them."""

from collections import deque
from dataclasses import dataclass

from peagle.engine.block_pool import BlockPool
from peagle.engine.request import Request
from peagle.engine.sizes import EngineSizes

_MOST_DECODED = 64  # rows of a chunk of an answer


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `first` .. `first + num_rows - 1` of `request.token_ids`, to be computed by the prefill pass.

    With `is_last` prefill ends with this chunk, and its last row samples. `decoded`: of an answer, to be computed in
    the form in which it was decoded.
    """

    request: Request
    first: int
    num_rows: int
    is_last: bool
    decoded: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work. `admitted` are those in `chunks` that have just got their slot and blocks.

    With `must_drain` there is no work: read every result in flight, then schedule again.
    """

    chunks: list[Chunk]
    decodes: list[Request]
    admitted: list[Request]
    must_drain: bool = False


class Scheduler:
    """First come, first served. Every running request past its prompt decodes in every step; prompts get the rest.

    `running` and `waiting` are both in the order of arrival, and whatever waits arrived after whatever runs: without
    memory the youngest running request goes back to the front of the queue, to be computed again later, so the oldest
    always advances. The caller counts what it launches: it moves `num_computed`, `in_flight` and `rows_in_flight`.
    """

    def __init__(self, pool: BlockPool, sizes: EngineSizes, *, shares_answers: bool = True) -> None:
        """`shares_answers`: what was decoded is as good as what a prompt's passes compute. Later requests find it, and
        a preempted request's answer is computed again as if it were of its prompt."""
        self.pool, self._sizes, self._shares_answers = pool, sizes, shares_answers
        self._block_size = sizes.block_size
        self._free_slots = list(range(sizes.max_num_seqs - 1, -1, -1))
        self._num_added = 0
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up in the cache, and found there
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._expect_fit()

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.arrival = self._num_added
        self._num_added += 1
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a running request out and free its slot and blocks at once; what is complete of it can be found.

        A step in flight may still write to them; that is harmless, for whoever gets them next writes after it.
        """
        self.computed(request)
        self.running.remove(request)
        self._free(request)

    def abort(self, request: Request) -> None:
        """Take a request out wherever it is; one that is neither running nor waiting is left alone."""
        if request.slot >= 0:
            self.finish(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._expect_fit()

    def computed(self, request: Request) -> None:
        """Let later requests find the blocks that are complete by now; call it whenever `num_computed` has moved."""
        count = min(request.num_computed, len(self._findable(request)))
        # Most calls end here: a block fills only every few steps.
        if count < (request.num_registered + 1) * self._block_size:
            return
        if request.cacheable and request.slot >= 0:
            known = request.num_registered
            request.num_registered = self.pool.register(request.token_ids, request.blocks, count, known)

    def schedule(self, num_drafts: int, most_drafts: int | None = None) -> Schedule:
        """The next step: decodes of 1 + `num_drafts` rows each, then chunks of prompts.

        Whoever is admitted has room for `most_drafts`, if more: K may have grown when its prompt ends.
        """
        decodes, prefills, growth = self._sort_running(num_drafts)
        while (fresh := self.pool.allocate(sum(count for _, count in growth))) is None:
            if any(request.in_flight for request in self.running):
                return Schedule([], [], [], must_drain=True)
            self._preempt(self.running.pop())
            decodes, prefills, growth = self._sort_running(num_drafts)
        for request, count in growth:
            request.blocks.extend(fresh[:count])
            del fresh[:count]
        most = self._sizes.max_num_batched_tokens
        budget = max(most - (1 + num_drafts) * len(decodes), min(self._block_size, most))
        chunks: list[Chunk] = []
        for request in prefills:
            budget -= self._take_chunk(request, budget, chunks)
        num_running = len(self.running)
        while budget > 0 and self.waiting and self._admit(self.waiting[0], most_drafts or num_drafts):
            self.running.append(self.waiting.popleft())
            budget -= self._take_chunk(self.running[-1], budget, chunks)
        return Schedule(chunks, decodes, self.running[num_running:])

    def _sort_running(self, num_drafts: int) -> tuple[list[Request], list[Request], list[tuple[Request, int]]]:
        """The requests that decode, those in prefill, and how many blocks some decodes lack for what they may write.

        A step writes up to 2K positions beyond its first; that one is `rows_in_flight` further than known at most.
        """
        block_size, reach = self._block_size, 2 * num_drafts + 1
        decodes: list[Request] = []
        prefills: list[Request] = []
        growth: list[tuple[Request, int]] = []
        for request in self.running:
            if request.num_computed < request.num_prefill:
                prefills.append(request)
            elif len(request.output_ids) + request.in_flight < request.max_tokens:  # else what is in flight ends it
                decodes.append(request)
                positions = request.num_computed + request.rows_in_flight + reach
                if positions > len(request.blocks) * block_size:
                    missing = self._sizes.blocks_for(positions) - len(request.blocks)
                    if missing > 0:
                        growth.append((request, missing))
        return decodes, prefills, growth

    def _admit(self, request: Request, num_drafts: int) -> bool:
        """Give a request a slot and blocks for its whole prefill and the step after it, or nothing.

        One block for each running request stays free, lest a newcomer be computed only to be preempted in the next
        steps. With nothing running, every request fits.
        """
        if not self._free_slots or not self._may_fit():
            return False
        pool, spare, before = self.pool, len(self.running), self.pool.num_free
        may_match = request.prompt_logprobs is None  # else every row of the prompt is to be computed
        matched = pool.match(self._findable(request)) if may_match else []
        count = self._sizes.blocks_for(len(request.token_ids) + 2 * num_drafts + 1) - len(matched)
        fresh = pool.allocate(count) if count + spare <= pool.num_free else None
        if fresh is None:
            longer = pool.next_key(self._findable(request), matched) if may_match else None
            self._expect_fit(count + before - pool.num_free, longer)
            pool.release(matched)
            return False
        self._expect_fit()
        if pool.prefix_caching and may_match and not request.started:  # what comes back finds its own blocks: no hit
            request.num_cached = len(matched) * self._block_size
            self.prefix_queries += len(request.token_ids)
            self.prefix_hits += request.num_cached
        request.slot, request.blocks = self._free_slots.pop(), matched + fresh
        request.num_prefill, request.num_registered = len(request.token_ids), len(matched)
        request.num_computed = len(matched) * self._block_size
        return True

    def _findable(self, request: Request) -> list[int]:
        """The tokens whose keys one request may have of another."""
        return request.token_ids if self._shares_answers else request.prompt_ids

    def _may_fit(self) -> bool:
        """Whether matching the head of the queue again, which takes as long as its prompt, could end otherwise."""
        return self.pool.num_free - len(self.running) >= self._lacks or self.pool.can_find(self._lacks_key)

    def _expect_fit(self, lacks: int = 0, key: bytes | None = None) -> None:
        """Try the head of the queue again with `lacks` free blocks, or when the block `key` is there to share."""
        self._lacks, self._lacks_key = lacks, key

    def _preempt(self, request: Request) -> None:
        """Put a request with nothing in flight back to the front of the queue."""
        self._free(request)
        request.num_computed = request.num_prefill = request.num_registered = 0
        request.cacheable = True  # what it left out is computed again
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        self._expect_fit()

    def _free(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_slots.append(request.slot)
        request.slot, request.blocks = -1, []

    def _take_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Append the next chunk of a request's prefill, at most `budget` rows; returns how many."""
        left = request.num_prefill - request.num_computed
        rows, of_prompt = min(left, budget), len(request.prompt_ids) - request.num_computed
        decoded = not self._shares_answers and of_prompt <= 0
        if not self._shares_answers and rows > 0:  # each number of decoded rows has a kernel of its own: powers of two
            rows = min(1 << rows.bit_length() - 1, _MOST_DECODED) if decoded else min(rows, of_prompt)
        if rows > 0:
            chunks.append(Chunk(request, request.num_computed, rows, rows == left, decoded))
        return rows
