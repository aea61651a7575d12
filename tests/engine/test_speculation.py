"""Choosing K: simulations with known costs and acceptance, and the bound that holds for any."""

import json
import logging
import random
from itertools import accumulate, pairwise
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.costs import _seconds, measure_costs
from peagle.engine.engine import LLM
from peagle.engine.speculation import (
    FixedK,
    KChooser,
    TableK,
    check_depth,
    choose_policy,
    draft_counts,
    load_k_table,
    trained_depth,
)
from peagle.errors import PeagleError
from peagle.sampling import SamplingParams
from tests.engine.tiny import random_prompts, tiny_llm, tiny_parts

MOST = 7
SLOPES = {"flat": 0.01, "medium": 0.06, "steep": 0.2, "dear": 0.5}
PROFILES = {
    "usual": [0.8, 0.7, 0.65, 0.6, 0.55, 0.5, 0.5],
    "excellent": [0.95] * 7,
    "first": [0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
    "none": [0.0] * 7,
}


def costs_of(slope, sizes=(1, 8, 64)):
    return {(n, k): 0.01 * (1 + slope * k + 0.08 * (k > 0)) for n in sizes for k in draft_counts(MOST)}


def length(rates, k):
    return sum(accumulate(rates[:k], mul, initial=1.0))


class Simulation:
    """Steps of `batch` requests whose drafts are kept by chance; a raised K takes a step to be drafted."""

    def __init__(self, policy, costs, batch, seed=0):
        self.policy, self.costs, self.batch, self.random = policy, costs, batch, random.Random(seed)
        self.chosen = []

    def run(self, steps, rates):
        """Tokens per second of a request over these steps."""
        seconds = tokens = 0.0
        for _ in range(steps):
            k = self.policy.choose(self.batch)
            fresh = min(k, self.chosen[-1] if self.chosen else 0)
            kept = [self._kept(rates[:fresh]) for _ in range(self.batch)]
            self.policy.record(kept, k)
            self.chosen.append(k)
            seconds += self.costs[self.batch, k]
            tokens += 1 + sum(kept) / self.batch
        return tokens / seconds

    def _kept(self, rates):
        return next((i for i, rate in enumerate(rates) if self.random.random() >= rate), len(rates))

    def best(self, rates):
        return max(length(rates, k) / self.costs[self.batch, k] for k in draft_counts(MOST))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("slope", SLOPES)
def test_the_best_k_is_found_within_3_percent_and_kept(slope, profile, batch):
    costs, rates = costs_of(SLOPES[slope]), PROFILES[profile]
    simulation = Simulation(KChooser(costs), costs, batch)
    simulation.run(500, rates)
    assert simulation.run(3000, rates) >= 0.97 * simulation.best(rates)
    assert sum(a != b for a, b in pairwise(simulation.chosen)) <= 40


@pytest.mark.parametrize("slope", SLOPES)
def test_it_follows_acceptance_down_and_up_again(slope):
    costs = costs_of(SLOPES[slope])
    simulation = Simulation(KChooser(costs), costs, 8)
    simulation.run(2000, PROFILES["usual"])
    simulation.run(300, PROFILES["none"])
    assert simulation.run(3000, PROFILES["none"]) >= 0.97 * simulation.best(PROFILES["none"])
    simulation.run(4000, PROFILES["usual"])
    assert simulation.run(1000, PROFILES["usual"]) >= 0.97 * simulation.best(PROFILES["usual"])


@pytest.mark.parametrize(("batch", "cost", "drafts"), [(64, 1.37, 0), (64, 1.2, 1), (1, 1.37, 1)])
def test_the_larger_a_batch_the_more_drafts_must_promise(batch, cost, drafts):
    """Two of five drafts kept are 2 % or 17 % more than plain decoding at these costs. A batch of chance ends late."""
    chooser, count, kept = KChooser({(batch, 0): 1.0, (batch, 1): cost}), 0, 0
    for step in range(400):
        k = chooser.choose(batch)
        count, kept = count + k * batch * (step > 0), kept
        now = round(0.4 * count) - kept
        kept += now
        chooser.record([1] * now + [0] * (batch - now), k)
    assert chooser.choose(batch) == drafts


def test_k_depends_on_the_batch():
    costs = {(n, k): 1 + 0.002 * n * k for n in (1, 256) for k in draft_counts(MOST)}
    chooser = KChooser(costs)
    assert Simulation(chooser, costs, 1).run(200, PROFILES["usual"]) > 2
    assert chooser.choose(1) == MOST
    simulation = Simulation(chooser, costs, 256)
    simulation.run(60, PROFILES["usual"])
    assert simulation.chosen[-1] < MOST


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, MOST), min_size=1, max_size=4), min_size=200, max_size=400),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.5),
    st.booleans(),
)
def test_never_3_percent_behind_plain_decoding_after_an_allowance(steps, slope, sparse, repeat):
    costs = costs_of(slope, sizes=(1, 4))
    chooser = KChooser(costs)
    spent = plain = 0.0
    allowance = 8 + max(costs[n, k] / costs[n, 0] for n, k in costs)
    last, since = 0, 16
    chance = random.Random(1)
    for line in steps * (1 + repeat):
        is_known = chooser._seen[0] >= 8
        k = chooser.choose(len(line))
        since = since if is_known else 16  # a trial ends when it has seen enough
        assert k == last or since >= 16 or k == 0  # plain steps follow at once when drafting has fallen behind
        last, since = k, 1 if k != last else since + 1
        kept = [min(count, k) if chance.random() < sparse else 0 for count in line]
        chooser.record(kept, k)
        spent += costs[1 if len(line) == 1 else 4, k] / costs[1, 0]
        plain += 1 + sum(kept) / len(kept)
        assert spent <= 1.03 * plain + allowance


