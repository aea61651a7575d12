"""Host arrays to the device without making the host wait."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 2  # int64 in 16 bytes


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors of the same shapes, in one transfer that the device's stream orders."""
    packed = pack(arrays, device)
    return unpack(packed.to(device, non_blocking=True), [array.shape for array in arrays])


def pack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Integer arrays in one int64 tensor of the host, pinned where `device` is a GPU.

    Each begins at a multiple of 16 bytes: kernels are compiled for where their inputs begin, and that must not depend
    on how long a prompt is.
    """
    packed = torch.zeros(_ends([array.shape for array in arrays])[-1], dtype=torch.int64)
    for array, part in zip(arrays, unpack(packed, [array.shape for array in arrays]), strict=True):
        part.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return packed.pin_memory() if device.type == "cuda" else packed


def unpack(packed: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of these shapes in what `pack` made of such arrays."""
    begins = [0, *_ends(shapes)]
    return [
        packed[begin : begin + int(np.prod(shape))].view(shape) for begin, shape in zip(begins, shapes, strict=False)
    ]


def _ends(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each array ends, what fills it up included; [0] for none."""
    sizes = [-(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED for shape in shapes]
    return np.cumsum(sizes).tolist() if sizes else [0]
