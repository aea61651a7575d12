"""Hopper's form of the streaming linear layers: weights and rows come through a ring of shared memory, by TMA.

The product is W x^T as in `stream_linear_triton`, but one thread asks for whole slabs of weights, without addresses or
masks, and a tile of several slabs shares its rows. The ring is always full: between the tiles of a program, and at its
start, when the kernel before may still run, and the one before that, if a norm lies between. So neither may be one that
writes weights. What lies past the end of a tensor comes as zero.

Triton cannot say this: its loads belong to the loop that uses them. Gluon, its lower level, can.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.kernels.early_launch import early_launch, launches_early
from peagle.kernels.stream_ring import SLAB, STEP, is_read_by_tma, ring_of

_SLAB, _STEP = gl.constexpr(SLAB), gl.constexpr(STEP)


@gluon.jit
def _ask_for_weights(weight: tma.tensor_descriptor, bufs: gl.shared_memory_descriptor,
                     arrived: gl.shared_memory_descriptor, i: gl.tensor, first: gl.tensor, count: gl.tensor,
                     TURNS: gl.constexpr, ROWS: gl.constexpr, SLABS: gl.constexpr, STAGES: gl.constexpr,
                     GATED: gl.constexpr) -> None:  # fmt: skip
    """Ask for those of the program's turn i, and say that its rows are to come with them."""
    tile, k, place = (first + i) // TURNS, (first + i) % TURNS * _STEP, i % STAGES
    barrier, wanted = arrived.index(place), i < count
    mbarrier.expect(barrier, (SLABS * _SLAB + ROWS) * _STEP * 2, pred=wanted)  # bytes, of 16-bit elements
    for s in gl.static_range(SLABS):
        buf, slab = bufs.index(place * SLABS + s), tile * SLABS + s
        if GATED:  # eight gates, their eight ups, and so on: a thread of the product has both of a column
            shaped = buf._reinterpret(weight.dtype, [4, 2, 8, _STEP], weight.layout)
            tma.async_copy_global_to_shared(weight, [slab * 4, 0, 0, k], barrier, shaped, pred=wanted)
        else:
            tma.async_copy_global_to_shared(weight, [slab * _SLAB, k], barrier, buf, pred=wanted)


@gluon.jit
def _ask_for_rows(x: tma.tensor_descriptor, bufs: gl.shared_memory_descriptor, arrived: gl.shared_memory_descriptor,
                  i: gl.tensor, first: gl.tensor, count: gl.tensor, TURNS: gl.constexpr,
                  STAGES: gl.constexpr) -> None:  # fmt: skip
    k, place = (first + i) % TURNS * _STEP, i % STAGES
    tma.async_copy_global_to_shared(x, [0, k], arrived.index(place), bufs.index(place), pred=i < count)


@gluon.jit
def _multiply(weight_bufs: gl.shared_memory_descriptor, x_KR: gl.shared_memory_descriptor, sums: gl.tuple,
              place: gl.tensor, goes_on: gl.tensor, SLABS: gl.constexpr) -> gl.tuple:  # fmt: skip
    """A turn's products of all slabs, added to `sums` if the tile `goes_on`."""
    new = ()
    for s in gl.static_range(SLABS):
        weight_GK = weight_bufs.index(place * SLABS + s)
        new += (hopper.warpgroup_mma(weight_GK, x_KR, sums[s], use_acc=goes_on, is_async=True),)  # type: ignore[assignment]
    done = hopper.warpgroup_mma_wait(0, deps=new)
    if SLABS == 1:
        done = (done,)
    return done


@gluon.jit
def _write_slab(out: gl.tensor, bias_G: gl.tensor, acc_GR: gl.tensor, slab: gl.tensor, cut: gl.tensor,
                rows: gl.tensor, OUT: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
                PARTS: gl.constexpr) -> None:  # fmt: skip
    """The output columns of one slab."""
    dtype: gl.constexpr = out.dtype.element_ty
    OWN: gl.constexpr = _SLAB // 2 if GATED else _SLAB
    if BIAS:
        g = gl.arange(0, _SLAB, layout=gl.SliceLayout(1, acc_GR.type.layout))
        column = slab * OWN + (g // 16 * 8 + g % 8 if GATED else g)
        read = column + (g // 8 % 2 * OUT if GATED else 0)
        acc_GR += gl.load(bias_G + read, mask=(column < OUT) & (cut == 0), other=0.0).to(gl.float32)[:, None]
    if GATED:
        wide = acc_GR.to(dtype).to(gl.float32)  # rounded as torch rounds the layer's output
        gate, up = gl.split(gl.permute(gl.reshape(wide, [4, 2, 8, ROWS]), (0, 2, 3, 1)))
        acc_GR = gl.reshape(gl.div_rn(gate, 1.0 + gl.exp(-gate)).to(dtype).to(gl.float32) * up, [OWN, ROWS])
    stored: gl.constexpr = gl.BlockedLayout([4, 1], [OWN // 4, 128 // OWN], [1, 4], [0, 1])
    column = slab * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, stored))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))
    at = row[None, :].to(gl.int64) * OUT + column[:, None]
    if PARTS:
        at += cut.to(gl.int64) * rows * OUT
    there = (row < rows)[None, :] & (column < OUT)[:, None]
    gl.store(out + at, gl.convert_layout(acc_GR.to(dtype), stored), mask=there)


