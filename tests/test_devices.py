"""Which device `auto` means, and what a process asks of CUDA before it starts."""

import os

import pytest
import torch

from peagle.devices import resolve_engine_device

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


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
