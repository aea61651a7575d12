"""Decoding attention with a fixed plan, both forms, against a loop over rows; what nobody sees holds NaN."""

import re
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.kernels import paged_decode
from peagle.kernels.backend import INVARIANT
from peagle.kernels.paged_attention import paged_attention, plan_rectangles
from peagle.kernels.paged_decode import (
    FINE_KEYS,
    CacheView,
    DecodePlan,
    chunk_start,
    most_scratch_bytes,
    num_chunks,
    paged_decode_ref,
    plan_decode,
)
from tests.kernels.hopper import before_the_wait, compile_for_hopper
from tests.kernels.interpreter import INTERPRETED, run_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCK = 16
# Relative, 2-norm of the whole output.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case:
    """B requests of R rows over tables of `width` blocks; `lengths` are keys, 0 for a request that only pads.

    The last `dead` rows of a request see what the row before them sees. Slots that no row sees hold NaN; tables
    are 0 past a request's last block.
    """

    def __init__(
        self, rows: int, lengths: list[int], heads: int, kv_heads: int, dim: int,
        *, window: int | None = None, sinks: bool = False, dead: int = 0, width: int | None = None,
        dtype: torch.dtype = torch.float32, device: str = "cpu",
    ) -> None:  # fmt: skip
        generator, rng = torch.Generator().manual_seed(len(lengths) + rows), np.random.default_rng(0)
        needed = [-(-length // BLOCK) for length in lengths]
        free = rng.permutation(sum(needed) + 2).tolist()
        self.rows, self.heads, self.kv_heads, self.dim, self.window = rows, heads, kv_heads, dim, window
        tables = torch.zeros(len(lengths), width or max(needed) + 1, dtype=torch.int32)
        keys = torch.full((kv_heads, len(free) * BLOCK + 1, dim), torch.nan)
        values, limits = keys.clone(), torch.full((len(lengths), rows), -1)
        for i, length in enumerate(lengths):
            blocks = [free.pop() for _ in range(needed[i])]
            tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            if not length:
                continue
            limits[i] = torch.arange(length - rows, length).clamp(min=-1)  # rows before the first see nothing
            if dead:
                limits[i, rows - dead :] = limits[i, rows - dead - 1]
            seen = torch.arange(int(limits[i].max()) + 1)
            if window is not None:
                lowest = limits[i][limits[i] >= 0].min()
                seen = seen[seen > int(lowest) - window]
            at = tables[i, seen // BLOCK] * BLOCK + seen % BLOCK
            keys[:, at], values[:, at] = torch.randn(2, kv_heads, len(seen), dim, generator=generator)
        # A slice of a wider projection: rows are further apart than they are long.
        wide = torch.randn(len(lengths) * rows, heads + 2 * kv_heads, dim, generator=generator)
        self.q_RND = wide.to(device, dtype)[:, :heads]
        self.keys, self.values = keys.to(device, dtype), values.to(device, dtype)
        self.limit_R, self.tables_BN = limits.flatten().to(device), tables.to(device)
        self.sinks_N = torch.randn(heads, generator=generator).to(device, dtype) if sinks else None

    def plan(self, backend: str, splits: int | None = None) -> DecodePlan:
        plan = plan_decode(
            self.rows, self.tables_BN, BLOCK, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim,
            backend=backend, splits=splits,
        )  # fmt: skip
        if plan.scratch is not None:
            plan.scratch.out_WMCTD.fill_(torch.nan)
            plan.scratch.stats_WMC2T.fill_(torch.nan)
        return plan

    def view(self) -> CacheView:
        return CacheView(self.keys, self.values, self.limit_R, self.window, self.sinks_N)

    def run(self, plan: DecodePlan) -> Tensor:
        out = paged_attention(self.q_RND, self.view(), plan)
        if plan.scratch is not None:
            assert not plan.scratch.arrivals_WM.any()
        return out

    def expected(self) -> Tensor:
        """Row by row in float64."""
        q, k, v = (x.double().cpu() for x in (self.q_RND, self.keys, self.values))
        out = torch.zeros_like(q)
        for r, limit in enumerate(self.limit_R.tolist()):
            seen = torch.arange(0 if self.window is None else max(0, limit + 1 - self.window), limit + 1)
            if not len(seen):
                continue
            at = self.tables_BN.cpu()[r // self.rows, seen // BLOCK] * BLOCK + seen % BLOCK
            group = self.heads // self.kv_heads
            scores = torch.einsum("nd,nsd->ns", q[r], k[:, at].repeat_interleave(group, 0)) * self.dim**-0.5
            if self.sinks_N is not None:
                scores = torch.cat((scores, self.sinks_N.double().cpu()[:, None]), dim=1)
            weights = scores.softmax(1)[:, : len(seen)]
            out[r] = torch.einsum("ns,nsd->nd", weights, v[:, at].repeat_interleave(group, 0))
        return out


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double().cpu() - expected).norm() / expected.norm())


# Heads, key-value heads and dims of SmolLM2, Qwen2.5-0.5B and 1.5B, Qwen3-8B and gpt-oss-20b; sliding window.
SHAPES = (
    (9, 3, 64, None),
    (14, 2, 64, None),
    (12, 2, 128, None),
    (32, 8, 128, None),
    (64, 8, 64, None),
    (64, 8, 64, 128),
)

CASES = {
    "one row": (1, [530, 1, 0, 17], {}),
    "verify": (4, [4, 700, 2, 33], {}),
    "layout": (8, [8, 290, 0, 64], {"dead": 3}),
    "window": (4, [600, 3, 270, 45], {"window": 37}),
    "wide window": (3, [600, 3, 530], {"window": 300, "dead": 1}),
    "sinks": (4, [4, 300, 0, 21], {"sinks": True}),
    "sinks and window": (2, [2, 600, 90], {"sinks": True, "window": 16, "width": 64}),
}


def test_chunks_cover_every_position_once():
    starts = [chunk_start(c) for c in range(60)]
    assert starts[:18] == [*range(0, 2049, 128), 2304]
    assert (starts[24], starts[25], starts[32]) == (4096, 4608, 8192)
    assert all(a < b and (b - a) % 128 == 0 for a, b in pairwise(starts))
    assert [num_chunks(n) for n in (1, 128, 129, 2048, 2049, 40960)] == [1, 1, 2, 16, 17, 50]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_torch_form(name: str, dtype: torch.dtype):
    rows, lengths, settings = CASES[name]
    case = Case(rows, lengths, 6, 2, 8, dtype=dtype, **settings)
    assert error(case.run(case.plan("torch")), case.expected()) < TOLERANCE[dtype]


def test_sinks_in_the_form_for_prompts():
    case = Case(4, [5, 300, 30], 6, 2, 8, sinks=True, dtype=torch.float64)
    lens = np.array([5, 300, 30])
    plan = plan_rectangles(
        np.full(3, 4), lens, case.tables_BN.long().numpy(), BLOCK, heads_per_kv=3, device=torch.device("cpu")
    )
    out = paged_attention(case.q_RND, case.view(), plan)
    assert error(out, case.expected()) < 1e-12


def test_the_split_follows_from_batch_and_width():
    tables = {batch: torch.zeros(batch, 512, dtype=torch.int32) for batch in (1, 8, 64)}

    def splits(batch: int, **changes: int) -> int:
        sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, **changes}
        return plan_decode(8, tables[batch], 16, backend="torch", **sizes).splits

    assert [splits(batch) for batch in (1, 8, 64)] == [16, 4, 1]
    assert splits(1, heads=40, head_dim=256) == 8  # of 32 chunks in 8,192 keys
    assert [splits(batch, heads=9, kv_heads=3, head_dim=64) for batch in (1, 8, 64)] == [16, 5, 2]


@pytest.mark.parametrize("heads,kv_heads,dim,forms", [
    (9, 3, 64, {(1, 8): (8, True), (8, 8): (8, True), (16, 1): (16, True), (8, 64): (32, False)}),
    (14, 2, 64, {(1, 1): (8, True), (4, 1): (16, True), (8, 8): (16, True), (16, 1): (64, False)}),
    (64, 8, 64, {(1, 1): (8, True), (8, 1): (16, True), (9, 1): (64, False), (8, 8): (64, False)}),
    (12, 2, 128, {(1, 1): (16, True), (8, 8): (16, True), (8, 64): (64, False)}),
    (32, 8, 128, {(4, 8): (16, True), (8, 8): (32, False), (15, 8): (32, False), (15, 9): (64, False)}),
    (4, 2, 256, {(1, 1): (16, False), (64, 1): (32, False)}),
])  # fmt: skip
def test_few_requests_have_warps_with_their_own_keys(
    heads: int, kv_heads: int, dim: int, forms: dict[tuple[int, int], tuple[int, bool]]
):
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    one = plan_decode(1, torch.zeros(1, 64), 16, backend=INVARIANT, **sizes)
    for (rows, batch), form in forms.items():
        plan = plan_decode(rows, torch.zeros(batch, 64), 16, backend="torch", **sizes)
        assert (plan.tile.size, plan.tile.own_keys) == form
        plan = plan_decode(rows, torch.zeros(batch, 64), 16, backend=INVARIANT, **sizes)
        assert (plan.tile.size, plan.tile.own_keys) == (one.tile.size, one.tile.own_keys)


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_scratch_is_accounted_for(dim: int, group: int):
    for rows, batch, kv_heads in product((1, 4, 8, 40), (1, 5, 16, 33, 100), (1, 2, 8)):
        tables = torch.zeros(batch, 256, dtype=torch.int32, device="meta")
        plan = plan_decode(rows, tables, 16, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim, backend="triton")
        if plan.scratch is not None:
            taken = plan.scratch.out_WMCTD.nbytes + plan.scratch.stats_WMC2T.nbytes
            assert taken <= most_scratch_bytes(256 * 16, dim)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("requests,rows,group,dim,window", [  # one: own keys, but for 256 dims
    (1, 8, 3, 64, 0), (1, 8, 7, 64, 0), (1, 8, 8, 64, 128), (1, 1, 4, 128, 0), (1, 8, 6, 128, 0), (1, 8, 2, 256, 0),
    (64, 4, 3, 64, 0), (64, 8, 3, 64, 0), (64, 8, 8, 64, 0), (64, 8, 8, 64, 128), (64, 4, 4, 128, 0),
    (64, 8, 4, 128, 0), (8, 8, 4, 128, 0), (8, 15, 4, 128, 0), (64, 8, 6, 128, 0), (64, 16, 2, 256, 0),
])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 4])
def test_programs_fit_on_a_multiprocessor_of_hopper(
    requests: int, rows: int, group: int, dim: int, window: int, splits: int
):
    from peagle.kernels.paged_decode_triton import _decode_tile, _launch_sizes

    kv_heads = 1 if requests == 1 else 8
    plan = plan_decode(
        rows, torch.zeros(requests, 256, device="meta"), BLOCK, heads=group * kv_heads, kv_heads=kv_heads,
        head_dim=dim, backend="torch", splits=splits,
    )  # fmt: skip
    assert plan.tile.own_keys == (requests == 1 and dim < 256)
    keys, warps, stages, registers = _launch_sizes(plan, dim, torch.bfloat16)
    assert FINE_KEYS % keys == 0
    first = dim == 64 and window == 0 and plan.tile.own_keys
    kinds = {"limit_R": "*i64", "tables_BN": "*i32", "arrivals": "*i32", "table_width": "i32", "scale_log2": "fp32"}
    scratch = dict.fromkeys(("scratch_out", "scratch_stats"), "*fp32")
    compiled = compile_for_hopper(
        _decode_tile, kinds | scratch, warps, stages, registers, ROWS=rows, GROUP=group, HEAD_DIM=dim, BLOCK_SIZE=BLOCK,
        TILE=plan.tile.size, KEYS=keys, CHUNKS=24, SPLITS=splits, WINDOW=window, SINKS=window > 0,
        OWN=plan.tile.own_keys, KEYS_FIRST=first, EARLY=True,
    )  # fmt: skip
    assert compiled.metadata.shared < 227 * 1024 // plan.tile.resident
    ptx = compiled.asm["ptx"]
    assert ("cp.async" in ptx) != plan.tile.own_keys
    assert ("ld.volatile" in ptx) == first
    if plan.tile.own_keys:  # limits and block ids are older than the kernel before; queries and keys come as vectors
        before = before_the_wait(ptx)
        assert "ld.global" in before
        assert not re.search(r"ld\.\S+\.v\d|st\.", before)
    else:  # nothing lets it start before what it reads is there
        assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("ld.")
        assert "griddepcontrol.wait" not in ptx
    products = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", ptx, re.DOTALL)
    assert len(products) == 2 * (plan.tile.size == 64)
    assert not any("bra" in between for between in products)  # nothing is read before it is there


