"""A pass that leaves work out equals the pass that does it all: sampled rows, and every key and value it writes."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.drafters.draft_pass import DraftPass, DraftSavings
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.p_eagle import drafter_for
from peagle.engine.kv_cache import PagedCache
from peagle.kernels.draft_layout import DraftLayout, LayoutSizes, draft_layout
from peagle.kernels.paged_attention import plan_attention
from peagle.kernels.paged_decode import plan_decode
from peagle.models.layers import Attend, use_kernels
from peagle.models.packing import pack_linears
from tests.drafters.conftest import CONFIG
from tests.helpers import random_weights
from tests.kernels.conftest import numpy_scalars  # noqa: F401, a fixture
from tests.kernels.interpreter import INTERPRETED, run_interpreted

interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCK, LIMIT = 4, 48
ALL, NOTHING = DraftSavings(), DraftSavings(last_layer_sampled=False, constant_mask_qkv=False)
EACH = (DraftSavings(constant_mask_qkv=False), DraftSavings(last_layer_sampled=False), ALL)
DECODES = [(8, kept, 11 * kept % 31, False) for kept in range(8)]  # seven drafts of which 0 to 7 were kept
PROMPT = (25, 24, 0, False)
PADDING = (8, 0, 0, True)

Request = tuple[int, int, int, bool]  # target rows, the last one that was kept, position of the first, padding?
REQUESTS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 11), st.integers(0, LIMIT - 2), st.booleans()), min_size=1, max_size=5
)


def make_head(seed: int, dtype: torch.dtype, **changes: object) -> Eagle3Drafter:
    head = drafter_for(replace(CONFIG, **changes))
    random_weights(head, seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name or name.endswith("bias") or name == "mask_embedding":
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return head.to(dtype).eval().requires_grad_(False)


class Case:
    """A drafter's pass over requests in a cache that earlier passes filled. Features that nobody may read are NaN."""

    def __init__(self, head: Eagle3Drafter, requests: list[Request], k: int, seed: int, device: str = "cpu") -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.head, self.config, self.device = head.to(device), head.config, device
        self.num_drafts = k if head.config.parallel else 1
        kept = np.array([min(kept, rows - 1) for rows, kept, *_ in requests])
        self.rows_B, self.first_B = (np.array(x) for x in list(zip(*requests, strict=True))[:3:2])
        self.padding_B = np.array([padding for *_, padding in requests])
        self.start_B1 = np.concatenate(([0], np.cumsum(self.rows_B)))
        blocks = LIMIT // BLOCK
        self.tables_BN = 1 + rng.permutation(len(requests) * blocks).reshape(-1, blocks)
        self.tables_BN[self.padding_B] = 0
        positions = np.concatenate([first + np.arange(rows) for rows, _, first, _ in requests])
        self.layout = self._lay_out(rng, positions, kept)
        features = torch.full((self.start_B1[-1], self.config.hidden_size), torch.nan, dtype=head.norm.weight.dtype)
        used = self.layout.source_rows[self.layout.source_rows >= 0].cpu()
        features[used] = torch.randn(len(used), self.config.hidden_size, generator=generator).to(features.dtype)
        self.features_TH = features.to(device)
        shape = (2, self.config.num_layers, self.config.num_kv_heads, (len(requests) * blocks + 1) * BLOCK + 1, 8)
        self.cached = torch.randn(shape, generator=generator).to(device, features.dtype)

    def _lay_out(self, rng: np.random.Generator, positions: np.ndarray, kept: np.ndarray) -> DraftLayout:
        batch = len(kept)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self.device)

        num_rows = len(positions) + batch * (self.num_drafts - 1)
        sizes = LayoutSizes(self.config.mask_token_id or 0, self.num_drafts, num_rows, BLOCK, LIMIT)
        return draft_layout(
            tensor(rng.integers(0, 61, len(positions))), tensor(positions), tensor(rng.integers(0, 61, batch)),
            tensor(self.start_B1), tensor(self.start_B1[:-1] + kept), tensor(self.tables_BN), sizes,
            tensor(np.where(self.padding_B, -1, np.arange(batch))), backend="torch",
        )  # fmt: skip

    def run(self, savings: DraftSavings, kernels: str = "torch") -> tuple[Tensor, Tensor, list[bool]]:
        """Stream of the sampled rows of real requests, the cache after the pass, and the attentions asked for."""
        c, asked = self.config, []
        cache = PagedCache(
            c, self.cached.shape[3] - 1, dtype=self.cached.dtype,
            device=torch.device(self.device), windows=c.windows, kernels=kernels,
        )  # fmt: skip
        cache.keys.copy_(self.cached[0])
        cache.values.copy_(self.cached[1])

        def attend_for(sampled: bool) -> Attend:
            asked.append(sampled)
            limit_R = self.layout.last_keys
            plan = self._plan(sampled, kernels)
            return cache.attend(self.layout.slots, limit_R[self.layout.sample_rows] if sampled else limit_R, plan)

        stream = DraftPass.of(self.head, savings, kernels)(self.layout, self.features_TH, attend_for)
        live = torch.from_numpy(~self.padding_B).repeat_interleave(self.num_drafts)
        return stream[live.to(self.device)], torch.stack((cache.keys, cache.values))[:, :, :, :-1], asked

    def _plan(self, sampled: bool, kernels: str):
        rows_B = np.full_like(self.rows_B, self.num_drafts) if sampled else self.rows_B + self.num_drafts - 1
        c, group = self.config, self.config.num_heads // self.config.num_kv_heads
        if kernels == "triton":
            tables = torch.from_numpy(self.tables_BN).to(self.device)
            return plan_decode(
                int(rows_B[0]), tables, BLOCK, heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim,
                backend=kernels,
            )  # fmt: skip
        keys_B = np.minimum(self.first_B + self.rows_B + self.num_drafts - 1, LIMIT)
        return plan_attention(
            rows_B, keys_B, self.tables_BN, BLOCK, heads_per_kv=group, head_dim=c.head_dim,
            device=torch.device(self.device), backend="torch",
        )  # fmt: skip


