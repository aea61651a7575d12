"""Fixtures of the kernels' tests."""

import pytest


@pytest.fixture
def numpy_scalars(monkeypatch):
    """NumPy 2.4 no longer turns a one-element array into an int; Triton 3.6 interprets `range` that way."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, *scope):
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
