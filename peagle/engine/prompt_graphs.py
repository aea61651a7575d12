"""Passes over short prompts as CUDA graphs: what else costs the host a launch for every kernel of every layer.

Chunks are padded to one of a few shapes (`prompt_rows`), each captured once per sampling mode when it was needed a few
times, or ahead of time. What fits no shape runs eagerly, as do requests that ask for more than tokens.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from peagle.engine.batch import PassTiles
from peagle.engine.graphs import Captured, GraphPool
from peagle.engine.outputs import StepOutput
from peagle.engine.prompt_rows import PaddedPrompts, PromptShape, shape_of
from peagle.engine.scheduler import Chunk
from peagle.engine.slots import SamplingMode

MODES = (SamplingMode(), SamplingMode(drawn=True, filtered=True))  # a filter of a request without one changes nothing
_USES = 3  # of a shape and mode before they are captured: an engine that answers one prompt need not

Key = tuple[PromptShape, SamplingMode]


class PromptGraphs:
    """Runs `body` over chunks of prompts in captured shapes. `passes` are the kinds of passes that the body makes; up
    to `most_to_split` rows several passes by graphs are taken to be faster than one that runs eagerly."""

    def __init__(
        self,
        body: Callable[[PaddedPrompts, SamplingMode], StepOutput],
        shapes: Sequence[PromptShape],
        passes: Collection[PassTiles],
        device: torch.device,
        pool: GraphPool,
        most_to_split: int,
    ) -> None:
        self._body, self._shapes, self._passes, self._device, self._pool = body, shapes, passes, device, pool
        self._most_to_split = most_to_split
        self._padded: dict[PromptShape, PaddedPrompts] = {}
        self._captured: dict[Key, Captured | None] = {}  # None: there was no memory for it
        self._uses: Counter[Key] = Counter()
        self._settled = False

    @property
    def num_captured(self) -> int:
        """How many graphs there are."""
        return sum(captured is not None for captured in self._captured.values())

    def settle(self) -> None:
        """Capture nothing any more: requests of now would wait for it."""
        self._settled = True

    def run(self, chunks: Sequence[Chunk], mode: SamplingMode) -> StepOutput | None:
        """The body's output for these chunks, lines of padding after theirs, good until the next run of any graph of
        the pool; None where the pass has to run eagerly."""
        key = self._key(chunks, mode)
        captured = key and self._graph(key)
        if not key or captured is None:
            return None
        self._padded[key[0]].fill(chunks)
        captured.graph.replay()
        return captured.out

    def split(self, chunks: Sequence[Chunk], mode: SamplingMode) -> list[list[Chunk]]:
        """The chunks as passes that run by graphs, few in number; as one pass where some would run eagerly anyway."""
        if sum(chunk.num_rows for chunk in chunks) > self._most_to_split:
            return [list(chunks)]
        passes: list[list[Chunk]] = [[]]
        for chunk in chunks:
            if shape_of([*passes[-1], chunk], self._shapes) is None:
                passes.append([])
            passes[-1].append(chunk)
        return passes if all(self._has_graph(self._key(part, mode)) for part in passes) else [list(chunks)]

    def _key(self, chunks: Sequence[Chunk], mode: SamplingMode) -> Key | None:
        """The graph that chunks need; None where there can be none."""
        wider = next((m for m in MODES if m.includes(mode)), None)
        shape = shape_of(chunks, self._shapes) if chunks else None
        if any(c.decoded or c.request.num_scored(c.first, c.num_rows) for c in chunks):
            return None
        return None if wider is None or shape is None else (shape, wider)

    def _has_graph(self, key: Key | None) -> bool:
        """Whether it is captured or will be."""
        return key is not None and (self._captured[key] is not None if key in self._captured else not self._settled)

    def warm_up(self) -> Iterator[PromptShape]:
        """Capture every shape in every mode, the largest first; yields each before that."""
        for shape in reversed(self._shapes):
            yield shape
            for mode in MODES:
                self._uses[shape, mode] = _USES
                self._graph((shape, mode))

    def _graph(self, key: Key) -> Captured | None:
        """What a pass runs by, once it was needed often enough."""
        self._uses[key] += 1
        if key not in self._captured and not self._settled and self._uses[key] > _USES:
            self._captured[key] = self._capture(*key)
        return self._captured.get(key)

    def _capture(self, shape: PromptShape, mode: SamplingMode) -> Captured | None:
        """Capture a pass over padding alone, which changes nothing."""
        if shape not in self._padded:
            self._padded[shape] = PaddedPrompts(shape, self._passes, self._device)
        padded = self._padded[shape]
        padded.fill(())
        return self._pool.capture(lambda: self._body(padded, mode), f"prompts of {shape.rows} tokens")
