"""What only a GPU can show: the kernels under training's shapes, compiled passes, bf16 Newton-Schulz, no recompiles."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file

from peagle.training.attention import RowAttention, attend_all, causal_document_attend
from peagle.training.batches import make_batch, map_tensors
from peagle.training.features import RowIndex
from peagle.training.head_loss import HeadLoss
from peagle.training.optim import build_optimizers, newton_schulz
from peagle.training.partition import Charge, Passes, prefix_once, recompute_prefix
from peagle.training.plan import PlanRule, plan_pack
from peagle.training.rows import RowLayout, draw_rows, mask_rows_capacity, pack_documents
from tests.training.tiny_drafter import TARGET_HIDDEN, VOCAB, dense_attend, document, random_taps, tiny_drafter
from tests.training.tiny_run import documents, recipe, run, tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
POSITIONS, K = 1024, 8
LAYOUT = RowLayout(
    positions=POSITIONS, mask_rows=mask_rows_capacity(POSITIONS, 0.8, K, 0.8, 0.0), num_depths=K, chunk_rows=512
)


@pytest.fixture
def no_recompiles(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)


def packs(layout=LAYOUT):
    rng = np.random.default_rng(0)
    documents = [document(int(rng.integers(20, 400)), seed=seed) for seed in range(20)]
    return [(packed, draw_rows(packed, layout, rng)) for packed in pack_documents(documents, layout)]


def on_gpu(value):
    return map_tensors(value, lambda tensor: tensor.to(CUDA))


def qkv(count, dtype):
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(count, n, HEAD_DIM, device=CUDA, dtype=dtype, requires_grad=True) for n in heads]


def attend_ranges(rows, backend, window):
    parts = (slice(0, POSITIONS), False), (slice(POSITIONS, None), True)
    return attend_all(
        POSITIONS,
        *(RowAttention(rows, POSITIONS, p, chains=c, windows=(window,), backend=backend) for p, c in parts),
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", ["kernel", "flex"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 4e-2)])
def test_backends_equal_the_formula_in_values_and_gradients(backend, dtype, tolerance, window):
    for _, host_rows in packs(replace(LAYOUT, chunk_rows=None))[:2]:
        rows = on_gpu(host_rows)
        real = rows.doc_R >= 0
        inputs = qkv(len(rows.anchor_R), dtype)
        upstream = torch.randn(len(rows.anchor_R), HEADS, HEAD_DIM, device=CUDA, dtype=dtype) * real[:, None, None]
        results = []
        for attend in (attend_ranges(rows, backend, window), dense_attend(rows, window)):
            out = attend(0, *inputs)
            results.append((out[real], *torch.autograd.grad(out, inputs, upstream)))
        for actual, wanted in zip(*results, strict=True):
            assert actual.isfinite().all()
            assert (actual - wanted).float().norm() < tolerance * wanted.float().norm()


@pytest.mark.parametrize("backend", ["kernel", "flex"])
def test_target_attention(backend):
    for packed, _ in packs()[:2]:
        doc = torch.from_numpy(packed.stream_doc_S).to(CUDA)
        with torch.no_grad():
            inputs = qkv(len(doc), torch.bfloat16)
            fast, plain = (causal_document_attend(doc, name)(0, *inputs) for name in (backend, "reference"))
        assert (fast - plain).float().norm() < 2e-2 * plain.float().norm()


def gradients_of(strategy, partition, backend, layout, dtype, compiled=False, count=1):
    """Gradients of the summed loss over `count` packs."""
    drafter = tiny_drafter(torch.float32, head_dim=16).to(CUDA)
    weight = drafter.lm_head.weight
    weight.grad = torch.zeros_like(weight)
    generator = torch.Generator(CUDA).manual_seed(0)
    rule = PlanRule(partition=partition, segments=4, depth_weight="gamma", gamma=0.8, num_depths=K, loss_chunk=512)
    for packed, rows in packs(layout)[:count]:
        nowhere = RowIndex(torch.empty(0), torch.empty(0), None)
        plan = plan_pack(rows, layout, rule)
        batch = on_gpu(make_batch(packed, rows, plan, rule, nowhere, epoch=0, index=0))
        hidden = torch.randn(POSITIONS, TARGET_HIDDEN, device=CUDA, generator=generator).to(dtype)
        head = torch.randn(VOCAB, TARGET_HIDDEN, device=CUDA, generator=generator).to(dtype)
        charge = Charge(HeadLoss(weight.detach().to(dtype), weight.grad, head, None), batch, hidden, True)
        taps = random_taps(tiny_drafter(torch.float32), POSITIONS).to(CUDA, dtype)
        strategy(Passes(drafter, backend, dtype, K, compiled), batch, taps, charge)
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize(
    ("partition", "strategy", "chunk_rows"),
    [("prefix-once", prefix_once, 512), ("algorithm1", recompute_prefix, None), ("flat", recompute_prefix, None)],
)
def test_partitions_with_kernels_equal_the_flat_reference(partition, strategy, chunk_rows):
    flat = replace(LAYOUT, chunk_rows=None)
    layout = replace(LAYOUT, chunk_rows=chunk_rows)
    expected = gradients_of(recompute_prefix, "flat", "reference", flat, torch.float32)
    actual = gradients_of(strategy, partition, "kernel", layout, torch.float32)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 1e-2 * gradient.norm(), name


def test_compiled_prefix_once_equals_eager_and_compiles_once(no_recompiles):
    eager = gradients_of(prefix_once, "prefix-once", "kernel", LAYOUT, torch.bfloat16, count=3)
    compiled = gradients_of(prefix_once, "prefix-once", "kernel", LAYOUT, torch.bfloat16, compiled=True, count=3)
    for name, gradient in eager.items():
        assert (compiled[name] - gradient).norm() < 5e-2 * gradient.norm(), name


@pytest.mark.parametrize(
    "changes",
    [
        {"compile": True},
        {"compile": True, "method": "eagle3"},
        {"checkpoint_activations": True},
        {"partition": "algorithm1", "segments": 1},
        {"accumulate": 2, "ema_decay": 0.9},
    ],
)
def test_captured_steps_equal_eager_ones(changes, tmp_path):
    """Whole runs: the same losses and heads with CUDA graphs and without."""
    target = tiny_target()
    target.model.to(CUDA, torch.bfloat16)
    losses, heads = [], []
    for graphs in (False, True):
        out = tmp_path / str(graphs)
        settings = {"attention": "reference", "graphs": graphs, **changes}
        run(out, recipe(max_steps=12, log_interval=1, holdout=0, **settings), documents(40), target=target)
        lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
        heads.append(load_file(out / "checkpoint/model.safetensors"))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    for name, tensor in heads[0].items():
        assert (heads[1][name].float() - tensor.float()).norm() <= 2e-2 * tensor.float().norm(), name


def test_optimizers_step_in_bfloat16():
    drafter = tiny_drafter(torch.float32).to(CUDA, torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    optimizers = build_optimizers(drafter, 1e-2, 1e-2, "muon")
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in drafter.named_parameters():
        assert parameter.isfinite().all(), name
        assert (parameter != before[name]).any(), name


def test_newton_schulz_orthogonalises_in_bfloat16():
    torch.manual_seed(0)
    matrices = torch.randn(3, 64, 200, device=CUDA)
    exact = torch.linalg.svdvals(newton_schulz(matrices))
    assert exact.min() > 0.5
    assert exact.max() < 1.5
