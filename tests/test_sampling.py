"""The sampling rule: its noise, its filters, its law."""

import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.errors import PeagleError
from peagle.sampling import RowSampling, SamplingParams, filter_logits, gumbel_noise, sample_tokens


def rows(count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 7) -> RowSampling:
    full = lambda value, dtype: torch.full((count,), value, dtype=dtype)  # noqa: E731
    return RowSampling(
        full(temperature, torch.float32), full(top_k, torch.int64), full(top_p, torch.float32),
        full(seed, torch.int64), torch.arange(count), top_k > 0 or top_p < 1,
    )  # fmt: skip


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 200_000))
@settings(max_examples=50, deadline=None)
def test_noise_depends_on_seed_index_and_token_only(seed: int, index: int, token: int):
    tokens = torch.tensor([token, token + 1, token + 2])
    alone = gumbel_noise(torch.tensor([seed]), torch.tensor([index]), tokens[:1])
    crowd = gumbel_noise(torch.tensor([seed ^ 1, seed]), torch.tensor([index, index]), tokens)
    assert crowd[1, 0] == alone[0, 0]
    assert len(set(crowd.flatten().tolist())) == 6


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(40), torch.arange(40) * 3, torch.arange(50_000)).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.003)
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.01)
    # Kolmogorov-Smirnov distance to exp(-exp(-x)) over 2 M draws
    ordered = noise.flatten().sort().values
    empirical = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert (torch.exp(-torch.exp(-ordered)) - empirical).abs().max() < 2e-3
    neighbours = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
    assert abs(neighbours) < 3e-3


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 5, 1.0), (1.0, 8, 0.8)])
def test_frequencies_follow_the_filtered_softmax(temperature: float, top_k: int, top_p: float):
    torch.manual_seed(1)
    count = 200_000
    logits = torch.randn(1, 12) * 2
    sampling = rows(count, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens = sample_tokens(logits.expand(count, 12), sampling)
    observed = torch.bincount(tokens, minlength=12) / count
    scaled = logits / temperature
    expected = filter_logits(scaled, torch.tensor([top_k]), torch.tensor([top_p])).softmax(-1)[0]
    assert observed[expected == 0].sum() == 0
    chi_square = (count * (observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 45  # 11 degrees of freedom: p < 1e-5 beyond


def test_top_k_and_top_p_keep_what_they_should():
    logits = torch.log(torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]))
    keep = lambda k, p: filter_logits(logits, torch.tensor([k]), torch.tensor([p])).isfinite()[0].tolist()  # noqa: E731
    assert keep(2, 1.0) == [False, True, False, True, False]
    assert keep(0, 0.5) == [False, True, False, True, False]  # .4 < .5, so the token that crosses it stays
    assert keep(0, 0.4 - 1e-3) == [False, True, False, False, False]
    assert keep(1, 1e-6) == [False, True, False, False, False]
    assert keep(0, 1.0) == [True] * 5


def test_min_p_keeps_a_share_of_the_likeliest_and_comes_before_the_nucleus():
    logits = torch.log(torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]]))
    keep = lambda min_p, k, p: (  # noqa: E731
        filter_logits(logits, torch.tensor([k]), torch.tensor([p]), torch.tensor([min_p])).isfinite()[0].tolist()
    )
    assert keep(0.0, 0, 1.0) == [True] * 5
    assert keep(0.3, 0, 1.0) == [False, True, True, True, False]  # .12 and more
    assert keep(1.0, 0, 1.0) == [False, True, False, False, False]
    assert keep(0.3, 2, 1.0) == [False, True, False, True, False]
    assert keep(0.0, 0, 0.55) == [False, True, False, True, False]
    assert keep(0.5, 0, 0.55) == [False, True, False, False, False]  # .4 is .57 of what min-p leaves