def test_a_cost_table_must_be_whole():
    with pytest.raises(ValueError, match="K = 0"):
        KChooser({(1, 1): 1.0})
    with pytest.raises(ValueError, match="every K"):
        KChooser({(1, 0): 1.0, (1, 1): 1.0, (2, 0): 1.0})


def test_leftover_drafts_teach_nothing():
    chooser = KChooser(costs_of(0.01))
    before = chooser.rates
    chooser.record([0, 0], 5)  # the first step with drafts: nothing was drafted for it
    assert chooser.rates == before
    chooser.record([0, 0], 5)
    assert chooser.rates[0] < before[0]


def test_back_to_plain_decoding_at_once_and_to_another_k_not():
    """Costs of two sizes of batches: what pays at one does not at the other."""
    costs = {(n, k): 1.0 + (0.01 if n == 1 else 2.0) * k for n in (1, 64) for k in (0, 3, MOST)}
    chooser = KChooser(costs)
    for _ in range(40):
        chooser.record([MOST], chooser.choose(1))
    assert chooser.choose(1) == MOST
    assert chooser.choose(64) == 0  # the step after
    chooser.record([0], 0)
    assert [chooser.choose(1) for _ in range(16)] == [0] * 16
    assert chooser.choose(1) == MOST


def test_what_was_gained_long_ago_is_not_lost_again():
    """However long drafts were good: what is spent on useless ones has one bound, and the account ends it where the
    rates say nothing of them."""
    costs = costs_of(0.2)
    chooser = KChooser(costs)
    for _ in range(3000):
        k = chooser.choose(1)
        chooser.record([k], k)
    lost = 0.0
    while k := chooser.choose(8):  # from now on a request keeps all, and seven that have gaps keep nothing
        chooser.record([k], k, [0] * 7)
        lost += costs[8, k] / costs[8, 0] - 1 - k / 8
    assert 7 < lost < 8 + costs[8, MOST] / costs[8, 0]


