"""Where the parameters of a run live: whole on every rank, or spread over them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from peagle.training.distributed import Ranks
from peagle.training.gradients import GradientBuffer

if TYPE_CHECKING:
    from peagle.training.sharding import OwnRows


class Placement:
    """A full copy of a module on every rank; rank 0's at the start. All ranks must call its methods together.

    `updated` are the tensors that optimisers update: trained parameters by name, or, in `ShardedModule`, this rank's
    rows of them; `own` says which rows, None for all.
    """

    own: "Mapping[str, OwnRows] | None" = None
    updated: Mapping[str, nn.Parameter]

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self.ranks = module, ranks
        self.updated = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        ranks.copy_from_main(self.updated.values())

    def gradients(self, counters: int) -> GradientBuffer:
        """The buffer of the run's gradients; to be called once."""
        return GradientBuffer(list(self.updated.values()), self.ranks, counters)

    def gathered(self) -> AbstractContextManager[None]:
        """Whole parameters in the module for the time of the block, which all ranks must enter and leave."""
        return nullcontext()

    def state(self) -> dict[str, Tensor]:
        """The module's whole state, on rank 0 at least; may share memory with it."""
        return dict(self._module.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the module from a whole state. Raises KeyError or RuntimeError when it is another module's."""
        self._module.load_state_dict(state)

    def whole(self, name: str, tensor: Tensor) -> Tensor:  # noqa: ARG002  # they all are
        """All of a tensor that lies as the parameter `name` does."""
        return tensor

    def part(self, name: str, whole: Tensor) -> Tensor:  # noqa: ARG002
        """Inverse of `whole`."""
        return whole


def place(module: nn.Module, parallel: str, ranks: Ranks) -> Placement:
    """Whole on every rank ("ddp") or spread over them ("fsdp"). Changes `module` in place."""
    if parallel == "fsdp" and ranks.world > 1:
        from peagle.training.sharding import ShardedModule  # half a second of imports that other runs do not need

        return ShardedModule(module, ranks)
    return Placement(module, ranks)
