"""The target model against transformers: same weights, same logits, same streams."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from peagle.models.target import read_spec
from peagle.models.weights import empty_model, load_model
from tests.helpers import causal_attend, random_weights
from tests.models.tiny import VARIANTS, hf_model

CPU = torch.device("cpu")
LENGTHS = (7, 12)


def small_spec(*, tied: bool) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=8, rms_norm_eps=1e-5, rope=RopeSpec(theta=10000.0, head_dim=8), max_position_embeddings=64,
        qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=tied, bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def packed_inputs(vocab: int, start: int) -> tuple[Tensor, Tensor]:
    """Two sequences end to end; positions restart, from `start`."""
    ids = torch.randint(0, vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([start + torch.arange(length) for length in LENGTHS])


def transformers_streams(model: torch.nn.Module, ids: Tensor, positions: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Logits, hidden_states[0..n] and the stream after the last layer before the norm, of each sequence by itself."""
    last: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        outputs = [
            model(part[None], position_ids=where[None], output_hidden_states=True, use_cache=False)
            for part, where in zip(ids.split(LENGTHS), positions.split(LENGTHS), strict=True)
        ]
    hook.remove()
    states = [torch.cat([x[0] for x in layer]) for layer in zip(*(o.hidden_states for o in outputs), strict=True)]
    return torch.cat([o.logits[0] for o in outputs]), states, torch.cat([x.reshape(-1, x.shape[-1]) for x in last])


@pytest.mark.parametrize("shard_size", [None, "20KB"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_equal_transformers(variant: str, shard_size: str | None, tmp_path: Path) -> None:
    reference = hf_model(variant)
    reference.save_pretrained(tmp_path, **({"max_shard_size": shard_size} if shard_size else {}))
    assert (tmp_path / "model.safetensors.index.json").is_file() == bool(shard_size)
    model = load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device=CPU)
    layers = model.spec.num_layers
    ids, positions = packed_inputs(model.spec.vocab_size, start=0 if shard_size else 150)
    logits, states, last = transformers_streams(reference, ids, positions)

    hidden, taps = model(ids, positions, causal_attend(LENGTHS), tuple(range(layers + 1)))
    assert taps is not None
    streams = taps.chunk(layers + 1, dim=-1)
    for k in range(layers):
        torch.testing.assert_close(streams[k], states[k], atol=1e-4, rtol=0)
    torch.testing.assert_close(streams[layers], last, atol=1e-4, rtol=0)
    torch.testing.assert_close(hidden, states[layers], atol=1e-4, rtol=0)  # transformers' last entry is normed
    torch.testing.assert_close(model.logits(hidden), logits, atol=1e-4, rtol=0)


def test_the_reference_variants_differ_in_what_they_test() -> None:
    """A rope rule, bias or head size that were silently ignored would make two of these models alike."""
    assert (
        hf_model("llama-llama3-rope").model.rotary_emb.inv_freq.min()
        < hf_model("llama").model.rotary_emb.inv_freq.min()
    )
    assert "model.layers.0.self_attn.o_proj.bias" in dict(hf_model("llama-tied-biases").named_parameters())
    assert hf_model("llama-head-dim").model.layers[0].self_attn.q_proj.out_features == 6 * 24
    assert "model.layers.0.self_attn.q_proj.bias" in dict(hf_model("qwen2").named_parameters())
    qwen3 = dict(hf_model("qwen3").named_parameters())
    assert (qwen3["model.layers.0.self_attn.q_norm.weight"] - 1).abs().max() > 0.1
    assert "model.layers.0.self_attn.q_proj.bias" not in qwen3


def test_taps_come_in_the_order_asked_for() -> None:
    model = TargetModel(small_spec(tied=False))
    ids, positions, attend = torch.arange(5), torch.arange(5), causal_attend([5])
    with torch.no_grad():
        singles = {k: model(ids, positions, attend, (k,))[1] for k in range(3)}
        _, taps = model(ids, positions, attend, (2, 0, 2))
        hidden, none = model(ids, positions, attend)
    torch.testing.assert_close(taps, torch.cat([singles[2], singles[0], singles[2]], dim=-1), atol=0, rtol=0)
    torch.testing.assert_close(singles[0], model.embed_tokens(ids), atol=0, rtol=0)
    torch.testing.assert_close(model.norm(singles[2]), hidden, atol=0, rtol=0)
    assert none is None


def test_sequences_do_not_see_each_other() -> None:
    model = TargetModel(small_spec(tied=True))
    ids, positions = packed_inputs(40, start=0)
    with torch.no_grad():
        both, _ = model(ids, positions, causal_attend(LENGTHS))
        alone, _ = model(ids[7:], positions[7:], causal_attend(LENGTHS[1:]))
    torch.testing.assert_close(both[7:], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_conversion_keeps_frequencies_and_tying(tied: bool) -> None:
    model = TargetModel(small_spec(tied=tied))
    frequencies = model.rope.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.rope.inv_freq.dtype == torch.float32
    assert torch.equal(model.rope.inv_freq, frequencies)
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in dict(model.named_parameters())) == (not tied)
    assert "inv_freq" not in model.state_dict()


def test_empty_model_is_frozen_tied_and_has_frequencies() -> None:
    model = empty_model(small_spec(tied=True), dtype=torch.bfloat16, device=CPU)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.rope.inv_freq, TargetModel(small_spec(tied=True)).rope.inv_freq)


def test_random_weights_depend_on_the_seed_only() -> None:
    models = [empty_model(small_spec(tied=True), dtype=torch.float32, device=CPU) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        random_weights(model, seed)
    first, same, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
