"""How graphs are captured: nothing is freed meanwhile, and nothing runs on a second stream."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from peagle.engine.graphs import GraphPool, capturing


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(fails: bool, monkeypatch):
    """It may hold graphs of an engine that is gone, and freeing one spoils a capture."""
    for name in ("CUDAGraph", "graph", "stream", "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(nullcontext, "pool", lambda _: None, raising=False)
    monkeypatch.setattr(nullcontext, "device", None, raising=False)
    seen = []

    def body() -> None:
        seen.append(gc.isenabled())
        if fails and not seen[-1]:
            raise torch.OutOfMemoryError("out of memory")

    captured = GraphPool(torch.device("cpu")).capture(body, "a test")
    assert (captured is None) == fails
    assert seen == [True, True, False]
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keeps_to_one", [True, False])
def test_captures_run_no_kernel_on_a_second_stream(keeps_to_one: bool):
    """Eight of them make all graphs slower. torch's own captures do run some: else ours could be simpler."""
    x, stream = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    x.add_(1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, None, stream) if keeps_to_one else torch.cuda.graph(graph, stream=stream):
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    assert x.tolist() == [2.0] * 8
    assert (len({event.device_resource_id for event in on_gpu}) == 1) == keeps_to_one
