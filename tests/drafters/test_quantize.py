import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.drafters.quantize import LEVELS, dequantize_rows, quantize_rows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    magnitude=st.floats(1e-6, 1e4),
    tail=st.floats(0.5, 4.0),
)
def test_no_element_is_off_by_more_than_half_a_level(seed, rows, columns, magnitude, tail):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight = magnitude * weight.sign() * weight.abs() ** tail
    q, scale = quantize_rows(weight)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert scale.shape == (rows,)
    assert int(q.abs().max()) <= LEVELS
    error = (weight - dequantize_rows(q, scale)).abs()
    bound = weight.abs().amax(dim=1, keepdim=True) / (2 * LEVELS)
    assert bool((error <= bound * (1 + 1e-4)).all())  # the slack is float32's: a tie may round either way


def test_rows_of_zeros_and_values_on_the_grid_are_exact():
    weight = torch.stack((torch.zeros(127), torch.arange(1.0, 128.0), -0.5 * torch.arange(1.0, 128.0)))
    q, scale = quantize_rows(weight)
    torch.testing.assert_close(dequantize_rows(q, scale), weight, rtol=1e-6, atol=0)
    again, scale_again = quantize_rows(dequantize_rows(q, scale))
    assert torch.equal(q, again)
    torch.testing.assert_close(scale, scale_again, rtol=1e-6, atol=0)
