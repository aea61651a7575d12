"""FSDP2: every rank keeps its rows of each trained parameter, and of the optimiser's state for it.

A step makes several forward and backward passes, not the same number on every rank, and reads parameters outside any
`forward`: the embedding, the mask row, fc. FSDP's hooks fit none of that. They reduce a module's gradients when those
of its inputs are there, which is before the parameters that made the inputs have theirs, and take part in collectives
with every pass. So `fully_shard` is applied to wrappers that are never called. It shards, gathers and frees; when, is
decided here: gather once before a step, sum the gradients once after it.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from peagle.training.distributed import Ranks
from peagle.training.gradients import GradientBuffer
from peagle.training.placement import Placement


class _Wrapper(nn.Module):
    """Carries a module so that `fully_shard` puts its hooks here, where nothing calls them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> None:
        """Not a module to be run. `fully_shard` insists on one that could be."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows [first, first + len(local)) of a parameter, this rank's own. `local` shares the shard's memory."""

    local: nn.Parameter
    first: int
    shape: torch.Size  # of the whole parameter
    mesh: DeviceMesh

    def gather(self, local: Tensor) -> Tensor:
        """The whole of a tensor of which each rank has these rows; all ranks must call it."""
        stride = torch.empty(self.shape, device="meta").stride()
        placed = DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=self.shape, stride=stride)
        return placed.full_tensor()

    def take(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor. Raises RuntimeError when that has another shape."""
        if whole.shape != self.shape:
            raise RuntimeError(f"a tensor of shape {tuple(whole.shape)} in place of one of {tuple(self.shape)}")
        return whole[self.first : self.first + len(self.local)]


class ShardedModule(Placement):
    """Shards the trained parameters of a module in place; what is frozen stays whole on every rank."""

    own: Mapping[str, OwnRows]

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        """Each part of `module` is gathered by itself, so that only one takes its space twice at a time."""
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        ranks.copy_from_main(trained.values())
        mesh = init_device_mesh(next(iter(trained.values())).device.type, (ranks.world,))
        self._module, self.ranks = module, ranks
        self._wrappers: list[FSDPModule] = []
        for part in (*_parts(module), module):
            others = {p for p in part.parameters() if not p.requires_grad or isinstance(p, DTensor)}
            if len(others) < sum(1 for _ in part.parameters()):
                self._wrappers.append(fully_shard(_Wrapper(part), mesh=mesh, ignored_params=others))
        self.gather()  # the first time, torch moves rows that do not divide evenly to padded memory
        self.release()
        shards = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self.own = {name: _own_rows(shards[name], mesh, ranks) for name in trained}
        self.updated = {name: rows.local for name, rows in self.own.items()}

    def gather(self) -> None:
        """Make every parameter whole; twice in a row is as good as once."""
        for wrapper in self._wrappers:
            wrapper.unshard()

    def release(self) -> None:
        """Keep only this rank's rows, with every update that `updated` has had."""
        for wrapper in self._wrappers:
            wrapper.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self.gather()
        yield
        self.release()

    def whole_parameters(self) -> list[nn.Parameter]:
        """The trained parameters while they are gathered, the same objects every time, in the order of `own`."""
        parameters = dict(self._module.named_parameters())
        return [parameters[name] for name in self.own]

    def gradients(self, counters: int) -> "ShardedGradients":
        return ShardedGradients(self, self.ranks, counters)

    def state(self) -> dict[str, Tensor]:
        """The module's whole state on the host, one tensor after the other; empty on ranks other than 0."""
        self.release()
        state = {}
        for name, tensor in self._module.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.ranks.is_main:
                state[name] = whole.cpu()
        return state

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of a tensor of which this rank has the rows of the parameter `name`, on the host."""
        return self.own[name].gather(tensor).cpu()

    def part(self, name: str, whole: Tensor) -> Tensor:
        return self.own[name].take(whole)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        self.release()
        present = self._module.state_dict()
        if present.keys() != state.keys():
            raise KeyError(min(present.keys() ^ state.keys()))
        for name, tensor in present.items():
            if name in self.own:
                self.own[name].local.copy_(self.part(name, state[name]))
            else:
                tensor.copy_(state[name])


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children, those of a list one by one."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else (child,)


def _own_rows(parameter: DTensor, mesh: DeviceMesh, ranks: Ranks) -> OwnRows:
    local = parameter.to_local().detach()
    first = min(ranks.rank * math.ceil(parameter.shape[0] / ranks.world), parameter.shape[0])
    return OwnRows(nn.Parameter(local), first, parameter.shape, mesh)


class ShardedGradients(GradientBuffer):
    """A gradient buffer for sharded parameters: whole gradients during a step, summed to the rank that owns the rows.

    The totals and the squared norm of the rows then go through the step's one all-reduce.
    """

    def __init__(self, module: ShardedModule, ranks: Ranks, counters: int = 0) -> None:
        """Takes over `gather` and `release`: whole from `zero` to `reduce`, sharded otherwise."""
        self._module, self._world = module, ranks.world
        module.gather()
        super().__init__(module.whole_parameters(), ranks, counters)
        module.release()
        self._own = list(module.own.values())
        self._square = self.totals.new_zeros(1)
        for rows, segment in zip(self._own, self._segments):
            start = rows.first * math.prod(rows.shape[1:])
            rows.local.grad = segment[start : start + rows.local.numel()].view_as(rows.local)

    def _length(self, parameter: nn.Parameter) -> int:
        rows = math.ceil(parameter.shape[0] / self._world) * self._world  # the same number for every rank
        return rows * math.prod(parameter.shape[1:])

    def zero(self) -> None:
        """Start an optimiser step: gather the parameters."""
        super().zero()
        self._module.gather()

    def reduce(self) -> None:
        """Sum each rank's own rows and the totals over the ranks; free the whole parameters."""
        self._check_views()
        for segment in self._segments:
            self._ranks.add_up_rows(segment)
        self._module.release()
        square = torch.stack(torch._foreach_norm(self._own_gradients())).square().sum()
        totals = torch.cat((self.totals, square[None]))
        self._ranks.add_up(totals)
        self.totals.copy_(totals[:-1])
        self._square = totals[-1]

    def _norm(self) -> Tensor:
        return self._square.sqrt()

    def _scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(self._own_gradients(), factor)

    def _own_gradients(self) -> list[Tensor]:
        return [rows.local.grad for rows in self._own if rows.local.grad is not None]