def test_requests_that_say_little_are_learned_from_alone_and_count_in_the_account():
    chooser = KChooser(costs_of(0.2))
    for _ in range(9):
        chooser.record([0], MOST, [MOST])
    assert chooser.rates[0] < 0.2
    for _ in range(9):
        chooser.record([], MOST, [MOST])
    assert chooser.rates[0] > 0.4
    chooser.record([], 0, [0])
    learned = chooser.rates
    chooser.record([], 0, [0])
    assert chooser.rates == learned


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_a_trial_is_eight_drafts_with_the_k_that_pays_at_even_odds(rate):
    costs = costs_of(0.2)
    at_even_odds = max(draft_counts(MOST)[1:], key=lambda k: length([0.5] * MOST, k) / costs[8, k])
    simulation = Simulation(KChooser(costs), costs, 8)
    simulation.run(3, [rate] * MOST)
    assert simulation.chosen[:2] == [at_even_odds] * 2  # leftovers, then the drafts of eight requests
    assert simulation.chosen[2] == (0 if rate == 0 else MOST)


@pytest.mark.parametrize(("fresh", "wait"), [(True, 512), (False, 1024)])
def test_a_useless_head_is_tried_anew_now_and_then_best_with_a_request_without_gaps(fresh, wait):
    chooser = KChooser(costs_of(0.2))
    while k := chooser.choose(8):
        chooser.record([0] * 8, k)
    steps = 0
    while not chooser.choose(8, fresh):
        chooser.record([0] * 8, 0)
        steps += 1
        assert steps <= wait
    assert steps == wait


def test_no_trial_where_even_perfect_drafts_would_not_pay():
    costs = {(1, k): 1.0 + 1.5 * k for k in draft_counts(MOST)}
    chooser = KChooser(costs)
    assert chooser.choose(1) == 0


def test_an_engine_drafts_again_when_drafts_are_good_again():
    config = EngineConfig(block_size=4, max_num_seqs=2)
    llm = LLM.from_parts(*tiny_parts(), MOST, config, pack=False, synthetic_rates=(0.0,) * MOST)
    llm.core.policy = KChooser(costs_of(0.08, sizes=(1, 2)))

    def rounds(rates):
        llm.core.synthetic.change(rates)
        outputs = llm.generate(random_prompts(2), SamplingParams(max_tokens=95, temperature=0.0, ignore_eos=True))
        return sum(len(output.rounds) for output in outputs)

    rounds((0.0,) * MOST)
    assert rounds((0.0,) * MOST) == 0  # plain steps only
    assert any(rounds((1.0,) * MOST) for _ in range(30))


def test_draft_counts():
    assert draft_counts(1) == [0, 1]
    assert draft_counts(4) == [0, 1, 2, 3, 4]
    assert draft_counts(16) == [0, 1, 2, 3, 5, 7, 10, 13, 16]


def test_tables_are_read_by_concurrency(tmp_path):
    table = TableK(load_k_table({"1": 7, "8": 5, "64": 0}))
    assert [table.choose(n) for n in (1, 2, 8, 9, 64, 500)] == [7, 5, 5, 0, 0, 0]
    assert table.max_drafts == 7
    file = tmp_path / "k.json"
    file.write_text(json.dumps({"4": 3}))
    assert load_k_table(str(file)) == {4: 3}
    file.write_text("[")
    for source, says in (
        (str(file), "cannot be read"),
        (str(tmp_path / "none"), "cannot be read"),
        ({}, "no entries"),
        ({"many": 3}, "'many'"),
        ({"0": 3}, "at least 1"),
        ({"1": 9}, "from 0 to 7"),
        ({"1": True}, "from 0 to 7"),
    ):
        with pytest.raises(PeagleError, match=says):
            load_k_table(source, 7)


def test_the_config_says_which_policy():
    def policy(measured, **values):
        config = SpeculativeConfig(model="head", **values)
        return choose_policy(config, lambda: measured)

    assert policy(None, num_speculative_tokens=4).choose(9) == 4
    assert isinstance(policy(None, num_speculative_tokens=4), FixedK)
    assert policy(None, num_speculative_tokens="auto", k_table={"1": 2}).max_drafts == 2
    assert isinstance(policy(costs_of(0.1), num_speculative_tokens="auto"), KChooser)


