"""Which form of an operation runs: torch, or Triton, imported where it is called as it is not installed everywhere."""

import os
from functools import cache
from importlib.util import find_spec

import torch

from peagle.errors import PeagleError

INVARIANT = "invariant"  # Triton, each operation in one form, so that a row's bits say nothing of how many share a call
LIBRARY = "library"  # of attention: as "auto", but for what a library's kernel takes
LEAST_GENERATION = 8  # major compute capability: Triton supports no older GPUs, and those multiply no bfloat16


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: on CUDA where triton is installed, elsewhere in its interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and find_spec("triton") is not None


def use_triton(backend: str, device: torch.device) -> bool:
    """ "auto" is Triton on CUDA where it is installed, so is `LIBRARY`; the others say which, whatever the device."""
    if backend in ("auto", LIBRARY):
        return device.type == "cuda" and can_run_triton(device)
    return backend in ("triton", INVARIANT)


def use_triton_for_inference(backend: str, device: torch.device) -> bool:
    """`use_triton` for a form without gradients: "auto" keeps to torch where autograd records."""
    return use_triton(backend, device) and (backend != "auto" or not torch.is_grad_enabled())


def is_on(setting: str) -> bool:
    """Whether the environment leaves something on: by 1, or by nothing. Raises PeagleError for what says neither."""
    asked = os.environ.get(setting, "1")
    if asked not in ("0", "1"):
        raise PeagleError(f"{setting} is {asked!r}: set it to 0 or 1, or not at all")
    return asked == "1"


@cache
def cuda_generation(device: torch.device) -> int:
    """The major compute capability that Triton compiles for, 9 for Hopper; 0 in its interpreter and without CUDA."""
    if os.environ.get("TRITON_INTERPRET") == "1" or device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]
