"""Host arrays to the device without making the host wait."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors of the same shapes, in one transfer that the device's stream orders."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
