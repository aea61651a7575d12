"""Which device and compute precision `auto` means, for every verb."""

import torch

from peagle.errors import PeagleError


def resolve_device(name: str) -> torch.device:
    """The device a setting names; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PeagleError(f"device {name!r} is not known: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PeagleError(f"device {name!r} was asked for and no CUDA GPU is visible: use --device cpu, or auto")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute precision; "auto" is bfloat16 on a GPU and float32 on a CPU, where drafts then change no bit."""
    choices = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}
    choices |= {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in choices:
        raise PeagleError(f"dtype {name!r} is not supported: use auto, float32 or bfloat16")
    return choices[name]
