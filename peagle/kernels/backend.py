"""Which form of an operation runs: torch, or Triton."""

import os
from importlib.util import find_spec

import torch


def can_run_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on `device`: on CUDA where triton is installed, elsewhere in its interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and find_spec("triton") is not None


def use_triton(backend: str, device: torch.device) -> bool:
    """ "auto" is Triton on CUDA where it is installed; "triton" and "torch" say which, whatever the device."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda" and can_run_triton(device))


def use_triton_for_inference(backend: str, device: torch.device) -> bool:
    """`use_triton` for a form without gradients: "auto" keeps to torch where autograd records."""
    return use_triton(backend, device) and (backend == "triton" or not torch.is_grad_enabled())
