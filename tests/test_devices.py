"""Which device `auto` means, and what a process asks of CUDA before it starts."""

import os
from collections.abc import Iterator

import pytest
import torch

from peagle.config import EngineConfig
from peagle.devices import resolve_device, resolve_dtype, resolve_engine_device
from peagle.engine.build import resolve_kernels
from peagle.errors import PeagleError
from peagle.kernels import backend
from peagle.kernels.backend import cuda_generation

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _cuda_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "")  # so that it is put back afterwards
    monkeypatch.delenv(QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_an_engine_asks_for_one_queue() -> None:
    resolve_engine_device("auto")
    assert os.environ[QUEUES] == "1"


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(QUEUES, "8")
    resolve_engine_device("auto")
    assert os.environ[QUEUES] == "8"


def test_nothing_is_set_for_a_cpu() -> None:
    assert resolve_engine_device("cpu") == torch.device("cpu")
    assert QUEUES not in os.environ


def test_nothing_is_set_where_cuda_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    resolve_engine_device("auto")
    assert QUEUES not in os.environ


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cuda_generation.cache_clear()
    yield
    cuda_generation.cache_clear()


def test_a_gpu_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    told = "device 'cuda' was asked for and no CUDA GPU is visible: use --device cpu, or auto"
    with pytest.raises(PeagleError, match=told):
        resolve_device("cuda")


@pytest.mark.usefixtures("fake_gpu")
def test_bfloat16_is_refused_where_there_is_none() -> None:
    assert resolve_dtype("auto", GPU) == resolve_dtype("float32", GPU) == torch.float32
    with pytest.raises(PeagleError, match="dtype is bfloat16 and Tesla T4 has none: use float32 or auto"):
        resolve_dtype("bfloat16", GPU)


@pytest.mark.usefixtures("fake_gpu")
def test_a_gpu_too_old_for_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda _: object())  # triton is installed
    told = "Tesla T4 has compute capability 7.5: Triton needs 8.0; use device cpu, or in Python kernels"
    for settings in ({}, {"kernels": "torch"}, {"attention": "torch"}, {"kernels": "triton", "attention": "torch"}):
        with pytest.raises(PeagleError, match=told):
            resolve_kernels(EngineConfig(**settings), GPU)
    assert resolve_kernels(EngineConfig(kernels="torch", attention="torch"), GPU) == "torch"
    monkeypatch.setattr(backend, "find_spec", lambda _: None)
    assert resolve_kernels(EngineConfig(), GPU) == "torch"  # as anywhere without triton


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 1)])
def test_newer_gpus_are_taken(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_kernels(EngineConfig(), GPU) == "triton"
    assert resolve_dtype("auto", GPU) == torch.bfloat16