def test_equal_logits_stay_or_go_together():
    """The filters look at values: of ties at the edge all stay, wherever in the vocabulary they are."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 3.0, 2.0, -0.0]])
    off, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    kept = lambda k, p: filter_logits(logits, k, p).isfinite()[0].tolist()  # noqa: E731
    threes, twos = [x >= 3 for x in logits[0].tolist()], [x >= 2 for x in logits[0].tolist()]
    assert kept(zero + 1, off) == kept(zero + 2, off) == kept(zero, off * 0.1) == threes
    assert kept(zero + 3, off) == kept(zero + 5, off) == kept(zero, off * 0.7) == twos
    assert kept(zero + 7, off) == [True] * 8  # both zeros are one value


def kept_by_hand(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The rule of `filter_logits`, token by token and in float64."""
    weights = [math.exp(x - max(logits)) for x in logits]
    stays = [w >= min_p and (top_k == 0 or sum(x > y for x in logits) < top_k) for w, y in zip(weights, logits)]
    total = sum(w for w, stay in zip(weights, stays) if stay)
    return [
        stay and (top_p == 1.0 or sum(w for w, x, ok in zip(weights, logits, stays) if ok and x > y) < top_p * total)
        for stay, y in zip(stays, logits)
    ]


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30), st.integers(0, 32), st.floats(0.013, 1.0),
    st.sampled_from((0.0, 0.013, 0.11, 0.47, 1.0)),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_filters_keep_what_the_rule_says(quarters: list[int], top_k: int, top_p: float, min_p: float):
    logits, top_p = [x / 4 for x in quarters], round(top_p, 3) + (1e-4 if top_p < 0.999 else 0)  # off any edge
    got = filter_logits(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    assert got[0].isfinite().tolist() == kept_by_hand(logits, top_k, top_p, min_p)


def test_filters_leave_rows_with_nan_and_infinity_their_winner():
    logits = torch.tensor([[0.0, torch.nan, 5.0, torch.nan], [0.0, 9.0, torch.inf, torch.inf], [-torch.inf] * 4])
    for options in ({"top_k": 1}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}):
        assert sample_tokens(logits, rows(3, **options)).tolist() == [1, 2, 0]


def test_greedy_and_sampled_rows_mix():
    logits = torch.randn(2, 50)
    mixed = RowSampling(
        torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.tensor([3, 3]),
        torch.tensor([4, 4]), False,
    )  # fmt: skip
    tokens = sample_tokens(logits, mixed)
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([4]), torch.arange(50))[0]
    assert tokens.tolist() == [logits[0].argmax().item(), (logits[1] + noise).argmax().item()]


def test_a_draft_vocabulary_sees_the_noise_of_its_target_ids():
    ids = torch.tensor([4, 9, 30])
    full = torch.full((6, 40), -torch.inf)
    full[:, ids] = torch.randn(6, 3)
    in_target = sample_tokens(full, rows(6))
    in_draft = ids[sample_tokens(full[:, ids], rows(6), ids)]
    assert in_target.tolist() == in_draft.tolist()


def test_spellings_that_vllm_takes_mean_the_same():
    assert SamplingParams(stop="###").stop == ("###",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(temperature=1e-39).temperature == 0.0
    assert SamplingParams(logit_bias={"50": 2, 7: -100}).logit_bias == {50: 2.0, 7: -100.0}
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_numbers_of_other_types_become_pythons_own():
    given = SamplingParams(
        max_tokens=np.int64(5), seed=np.uint64(2**63 - 1), top_k=np.int32(3), temperature=np.float32(0.5), top_p=1,
        min_p=Fraction(1, 4), presence_penalty=np.int8(1), stop_token_ids=np.array([3, 4]), ignore_eos=np.bool_(True),
        logit_bias={np.int64(7): np.float64(1.5)}, stop={"a"}, logprobs=np.int16(2), prompt_logprobs=np.int64(0),
    )  # fmt: skip
    wanted = SamplingParams(
        max_tokens=5, seed=2**63 - 1, top_k=3, temperature=0.5, top_p=1.0, min_p=0.25, presence_penalty=1.0,
        stop_token_ids=(3, 4), ignore_eos=True, logit_bias={7: 1.5}, stop=("a",),
        logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    assert given == wanted
    values = [getattr(given, field.name) for field in fields(given)]
    assert {type(value) for value in values} == {int, float, bool, tuple, dict, type(None)}
    assert type(given.stop_token_ids[0]) is int


def test_what_a_request_needs():
    plain = SamplingParams()
    assert not plain.filtered
    assert not plain.penalised
    assert all(SamplingParams(**on).filtered for on in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}))
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert all(SamplingParams(**{name: 0.5}).penalised for name in penalties)
    assert SamplingParams(logit_bias={0: 1.0}).penalised


