"""Where the parameters of a run live: whole on every rank, or spread over them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from peagle.training.distributed import Ranks
from peagle.training.gradients import GradientBuffer

if TYPE_CHECKING:
    from peagle.training.sharding import OwnRows


class Placement(Protocol):
    """What the trainer needs to know of it."""

    ranks: Ranks

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """The tensors that optimisers update: trained parameters by name, or this rank's rows of them."""

    @property
    def own(self) -> "Mapping[str, OwnRows] | None":
        """Which rows `updated` are; None when they are whole."""

    def gradients(self, counters: int) -> GradientBuffer:
        """The buffer of the run's gradients; to be called once."""

    def gathered(self) -> AbstractContextManager[None]:
        """Whole parameters in the module for the time of the block, which all ranks must enter and leave."""

    def state(self) -> dict[str, Tensor]:
        """The module's whole state on every rank; all ranks must call it."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the module from a whole state. Raises KeyError or RuntimeError when it is another module's."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of a tensor that lies as the parameter `name` does; all ranks must call it."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Inverse of `whole`."""


class Whole:
    """A full copy on every rank; rank 0's at the start."""

    own = None

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self.ranks = module, ranks
        self.updated = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        ranks.copy_from_main(self.updated.values())

    def gradients(self, counters: int) -> GradientBuffer:
        """One all-reduce per step."""
        return GradientBuffer(list(self.updated.values()), self.ranks, counters)

    def gathered(self) -> AbstractContextManager[None]:
        """They are whole anyway."""
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """The module's state; shares memory with it."""
        return dict(self._module.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the module from such a state."""
        self._module.load_state_dict(state)

    def whole(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002  # they all are
        """It is whole already."""
        return tensor

    def part(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        """All of it."""
        return whole


def place(module: nn.Module, parallel: str, ranks: Ranks) -> Placement:
    """Whole on every rank ("ddp") or spread over them ("fsdp"). Changes `module` in place."""
    if parallel == "fsdp" and ranks.world > 1:
        from peagle.training.sharding import ShardedModule  # half a second of imports that other runs do not need

        return ShardedModule(module, ranks)
    return Whole(module, ranks)
