"""Packs and updates of training as CUDA graphs: a step is then two launches, and the GPU never waits for the host.

A graph replays what was captured, on the same memory: a pack is copied into the tensors of the first one, its number of
charged rows filled up to the most that any pack has. Packs that do not fit that shape run eagerly.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from peagle.training.batches import Batch, map_tensors
from peagle.training.gradients import GradientBuffer
from peagle.training.objective import Objective
from peagle.training.optim import MasterOptimizer

T = TypeVar("T")
_EAGER_CALLS = 3  # before the capture: compilation, optimiser state and the libraries' workspaces come about here


class Captured(Generic[T]):
    """A function without arguments that always works on the same tensors: eager at first, then replayed."""

    def __init__(self, function: Callable[[], T], enabled: bool) -> None:
        self._function, self._enabled = function, enabled
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    def __call__(self) -> T:
        """The result; once captured, the same tensors every time, with new values."""
        self._calls += 1
        if not self._enabled or self._calls <= _EAGER_CALLS:
            return self._function()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile: the loader pins memory.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._result = self._function()
            self._graph = graph
        self._graph.replay()
        return self._result  # type: ignore[return-value]  # set with the graph


class Steps:
    """What a training step does on the device: packs, then one update."""

    def __init__(
        self,
        objective: Objective,
        gradients: GradientBuffer,
        optimizers: Sequence[MasterOptimizer],
        clip_norm: float,
        *,
        graphs: bool,
    ) -> None:
        """`graphs`: capture packs of fixed shape, where the objective allows it, and the update."""
        self._objective, self._gradients, self._optimizers = objective, gradients, optimizers
        self._clip_norm, self._graphs = clip_norm, graphs
        self._batch: Batch | None = None  # the captured one
        self._pack = Captured(self._run_captured_pack, graphs and objective.capturable)
        self.update = Captured(self._update, graphs)

    def run_pack(self, batch: Batch) -> None:
        """Add a pack's gradients and totals to the step's."""
        if not (self._graphs and batch.plan.fixed):
            self._run_pack(batch)
            return
        if self._batch is None:
            self._batch = map_tensors(batch, torch.clone)
        else:
            torch._foreach_copy_(_tensors(self._batch), _tensors(batch))
        self._pack()

    def _run_captured_pack(self) -> None:
        if self._batch is not None:
            self._run_pack(self._batch)

    def _run_pack(self, batch: Batch) -> None:
        outcome = self._objective(batch)
        self._gradients.add_totals(outcome.loss_sum, batch.totals, outcome.statistics.table_4K)

    def _update(self) -> tuple[Tensor, Tensor]:
        """Mean loss and gradient norm of the step, and new weights."""
        loss, norm = self._gradients.normalise_and_clip(self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss, norm


def _tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, always in the same order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found
