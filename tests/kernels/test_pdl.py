"""Kernels that start before the one before them has ended: what they do before they wait, as compiled for Hopper."""

import re
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(find_spec("triton") is None or INTERPRETED, reason="compiles with triton")

_INT64, _INT32, _FLOAT32 = "*i64", "*i32", "*fp32"
_LINEAR = {
    "ROWS": 16, "COLUMNS": 8, "SLICES": 4, "STEP": 64, "STAGES": 4, "NORM": True, "NORM_FIRST": False, "GATED": False,
    "BIAS": True, "ADD": False,
}  # fmt: skip
_DECODE = {
    "ROWS": 8, "TILE_ROWS": 8, "GROUP": 3, "BLOCK_SIZE": 16, "CHUNKS": 24, "SPLITS": 24, "WINDOW": 0, "SINKS": False,
}  # fmt: skip
_DECODE_TYPES = {
    "limit_R": _INT64, "tables_BN": _INT32, "scratch_out": _FLOAT32, "scratch_stats": _FLOAT32, "arrivals": _INT32,
    "table_width": "i32", "scale_log2": "fp32",
}  # fmt: skip
_SLOTS = {"slots_R": _INT64}
_ROWS = dict.fromkeys(("ids_R", "source_rows_R", "rows_U"), _INT64) | {"is_masked_R": "*i1"}
_SCAN_TYPES = {
    "highest_RP": _FLOAT32, "best_RP": _INT32, "temperature_R": _FLOAT32, "threshold_R": _FLOAT32, "seed_R": _INT64,
    "index_R": _INT64, "token_ids_V": _INT64, "vocab": "i32", "part_blocks": "i32", "parts": "i32", "token_R": _INT64,
}  # fmt: skip
_TABLE_TYPES = {"tables_BN": _INT32, "tables_SN": _INT32, "padding_row": "i64", "limit": "i64", "width": "i64"}
_LAYOUT_TYPES = {"is_rejected_R": "*i1", "is_masked_R": "*i1", "mask_token_id": "i64", "limit": "i64", "rows": "i64"}

