"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2, 7])
def numbers_of_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who computes a row, and beside which others, changes with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def numpy_scalars(monkeypatch):
    """NumPy 2.4 no longer turns a one-element array into an int; Triton 3.6 interprets `range` that way."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, *scope):
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture
def rounded_bfloat16(monkeypatch):
    """The interpreter cuts float32 off to bfloat16; a GPU rounds to the nearest."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    original = InterpreterBuilder.cast_impl

    def cast(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return original(self, src, dst_type)
        rounded = torch.from_numpy(src.data).to(torch.bfloat16).view(torch.uint16)
        return TensorHandle(rounded.numpy(), dst_type.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


@pytest.fixture
def bfloat16_products(rounded_bfloat16, monkeypatch):
    """The interpreter keeps bfloat16 as its bits and would multiply those."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(torch.from_numpy(x.data.copy()).view(torch.bfloat16).float().numpy(), tl.float32)

    original_dot, original_mul = InterpreterBuilder.create_dot, InterpreterBuilder.create_fmul

    def dot(self, a, b, *rest):
        return original_dot(self, widened(a), widened(b), *rest)

    def mul(self, a, b):
        product = original_mul(self, widened(a), widened(b))
        return product if a.dtype.scalar != tl.bfloat16 else self.cast_impl(product, tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fmul", mul)


@pytest.fixture
def products_in_order(monkeypatch):
    """The interpreter multiplies by a library, in which the order of a sum may depend on its place in the tile."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, d, *options):
        products_MKN = a.data[..., :, :, None].astype(d.data.dtype) * b.data[..., None, :, :]
        return TensorHandle(products_MKN.sum(-2) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def wide_tiles(monkeypatch):
    """Fewer programs of the fused linear layers: each takes the interpreter 10 ms, whatever its size."""
    from peagle.kernels import fused_linear_triton

    monkeypatch.setattr(fused_linear_triton, "_PROGRAMS", 1)
    monkeypatch.setattr(fused_linear_triton, "_MOST_COLUMNS", 128)
