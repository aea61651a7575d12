"""An engine without a model: it runs a real `Scheduler` and `BlockPool` and keeps what the KV cache would hold.

The device writes at once, in launch order; the host reads `depth` steps later. A cell of the cache holds what its two
halves depend on: (all tokens up to its position, those and the next one). The drafter's is None if it was left out.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass

from peagle.engine.block_pool import BlockPool
from peagle.engine.request import Request
from peagle.engine.scheduler import Chunk, Schedule, Scheduler
from peagle.engine.sizes import EngineSizes
from peagle.sampling import SamplingParams

VOCAB = 5


def next_token(ids: list[int]) -> int:
    """The one token that may follow `ids`."""
    return random.Random(str(ids)).randrange(VOCAB)


def expected_output(request: Request) -> list[int]:
    """What a request emits when nothing disturbs it."""
    ids = list(request.prompt_ids)
    while len(ids) < len(request.prompt_ids) + request.max_tokens:
        ids.append(next_token(ids))
        if ids[-1] in request.stop_ids:
            break
    return ids[len(request.prompt_ids) :]


def make_request(index: int, prompt_ids: list[int], max_tokens: int, stop_ids: frozenset[int] = frozenset()) -> Request:
    return Request(
        index=index,
        prompt="",
        prompt_ids=prompt_ids,
        params=SamplingParams(),
        seed=0,
        stop_ids=stop_ids,
        max_tokens=max_tokens,
    )


@dataclass
class Launched:
    request: Request
    tokens: list[int]
    rows: int  # of a decode; 0 for a prompt


class SimulatedEngine:
    """Runs requests through a scheduler and checks everything it hands out."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_drafts: tuple[int, ...] = (3,),
        depth: int = 1,
        prefix_caching: bool = True,
        shares_answers: bool = True,
        seed: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching)
        self.sizes = EngineSizes(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        self.shares_answers = shares_answers
        self.scheduler = Scheduler(self.pool, self.sizes, shares_answers=shares_answers)
        self.block_size, self.max_model_len, self.max_num_seqs = block_size, max_model_len, max_num_seqs
        self.max_num_batched_tokens, self.num_drafts, self.depth = max_num_batched_tokens, num_drafts, depth
        self.rng = random.Random(seed)
        self.cells: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...] | None] | None] = {}
        self.decoded: set[tuple[int, int]] = set()  # cells that are computed in decoding's form
        self.device_ids: dict[int, list[int]] = {}  # by slot: all tokens the device has emitted
        self.unread: deque[list[Launched]] = deque()
        self.num_matched = self.num_drains = 0

    def add(self, request: Request) -> bool:
        """Queue a request, unless it could never fit."""
        positions = len(request.prompt_ids) + request.max_tokens + 2 * max(self.num_drafts) + 1
        if self.sizes.blocks_for(positions) > self.pool.num_blocks:
            return False
        self.scheduler.add(request)
        return True

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.scheduler.abort(request)

    def step(self) -> Schedule:
        num_drafts = self.rng.choice(self.num_drafts)
        schedule = self._schedule(num_drafts)
        if schedule.must_drain:
            assert any(request.in_flight for request in self.scheduler.running)
            assert not schedule.chunks + schedule.decodes + schedule.admitted
            self.num_drains += 1
            self._read(0)
            schedule = self._schedule(num_drafts)
            assert not schedule.must_drain
        self._check(schedule, num_drafts)
        launched = [self._decode(request, num_drafts) for request in schedule.decodes]
        launched += [work for chunk in schedule.chunks if (work := self._prefill(chunk, num_drafts))]
        self.unread.append(launched)
        self._read(self.depth if launched or schedule.chunks else 0)
        return schedule

    def run(self, max_steps: int = 5000) -> int:
        """Step to the end; how many steps that took."""
        steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            steps += 1
            assert steps < max_steps, "no end"
        return steps

    def check_all_free(self) -> None:
        assert self.pool.num_free == self.pool.num_blocks
        assert self.pool.usage == 0
        assert not any(self.pool._references)
        assert sorted(self.scheduler._free_slots) == list(range(self.max_num_seqs))

    def _schedule(self, num_drafts: int) -> Schedule:
        """Ask the scheduler; whoever had something in flight must still be running."""
        unread = [request for request in self.scheduler.running if request.in_flight]
        schedule = self.scheduler.schedule(num_drafts)
        assert all(request.slot >= 0 for request in unread)
        return schedule

    # ---- what a schedule must hold ----

    def _check(self, schedule: Schedule, num_drafts: int) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        arrivals = [request.arrival for request in (*running, *waiting)]
        assert arrivals == sorted(arrivals)
        assert len({request.slot for request in running}) == len(running) <= self.max_num_seqs
        assert all(0 <= request.slot < self.max_num_seqs for request in running)
        assert all(request.slot == -1 and not request.blocks for request in waiting)
        self._check_owners()
        for request in schedule.decodes:
            reach = request.num_computed + request.rows_in_flight + 2 * num_drafts + 1
            assert len(request.blocks) * self.block_size >= min(reach, self.max_model_len)
            assert len(request.output_ids) + request.in_flight < request.max_tokens
        for request in schedule.admitted:
            self._check_match(request)
        self._check_progress(schedule, num_drafts)

    def _check_owners(self) -> None:
        owners: dict[int, list[tuple[int, Request]]] = {}
        for request in self.scheduler.running:
            for i, block in enumerate(request.blocks):
                owners.setdefault(block, []).append((i, request))
        counts = Counter({block: len(held) for block, held in owners.items()})
        assert counts == Counter({block: n for block, n in enumerate(self.pool._references) if n})
        assert all(1 <= block <= self.pool.num_blocks for block in owners)
        assert self.pool.num_free == self.pool.num_blocks - len(owners)
        for held in owners.values():
            end = (held[0][0] + 1) * self.block_size
            assert len({(i, *request.token_ids[: end + 1]) for i, request in held}) == 1
            assert len(held) == 1 or all(request.num_computed >= end for _, request in held)

    def _check_match(self, request: Request) -> None:
        """Prefix caching gave whole blocks, each cell of them exact for target and drafter."""
        assert request.num_computed % self.block_size == 0
        assert request.num_computed < request.num_prefill == len(request.token_ids)
        self.num_matched += request.num_computed
        for position in range(request.num_computed):
            ids = request.token_ids
            assert self._cell(request, position) == (tuple(ids[: position + 1]), tuple(ids[: position + 2]))
            self._check_form(request, position)

    def _check_progress(self, schedule: Schedule, num_drafts: int) -> None:
        """The oldest advances, whatever can decode does, and prompts get their share of the rows."""
        running = self.scheduler.running
        busy = {id(request) for request in schedule.decodes} | {id(chunk.request) for chunk in schedule.chunks}
        assert running or not self.scheduler.waiting
        if running:
            assert id(running[0]) in busy or running[0].in_flight
        for request in running:
            assert request.in_prefill or id(request) in busy or request.in_flight
        in_prefill = [request for request in running if request.in_prefill]
        assert [chunk.request for chunk in schedule.chunks] == in_prefill[: len(schedule.chunks)]
        rows = sum(chunk.num_rows for chunk in schedule.chunks)
        left = self.max_num_batched_tokens - (num_drafts + 1) * len(schedule.decodes)
        budget = max(left, min(self.block_size, self.max_num_batched_tokens))
        assert rows <= budget
        if self.shares_answers:
            assert not any(chunk.decoded for chunk in schedule.chunks)
            assert rows == min(budget, sum(r.num_prefill - r.num_computed for r in in_prefill))
            return
        assert rows == budget or len(schedule.chunks) == len(in_prefill)
        for chunk in schedule.chunks:
            left = len(chunk.request.prompt_ids) - chunk.first
            assert chunk.decoded == (left <= 0)
            assert chunk.num_rows & (chunk.num_rows - 1) == 0 if chunk.decoded else chunk.num_rows <= left

    # ---- the device ----

    def _cell(self, request: Request, position: int):
        return self.cells.get((request.blocks[position // self.block_size], position % self.block_size))

    def _write(self, request: Request, position: int, value) -> None:
        if position < self.max_model_len:
            self.cells[request.blocks[position // self.block_size], position % self.block_size] = value

    def _check_form(self, request: Request, position: int) -> None:
        """Where the forms are not the same, a prompt was computed as one, and an answer as it was decoded."""
        key = request.blocks[position // self.block_size], position % self.block_size
        assert self.shares_answers or (key in self.decoded) == (position >= len(request.prompt_ids))

    def _check_read(self, request: Request, ids: list[int], end: int) -> None:
        for position in range(min(end, self.max_model_len)):
            cell = self._cell(request, position)
            assert cell is not None
            assert cell[0] == tuple(ids[: position + 1])
            assert cell[1] in (tuple(ids[: position + 2]), None)
            assert cell[1] is not None or not request.cacheable
            self._check_form(request, position)

    def _prefill(self, chunk: Chunk, num_drafts: int) -> Launched | None:
        request, end = chunk.request, chunk.first + chunk.num_rows
        assert chunk.num_rows > 0
        assert chunk.first == request.num_computed
        assert chunk.is_last == (end == request.num_prefill)
        ids = list(request.token_ids)
        self._check_read(request, ids, chunk.first)
        if chunk.is_last:
            ids.append(next_token(ids))
            self.device_ids[request.slot] = ids
        self._write_rows(request, ids, chunk.first, end, num_drafts, decoded=chunk.decoded)
        request.num_computed = end
        self._launched(request, num_drafts)
        self.scheduler.computed(request)
        if not chunk.is_last:
            return None
        request.in_flight += 1
        return Launched(request, ids[-1:], 0)

    def _decode(self, request: Request, num_drafts: int) -> Launched:
        ids = self.device_ids[request.slot]
        first, accepted = len(ids) - 1, self.rng.randint(0, num_drafts)
        self._check_read(request, ids, first)
        for _ in range(accepted + 1):
            ids.append(next_token(ids))
        self._write_rows(request, ids, first, first + accepted + 1, num_drafts, decoded=True)
        for position in range(first + accepted + 1, first + 2 * num_drafts + 1):
            self._write(request, position, None)  # rejected drafts and mask rows
        request.in_flight += 1
        request.rows_in_flight += num_drafts + 1
        self._launched(request, num_drafts)
        return Launched(request, ids[first + 1 :], num_drafts + 1)

    def _write_rows(
        self, request: Request, ids: list[int], first: int, end: int, num_drafts: int, *, decoded: bool
    ) -> None:
        has_drafter = max(self.num_drafts) > 0
        for position in range(first, end):
            draft = None if has_drafter and num_drafts == 0 else tuple(ids[: position + 2])
            self._write(request, position, (tuple(ids[: position + 1]), draft))
            if position < self.max_model_len:
                key = request.blocks[position // self.block_size], position % self.block_size
                (self.decoded.add if decoded else self.decoded.discard)(key)

    def _launched(self, request: Request, num_drafts: int) -> None:
        request.cacheable &= num_drafts > 0 or max(self.num_drafts) == 0

    # ---- the host ----

    def _read(self, depth: int) -> None:
        while len(self.unread) > depth:
            for work in self.unread.popleft():
                if work.request.finish_reason is None:
                    self._advance(work)

    def _advance(self, work: Launched) -> None:
        request = work.request
        request.in_flight -= 1
        request.rows_in_flight -= work.rows
        request.num_computed += len(work.tokens) if work.rows else 0
        request.emit(work.tokens)
        if request.finish_reason is None:
            self.scheduler.computed(request)
        else:
            self.scheduler.finish(request)