# module.kernel: constants, types of its other parameters, type of a tensor that is not among them, warps
KERNELS = {
    "fused_linear._linear_tile": (_LINEAR | {"IN": 576, "OUT": 960}, {"rows": "i32"}, "*bf16", 4),
    "fused_linear._linear_tile gated": (
        _LINEAR | {"IN": 4096, "OUT": 12288, "COLUMNS": 32, "STAGES": 3, "GATED": True}, {"rows": "i32"}, "*bf16", 4,
    ),
    "fused_linear._linear_tile sum": (
        _LINEAR | {"IN": 333, "OUT": 40, "NORM": False, "ADD": True}, {"rows": "i32"}, "*fp16", 4,
    ),
    "paged_decode._decode_tile": (_DECODE | {"HEAD_DIM": 64, "TILE": 32, "KEYS": 64}, _DECODE_TYPES, "*bf16", 4),
    "paged_decode._decode_tile window": (
        _DECODE | {"HEAD_DIM": 128, "TILE": 32, "KEYS": 32, "WINDOW": 300, "SINKS": True}, _DECODE_TYPES, "*bf16", 4,
    ),
    "paged_decode._decode_tile alone": (
        _DECODE | {"HEAD_DIM": 64, "TILE": 32, "KEYS": 32, "SPLITS": 1}, _DECODE_TYPES, "*fp32", 8,
    ),
    "rope_write._rotate_and_write": (
        {"QUERY_HEADS": 9, "KV_HEADS": 3, "HALF": 32, "HEADS": 4, "BLOCK": 32, "NORM": True}, _SLOTS, "*bf16", 2,
    ),
    "rope._fill_tables": ({"HALF": 32, "BLOCK": 32}, {"positions_R": _INT64, "inv_freq": _FLOAT32}, "*bf16", 1),
    "rope._rotate_heads": (
        {"QUERY_HEADS": 9, "ROTATED_HEADS": 12, "HALF": 32, "HEADS": 8, "BLOCK": 32, "NORM": False}, {}, "*bf16", 2,
    ),
    "rms_norm._norm_row": ({"SIZE": 576, "BLOCK": 1024, "ADD": True}, {}, "*bf16", 2),
    "swiglu._silu_mul": ({"SIZE": 1536, "BLOCK": 1024}, {}, "*bf16", 4),
    "kv_write._write_row": ({"KV_HEADS": 3, "HEAD_DIM": 64, "PART": 256}, _SLOTS, "*bf16", 1),
    "accept._accept_request": ({"DRAFTS": 7, "COLUMNS": 8, "PADDED": True}, {}, _INT64, 1),
    "commit._commit_request": ({"EMITTED": 8, "DRAFTS": 7, "COLUMNS": 8}, {}, _INT64, 1),
    "expand_rows._expand_row": ({"SIZE": 576, "CHOSEN": True, "PART": 1024}, _ROWS, "*bf16", 4),
    "draft_rows._copy_row": ({"HIDDEN": 576, "MASKED": True, "PART": 1024}, _ROWS, "*bf16", 4),
    "verify_rows._collect_request": (
        {"DRAFTS": 7, "ROWS": 8, "BLOCK_SIZE": 16, "PART": 512}, _TABLE_TYPES, _INT64, 2,
    ),
    "draft_layout._lay_out_request": (
        {"DRAFTS": 7, "DRAFTS_P2": 8, "BLOCK_SIZE": 16, "PADDED": True, "TILE": 32}, _TABLE_TYPES | _LAYOUT_TYPES,
        _INT64, 1,
    ),
    "draft_layout._slots_of_rows": ({"BLOCK_SIZE": 16, "TILE": 128}, _TABLE_TYPES | _LAYOUT_TYPES, _INT64, 1),
    "sample._scan_part": (
        {"IN_DRAFT_VOCAB": True, "DRAWN": True, "FILTERED": True, "BLOCK": 2048}, _SCAN_TYPES, "*bf16", 4,
    ),
    "sample._best_of_row": ({"IN_DRAFT_VOCAB": True, "PARTS_P2": 128}, _SCAN_TYPES, _INT64, 1),
}  # fmt: skip


def instructions(name: str) -> list[str]:
    """The kernel's PTX for Hopper, launched early, without comments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants, types, tensor, warps = KERNELS[name]
    module, kernel = name.split()[0].split(".")
    fn = getattr(import_module(f"peagle.kernels.{module}_triton"), kernel)
    constants = {**constants, "PDL": True}
    types = {"eps": "fp32"} | {n: "i64" for n in fn.arg_names if n.endswith("_stride")} | types
    source = ASTSource(
        fn, {n: "constexpr" if n in constants else types.get(n, tensor) for n in fn.arg_names},
        constexprs={(fn.arg_names.index(n),): value for n, value in constants.items()},
    )  # fmt: skip
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
    body = compiled.asm["ptx"].split(".visible .entry")[1]
    return [line.split("//")[0].strip() for line in body.splitlines()]


def first(lines: list[str], pattern: str) -> int:
    return next((i for i, line in enumerate(lines) if re.search(pattern, line)), len(lines))


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_touched_before_the_wait(name: str):
    """Nor does any program end or turn off before it."""
    lines = instructions(name)
    wait = first(lines, r"griddepcontrol\.wait")
    assert wait < first(lines, r"griddepcontrol\.launch_dependents") < len(lines)
    touched = first(lines, r"\b(ld|st|atom|red)\b(?!\.(param|shared|local))|\bcp\.async")
    assert wait < touched < len(lines)
    assert wait < first(lines, r"\b(bra|ret|exit)\b")
    if "_linear_tile" in name:
        assert first(lines, r"prefetch\.global\.L2") < wait


def test_launches_say_so_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch):
    from peagle.kernels import pdl

    assert pdl.pdl_options(torch.device("cpu")) == {"PDL": False}
    monkeypatch.setattr(pdl, "_has_pdl", lambda device: device.type == "cuda")
    assert pdl.pdl_options(torch.device("cuda")) == {"PDL": True, "launch_pdl": True}
