"""Two processes by gloo: their gradients are one process's, one all-reduce per step, and none waits for ever."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from peagle.errors import PeagleError
from peagle.training.distributed import SINGLE, Ranks
from peagle.training.gradients import GradientBuffer
from peagle.training.optim import build_optimizers
from peagle.training.sharding import ShardedGradients, ShardedModule
from tests.training.many_passes import run_pack, small_drafter
from tests.training.ranks import on_two_ranks

STEPS = ((0, 1), (2, 5), (4,), (3, 0))  # packs of each step, dealt in turn; of the third, rank 1 gets none
CLIP = 0.5
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def trained(drafter):
    return {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}


def straight(kind, device):
    """One process, both packs of a step in turn: losses, norms, each step's gradients, final parameters."""
    drafter = small_drafter(device=device)
    buffer = GradientBuffer(list(trained(drafter).values()), counters=5)
    optimizers = build_optimizers(drafter, 1e-2, 1e-2, kind)
    record = []
    for packs in STEPS:
        buffer.zero()
        for number in packs:
            run_pack(drafter, number, buffer)
        buffer.reduce()
        loss, norm = buffer.normalise_and_clip(CLIP)
        record.append(
            (loss, norm, {name: p.grad.clone() for name, p in trained(drafter).items()}, buffer.counters.clone())
        )
        for optimizer in optimizers:
            optimizer.step()
    return record, {name: p.detach() for name, p in trained(drafter).items()}


@contextmanager
def counted_collectives():
    """How often torch's reducing collectives are called in the block, by name."""
    counts = Counter()

    def counting(name, original):
        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(dist, name):
                patch.setattr(dist, name, counting(name, getattr(dist, name)))
        yield counts


def same(mine, wanted, what):
    torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def train_and_compare(ranks, drafter, buffer, optimizers, record, gradients_now):
    """The steps of `straight`, dealt to the ranks; `gradients_now(wanted)` yields (name, mine, wanted)."""
    for packs, (loss, norm, gradients, counters) in zip(STEPS, record):
        buffer.zero()
        for number in packs[ranks.rank :: ranks.world]:
            run_pack(drafter, number, buffer)
        buffer.reduce()
        same(buffer.normalise_and_clip(CLIP), (loss, norm), "loss and norm")
        same(buffer.counters, counters, "counters")
        for name, mine, wanted in gradients_now(gradients):
            same(mine, wanted, name)
        for optimizer in optimizers:
            optimizer.step()


def check_replicated(ranks, kind, device):
    record, final = straight(kind, device)
    drafter = small_drafter(device=device)
    if ranks.rank == 1:  # a start of its own, which must not survive
        torch.nn.init.normal_(drafter.fc.weight)
    ranks.copy_from_main(trained(drafter).values())
    buffer = GradientBuffer(list(trained(drafter).values()), ranks, counters=5)
    optimizers = build_optimizers(drafter, 1e-2, 1e-2, kind)
    with counted_collectives() as counts:
        train_and_compare(
            ranks, drafter, buffer, optimizers, record,
            lambda wanted: ((name, p.grad, wanted[name]) for name, p in trained(drafter).items()),
        )  # fmt: skip
    assert counts == {"all_reduce": len(STEPS)}
    for name, parameter in trained(drafter).items():
        same(parameter.detach(), final[name], name)
    assert ranks.share([ranks.rank + 0.5, 7]) == [0.5, 7.0]


def check_sharded(ranks, kinds, device):
    for kind in kinds:
        compare_sharded(ranks, kind, device)


def compare_sharded(ranks, kind, device):
    record, final = straight(kind, device)
    drafter = small_drafter(device=device)
    whole = sum(parameter.numel() for parameter in trained(drafter).values())
    sharded = ShardedModule(drafter, ranks)
    assert sum(rows.local.numel() for rows in sharded.own.values()) < 0.53 * whole
    optimizers = build_optimizers(drafter, 1e-2, 1e-2, kind, sharded.own)
    buffer = ShardedGradients(sharded, ranks, counters=5)
    with counted_collectives() as counts:
        train_and_compare(
            ranks, drafter, buffer, optimizers, record,
            lambda wanted: ((name, r.local.grad, r.take(wanted[name])) for name, r in sharded.own.items()),
        )  # fmt: skip
    assert counts.pop("all_reduce") == len(STEPS), "the totals"
    assert set(counts.values()) == {len(STEPS) * len(sharded.own)}, "one reduce-scatter per parameter"
    for name, rows in sharded.own.items():
        same(sharded.whole(name, rows.local.detach()), final[name].cpu(), name)
        assert all(state.shape in (rows.local.shape, ()) for o in optimizers for state in o.state[rows.local].values())
    state = sharded.state()
    assert bool(state) == ranks.is_main
    for name in final if ranks.is_main else ():
        same(state[name], final[name].cpu(), name)
    again = ShardedModule(small_drafter(device=device), ranks)
    again.load({name: final.get(name, tensor) for name, tensor in small_drafter().state_dict().items()})
    for name, rows in again.own.items():
        assert torch.equal(rows.local, rows.take(final[name])), name
    with sharded.gathered():
        for name, parameter in trained(drafter).items():
            same(parameter.detach(), final[name], name)
        if ranks.is_main:  # an evaluation on one rank waits for no other
            drafter.combine(torch.zeros(2, drafter.config.feature_size, dtype=torch.float64, device=device))
    ranks.share([0.0])


def test_two_ranks_are_one_with_twice_the_packs():
    on_two_ranks(check_replicated, "muon", "cpu")


def test_sharded_ranks_are_one_with_twice_the_packs():
    on_two_ranks(check_sharded, ("muon", "adamw"), "cpu")


def test_environment():
    assert Ranks.from_environment({}) == SINGLE
    assert Ranks.from_environment(ENVIRONMENT) == Ranks(rank=1, world=2, local_rank=1)
    assert not Ranks.from_environment(ENVIRONMENT).is_main
    for changes in ({"RANK": "2"}, {"RANK": "x"}, {"LOCAL_RANK": "-1"}):
        with pytest.raises(PeagleError, match="torchrun"):
            Ranks.from_environment(ENVIRONMENT | changes)
    for name in ENVIRONMENT:
        with pytest.raises(PeagleError, match=r"(?s)torchrun"):
            Ranks.from_environment({key: value for key, value in ENVIRONMENT.items() if key != name})


def test_a_rank_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        PeagleError, match="local rank 1 has no GPU, this machine has 1: give torchrun --nproc-per-node 1"
    ):
        Ranks(rank=1, world=2, local_rank=1).own_device(torch.device("cuda"))
    assert Ranks(rank=0, world=2).own_device(torch.device("cuda")) == torch.device("cuda", 0)
    assert Ranks(rank=1, world=2, local_rank=1).own_device(torch.device("cpu")) == torch.device("cpu")


def test_a_single_process_needs_no_group():
    tensor = torch.arange(4.0)
    SINGLE.add_up(tensor)
    SINGLE.copy_from_main([tensor])
    assert SINGLE.add_up_rows(tensor).tolist() == tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert SINGLE.share([1.5]) == [1.5]
