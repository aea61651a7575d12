"""gpt-oss against transformers: a mixture of experts, attention sinks, sliding windows and YaRN, over a paged cache."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from peagle.engine.kv_cache import PagedCache
from peagle.errors import PeagleError
from peagle.kernels.packed_experts import unpack
from peagle.kernels.paged_attention import plan_attention
from peagle.models.decoder import TargetModel
from peagle.models.moe import PackedExperts
from peagle.models.mxfp4 import dequantize
from peagle.models.target import load_target, read_spec
from peagle.models.tokenizer import placeholder_tokenizer
from peagle.models.weights import dummy_model, load_model

CPU = torch.device("cpu")
BLOCK_SIZE, LENGTH, WINDOW = 4, 45, 8
EXPERTS = "model.layers.1.mlp.experts."


def hf_model(**changes: Any) -> GptOssForCausalLM:
    """Float32, every parameter random; sinks, router and limit such that leaving one out shows."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=160, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=WINDOW,
        max_position_embeddings=256, swiglu_limit=0.8, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(GptOssConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
            if "norm" in name:
                parameter.add_(1.0)
    model.set_attn_implementation("eager")
    return model.eval()


def paged_logits(
    model: TargetModel, ids: Tensor, chunks: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Logits and the taps of every layer, computed so many tokens at a time over one request's shuffled blocks."""
    spec = model.spec
    blocks = -(-LENGTH // BLOCK_SIZE)
    table_1N = np.random.default_rng(0).permutation(blocks)[None] + 1
    cache = PagedCache(
        spec, (blocks + 1) * BLOCK_SIZE, dtype=dtype, device=CPU,
        windows=spec.windows, sinks=model.sinks,
    )  # fmt: skip
    parts = []
    for positions in torch.arange(len(ids)).split(chunks):
        plan = plan_attention(
            np.array([len(positions)]), np.array([int(positions[-1]) + 1]), table_1N, BLOCK_SIZE,
            heads_per_kv=spec.num_heads // spec.num_kv_heads, head_dim=spec.head_dim, device=CPU,
        )  # fmt: skip
        slots = torch.from_numpy(table_1N[0])[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attend = cache.attend(slots, positions, plan)
        hidden, taps = model(ids[positions], positions, attend, tuple(range(spec.num_layers)))
        parts.append((model.logits(hidden), taps))
    return tuple(torch.cat(part) for part in zip(*parts))


@pytest.mark.parametrize("chunks", [[LENGTH], [17, 9, 1, 1, 1, 5, 11], [1] * LENGTH])
@torch.no_grad()
def test_logits_and_taps_equal_transformers(chunks: list[int], tmp_path: Path) -> None:
    reference = hf_model()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, read_spec(tmp_path), dtype=torch.float32, device=CPU)
    ids = torch.randint(0, 160, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = reference(ids[None], output_hidden_states=True, use_cache=False)
    logits, taps = paged_logits(model, ids, chunks)
    torch.testing.assert_close(logits, expected.logits[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(taps, torch.cat([x[0] for x in expected.hidden_states[:4]], -1), atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_reference_depends_on_each_of_its_parts(tmp_path: Path) -> None:
    ids = torch.arange(LENGTH)[None]
    logits = hf_model()(ids).logits
    plain_rope = {"rope_type": "default", "rope_theta": 150000.0}
    for changes in ({"sliding_window": 200}, {"swiglu_limit": 7.0}, {"rope_parameters": plain_rope}):
        assert (hf_model(**changes)(ids).logits - logits).abs().max() > 1e-2, changes
    without_sinks = hf_model()
    for layer in without_sinks.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert (without_sinks(ids).logits - logits).abs().max() > 1e-2


def value_of(code: int) -> float:
    """A number of one sign bit, two of exponent (bias 1) and one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def packed(experts: int, outputs: int, groups: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Random blocks and scales, and their matrix [E, 32 G, O] by the definition."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, outputs, groups, 32))
    scales = rng.integers(117, 130, (experts, outputs, groups))
    values = np.vectorize(value_of)(codes) * 2.0 ** (scales[..., None] - 127)
    matrix = torch.from_numpy(values.reshape(experts, outputs, -1)).transpose(1, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales.astype(np.uint8)), matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_unpacked_exactly(dtype: torch.dtype) -> None:
    blocks, scales, matrix = packed(1, 8, 3)
    assert torch.equal(dequantize(blocks[0], scales[0], dtype).double(), matrix[0].T)
    every = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 1, 16)
    assert torch.isfinite(dequantize(every, torch.full((256, 1), 250, dtype=torch.uint8), dtype)).all()


def test_a_checkpoint_with_packed_experts(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = {}
    for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
        del tensors[EXPERTS + name]
        blocks, scales, matrices[name] = packed(6, outputs, 1)
        tensors |= {f"{EXPERTS}{name}_blocks": blocks, f"{EXPERTS}{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec = read_spec(tmp_path)
    experts = load_model(tmp_path, spec, dtype=torch.bfloat16, device=CPU).get_submodule("layers.1.mlp.experts")
    for name, matrix in matrices.items():
        assert torch.equal(experts.get_parameter(name).double(), matrix)

    for changed, message in (
        (tensors[f"{EXPERTS}down_proj_scales"][:, :5].clone(), "down_proj_blocks of shape"),
        (tensors[f"{EXPERTS}down_proj_scales"].float(), "MXFP4 is uint8"),
        (None, r"lacks 1 of .*down_proj"),
    ):
        parts = {**tensors, f"{EXPERTS}down_proj_scales": changed}
        save_file({k: v for k, v in parts.items() if v is not None}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(PeagleError, match=message):
            load_model(tmp_path, spec, dtype=torch.bfloat16, device=CPU)


def packed_checkpoint(path: Path) -> dict[str, Tensor]:
    """A model directory whose experts are all MXFP4, as published ones are; its tensors."""
    hf_model().save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    tensors = load_file(path / "model.safetensors")
    for layer in range(4):
        for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[full]
            tensors[f"{full}_blocks"], scales, _matrix = packed(6, outputs, 1, seed=layer)
            tensors[f"{full}_scales"] = scales - 6  # activations stay near 1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_experts_compute_what_unpacked_ones_do(dtype: torch.dtype, tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.moe is not None
    assert spec.moe.packed
    plain = replace(spec, moe=replace(spec.moe, packed=False))
    ids = torch.randint(0, 160, (LENGTH,), generator=torch.Generator().manual_seed(1))
    logits = [
        paged_logits(load_model(tmp_path, one, dtype=dtype, device=CPU), ids, [17, 9, 1, 1, 1, 5, 11], dtype)[0]
        for one in (spec, plain)
    ]
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)


def test_what_cannot_stay_packed(tmp_path: Path) -> None:
    tensors = packed_checkpoint(tmp_path)
    spec, file = read_spec(tmp_path), tmp_path / "model.safetensors"
    scales = tensors[f"{EXPERTS}down_proj_scales"]
    too_large = scales.clone()
    too_large[3, 2, 0] = 129
    plain = {k: v for k, v in tensors.items() if not k.startswith(f"{EXPERTS}down_proj")}
    for changed, message in (
        ({**tensors, f"{EXPERTS}down_proj_scales": too_large}, r"scale of 2\^2.*at most 2\^1.*--unpack-experts"),
        ({**tensors, f"{EXPERTS}down_proj_scales": scales[:, :5].clone()}, "down_proj_blocks of shape"),
        (plain, r"lacks 2 of .*down_proj"),
        ({**plain, f"{EXPERTS}down_proj": torch.zeros(6, 32, 32)}, "does not have"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(PeagleError, match=message):
            load_model(tmp_path, spec, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_on_the_cpu_experts_are_unpacked_when_loaded(load_format: str, tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    placeholder_tokenizer(160).save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.float32, device=CPU, load_format=load_format)
    assert target.spec.moe is not None
    assert not target.spec.moe.packed
    assert target.model.get_submodule("layers.0.mlp.experts").get_parameter("down_proj").shape == (6, 32, 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_on_a_gpu_experts_stay_packed(load_format: str, tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    placeholder_tokenizer(160).save_pretrained(tmp_path)
    for unpacked in (False, True):
        target = load_target(
            str(tmp_path), dtype=torch.bfloat16, device=torch.device("cuda"), load_format=load_format,
            unpack_experts=unpacked,
        )  # fmt: skip
        assert target.spec.moe is not None
        assert target.spec.moe.packed is not unpacked
        experts = target.model.get_submodule("layers.0.mlp.experts")
        assert isinstance(experts.down_proj, PackedExperts) is not unpacked
        assert {t.device.type for t in (*experts.parameters(), *experts.buffers())} == {"cuda"}


def test_random_packed_weights_are_those_of_a_trained_models_size(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    model = dummy_model(read_spec(tmp_path), dtype=torch.float32, device=CPU)
    experts = model.get_submodule("layers.3.mlp.experts")
    matrices = torch.stack([unpack(experts.get_submodule("gate_up_proj").matrix, e, torch.float32) for e in range(6)])
    assert matrices.std() == pytest.approx(32**-0.5, rel=0.05)
    assert not experts.get_parameter("gate_up_proj_bias").any()


def test_random_weights_keep_the_stream_and_the_routing_realistic(tmp_path: Path) -> None:
    hf_model(hidden_size=64, intermediate_size=96, num_local_experts=16).config.save_pretrained(tmp_path)
    model = dummy_model(read_spec(tmp_path), dtype=torch.float32, device=CPU)
    experts, router = (model.get_submodule(f"layers.0.mlp.{part}") for part in ("experts", "router"))
    assert experts.gate_up_proj.std() == pytest.approx(64**-0.5, rel=0.05)
    assert experts.down_proj.std() == pytest.approx(96**-0.5, rel=0.05)
    assert not experts.gate_up_proj_bias.any()
    assert not experts.down_proj_bias.any()
    assert not model.sinks[0].any()
    chosen = router(torch.randn(4000, 64)).topk(3).indices
    assert torch.bincount(chosen.flatten(), minlength=16).min() > 4000 * 3 / 16 / 2