def test_more_drafts_than_trained_is_said_once(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({"peagle_provenance": {"recipe": {"num_depths": 8}}}))
    assert trained_depth(tmp_path) == 8
    (tmp_path / "config.json").write_text("{}")
    assert trained_depth(tmp_path) is None
    with caplog.at_level(logging.WARNING):
        assert check_depth(8, 8)
        assert check_depth(16, None)
        assert not caplog.records
        assert not check_depth(9, 8)
    assert "lower num_speculative_tokens to 8" in caplog.text


def test_steps_are_timed_on_contexts_and_leave_no_trace(monkeypatch):
    llm = tiny_llm(3, max_num_seqs=2, enable_prefix_caching=False)  # whose contexts end at 128 tokens, as a request's
    prompts = [*random_prompts(1), list(range(2, 22))]
    params = SamplingParams(max_tokens=108, temperature=0.0, ignore_eos=True)
    before = [output.token_ids for output in llm.generate(prompts, params)]
    step, contexts = llm.core._speculative, []
    caches = (step._target_cache, step._draft_side.cache)
    parts = [part[:, :, 4:-1] for cache in caches for part in (cache.keys, cache.values)]  # but for the null block
    for part in parts:
        part.normal_()
    held, run = [part.clone() for part in parts], step.run

    def spy(rows, num_drafts, mode):
        contexts.append((rows.slot_B.tolist(), rows.first_B.tolist(), rows.tables_BN.count_nonzero().item()))
        return run(rows, num_drafts, mode)

    monkeypatch.setattr(step, "run", spy)
    assert _seconds(llm.core, 2, 3, 1, 2, 512) > 0
    (slots, first, blocks), (_, later, _) = contexts
    assert (slots, first, blocks) == ([0, 1], [112, 112], 56)
    assert all(112 < n <= 116 for n in later)
    assert all(torch.equal(kept, part) for kept, part in zip(held, parts, strict=True))
    assert not any(part.any() for part in (*llm.core._state.rows, torch.from_numpy(llm.core._state.host_tables)))
    monkeypatch.undo()
    assert [output.token_ids for output in llm.generate(prompts, params)] == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_costs_of_a_gpu_are_measured_in_graphs_and_leave_no_trace():
    llm = tiny_llm(3, max_num_seqs=4, device="cuda")
    prompts, params = random_prompts(4), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    before = [output.token_ids for output in llm.generate(prompts, params)]
    assert all(seconds > 0 for seconds in measure_costs(llm.core, (0, 1, 3)).values())
    assert not any(part.any() for part in llm.core._state.rows)
    assert [output.token_ids for output in llm.generate(prompts, params)] == before


def test_every_step_has_run_before_the_first_is_timed(monkeypatch):
    core = tiny_llm(3, max_num_seqs=4).core
    ran, run = [], core.run_padding
    monkeypatch.setattr(core, "run_padding", lambda size, k, **_: ran.append((size, k)) or run(size, k))
    measure_costs(core, (0, 1, 3))
    assert set(ran[:6]) == set(ran[6:]) == {(size, k) for size in (1, 4) for k in (0, 1, 3)}


def test_measuring_costs_says_what_it_does(caplog):
    with caplog.at_level("INFO"):
        costs = measure_costs(tiny_llm(3, max_num_seqs=4).core, (0, 1, 3))
    assert set(costs) == {(size, k) for size in (1, 4) for k in (0, 1, 3)}
    assert all(seconds > 0 for seconds in costs.values())
    warning, *steps, done = caplog.messages[-4:]
    assert "auto: running 12 steps to measure what they cost, batches of 1, 4 requests" in warning
    assert "on a CPU this takes a while" in warning
    assert len(steps) == 2
    assert done.startswith("measured in ")
