"""Swap a model's linear layers for packed ones before inference on the CPU (see `kernels/linear.py`)."""

from torch import Tensor, nn

from peagle.kernels.linear import can_pack, pack_weight, packed_linear


class PackedLinear(nn.Module):
    """A linear layer whose weight exists in oneDNN's layout only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = pack_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, x_RI: Tensor) -> Tensor:
        return packed_linear(x_RI, self.packed, self.bias)


def pack_linears(module: nn.Module, keep: nn.Module | None = None) -> None:
    """Replace every linear layer below `module` that can be packed, in place, but for `keep`. The module is for
    inference only then."""
    for name, child in module.named_children():
        if child is keep:
            continue
        if isinstance(child, nn.Linear) and can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child, keep)
