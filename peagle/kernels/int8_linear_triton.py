"""Triton form of the layer with a byte for each weight: a program per tile of output columns, as in
`stream_linear_triton`.

A byte b becomes a float16 by two operations for two of them: 0x6400 | b is 1024 + b, of which 1152 are taken off.
Triton would take four more to bring the bytes there, so this is in PTX, but for the interpreter, which has none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch, launches_early, prefetch_rows, wait_for_previous
from peagle.kernels.int8_linear import MOST_ROWS, WORDS

_PREFETCHED = tl.constexpr(256)  # words of a program's columns, while the kernel before runs
# Of two words one byte each, with 0x64 above it.
_PTX = "{{ .reg .b32 two, off; prmt.b32 two, $1, 0x64646464, {}; mov.b32 off, 0x64806480; sub.rn.f16x2 $0, two, off; }}"
_LOW_PTX, _HIGH_PTX = (tl.constexpr(_PTX.format(bytes)) for bytes in ("0x4240", "0x4341"))


@triton.jit
def _numbers(word: tl.tensor, HIGH: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
    """What the high or the low byte of a word stands for, in float16."""
    if PTX:
        ptx: tl.constexpr = _HIGH_PTX if HIGH else _LOW_PTX
        number = tl.inline_asm_elementwise(ptx, "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    else:
        byte = word >> 8 & 255 if HIGH else word & 255
        number = (byte | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
    return number


@triton.jit(do_not_specialize=["rows"])
def _int8_tile(out_RO: tl.tensor, x_RI: tl.tensor, words_OW: tl.tensor, scale_O: tl.tensor, rows: tl.int32,
               x_row_stride: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, ALL_WORDS: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
               PTX: tl.constexpr, EARLY: tl.constexpr) -> None:  # fmt: skip
    WHOLE: tl.constexpr = IN % (2 * STEP) == 0
    column_O, row_R, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS), tl.arange(0, STEP)
    read_O = tl.minimum(column_O, OUT - 1)  # spares the loads of words a mask
    live_R1 = (row_R < rows)[:, None]
    first_O = words_OW + read_O.to(tl.int64) * ALL_WORDS
    if EARLY:
        prefetch_rows(first_O, min(_PREFETCHED, ALL_WORDS))
    wait_for_previous(EARLY)
    x = x_RI + (row_R.to(tl.int64) * x_row_stride)[:, None] + k[None]
    acc_OR = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, ALL_WORDS, STEP, num_stages=STAGES):
        word_OK = tl.load(first_O[:, None] + start + k[None], eviction_policy="evict_first")
        input_K = 2 * start + k
        low_RK = tl.load(x + 2 * start, mask=live_R1 & ((input_K < IN) | WHOLE)[None], other=0.0)
        high_RK = tl.load(x + 2 * start + STEP, mask=live_R1 & ((input_K < IN - STEP) | WHOLE)[None], other=0.0)
        acc_OR = tl.dot(_numbers(word_OK, False, PTX), tl.trans(low_RK), acc_OR)
        acc_OR = tl.dot(_numbers(word_OK, True, PTX), tl.trans(high_RK), acc_OR)
    acc_OR *= tl.load(scale_O + read_O)[:, None]
    at_OR = row_R.to(tl.int64)[None] * OUT + column_O[:, None]
    tl.store(out_RO + at_OR, acc_OR.to(out_RO.dtype.element_ty), mask=(row_R < rows)[None] & (column_O < OUT)[:, None])


def int8_linear_triton(x_RI: Tensor, words_OW: Tensor, scale_O: Tensor) -> Tensor:
    """The Triton form of `int8_linear`. Rows of x may be strided, their elements not."""
    (rows, inputs), (outputs, words) = x_RI.shape, words_OW.shape
    out = torch.empty((rows, outputs), dtype=x_RI.dtype, device=x_RI.device)
    if rows == 0:
        return out
    x_RI = x_RI.to(torch.float16)
    x_RI = x_RI if x_RI.stride(1) == 1 else x_RI.contiguous()
    tile_rows, columns, stages = _tile(rows)
    early = launches_early(x_RI.device)
    with torch.cuda.device_of(x_RI):
        _int8_tile[(triton.cdiv(outputs, columns),)](
            out, x_RI, words_OW, scale_O, rows, x_RI.stride(0), IN=inputs, OUT=outputs, ALL_WORDS=words,
            ROWS=tile_rows, COLUMNS=columns, STEP=WORDS, STAGES=stages,
            PTX=x_RI.is_cuda and torch.version.hip is None, EARLY=early, num_warps=4, **early_launch(early),
        )  # fmt: skip
    return out


def _tile(rows: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and stages of its loop: on an H200 none of ten was faster by more than 4 %
    (docs/decisions.md). Programs read as much of the rows as of the words, from the L2 cache, where the rows are 64."""
    tile_rows = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    return (tile_rows, 64, 3) if tile_rows == 16 else (tile_rows, 128, 4)
