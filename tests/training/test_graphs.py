"""What can be seen of captured steps without a GPU: when they replay, on which tensors, and who is left out."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from peagle.training import graphs
from peagle.training.batches import Place, batches
from peagle.training.features import OnlineFeatures
from peagle.training.gradients import GradientBuffer
from peagle.training.graphs import Captured, Steps
from peagle.training.objective import Objective
from peagle.training.optim import build_optimizers
from peagle.training.setup import build_drafter, plan_rule, row_layout
from tests.training.tiny_run import documents, recipe, tiny_target

CPU = torch.device("cpu")


class Run:
    """A tiny run without its trainer: packs of one shape, and the steps that take them."""

    def __init__(self, *, graphs: bool, features: object = None, **settings: object) -> None:
        config, target, data = recipe(**settings), tiny_target(), documents(20)
        self.drafter = build_drafter(target, data, config, torch.float32, CPU)
        source = features or OnlineFeatures(target.model, self.drafter.config.tap_ids, "reference")
        parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.gradients = GradientBuffer(parameters, counters=2 + 4 * config.num_depths)
        objective = Objective(self.drafter, target.model, source, config, backend="reference", dtype=torch.float32)
        optimizers = build_optimizers(self.drafter, 1e-2, 1e-2, "muon")
        self.steps = Steps(objective, self.gradients, optimizers, config.clip_norm, graphs=graphs)
        layout = row_layout(config, data, self.drafter.config, CPU)
        rule = replace(plan_rule(config), fixed=True)
        self.packs = batches(data, layout, rule, source, seed=0, place=Place())

    def step(self, packs: int) -> tuple[float, float]:
        self.gradients.zero()
        for pack in islice(self.packs, packs):
            assert pack.plan.fixed
            self.steps.run_pack(pack)
        loss, norm = self.steps.update()
        return loss.item(), norm.item()


@pytest.mark.parametrize("settings", [{}, {"method": "eagle3"}, {"num_depths": 1}, {"partition": "flat"}])
def test_packs_copied_into_the_first_ones_tensors_train_alike(monkeypatch, settings):
    monkeypatch.setattr(graphs, "_EAGER_CALLS", 1000)  # all but the capture itself
    fresh, copied = Run(graphs=False, **settings), Run(graphs=True, **settings)
    assert [copied.step(2) for _ in range(4)] == [fresh.step(2) for _ in range(4)]
    for (name, actual), wanted in zip(copied.drafter.named_parameters(), fresh.drafter.parameters(), strict=True):
        assert torch.equal(actual, wanted), name


def test_totals_of_a_step_count_all_of_its_packs():
    run = Run(graphs=False)
    packs = list(islice(run.packs, 2))
    for pack in packs:
        run.steps.run_pack(pack)
    positions, rows, *table = run.gradients.counters.tolist()
    assert run.gradients.totals[1].item() == pytest.approx(sum(pack.plan.weight for pack in packs))
    assert positions == sum(pack.positions for pack in packs)
    assert rows == sum(pack.plan.charged_rows for pack in packs) == sum(table[:4]), "all depths together"


def test_a_function_is_captured_after_its_first_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: calls.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    captured = Captured(lambda: calls.append("run") or len(calls), enabled=True)
    results = [captured() for _ in range(6)]
    assert calls == ["run"] * 4 + ["replay"] * 3
    assert results == [1, 2, 3, 4, 4, 4]


def test_a_network_that_waits_for_the_device_is_not_captured(monkeypatch):
    """Those of transformers read the lengths of the documents on the host, which ends a capture in an error."""
    enabled = []
    monkeypatch.setattr(graphs, "Captured", lambda _function, enable: enabled.append(enable))
    foreign = OnlineFeatures(torch.nn.Identity(), (1, 2, 3), "reference")  # no TargetModel
    Run(graphs=True)
    Run(graphs=True, features=foreign)
    assert enabled == [True, True, False, True], "packs, then updates, of each"
