"""Experts of four-bit numbers: packing is exact, and the kernel computes what it does with the matrices unpacked."""

from typing import Any

import pytest
import torch

from peagle.kernels.moe import ExpertWeights
from peagle.kernels.packed_experts import MOST_SCALE, PackedMatrix, draw, num_groups, pack, unpack
from peagle.models.mxfp4 import dequantize
from tests.kernels.hopper import compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted
from tests.kernels.test_moe import (
    GPT_OSS,
    check_graph,
    check_rows_keep_their_bits,
    distance,
    gpu,
    inputs,
    interpreter,
    run,
)  # fmt: skip

SIZES = (160, 64, 5, 2)  # hidden, features, experts, chosen; groups that are full, half full, and both


def packed_matrix(experts: int, inputs: int, outputs: int, device: str = "cpu") -> tuple[PackedMatrix, torch.Tensor]:
    """Of random numbers near `inputs` ** -0.5, and what a checkpoint's reader makes of it, in bfloat16."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    middle = 125 - round(torch.tensor(inputs).log2().item() / 2)
    scales = torch.randint(middle - 4, middle + 2, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    words, exponents = zip(*(pack(b, s) for b, s in zip(blocks, scales)))
    matrix = torch.stack([dequantize(b, s, torch.bfloat16).T for b, s in zip(blocks, scales)]).contiguous()
    packed = PackedMatrix(torch.stack(words).to(device), torch.stack(exponents).to(device), inputs)
    return packed, matrix.to(device)


def weights(hidden: int, features: int, experts: int, biases: ExpertWeights) -> tuple[ExpertWeights, ExpertWeights]:
    """Packed, and the same as matrices; with the biases of others."""
    device = str(biases.down_bias_EH.device)
    (up, up_matrix), (down, down_matrix) = (
        packed_matrix(experts, hidden, 2 * features, device), packed_matrix(experts, features, hidden, device)
    )  # fmt: skip
    gate_up_bias, down_bias = biases.gate_up_bias_EJ, biases.down_bias_EH
    dtype = down_bias.dtype
    return (
        ExpertWeights(up, gate_up_bias, down, down_bias),
        ExpertWeights(up_matrix.to(dtype), gate_up_bias, down_matrix.to(dtype), down_bias),
    )


def case(rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """x, logits, packed weights, matrices, top_k."""
    *shape, top_k = sizes
    x, logits, others = inputs(rows, *shape, dtype=dtype, device=device)
    return x, logits, *weights(*shape, others), top_k


def check(
    rows: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu", crowd: bool = False
) -> None:
    """As near to float64 as torch with the same matrices."""
    x, logits, packed, matrices, top_k = case(rows, sizes, dtype, device)
    if crowd:
        logits[:, 1], logits[:, 0] = 60.0, -60.0
    truth = run(x.double(), logits.double(), ExpertWeights(*(w.double() for w in matrices)), top_k, "torch")
    got, twin = run(x, logits, packed, top_k, "triton"), run(x.contiguous(), logits, matrices, top_k, "torch")
    assert (got.shape, got.dtype) == (x.shape, dtype)
    assert distance(got, truth) < (3e-6 if dtype == torch.float32 else 1.1 * distance(twin, truth) + 1e-3)


@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (3, 4), (5, 7), (2, 90)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_keeps_every_number(outputs: int, blocks: int, dtype: torch.dtype):
    """All pairs of the 16 numbers at every scale there is room for, zeros behind the last block."""
    codes = torch.arange(outputs * blocks * 16, dtype=torch.int64).mul(7).remainder(256)
    codes = codes.to(torch.uint8).view(outputs, blocks, 16)
    scales = torch.linspace(0, MOST_SCALE, outputs * blocks).round().to(torch.uint8).view(outputs, blocks)
    words, exponents = pack(codes, scales)
    assert words.shape == (num_groups(32 * blocks), outputs, 16)
    matrix = PackedMatrix(words[None], exponents[None], 32 * blocks)
    assert matrix.shape == (1, 32 * blocks, outputs)
    assert torch.equal(unpack(matrix, 0, dtype), dequantize(codes, scales, dtype).T)
    filled = unpack(matrix._replace(inputs=128 * num_groups(32 * blocks)), 0, dtype)
    assert not filled[32 * blocks :].any()


def test_drawn_matrices_have_the_deviation_asked_for():
    words, scales = torch.full((3, 3, 200, 16), -1, dtype=torch.int32), torch.full((3, 3, 200), -1, dtype=torch.int32)
    for std in (1.0, 0.0186, 0.001):
        draw(words, scales, std, torch.Generator().manual_seed(0))
        matrices = torch.stack([unpack(PackedMatrix(words, scales, 384), e, torch.float32) for e in range(3)])
        assert matrices.std() == pytest.approx(std, rel=0.02)
        assert abs(matrices.mean()) < 0.02 * std
        values, counts = (matrices[0] != 0).unique(return_counts=True)
        assert counts[0] / counts.sum() == pytest.approx(1 / 8, rel=0.05)  # both zeros
        assert len(values) == 2


@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_torch_form_has_the_bits_of_the_matrices(rows: int, dtype: torch.dtype):
    x, logits, packed, matrices, top_k = case(rows, SIZES, dtype)
    assert torch.equal(run(x, logits, packed, top_k, "torch"), run(x, logits, matrices, top_k, "torch"))


def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("tests/kernels/test_packed_experts.py")


@pytest.mark.parametrize("rows", [1, 8, 4096])
def test_unpacked_weights_go_from_registers_into_tensor_cores(rows: int):
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("compiles")
    from peagle.kernels.moe_triton import _packed_tile, _packed_tile_size

    pairs, words = rows * 4, dict.fromkeys(("words_EGOW", "scales_EGO", "pairs_ER", "counts_E"), "*i32")
    for gated, outputs in ((True, 5760), (False, 2880)):
        tile = _packed_tile_size(pairs, 32, outputs, torch.bfloat16)
        compiled = compile_for_hopper(
            _packed_tile, {**words, "rows": "i32", "alpha": "fp32", "limit": "fp32"}, tile.warps, IN=2880, OUT=outputs,
            EXPERTS=32, WIDTH=32, PAIRS_A_ROW=4 if gated else 1, ROWS=tile.rows, COLUMNS=tile.columns,
            STAGES=tile.stages, GATED=gated,
        )  # fmt: skip
        assert f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16" in compiled.asm["ptx"]
        assert "dot_op<{opIdx = 0" in compiled.asm["ttgir"]
        assert compiled.metadata.shared < 227 * 1024 // 2


@interpreter
@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_interpreted_bfloat16(rows: int, crowd: bool, numpy_scalars, bfloat16_products):
    check(rows, SIZES, torch.bfloat16, crowd=crowd)


@interpreter
def test_interpreted_float32(numpy_scalars, bfloat16_products):
    check(3, (96, 32, 4, 2), torch.float32)


@interpreter
@pytest.mark.parametrize("rows", [20, 70, 140])
def test_interpreted_higher_tiles(rows: int, numpy_scalars, bfloat16_products):
    check(rows, (32, 32, 2, 1), torch.bfloat16)


@interpreter
def test_interpreted_rows_keep_their_bits_and_spoil_no_others(numpy_scalars, bfloat16_products):
    x, logits, packed, _matrices, top_k = case(9, SIZES, torch.bfloat16)
    together = run(x, logits, packed, top_k, "triton")
    for count in (1, 4):
        assert torch.equal(run(x[:count], logits[:count], packed, top_k, "triton"), together[:count])
    x, logits = x.clone(), logits.clone()
    x[0], logits[0] = torch.nan, torch.nan
    assert torch.equal(run(x, logits, packed, top_k, "triton")[1:], together[1:])


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 200, 512, 1500])
def test_gpt_oss_sizes_on_gpu(rows: int, crowd: bool):
    check(rows, GPT_OSS, torch.bfloat16, "cuda", crowd)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20, 300])
def test_odd_sizes_on_gpu(rows: int, dtype: torch.dtype):
    check(rows, (224, 96, 5, 2), dtype, "cuda")
    check(rows, (96, 32, 128, 4), dtype, "cuda")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 600])
def test_it_differs_from_the_kernel_of_matrices_by_rounding_on_gpu(rows: int):
    """The same products in float32, added up in another order: as far apart as neighbouring bfloat16 numbers."""
    x, logits, packed, matrices, top_k = case(rows, GPT_OSS, torch.bfloat16, "cuda")
    ours, theirs = (run(x, logits, w, top_k, "triton") for w in (packed, matrices))
    assert distance(ours, theirs.double()) < 3e-3


@pytest.mark.gpu
@gpu
def test_a_row_keeps_its_bits_on_gpu():
    x, logits, packed, _matrices, top_k = case(64, GPT_OSS, torch.bfloat16, "cuda")
    check_rows_keep_their_bits(x, logits, packed, top_k)


@pytest.mark.gpu
@gpu
def test_a_graph_replays_with_other_routing():
    x, logits, packed, _matrices, top_k = case(8, GPT_OSS, torch.bfloat16, "cuda")
    check_graph(x, logits, packed, top_k)


@pytest.mark.gpu
@gpu
def test_drawing_on_gpu():
    words, scales = (torch.empty(8, 23, 2880, *rest, dtype=torch.int32, device="cuda") for rest in ((16,), ()))
    draw(words, scales, 2880**-0.5, torch.Generator("cuda").manual_seed(0))
    assert unpack(PackedMatrix(words, scales, 2880), 3, torch.float32).std().item() == pytest.approx(
        2880**-0.5, rel=0.01
    )
