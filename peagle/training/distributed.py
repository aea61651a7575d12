"""The ranks of a data-parallel run: who this process is, and the few collectives that training needs.

`torchrun` starts one process per GPU and says who is who in RANK, WORLD_SIZE and LOCAL_RANK. Tensors on a GPU travel
by NCCL. Everything on the host goes by gloo, CPU training included: `share` tells all ranks what rank 0 has decided,
without making any of them wait for its GPU, and it fails at once when another process has died.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.errors import PeagleError, one_line

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# A rank may wait as long as rank 0 evaluates or saves. Ranks that died are noticed by their closed connections.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among `world` of them; a single process is rank 0 of 1, and its collectives do nothing."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Ranks":
        """What torchrun says; a single process when it says nothing. Raises PeagleError when it makes no sense."""
        if "WORLD_SIZE" not in environment and "RANK" not in environment:
            return cls()
        try:
            rank, world, local_rank = (int(environment[name]) for name in _NAMES)
        except (KeyError, ValueError):
            said = ", ".join(f"{name}={environment.get(name, '(unset)')}" for name in _NAMES)
            raise PeagleError(f"{said}: three whole numbers are needed, start the ranks with torchrun") from None
        if not 0 <= rank < world or local_rank < 0:
            raise PeagleError(
                f"RANK={rank} of WORLD_SIZE={world}: ranks are 0 to {world - 1}, start them with torchrun"
            )
        if world > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            raise PeagleError("MASTER_ADDR or MASTER_PORT is unset: start the ranks with torchrun")
        return cls(rank=rank, world=world, local_rank=local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this process logs, evaluates and saves."""
        return self.rank == 0

    def own_device(self, device: torch.device) -> torch.device:
        """The device of this rank, given what the user asked for: each rank of a machine takes its own GPU."""
        if self.world == 1 or device.type != "cuda":
            return device
        count = torch.cuda.device_count()
        if self.local_rank >= count:
            raise PeagleError(
                f"local rank {self.local_rank} has no GPU, this machine has {count}: "
                f"give torchrun --nproc-per-node {count}"
            )
        return torch.device("cuda", self.local_rank)

    def add_up(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks, the same on each. On a GPU the host does not wait."""
        if self.world > 1:
            with self._contact():
                dist.all_reduce(tensor)

    def add_up_rows(self, parts: Tensor) -> Tensor:
        """Sum contiguous `parts` [world * n] over the ranks; this rank gets the n elements that are its own, in place.

        The rest of `parts` is left undefined.
        """
        own = parts.chunk(self.world)[self.rank]
        if self.world > 1:
            with self._contact():
                # Named anew in torch 2.13, which warns of the old name.
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(own, parts)
        return own

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` by those of rank 0."""
        if self.world > 1:
            with self._contact(), torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def share(self, values: Sequence[float]) -> list[float]:
        """The numbers that rank 0 gave, on every rank. The hosts wait for rank 0's host, never for a GPU."""
        if self.world == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        with self._contact():
            dist.broadcast(shared, src=0)
        numbers: list[float] = shared.tolist()
        return numbers

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """Turn what torch says when another process is gone into one line."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeagleError(
                f"rank {self.rank} lost the other ranks ({one_line(error)}): the first of them to stop says why; "
                "run the same command to resume from the last checkpoint"
            ) from None


SINGLE = Ranks()


@contextmanager
def process_group(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Connect the ranks for the time of the block; `device` is this rank's own. Does nothing for a single process."""
    if ranks.world == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeagleError(
            f"rank {ranks.rank} cannot reach rank 0 at {where} ({one_line(error)}): check the network"
        ) from None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # all ranks stop, at the same step
        dist.destroy_process_group()
        raise
    # Not after an error: this would wait for ranks that will never come.
    ranks.share([0.0])  # rank 0 may still be evaluating and writing
    dist.destroy_process_group()