@needs_triton
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_launch_sizes_do_not_depend_on_the_split(dim: int, group: int):
    """Turns of the loop round apart."""
    from peagle.kernels.paged_decode_triton import _launch_sizes

    for rows, batch, kv_heads in product((1, 4, 8, 16), (1, 8, 64), (2, 8)):
        tables = torch.zeros(batch, 256, dtype=torch.int32, device="meta")
        sizes = {
            _launch_sizes(
                plan_decode(rows, tables, BLOCK, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim,
                            backend="torch", splits=splits), dim, torch.bfloat16,
            )
            for splits in (None, 1, 2, 7)
        }  # fmt: skip
        assert len(sizes) == 1


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("name", CASES)
def test_interpreted_and_the_split_changes_no_bit(name: str):
    rows, lengths, settings = CASES[name]
    case = Case(rows, lengths, 6, 2, 16, **settings)
    expected, alone = case.expected(), case.run(case.plan("triton", 1))
    assert error(alone, expected) < TOLERANCE[torch.float32]
    for splits in (2, 3, 5, 8) if name == "one row" else (2,):
        plan = case.plan("triton", splits)
        for _ in range(2):  # nothing is left behind
            assert torch.equal(case.run(plan), alone)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("heads,kv_heads,dim", [(7, 1, 32), (2, 2, 64), (20, 1, 16)])