def check(case: Case, tolerance: float, kernels: str = "torch") -> None:
    """Each saving, and all of them, against the pass that saves nothing."""
    expected, cached, _ = case.run(NOTHING)
    assert expected.isfinite().all()
    for savings in EACH:
        stream, after, _ = case.run(savings, kernels)
        torch.testing.assert_close(stream, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(after, cached, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 7), REQUESTS, st.integers(0, 2**31), st.integers(1, 3), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_savings_change_nothing(
    k: int, requests: list[Request], seed: int, layers: int, slides: bool, bias: bool, before: bool, parallel: bool,
    always: bool,
):  # fmt: skip
    """Ragged batches with dead rows, padding and rows past the length limit; heads of every kind."""
    window: dict = {"layer_types": ("sliding_attention",) * layers, "sliding_window": 6} if slides else {}
    head = make_head(
        seed, torch.float64, num_layers=layers, norm_before_residual=before, attention_bias=bias,
        mask_token_id=7 if parallel else None, **window,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if always:
            patch.setattr(DraftPass, "_saves_rows", staticmethod(lambda *_: True))
        check(Case(head, requests, k, seed), 1e-12)


@pytest.mark.parametrize("parallel", [True, False])
def test_fc_over_all_rows_says_the_same_of_target_rows(parallel: bool):
    """Asked to, it sees 14 rows of a request with 7 drafts, not 8."""
    head, seen = make_head(6, torch.float64, mask_token_id=7 if parallel else None), []
    case = Case(head, [*DECODES, PADDING], 7, 6)
    taps = torch.randn(len(case.features_TH), head.config.feature_size, dtype=torch.float64)
    head.fc.register_forward_pre_hook(lambda _, x: seen.append(len(x[0])))
    saved, whole = (
        DraftPass.of(head, DraftSavings(fc_target_rows=saves), "torch").features(case.layout, taps)
        for saves in (True, False)
    )
    read = case.layout.source_rows[case.layout.source_rows >= 0]
    torch.testing.assert_close(whole[read], saved[read], rtol=1e-12, atol=1e-12)
    assert [rows for rows in seen if rows > 1] == [9 * 8, 9 * 14 if parallel else 9 * 8]  # 1: the mask's, at load


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_in_float32(layers: int, packed: bool):
    """Also over weights packed for the CPU, which cannot be cut."""
    head = make_head(3, torch.float32, num_layers=layers)
    if packed:
        pack_linears(head)
    check(Case(head, [*DECODES, PROMPT, PADDING], 7, 3), 2e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_what_is_left_out(layers: int):
    """Of 3 requests with 7 drafts: layer 0 projects 24 rows, not 42; the last layer's feed-forward part sees 21."""
    head = make_head(4, torch.float64, num_layers=layers)
    case, seen = Case(head, DECODES[:3], 7, 4), {}
    last = head.layers[-1] if layers > 1 else head.fusion
    for name, module in {"qkv": head.fusion.self_attn.qkv_proj, "mlp": last.mlp}.items():
        module.register_forward_pre_hook(lambda _, x, name=name: seen.__setitem__(name, len(x[0])))
    case.run(NOTHING)
    assert seen == {"qkv": 42, "mlp": 42}
    _, _, asked = case.run(ALL)
    assert seen == {"qkv": 24, "mlp": 21}
    assert asked == ([True] if layers == 1 else [True, False])


def test_a_prompt_projects_queries_of_sampled_rows_only():
    head, seen = make_head(5, torch.float64, num_layers=2), []
    case = Case(head, [PROMPT], 3, 5)
    head.layers[0].self_attn.qkv_proj.register_forward_pre_hook(lambda *_: seen.append(1))
    case.run(ALL)
    assert not seen  # its weight is cut in two


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="needs triton; this is the process it starts")
def test_in_the_interpreter():
    run_interpreted(__file__)


def check_kernels(head: Eagle3Drafter, k: int, requests: list[Request], tolerance: float, device: str) -> None:
    """Decoding requests with the Triton forms of everything, against torch with nothing left out."""
    case = Case(head, requests, k, 6, device)
    expected, cached, _ = case.run(NOTHING)
    use_kernels(head, "triton")
    stream, after, _ = case.run(ALL, "triton")
    torch.testing.assert_close(stream, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(after, cached, rtol=tolerance, atol=tolerance)


@interpreter
@pytest.mark.usefixtures("numpy_scalars")
@pytest.mark.parametrize("layers", [1, 2])
@torch.inference_mode()
def test_interpreted(layers: int):
    requests = [(4, 1, 9, False), (4, 0, 0, True)]
    check_kernels(make_head(6, torch.float32, num_layers=layers), 3, requests, 1e-4, "cpu")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 2, 3])
@torch.inference_mode()
def test_on_gpu(layers: int):
    requests = [*DECODES, *DECODES, PADDING]
    check_kernels(make_head(6, torch.float32, num_layers=layers), 7, requests, 1e-3, "cuda")
