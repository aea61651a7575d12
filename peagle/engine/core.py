"""`EngineCore`: what turns requests into tokens. It owns scheduler, caches, slots and steps, and knows no text.

On CUDA the host runs one step behind the device: it launches step t + 1 before it reads what step t emitted. A request
that turns out to have finished in step t has then one step too many in flight, whose result is dropped.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peagle.engine.batch import HostShape, Rows
from peagle.engine.grammar import must_wait, write_masks
from peagle.engine.graphs import DecodeGraphs, GraphPool, bucket_sizes
from peagle.engine.outputs import StepOutput
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.prompt_rows import PromptShape
from peagle.engine.request import Request
from peagle.engine.scheduler import Chunk, Schedule, Scheduler
from peagle.engine.sizes import EngineSizes
from peagle.engine.slots import SamplingMode
from peagle.engine.speculation import FixedK, KPolicy
from peagle.engine.step import SpeculativeStep
from peagle.errors import PeagleError
from peagle.kernels.logprobs import RowLogprobs
from peagle.kernels.synthetic_acceptance import SyntheticLengths

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A pass whose output the host has not read: in pinned memory once `done`."""

    step: int
    lines: list[tuple[int, Request]]  # which line belongs to whom
    num_drafts: int | None  # None: prompts
    scored: list[tuple[Request, int, int]]  # whose prompt rows have log-probabilities: the first row, how many
    out: StepOutput
    done: torch.cuda.Event | None
    proposed: dict[Request, int] = field(default_factory=dict)  # drafts of requests whose grammar forbids the others


