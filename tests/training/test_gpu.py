"""What only a GPU can show: compiled FlexAttention with gradients, compiled loss, bf16 Newton-Schulz, no recompiles."""

import numpy as np
import pytest
import torch
import torch._dynamo

from peagle.training.attention import attend_rows, causal_document_attend
from peagle.training.batches import map_tensors
from peagle.training.loss import cross_entropy, soft_targets
from peagle.training.optim import build_optimizers, newton_schulz
from peagle.training.rows import RowLayout, draw_rows, mask_rows_capacity, pack_documents
from tests.training.tiny_drafter import document, tiny_drafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64


@pytest.fixture
def no_recompiles(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)


def packs():
    shape = RowLayout(positions=1024, mask_rows=mask_rows_capacity(1024, 0.8, 8, 0.8, 0.0), num_depths=8)
    rng = np.random.default_rng(0)
    documents = [document(int(rng.integers(20, 400)), seed=seed) for seed in range(20)]
    return [(packed, draw_rows(packed, shape, rng)) for packed in pack_documents(documents, shape)]


def qkv(count, dtype):
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(count, n, HEAD_DIM, device=CUDA, dtype=dtype, requires_grad=True) for n in heads]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 4e-2)])
def test_flex_equals_dense_in_values_and_gradients(dtype, tolerance, no_recompiles):
    for _, host_rows in packs()[:3]:
        rows = map_tensors(host_rows, lambda tensor: tensor.to(CUDA))
        inputs = qkv(len(rows.anchor_R), dtype)
        upstream = torch.randn(len(rows.anchor_R), HEADS, HEAD_DIM, device=CUDA, dtype=dtype)
        results = []
        for backend in ("flex", "dense"):
            out = attend_rows(rows, backend)(0, *inputs)
            results.append((out, *torch.autograd.grad(out, inputs, upstream)))
        for actual, wanted in zip(*results, strict=True):
            assert actual.isfinite().all()
            assert (actual - wanted).float().norm() < tolerance * wanted.float().norm()


def test_target_attention(no_recompiles):
    for packed, _ in packs()[:2]:
        doc = torch.from_numpy(packed.stream_doc_S).to(CUDA)
        with torch.no_grad():
            inputs = qkv(len(doc), torch.bfloat16)
            flex, dense = (causal_document_attend(doc, backend)(0, *inputs) for backend in ("flex", "dense"))
        assert (flex - dense).float().norm() < 2e-2 * dense.float().norm()


def test_compiled_loss_equals_plain(no_recompiles):
    torch.manual_seed(0)
    head = (0.1 * torch.randn(5000, 64, device=CUDA)).bfloat16().requires_grad_()
    targets = soft_targets(torch.randn(512, 64, device=CUDA).bfloat16(), head.detach(), None)
    for rows in (1500, 1100):
        hidden = torch.randn(rows, 64, device=CUDA).bfloat16().requires_grad_()
        index = torch.randint(0, 512, (rows,), device=CUDA)
        weight = (torch.rand(rows, device=CUDA) < 0.8).float()
        plain, fused = (
            cross_entropy(hidden, head, targets, index, weight, weight.sum(), chunk=512, compiled=flag)
            for flag in (False, True)
        )
        torch.testing.assert_close(fused.loss, plain.loss, rtol=1e-3, atol=1e-3)
        for a, b in zip(*(torch.autograd.grad(r.loss, (hidden, head)) for r in (fused, plain)), strict=True):
            assert (a - b).float().norm() < 2e-2 * b.float().norm()


def test_optimizers_step_in_bfloat16():
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 192, 576, device=CUDA)))
    assert values.min() > 0.5
    assert values.max() < 1.3
    drafter = tiny_drafter(torch.bfloat16).to(CUDA)
    before = [p.detach().clone() for p in drafter.parameters()]
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in build_optimizers(drafter, 2e-2, 1e-2, "muon"):
        optimizer.step()
    assert all(p.isfinite().all() and (p != b).any() for p, b in zip(drafter.parameters(), before, strict=True))
