"""The profile of a step is a pure function of events; traces of torch's profiler are read into events."""

import gzip
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

import peagle
from peagle.bench.profile import STEP, Event, busy_time, group_of, read_trace, summarise
from peagle.bench.profiling import run_profile
from peagle.bench.roofline import PassCost, StepCost, copy_bandwidth, step_cost, touched_experts
from peagle.config import ProfileConfig
from peagle.errors import PeagleError
from peagle.models.spec import MoESpec
from tests.engine.tiny import tiny_spec


def kernel(name, start, duration):
    return Event(name, start, duration, "kernel")


def test_overlapping_kernels_count_once():
    events = [kernel("a", 0, 10), kernel("b", 5, 10), kernel("c", 6, 2), kernel("d", 20, 5), kernel("e", 15, 1)]
    assert busy_time(events) == 15 + 1 + 5
    assert busy_time([]) == 0.0
    assert busy_time(reversed(events)) == busy_time(events)


def test_a_gpu_profile():
    events = [
        Event(STEP, 0, 50, "step"),
        Event(STEP, 50, 70, "step"),
        Event("aten::mm", 1, 40, "op"),  # host time is not GPU time
        Event("cudaEventSynchronize", 60, 30, "wait"),
        Event("cudaLaunchKernel", 2, 1, "launch"),
        Event("cudaGraphLaunch", 3, 1, "graph"),
        Event("cudaGraphLaunch", 53, 1, "graph"),
        kernel("nvjet_tst_64x8", 10, 30),
        kernel("nvjet_tst_64x8", 60, 30),
        kernel("_decode_tile", 40, 10),
        Event("Memcpy DtoH", 100, 10, "copy"),
    ]
    profile = summarise(events)
    assert profile.on_gpu
    assert (profile.steps, profile.kernels, profile.copies) == (2, 3, 1)
    assert (profile.launches, profile.graph_launches) == (1, 2)
    assert (profile.span_us, profile.busy_us) == (100, 80)
    assert profile.busy_share == 0.8
    assert profile.busy_ms == 0.04
    assert profile.host_us == 50 + 70 - 30
    assert [(share.label, share.calls, share.us) for share in profile.groups] == [
        ("matmul", 2, 60.0),
        ("attention", 1, 10.0),
        ("copy", 1, 10.0),
    ]
    assert profile.top[0].label == "nvjet_tst_64x8"


def test_a_cpu_profile_takes_each_operation_without_its_callees():
    events = [
        Event(STEP, 0, 100, "step"),
        Event("aten::linear", 10, 50, "op"),
        Event("aten::t", 10, 5, "op"),
        Event("aten::addmm", 20, 40, "op"),
        Event("aten::copy_", 25, 10, "op"),
        Event("aten::argmax", 70, 20, "op"),
    ]
    profile = summarise(events)
    assert not profile.on_gpu
    assert profile.span_us == 100
    assert profile.busy_us == 50 + 20
    assert {share.label: share.us for share in profile.top} == {
        "aten::linear": 5, "aten::t": 5, "aten::addmm": 30, "aten::copy_": 10, "aten::argmax": 20,
    }  # fmt: skip
    assert sum(share.us for share in profile.groups) == profile.busy_us


@pytest.mark.parametrize("events", [[], [Event(STEP, 0, 1, "step")], [kernel("a", 0, 1)]])
def test_nothing_to_summarise(events):
    with pytest.raises(PeagleError, match="at least one step"):
        summarise(events)


def test_steps_can_be_given_where_nothing_marks_them():
    assert summarise([kernel("a", 0, 8)], steps=4).busy_ms == 0.002


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x8_64x12_4x1_v_bz_splitK_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matmul"),
        ("_linear_tile", "matmul"),
        ("_qkv_linear_tile", "matmul"),
        ("_stream_tile", "matmul"),
        ("_stream_ring", "matmul"),
        ("_expert_tile", "experts"),
        ("_packed_tile", "experts"),
        ("_apply_masks", "sampling"),
        ("void flash_fwd_splitkv_kernel", "attention"),
        ("_decode_tile", "attention"),
        ("_norm_row", "norm, rotation, gate"),
        ("_rotate_heads", "norm, rotation, gate"),
        ("_silu_mul", "norm, rotation, gate"),
        ("_best_of_part", "sampling"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("_copy_row", "draft layout"),
        ("_write_row", "KV cache write"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copy"),
        ("aten::to", "copy"),
        ("aten::t", "views, allocation"),
        ("aten::split_with_sizes", "views, allocation"),
        ("aten::index_select", "copy"),
        ("aten::mul", "elementwise"),
        ("something else", "other"),
    ],
)
def test_groups(name, group):
    assert group_of(name) == group