class EngineCore:
    """Runs requests to their end, one `step` at a time."""

    def __init__(
        self,
        step: SpeculativeStep,
        scheduler: Scheduler,
        num_drafts: int,
        *,
        sizes: EngineSizes,
        device: torch.device,
        kernels: str,
        graphs: bool,
        max_graphs: int,
        steps_ahead: int,
        has_drafter: bool,
        prompt_graphs: PromptGraphs | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        """`num_drafts` is K, until `policy` is replaced by another way to choose it, up to the same K.

        `steps_ahead` is how many steps may be launched and unread; `graphs`, at most `max_graphs`, need CUDA and
        kernels "triton"."""
        self.scheduler, self._speculative = scheduler, step
        self.policy: KPolicy = FixedK(num_drafts)
        self._state = step.state
        self.max_num_seqs, self.max_model_len, self._sizes = sizes.max_num_seqs, sizes.max_model_len, sizes
        self.context_remedy = sizes.context_remedy
        self._kernels, self._steps_ahead, self._has_drafter = kernels, steps_ahead, has_drafter
        self.device = device
        self._graphs = None
        if kernels == "triton":
            self._graphs = DecodeGraphs(
                self._verify, self.max_num_seqs, device, enabled=graphs, max_graphs=max_graphs, pool=pool
            )
        self._prompt_graphs = prompt_graphs
        self._launched: deque[_Launched] = deque()
        self._step = 0

    def keep_history(self, vocab_size: int) -> None:
        """Prepare for requests with penalties or a bias. Raises PeagleError where there is no memory for it."""
        self._state.keep_history(vocab_size)

    def keep_masks(self, vocab_size: int) -> None:
        """Prepare for requests with a grammar. Raises PeagleError where there is no memory for it."""
        self._state.keep_masks(vocab_size)

    @property
    def num_graphs(self) -> int:
        """How many steps and passes over prompts are captured."""
        return sum(graphs.num_captured for graphs in (self._graphs, self._prompt_graphs) if graphs is not None)

    @property
    def synthetic(self) -> SyntheticLengths | None:
        """What SYNTHETIC accept lengths are drawn from; None where drafts are verified."""
        return self._speculative.synthetic

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PeagleError for one that was queued before."""
        if request.arrival >= 0:
            raise PeagleError(f"request {request.index} was added before: make a new one for the same prompt")
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now; what is in flight for it is dropped."""
        request.finish_reason = request.finish_reason or "abort"
        request.ended = time.perf_counter()
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """End every request, and forget what is in flight."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        self._launched.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launch the next passes and read those that are due; the requests that got tokens, finished ones included."""
        with self._on_device():
            num_drafts = self._num_drafts()
            advanced = self._read(self._step) if must_wait(self.scheduler.running) else []
            schedule = self.scheduler.schedule(num_drafts, self.policy.max_drafts)
            if schedule.must_drain:
                advanced += self._read(self._step)
                schedule = self.scheduler.schedule(num_drafts, self.policy.max_drafts)
            self._step += 1
            self._launch(schedule, num_drafts)
            is_idle = not (schedule.chunks or schedule.decodes)
            return advanced + self._read(self._step - (0 if is_idle else self._steps_ahead))

    def _num_drafts(self) -> int:
        """K of the next step. A batch drafts together, so who wants no drafts gets none only when running alone."""
        running = self.scheduler.running
        if len(running) == 1 and not running[0].params.drafts:
            return 0
        return self.policy.choose(len(running), any(r.cacheable and not r.in_prefill for r in running))

    @torch.inference_mode()
    def run_padding(
        self, size: int, num_drafts: int, mode: SamplingMode | None = None, *, padding: bool = True
    ) -> None:
        """One decode step of a batch in which nobody is: compiles, captures, and can be timed. Without `padding` it is
        one of the first slots, which must be `pretended`."""
        slots = np.full(size, -1) if padding else np.arange(size)
        with self._on_device():
            self._run_decode(
                slots, num_drafts, mode or SamplingMode(), lambda: self._state.num_computed[slots].tolist()
            )

    @contextmanager
    @torch.inference_mode()
    def pretended(self, context: int) -> Iterator[None]:
        """In an engine without work: all slots look like requests that have so many tokens."""
        with self._on_device(), self._state.pretended(context, self._sizes.block_size, self.scheduler.pool.num_blocks):
            yield

    def warm_up(
        self, draft_counts: Sequence[int], modes: Sequence[SamplingMode] = (SamplingMode(),)
    ) -> Iterator[tuple[int, int]]:
        """Compile and capture decode steps of every size, so that no request waits for it; yields the size and K of
        each step before it runs, the largest first: smaller ones find its memory. The default mode is greedy."""
        for mode in sorted(modes, key=sum, reverse=True):
            self._prepare(mode)
            for num_drafts in sorted(draft_counts, reverse=True):
                for size in reversed(bucket_sizes(self.max_num_seqs)):
                    yield size, num_drafts
                    self.run_padding(size, num_drafts, mode)

    def modes_with_room(self, modes: Sequence[SamplingMode], num_counts: int) -> Sequence[SamplingMode]:
        """Of these modes the first ones, as many as there may be graphs for, of every size and `num_counts` K."""
        if self._graphs is None:
            return modes
        return modes[: max(1, self._graphs.max_graphs // (num_counts * len(bucket_sizes(self.max_num_seqs))))]

    def settle(self) -> None:
        """All that is common has been captured: steps of other modes run by these graphs, which do more than they
        have to, rather than make the requests of now wait for a capture."""
        for graphs in (self._graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.settle()

    @torch.inference_mode()
    def warm_up_prompts(self) -> Iterator[PromptShape]:
        """Capture the passes over prompts that may be; yields the shape of each before it runs."""
        if self._prompt_graphs is not None:
            with self._on_device():
                yield from self._prompt_graphs.warm_up()

    @torch.inference_mode()
    def warm_up_whole_prompts(self) -> Iterator[int]:
        """Plan attention of long prompts, where a library needs to; yields each length before its turn."""
        with self._on_device():
            yield from self._speculative.plan_whole()

    def _prepare(self, mode: SamplingMode) -> None:
        """Make what steps of a mode read."""
        if mode.penalised:
            self.keep_history(self._speculative.vocab_size)
        if mode.masked:
            self.keep_masks(self._speculative.vocab_size)

    def _on_device(self) -> AbstractContextManager[object]:
        """Streams, events and captures are those of the current device, which need not be this engine's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _launch(self, schedule: Schedule, num_drafts: int) -> None:
        if schedule.admitted:
            now = time.perf_counter()
            for request in schedule.admitted:
                request.started = request.started or now
            self._state.admit(schedule.admitted)
        self._state.extend_tables([*schedule.admitted, *schedule.decodes])
        if schedule.decodes:
            self._launch_decode(schedule.decodes, num_drafts)
        if schedule.chunks:
            for chunks in self._passes(schedule.chunks):
                self._launch_prompts(chunks, num_drafts)

    def _passes(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Chunks that are computed together."""
        passes, chunks = [[chunk] for chunk in chunks if chunk.decoded], [c for c in chunks if not c.decoded]
        if chunks and self._prompt_graphs is not None:
            return passes + self._prompt_graphs.split(chunks, SamplingMode.of(chunk.request for chunk in chunks))
        return [*passes, chunks] if chunks else passes

    def _launch_prompts(self, chunks: Sequence[Chunk], num_drafts: int) -> None:
        """Compute chunks of prompts; those that end one emit a token.

        Where a later step may draft, the drafter sees every prompt: what it has not seen it could never read.
        """
        num_drafts = max(num_drafts, min(self.policy.max_drafts, 1))
        lines = [(line, chunk.request) for line, chunk in enumerate(chunks) if chunk.is_last]
        write_masks(self._state, [request for _, request in lines], 0)
        out = self._run_prompts(chunks, num_drafts, SamplingMode.of(request for _, request in lines))
        scored = [(c.request, c.first, c.request.num_scored(c.first, c.num_rows)) for c in chunks]
        for chunk in chunks:
            request = chunk.request
            request.num_computed += chunk.num_rows
            request.in_flight += int(chunk.is_last)
            self._note_drafter(request, num_drafts)
            self.scheduler.computed(request)
        if lines or out.prompt_logprobs is not None:
            self._send(lines, None, out, scored)

    def _run_prompts(self, chunks: Sequence[Chunk], num_drafts: int, mode: SamplingMode) -> StepOutput:
        """A captured pass drafts as many tokens as any may: a step that verifies fewer passes the others over."""
        out = None if self._prompt_graphs is None else self._prompt_graphs.run(chunks, mode)
        if out is not None:
            return out
        return self._speculative.run(
            Rows.of_prompts(chunks, self._state, self._sizes, self._kernels), num_drafts, mode
        )  # fmt: skip

    def _launch_decode(self, requests: list[Request], num_drafts: int) -> None:
        """Verify, accept and draft for requests whose prompts are done."""
        slots = np.array([r.slot for r in requests], dtype=np.int64)
        mode, width = SamplingMode.of(requests), num_drafts + 1
        proposed = write_masks(self._state, requests, num_drafts)
        out = self._run_decode(slots, num_drafts, mode, lambda: [r.num_computed + r.rows_in_flight for r in requests])
        for request in requests:
            request.in_flight += 1
            request.rows_in_flight += width
            self._note_drafter(request, num_drafts)
        self._send(list(enumerate(requests)), num_drafts, out, proposed=proposed)

    def _run_decode(
        self, slots: np.ndarray, num_drafts: int, mode: SamplingMode, most_computed: Callable[[], list[int]]
    ) -> StepOutput:
        """`most_computed` says how far each request can be on the device, which only plans made by the host ask."""
        if self._graphs is not None:
            out = self._graphs.run(slots, num_drafts, mode)
            return out.only(drafts=mode.shows_drafts, logprobs=mode.scores)
        width = num_drafts + 1
        host = HostShape(
            np.full(len(slots), width), np.array(most_computed()) + width, self._state.host_tables[slots]
        )  # fmt: skip
        return self._verify(torch.from_numpy(slots).to(self.device), num_drafts, mode, host)

    def _verify(self, slot_B: Tensor, num_drafts: int, mode: SamplingMode, host: HostShape | None = None) -> StepOutput:
        rows = Rows.to_verify(self._state, slot_B, num_drafts, self._sizes, host, self._kernels)
        return self._speculative.run(rows, num_drafts, mode)

    def _note_drafter(self, request: Request, num_drafts: int) -> None:
        """Blocks with rows that the drafter never saw are of no use to a request that drafts."""
        request.cacheable &= num_drafts > 0 or not self._has_drafter

    def _send(
        self,
        lines: list[tuple[int, Request]],
        num_drafts: int | None,
        out: StepOutput,
        scored: list[tuple[Request, int, int]] | None = None,
        proposed: dict[Request, int] | None = None,
    ) -> None:
        """Send what a pass emitted and shows on its way to the host."""
        done = None
        if self.device.type == "cuda":
            out = out.each(_to_pinned)
            done = torch.cuda.Event()
            done.record()
        launched = _Launched(self._step, lines, num_drafts, scored or [], out, done, proposed or {})
        self._launched.append(launched)

    def _read(self, through_step: int) -> list[Request]:
        """Hand requests their tokens of all passes up to a step; the requests that got some."""
        advanced: list[Request] = []
        while self._launched and self._launched[0].step <= through_step:
            launched = self._launched.popleft()
            if launched.done is not None:
                launched.done.synchronize()
            if launched.out.prompt_logprobs is not None:
                _score_prompts(launched.scored, launched.out.prompt_logprobs)
            lines_BW, now = launched.out.tokens_BW.tolist(), time.perf_counter()
            live = [(line, request) for line, request in launched.lines if request.finish_reason is None]
            shows = launched.out.drafts_BK is not None or launched.out.logprobs is not None
            for line, request in live:
                num_drafts = launched.proposed.get(request, launched.num_drafts)
                first_index = len(request.output_ids)
                self._advance(request, lines_BW[line], launched, now)
                if shows:
                    request.show(launched.out, line, first_index, num_drafts)
            if launched.num_drafts is not None:
                # Requests with gaps in the drafter's cache, or with forbidden drafts, say nothing about the head.
                told, others = (
                    [lines_BW[line][-1] for line, r in live if (r.cacheable and r.matcher is None) == tells]
                    for tells in (True, False)
                )
                self.policy.record(told, launched.num_drafts, others)
            advanced += [request for _, request in live]
        return advanced

    def _advance(self, request: Request, line: list[int], launched: _Launched, now: float) -> None:
        """One request's tokens of one pass."""
        accepted, first_index, num_drafts = line[-1], len(request.output_ids), launched.num_drafts
        request.in_flight -= 1
        kept = request.emit(line[: accepted + 1])
        if request.matcher is not None and not all(map(request.matcher.accept, line[:kept])):
            _log.error("request %d left its grammar: it is aborted", request.index)
            request.finish_reason = "abort"
        if num_drafts is not None:
            request.rows_in_flight -= num_drafts + 1
            request.num_computed += accepted + 1
            if num_drafts > 0:
                request.record_round(first_index, min(accepted, kept), launched.proposed.get(request, num_drafts))
        if request.finish_reason is None:
            self.scheduler.computed(request)
        else:
            request.ended = now
            self.scheduler.finish(request)


def _to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, on its way."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _score_prompts(scored: list[tuple[Request, int, int]], rows: RowLogprobs) -> None:
    """Hand requests the log-probabilities of their prompts' tokens, those of a pass in its order."""
    at = 0
    for request, first, count in scored:
        if request.finish_reason is None:
            request.score_prompt(first, RowLogprobs(*(part[at : at + count] for part in rows)))
        at += count
