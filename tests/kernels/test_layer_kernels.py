"""RMSNorm, RoPE and the SwiGLU gate: the Triton forms round where the torch forms round.

Norms get inputs whose squares add up exactly in any order, so that equality to the last bit can be asked for.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafters.init import new_drafter
from peagle.kernels.rms_norm import add_rms_norm, rms_norm
from peagle.kernels.rope import HeadNorms, rope_qkv, rope_tables
from peagle.kernels.swiglu import silu_mul
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec, rope_inverse_frequencies, use_kernels
from peagle.sampling import SamplingParams
from tests.engine import tiny
from tests.engine.tiny import tiny_spec
from tests.helpers import causal_attend, random_weights
from tests.kernels.hopper import before_the_wait, compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def eighths(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Multiples of 1/8 within -4 .. 4: sums of a few thousand squares are exact in float32."""
    x = torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed))
    return (x / 8).to(device, dtype)


def strided(x: Tensor) -> Tensor:
    """The same rows, further apart, with NaN between them."""
    return torch.cat((x, torch.full_like(x, torch.nan)), dim=-1)[..., : x.shape[-1]]


def weight(size: int, device: str, dtype: torch.dtype, seed: int = 9) -> Tensor:
    return (1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def check_norms(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    x, residual = (strided(eighths(rows, size, device=device, dtype=dtype, seed=seed)) for seed in (1, 2))
    w = weight(size, device, dtype)
    assert torch.equal(rms_norm(x, w, EPS, backend="triton"), rms_norm(x, w, EPS, backend="torch"))
    for got, expected in zip(*(add_rms_norm(x, residual, w, EPS, backend=b) for b in ("triton", "torch"))):
        assert torch.equal(got, expected)
    x = torch.randn(2, rows, size).to(device, dtype)
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(
        rms_norm(x, w, EPS, backend="triton"), rms_norm(x, w, EPS, backend="torch"), **tolerance
    )  # fmt: skip


def check_rope(rows: int, heads: int, kv_heads: int, dim: int, normed: bool, device: str, dtype: torch.dtype) -> None:
    """In place, equal to the last bit; v and what lies between the rows stay."""
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=1e4, head_dim=dim)).to(device)
    cos, sin = rope_tables(torch.arange(rows, device=device) * 37, inv_freq, dtype, backend="torch")
    norms = HeadNorms(weight(dim, device, dtype, 3), weight(dim, device, dtype, 4), EPS) if normed else None
    width = (heads + 2 * kv_heads) * dim
    wide = torch.cat(
        (eighths(rows, width, device=device, dtype=dtype), torch.ones(rows, 3, device=device, dtype=dtype)), 1
    )
    expected = rope_qkv(wide[:, :width], cos, sin, heads, kv_heads, norms, backend="torch")
    out = rope_qkv(wide[:, :width], cos, sin, heads, kv_heads, norms, backend="triton")
    for part, (got, want) in zip("qkv", zip(out, expected)):
        assert torch.equal(got, want), part
        assert got.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()
    assert wide[:, width:].eq(1).all()


def check_tables(device: str) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071], device=device)
    inv_freq = rope_inverse_frequencies(RopeSpec(theta=5e5, head_dim=64)).to(device)
    for dtype, atol in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        pairs = zip(*(rope_tables(positions, inv_freq, dtype, backend=b) for b in ("triton", "torch")))
        for got, expected in pairs:
            assert got.shape == (6, 1, 64)
            torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def check_gate(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    x = strided(4 * torch.randn(rows, 2 * size).to(device, dtype))
    x[0, 0], x[0, 1] = -200.0, 200.0  # exp overflows one way only
    got, expected = (silu_mul(x, backend=b) for b in ("triton", "torch"))
    assert got.isfinite().all()
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-6}
    torch.testing.assert_close(got, expected, **tolerance)
    if dtype == torch.bfloat16:  # the exponentials may differ in the last bit of a float32
        assert (got == expected).float().mean() > 0.97


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


def test_auto_stays_with_torch_where_autograd_records():
    x = torch.randn(2, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), EPS).sum().backward()
    assert x.grad is not None


@interpreter
@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(3, 48), (1, 64), (5, 576)])
def test_interpreted_norms(rows: int, size: int, dtype: torch.dtype):
    check_norms(rows, size, "cpu", dtype)


@interpreter
@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (1, 1, 16), (4, 2, 24)])
def test_interpreted_rope(heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype):
    check_rope(5, heads, kv_heads, dim, normed, "cpu", dtype)


@interpreter
def test_interpreted_tables():
    check_tables("cpu")