def test_every_kernel_of_a_step_is_in_a_group():
    of_training = ("draft_loss", "range_attention")
    files = (Path(peagle.__file__).parent / "kernels").glob("*_triton.py")
    text = "\n".join(path.read_text() for path in files if not path.name.startswith(of_training))
    launched = set(re.findall(r"\b(_[a-z_]+)\[\(", text))
    assert len(launched) > 20
    assert [name for name in launched if group_of(name) == "other"] == []


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "ts": 0},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 2, "tid": 7},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 8, "dur": 1, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 3, "dur": 2, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::rand", "ts": 1, "dur": 2, "tid": 2},
        {"ph": "X", "cat": "user_annotation", "name": STEP, "ts": 0, "dur": 9, "tid": 1},
        {"ph": "X", "cat": "user_annotation", "name": "other", "ts": 0, "dur": 9, "tid": 1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": STEP, "ts": 0, "dur": 9, "tid": 7},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 2, "dur": 1, "tid": 1},
        {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 2, "dur": 1, "tid": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": 2, "dur": 1, "tid": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMalloc", "ts": 2, "dur": 1, "tid": 1},
    ]
}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read(tmp_path, name):
    text = json.dumps(TRACE).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    events = read_trace(tmp_path / name)
    assert [event.kind for event in events] == ["kernel", "copy", "op", "op", "step", "graph", "launch", "wait"]
    assert events[0] == Event("k", 5.0, 2.0, "kernel")


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json"])
def test_a_file_that_is_no_trace(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(PeagleError, match="no Chrome trace"):
        read_trace(tmp_path / "t.json")


def test_what_a_step_must_read():
    spec = tiny_spec()
    cost = step_cost(spec, None, 0, requests=2, context=10.0, dtype=torch.bfloat16)
    layer = 32 * (4 + 2 * 2) * 8 + 32 * 32 + 3 * 32 * 48
    assert cost.target.weight_bytes == 2 * (4 * layer + 96 * 32)
    assert cost.drafter == ()
    assert cost.target.kv_bytes == 2 * (2 * 4 * 2 * 8) * 2 * 10
    assert cost.floor_ms(cost.num_bytes) == 1e3


def test_experts_are_read_if_any_row_chooses_them_and_keys_if_a_window_reaches_them():
    moe = MoESpec(num_experts=8, experts_per_token=2, gate_alpha=1.7, gate_limit=7.0)
    dense, spec = tiny_spec(), tiny_spec(moe=moe, windows=(4, None, 4, None))
    assert [touched_experts(dense, 1), touched_experts(spec, 1), touched_experts(spec, 2)] == [1, 2, 3.5]
    assert touched_experts(spec, 1000) == pytest.approx(8)

    def cost(of, requests):
        return step_cost(of, None, 0, requests=requests, context=10.0, dtype=torch.bfloat16)

    expert = 4 * 3 * 32 * 48  # parameters of one in each layer
    for requests, touched in ((1, 2), (2, 3.5)):
        more = cost(spec, requests).target.weight_bytes - cost(dense, requests).target.weight_bytes
        assert more == 2 * expert * (touched - 1)
    assert cost(spec, 1).target.kv_bytes == cost(dense, 1).target.kv_bytes * (4 + 10) / 20
    packed = tiny_spec(moe=replace(moe, packed=True), windows=(4, None, 4, None))
    assert cost(spec, 2).target.weight_bytes - cost(packed, 2).target.weight_bytes == (2 - 17 / 32) * expert * 3.5


def test_an_eagle3_head_is_read_once_per_draft():
    from tests.engine.tiny import tiny_parts

    costs = {}
    for parallel in (True, False):
        config = tiny_parts(parallel=parallel)[1].config
        costs[parallel] = step_cost(tiny_spec(), config, 3, requests=1, context=10.0, dtype=torch.float32)
    eight = step_cost(tiny_spec(), config, 3, requests=1, context=10.0, dtype=torch.float32, int8_head=True)
    assert costs[False].num_bytes - eight.num_bytes == 3 * (4 - 1) * 32 * 96  # config is EAGLE-3's: a pass each
    (once,), (first, *others) = costs[True].drafter, costs[False].drafter
    assert once.num_bytes == first.num_bytes
    assert [first.weight_bytes - other.weight_bytes for other in others] == [4 * 32 * 96] * 2  # fc
    assert {other.kv_bytes for other in others} == {once.kv_bytes}


@pytest.mark.parametrize("layers", [1, 3])
def test_what_a_step_must_multiply(layers: int):
    """A matrix for each row that needs it: 3 requests, K = 4, 2.5 tokens a step."""
    from tests.engine.tiny import tiny_parts

    config = replace(tiny_parts(parallel=True)[1].config, num_layers=layers)
    cost_of = partial(step_cost, tiny_spec(), requests=3, context=10.0, dtype=torch.float32, acceptance_length=2.5)
    cost = cost_of(config, 4)
    projection, rest, head = 32 * (4 + 2 * 2) * 8, 32 * 32 + 3 * 32 * config.intermediate_size, 32 * 96
    assert cost.target.flops == 2 * 3 * 5 * (4 * (projection + 32 * 32 + 3 * 32 * 48) + 32 * 96)
    inner = (layers - 1) * (projection + rest)
    new = config.feature_size * 32 + 2 * projection
    assert [one.flops for one in cost.drafter] == [2 * 3 * (2.5 * new + 5.5 * inner + 4 * (rest + head))]
    first, other = cost_of(replace(config, mask_token_id=None), 2).drafter
    assert first.flops == 2 * 3 * (2.5 * new + 2.5 * inner + rest + head)
    assert other.flops == 2 * 3 * (2 * projection + inner + rest + head)


def test_a_pass_takes_as_long_as_the_slower_of_reading_and_computing():
    passes = PassCost(100, 20, 10.0), PassCost(30, 0, 90.0), PassCost(8, 2, 90.0)
    cost = StepCost(passes[0], passes[1:])
    assert cost.num_bytes == 160
    assert cost.floor_ms(10.0) == 16e3
    assert cost.floor_ms(10.0, 10.0) == (12 + 9 + 9) * 1e3


def test_bandwidth_of_this_machine(monkeypatch):
    monkeypatch.setattr("peagle.bench.roofline._COPY_BYTES", {"cpu": 1 << 20})
    assert copy_bandwidth(torch.device("cpu")) > 1e7


def test_drafting_is_from_the_layout_to_the_commit():
    names = ("gemm", "_lay_out_request", "gemm", "_commit_request", "copy", "_lay_out_request", "_commit_request")
    events = [Event(name, 10.0 * i, 4.0, "kernel") for i, name in enumerate(names)]
    assert summarise(events, steps=2).drafting_us == 24.0 + 14.0
    assert summarise(events[:1], steps=1).drafting_us == 0.0


def test_a_profile_that_could_not_be_written_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.profiling.read_spec", lambda _: pytest.fail("reads the model"))

    def refused(says, **paths):
        with pytest.raises(PeagleError, match=says):
            run_profile("model", None, ProfileConfig(), Console(), **paths)

    refused(f"the result {tmp_path} is a folder: give the name of a file", out=tmp_path)
    refused(f"the trace {tmp_path} is a folder: give the name of a file", trace=tmp_path)
    refused("the trace /dev/null is a device or a pipe", trace=Path("/dev/null"))
    refused("--out and --trace are both", out=tmp_path / "a.json", trace=tmp_path / "b" / ".." / "a.json")
