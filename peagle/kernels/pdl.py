"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results itself.

A decode step is a chain of kernels of a few microseconds each. Started early, a kernel has its programs placed, its
addresses computed and its weights on their way when the one before it ends. The rules, for every kernel launched so:

* All of its programs wait, those with nothing to do included: the next kernel waits only for this one to end.
* Nothing is loaded or stored before the wait. Outputs count: the allocator may have taken their memory from a tensor
  that an earlier kernel still reads. A prefetch to L2 is neither a load nor a store.

`PEAGLE_PDL=0` turns it off. GPUs before Hopper have none of it, nor has the interpreter.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ENABLED = os.environ.get("PEAGLE_PDL", "1") != "0" and os.environ.get("TRITON_INTERPRET") != "1"
_LINE_BYTES = tl.constexpr(128)  # of the L2 cache


def pdl_options(device: torch.device) -> dict[str, bool]:
    """What a launch on `device` passes to a kernel that has `PDL` among its parameters."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}


@cache
def _has_pdl(device: torch.device) -> bool:
    if not _ENABLED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def pdl_wait(PDL: tl.constexpr) -> None:
    """Wait until the kernels before are done, then let the next one start.

    Not the other way round: kernels would start many deep and hold the multiprocessors while they wait, which
    is slower than starting none early.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(first_R: tl.tensor, LENGTH: tl.constexpr) -> None:
    """Ask L2 for LENGTH elements from each of these addresses."""
    line: tl.constexpr = _LINE_BYTES // (first_R.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = triton.next_power_of_2((LENGTH + line - 1) // line)
    at_RL = first_R[:, None] + tl.minimum(tl.arange(0, lines) * line, LENGTH - 1)[None]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // no result: $0", "=r,l", [at_RL.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