def test_interpreted_groups(heads: int, kv_heads: int, dim: int):
    case = Case(5, [5, 280], heads, kv_heads, dim, sinks=True)
    assert error(case.run(case.plan("triton")), case.expected()) < TOLERANCE[torch.float32]


FORMS = {(8, True): (2, 6, 2, 16), (16, True): (4, 7, 1, 16), (16, "wide"): (2, 7, 1, 128), (64, False): (5, 20, 1, 16)}


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("settings,dtype", [  # the interpreter does not multiply bfloat16
    ({"window": 600, "sinks": True, "dead": 1}, torch.float32), ({}, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_interpreted_forms_past_the_fine_chunks(form: tuple[int, object], settings: dict[str, int], dtype: torch.dtype):
    rows, heads, kv_heads, dim = FORMS[form]
    case = Case(rows, [2700, 130], heads, kv_heads, dim, dtype=dtype, **settings)
    alone = case.run(case.plan("triton", 1))
    assert error(alone, case.expected()) < TOLERANCE[dtype]
    for splits in (17, None):
        plan = case.plan("triton", splits)
        assert (plan.tile.size, plan.tile.own_keys) == (form[0], bool(form[1]))
        assert torch.equal(case.run(plan), alone)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize(
    "rows,dim,few", [(8, 128, True), (8, 128, False), (4, 128, False), (16, 128, True), (4, 64, True)]
)
def test_interpreted_streams_and_the_split_changes_no_bit(rows: int, dim: int, few: bool, monkeypatch):
    """Of half precision, whose turns are the longest, where warps would have their own keys."""
    monkeypatch.setattr(paged_decode, "_FEW_TILES", 0)
    if not few:
        monkeypatch.setattr(paged_decode, "_MULTIPROCESSORS", 1)
    case = Case(rows, [600, rows], 4, 1, dim, dtype=torch.float16)
    plans = [case.plan("triton", splits) for splits in (1, 2, 5)]
    assert {(plan.tile.few, plan.tile.own_keys) for plan in plans} == {(few, False)}
    alone, *others = [case.run(plan) for plan in plans]
    assert error(alone, case.expected()) < TOLERANCE[torch.float16]
    for out in others:
        assert torch.equal(out, alone)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("heads,kv_heads,dim", [(6, 2, 16), (7, 1, 16), (20, 1, 16), (4, 1, 128), (7, 1, 128)])
@pytest.mark.parametrize("settings", [{}, {"window": 150}])
def test_interpreted_rows_do_not_depend_on_neighbours(heads: int, kv_heads: int, dim: int, settings: dict[str, int]):
    """A request alone, in a wider table, and one row at a time."""
    case = Case(4, [700, 30, 410], heads, kv_heads, dim, **settings)
    together = case.run(case.plan("triton"))
    tables = torch.zeros(1, 90, dtype=torch.int32)
    tables[0, : case.tables_BN.shape[1]] = case.tables_BN[2]
    for rows in ([8, 9, 10, 11], [9], [10, 11]):
        plan = plan_decode(len(rows), tables, BLOCK, heads=heads, kv_heads=kv_heads, head_dim=dim, backend="triton")
        alone = paged_attention(case.q_RND[rows], case.view()._replace(limit_R=case.limit_R[rows]), plan)
        torch.testing.assert_close(alone, together[rows], rtol=0, atol=0 if len(rows) == 4 else 1e-6)


@interpreter
@pytest.mark.usefixtures("numpy_scalars", "products_in_order")
@pytest.mark.parametrize("heads,kv_heads,dim", [(6, 2, 16), (20, 1, 16), (4, 1, 128), (4, 2, 256)])
@pytest.mark.parametrize("window", [None, 150])
def test_interpreted_invariant_rows_do_not_depend_on_their_number(
    heads: int, kv_heads: int, dim: int, window: int | None
):
    case = Case(4, [300, 3, 270], heads, kv_heads, dim, window=window)
    together = run_part(case, 3, 4, INVARIANT)[0].unflatten(0, (3, 4))
    for requests, rows in ((1, 1), (3, 1), (2, 3)):
        part = run_part(case, requests, rows, INVARIANT)[0].unflatten(0, (requests, rows))
        assert torch.equal(part, together[:requests, -rows:])


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
def test_interpreted_plans_outlive_lengths_and_tables():
    """What a captured graph relies on: tables and limits change in place, the plan stays."""
    case, other = Case(4, [600, 30], 6, 2, 16, width=40), Case(4, [40, 330], 6, 2, 16, width=40)
    plan = case.plan("triton", 2)
    case.run(plan)
    case.tables_BN.copy_(other.tables_BN)
    out = paged_attention(other.q_RND, other.view(), plan)
    assert error(out, other.expected()) < TOLERANCE[torch.float32]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads,kv_heads,dim", [(9, 3, 64), (32, 8, 128), (14, 2, 64), (64, 8, 64), (4, 2, 256)])
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, name: str):
    rows, lengths, settings = CASES[name]
    lengths = [*lengths, 5000, 1200] if "width" not in settings else lengths
    case = Case(rows, lengths, heads, kv_heads, dim, dtype=dtype, device="cuda", **settings)
    outs = [case.run(case.plan("triton", splits)) for splits in (1, 2, 7, None)]
    assert error(outs[0], case.expected()) < TOLERANCE[dtype]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def run_part(case: Case, requests: int, rows: int, backend: str) -> tuple[Tensor, DecodePlan, Tensor, CacheView]:
    """The last `rows` rows of the first requests: the answer, and what to ask for it again."""
    q_RND, limit_R = (
        x.view(-1, case.rows, *x.shape[1:])[:requests, -rows:].flatten(0, 1).contiguous()
        for x in (case.q_RND, case.limit_R)
    )
    tables, cache = case.tables_BN[:requests], case.view()._replace(limit_R=limit_R)
    sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.dim}
    plan = plan_decode(rows, tables, BLOCK, backend=backend, **sizes)
    return paged_attention(q_RND, cache, plan), plan, q_RND, cache


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", INVARIANT])
@pytest.mark.parametrize("heads,kv_heads,dim,window", SHAPES)
def test_shapes_on_gpu(heads: int, kv_heads: int, dim: int, window: int | None, backend: str):
    """Any number of rows, of requests and of keys: right, and the same ten times; `INVARIANT`: the same bits for one
    request as for 64, and for one row as for eight."""
    lengths = [1200, 0, 1, 7, 127, 128, 129, 2048, 2049, 5000, *np.random.default_rng(5).integers(0, 5000, 54).tolist()]
    case = Case(8, lengths, heads, kv_heads, dim, window=window, sinks=window is not None, dtype=torch.bfloat16,
                device="cuda")  # fmt: skip
    together = run_part(case, 64, 8, backend)[0].unflatten(0, (64, 8))
    for rows in range(1, 9):
        out, plan, q_RND, cache = run_part(case, 64, rows, backend)
        assert torch.equal(out, together[:, -rows:].flatten(0, 1)) or backend == "triton"
        for first in range(0, 64, 8):  # not all at once: float64 of all keys
            some, at = slice(first * rows, (first + 8) * rows), slice(first, first + 8)
            view = CacheView(
                cache.keys_MSD.double(), cache.values_MSD.double(), cache.limit_R[some], window,
                None if cache.sinks_N is None else cache.sinks_N.double(),
            )  # fmt: skip
            expected = paged_decode_ref(q_RND[some].double(), view, replace(plan, tables_BN=plan.tables_BN[at]))
            assert error(out[some], expected.cpu()) < TOLERANCE[torch.bfloat16]
        for requests in (1, 8, 64):
            part, plan, q_RND, cache = run_part(case, requests, rows, backend)
            assert error(part, out[: requests * rows].double().cpu()) < TOLERANCE[torch.bfloat16]
            assert torch.equal(part, out[: requests * rows]) or backend == "triton"
            for _ in range(10):
                assert torch.equal(paged_attention(q_RND, cache, plan), part)


@gpu
@pytest.mark.gpu
def test_a_graph_replays_while_lengths_change_on_gpu():
    case = Case(8, [3000, 70, 8, 0], 32, 8, 128, width=200, dtype=torch.bfloat16, device="cuda")
    plan = case.plan("triton")
    case.run(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(case.q_RND, case.view(), plan)
    for _ in range(200):
        graph.replay()
    first = out.clone()
    assert torch.equal(first, case.run(plan))
    case.limit_R.sub_(1).clamp_(min=-1)
    graph.replay()
    assert error(out, case.expected()) < TOLERANCE[torch.bfloat16]
