"""Which device and compute precision `auto` means, for every verb."""

import os

import torch

from peagle.errors import PeagleError


def resolve_engine_device(name: str) -> torch.device:
    """`resolve_device` for a process whose steps are CUDA graphs: it gets one hardware queue unless told otherwise.

    With several, an H200 soon needs 0.4 us between any two kernels of a graph in place of 0.1 (docs/decisions.md). CUDA
    reads the setting when it starts; where it runs already, nothing changes.
    """
    if name != "cpu" and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return resolve_device(name)


def resolve_device(name: str) -> torch.device:
    """The device a setting names; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PeagleError(f"device {name!r} is not known: use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise PeagleError(f"device {name!r} is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PeagleError(f"device {name!r} was asked for and no CUDA GPU is visible: use --device cpu, or auto")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute precision; "auto" is bfloat16 on a GPU that has it, and float32 on a CPU, where drafts change no bit."""
    if name not in ("auto", "float32", "bfloat16"):
        raise PeagleError(f"dtype {name!r} is not supported: use auto, float32 or bfloat16")
    on_gpu = device.type == "cuda"
    has_bfloat16 = not on_gpu or torch.cuda.get_device_capability(device)[0] >= 8
    if name == "bfloat16" and not has_bfloat16:
        raise PeagleError(f"dtype is bfloat16 and {torch.cuda.get_device_name(device)} has none: use float32 or auto")
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and on_gpu and has_bfloat16) else torch.float32