@gluon.jit(do_not_specialize=["rows"])
def _stream_ring(out: gl.tensor, bias_G: gl.tensor, x: tma.tensor_descriptor, weight: tma.tensor_descriptor,
                 rows: gl.tensor, OUT: gl.constexpr, CUTS: gl.constexpr, TURNS: gl.constexpr, OWN_TURNS: gl.constexpr,
                 ALL_TURNS: gl.constexpr, ROWS: gl.constexpr, SLABS: gl.constexpr, STAGES: gl.constexpr,
                 GATED: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr,
                 EARLY: gl.constexpr) -> None:  # fmt: skip
    """A program's turns, see `Ring`: they are asked for in their order, STAGES of them ahead of their products."""
    first, cut = gl.program_id(0) * OWN_TURNS, gl.program_id(0) % CUTS
    count = gl.minimum(OWN_TURNS, ALL_TURNS - first)
    weight_bufs = gl.allocate_shared_memory(weight.dtype, [STAGES * SLABS, _SLAB, _STEP], x.layout)
    x_bufs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, _STEP], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(arrived.index(s), count=1)
    hopper.fence_async_shared()
    gl.thread_barrier()
    for s in gl.static_range(STAGES):
        _ask_for_weights(weight, weight_bufs, arrived, s, first, count, TURNS, ROWS, SLABS, STAGES, GATED)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for s in gl.static_range(STAGES):
        _ask_for_rows(x, x_bufs, arrived, s, first, count, TURNS, STAGES)
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums = (gl.zeros([_SLAB, ROWS], gl.float32, layout=product),) * SLABS
    for i in range(count):
        turn, place = first + i, i % STAGES
        mbarrier.wait(arrived.index(place), i // STAGES & 1)
        goes_on = (turn % TURNS != 0) & (i != 0)
        sums = _multiply(weight_bufs, x_bufs.index(place).permute((1, 0)), sums, place, goes_on, SLABS)
        gl.thread_barrier()  # all warps are through with this place of the ring
        then = i + STAGES
        _ask_for_weights(weight, weight_bufs, arrived, then, first, count, TURNS, ROWS, SLABS, STAGES, GATED)
        _ask_for_rows(x, x_bufs, arrived, then, first, count, TURNS, STAGES)
        if ((turn + 1) % TURNS == 0) | (i == count - 1):
            for s in gl.static_range(SLABS):
                slab = turn // TURNS * SLABS + s
                _write_slab(out, bias_G, sums[s], slab, cut, rows, OUT, ROWS, GATED, BIAS, PARTS)


def launch_ring(x_RI: Tensor, weight_GI: Tensor, bias_G: Tensor | None, *, gated: bool, parts: bool) -> Tensor:
    """A linear layer of at most 64 rows whose weights `suits_ring`, in the forms of `stream_linear_triton`."""
    rows, outputs = x_RI.shape[0], weight_GI.shape[0] // (2 if gated else 1)
    ring = ring_of(*weight_GI.shape, parts=parts)
    shape, dtype = ((ring.cuts, rows, outputs), torch.float32) if parts else ((rows, outputs), x_RI.dtype)
    out = torch.empty(shape, dtype=dtype, device=x_RI.device)
    tile_rows = max(triton.next_power_of_2(rows), 16)
    x, weight = _descriptors(x_RI, weight_GI, tile_rows, gated)
    early = launches_early(x_RI.device)
    with torch.cuda.device_of(x_RI):
        _stream_ring[(ring.programs,)](
            out, x_RI if bias_G is None else bias_G, x, weight, rows, OUT=outputs, CUTS=ring.cuts, TURNS=ring.turns,
            OWN_TURNS=ring.own_turns, ALL_TURNS=ring.all_turns, ROWS=tile_rows, SLABS=ring.slabs, STAGES=ring.stages,
            GATED=gated, BIAS=bias_G is not None, PARTS=parts, EARLY=early, num_warps=4,
            **early_launch(early),
        )  # fmt: skip
    return out


def _descriptors(x_RI: Tensor, weight_GI: Tensor, tile_rows: int, gated: bool) -> list[TensorDescriptor]:
    """What TMA is told. Rows that lie as it cannot read them are copied, so that the kernel does not follow from it."""
    if not is_read_by_tma(x_RI):
        x_RI = torch.empty(x_RI.shape, dtype=x_RI.dtype, device=x_RI.device).copy_(x_RI)
    box = [SLAB, STEP]
    if gated:
        features, inputs = weight_GI.shape[0] // 2, weight_GI.shape[1]
        weight_GI = weight_GI.as_strided((features // 8, 2, 8, inputs), (8 * inputs, features * inputs, inputs, 1))
        box = [4, 2, 8, STEP]
    boxes = (x_RI, [tile_rows, STEP]), (weight_GI, box)
    return [TensorDescriptor.from_tensor(t, b, gl.NVMMASharedLayout(128, 16, rank=len(b))) for t, b in boxes]