def test_bias_of_a_token_that_is_not_there():
    SamplingParams(logit_bias={99: 1.0}).check_vocabulary(100)
    SamplingParams().check_vocabulary(1)
    with pytest.raises(PeagleError, match=r"logit_bias has 100: the target has tokens 0 \.\. 99"):
        SamplingParams(logit_bias={3: 1.0, 100: 1.0}).check_vocabulary(100)
    with pytest.raises(PeagleError, match=r"stop_token_ids has 10{9}: the target has tokens 0 \.\. 99"):
        SamplingParams(stop_token_ids=[99, 10**9]).check_vocabulary(100)


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
            {"top_k": -2}, {"top_k": 10**20}, {"seed": -1}, {"stop": ("",)}, {"stop": (5,)}, {"temperature": 1e300},
            {"max_tokens": None}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": float("nan")}, {"min_p": None},
            {"presence_penalty": 2.1}, {"presence_penalty": float("nan")}, {"frequency_penalty": -2.1},
            {"frequency_penalty": "1"}, {"repetition_penalty": 0.0}, {"repetition_penalty": -1.0},
            {"repetition_penalty": 10.5}, {"repetition_penalty": float("nan")}, {"logit_bias": {-1: 1.0}},
            {"logit_bias": {"a": 1.0}}, {"logit_bias": {1.5: 1.0}}, {"logit_bias": {1: 100.5}},
            {"min_p": True}, {"temperature": False}, {"top_p": "0.5"}, {"temperature": None}, {"temperature": 1j},
            {"temperature": 10**400}, {"max_tokens": True}, {"max_tokens": "5"}, {"max_tokens": 5.0},
            {"max_tokens": -(10**5000)}, {"seed": 10**5000}, {"top_k": 10**5000}, {"seed": torch.tensor(3.0)},
            {"seed": "1"}, {"stop": 5}, {"stop": b"x"}, {"stop": [b"x"]}, {"stop": {"a": 1}}, {"stop": True},
            {"stop_token_ids": 5}, {"stop_token_ids": "12"}, {"stop_token_ids": [1.0]}, {"stop_token_ids": [-1]},
            {"stop_token_ids": [True]}, {"stop_token_ids": {3: 4}}, {"ignore_eos": "no"}, {"ignore_eos": 1},
            {"ignore_eos": None}, {"logprobs": True}, {"logprobs": 10**5000}, {"drafts": 1}, {"show_drafts": "x"},
            {"repetition_penalty": "1"}, {"repetition_penalty": True}, {"repetition_penalty": 5e-324},
            {"structured_outputs": "x"}, {"structured_outputs": {"regex": "a"}},
            {"logit_bias": {1: True}}, {"logit_bias": {1: "2"}}, {"logit_bias": {1: 10**400}},
            {"logit_bias": {True: 1}},
            {"logit_bias": {1: float("nan")}}, {"logit_bias": {1: None}}, {"logit_bias": [1, 2]}, {"logit_bias": 5}],
)  # fmt: skip
def test_bad_parameters_are_named(bad: dict):
    with pytest.raises(PeagleError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert len(str(error.value)) < 250
