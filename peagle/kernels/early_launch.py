"""Programmatic dependent launch: a kernel starts while the one before it still runs.

What is older than both is on its way by then: weights into a ring or the L2 cache, limits, slots, block tables. Before
it loads anything newer, or stores anything, a kernel calls `wait_for_previous`, which lets the next one start: so all
but the kernel right before that are done. Norms `let_next_start` first of all: what follows them loads only constants
before it waits. So does streamed attention, which is not launched early itself.

GPUs before Hopper have none of it, nor has the interpreter. `PEAGLE_EARLY_LAUNCH=0` turns it off.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.kernels.backend import cuda_generation, is_on

_LINE_BYTES = tl.constexpr(128)  # of the L2 cache


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels on `device` are launched so. Raises PeagleError for a setting that says neither."""
    return is_on("PEAGLE_EARLY_LAUNCH") and cuda_generation(device) >= 9


def early_launch(early: bool) -> dict[str, bool]:
    """The option of a launch."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def let_next_start(EARLY: tl.constexpr) -> None:
    """The next kernel may start as soon as all programs of this one have come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr) -> None:
    """Wait until the kernels before are done and what they stored is there, then let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(first_R: tl.tensor, LENGTH: tl.constexpr) -> None:
    """Ask the L2 cache for LENGTH elements from each of these addresses on."""
    line: tl.constexpr = _LINE_BYTES // (first_R.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = triton.next_power_of_2((LENGTH + line - 1) // line)
    at_RL = first_R[:, None] + tl.minimum(tl.arange(0, lines) * line, LENGTH - 1)[None]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // no result: $0", "=r,l", [at_RL.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