@interpreter
@pytest.mark.usefixtures("rounded_bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(3, 80), (2, 1500)])
def test_interpreted_gate(rows: int, size: int, dtype: torch.dtype):
    check_gate(rows, size, "cpu", dtype)


@interpreter
def test_interpreted_models():
    """A target whose heads are normed and a drafter, switched over as a whole and back."""
    spec = tiny_spec(family="qwen3", head_dim=16, rope=RopeSpec(theta=1e4, head_dim=16), qk_norm=True)
    target = TargetModel(spec).eval().requires_grad_(False)
    random_weights(target, 0)
    head = new_drafter(target, num_layers=2, mask_token_id=95, seed=1, target_init=False, tap_ids=(1, 2, 4))
    ids, attend = torch.arange(9) * 7, causal_attend([9])

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            hidden, taps = target(ids, torch.arange(9), attend, (1, 2, 4))
            return hidden, taps, head(target.embed_tokens(ids), head.combine(taps), torch.arange(9), attend)

    expected = run()
    for kernels in ("triton", "torch"):
        for module in (target, head):
            use_kernels(module, kernels)
        for got, want in zip(run(), expected):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5 if kernels == "triton" else 0)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_engine(monkeypatch):
    """The whole step on Triton kernels: the same tokens."""
    spec = tiny_spec(head_dim=16, rope=RopeSpec(theta=1e4, head_dim=16), num_layers=2)
    monkeypatch.setattr(tiny, "tiny_spec", lambda **_: spec)
    monkeypatch.setattr(
        tiny, "new_drafter", lambda *parts, **given: new_drafter(*parts, **{**given, "tap_ids": (0, 1, 2)})
    )
    prompts, params = tiny.random_prompts(2, longest=8), SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    outs = [
        [output.token_ids for output in tiny.tiny_llm(2, kernels=kernels).generate(prompts, params)]
        for kernels in ("torch", "triton")
    ]
    assert outs[0] == outs[1]


@interpreter
def test_interpreted_empty_batches():
    empty = torch.empty(0, 32)
    assert rms_norm(empty, torch.ones(32), EPS, backend="triton").shape == (0, 32)
    assert silu_mul(empty, backend="triton").shape == (0, 16)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_what_is_newer_than_the_kernel_before_is_loaded_after_it():
    """A norm asks for its weight before, a rotation for its rows' slots."""
    from peagle.kernels.rms_norm_triton import _norm_row
    from peagle.kernels.rope_write_triton import _rotate_and_write

    norm = compile_for_hopper(
        _norm_row, {"eps": "fp32", "x_RH": "*fp32"}, 16, SIZE=4096, BLOCK=4096, ADD=True, PARTS=2, EARLY=True
    )
    before = before_the_wait(norm.asm["ptx"])
    assert before.index("griddepcontrol.launch_dependents") < before.index("ld.global")
    assert before.count("ld.global.v4.b32") == 4096 // (16 * 32 * 8)  # of bfloat16
    write = compile_for_hopper(
        _rotate_and_write, {"eps": "fp32", "slots_R": "*i64"}, 2, QUERY_HEADS=32, KV_HEADS=8, HALF=64, HEADS=4,
        BLOCK=64, NORM=True, EARLY=True,
    )  # fmt: skip
    before = before_the_wait(write.asm["ptx"])
    assert before.count("ld.global") == before.count("ld.global.b64") == 1
    assert "st." not in before


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(1, 576), (8, 4096), (512, 896), (3, 1536)])
def test_norms_and_gate_on_gpu(rows: int, size: int, dtype: torch.dtype):
    check_norms(rows, size, "cuda", dtype)
    check_gate(rows, size, "cuda", dtype)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows,heads,kv_heads,dim", [(8, 9, 3, 64), (512, 32, 8, 128), (14, 14, 2, 64)])
def test_rope_on_gpu(rows: int, heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype):
    check_rope(rows, heads, kv_heads, dim, normed, "cuda", dtype)
    check_tables("cuda")


@pytest.mark.usefixtures("numbers_of_threads")
def test_a_row_of_the_gate_has_the_same_bits_among_others():
    for features in (48, 1504):
        gate_up = torch.randn(130, 2 * features, generator=torch.Generator().manual_seed(0))
        together = silu_mul(gate_up)
        torch.testing.assert_close(together, F.silu(gate_up[:, :features]) * gate_up[:, features:])
        for rows in (1, 2, 3, 5, 23, 31, 41, 63, 65, 129):
            assert torch.equal(silu_mul(gate_up[:rows].clone()), together[:rows])
