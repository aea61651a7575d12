"""Targets through transformers: taps, hidden states and logits are the library's own; what does not fit is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.drafters.init import new_drafter
from peagle.errors import PeagleError
from peagle.models.spec import UnsupportedTarget
from peagle.models.target import read_spec
from peagle.training import hf_target as hf_module
from peagle.training.features import OnlineFeatures, fill_cache
from peagle.training.hf_target import HFTargetModel, check_network, hf_spec, load_training_target, target_sizes
from peagle.training.rows import RowLayout, pack_documents
from tests.training.tiny_run import documents

CPU = torch.device("cpu")
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES = {
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "mistral": {**GROUPED, "sliding_window": None},
    "gemma3_text": {**GROUPED, "sliding_window": 4},
    "gpt2": {},
    "gpt_oss": {**GROUPED, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SPAN = 40


def network(family, **changes):
    """A random network of five layers, wide enough in its weights that attention matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        max_position_embeddings=SPAN, **SPECIAL, **changes,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return made


def adapter(family="mistral", **changes):
    made = network(family, **{**FAMILIES.get(family, {}), **changes})
    return HFTargetModel(made, hf_spec(made))


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_hidden_states_and_logits_are_the_librarys(family):
    model = adapter(family)
    check_network(model)
    ids_T = torch.randint(3, 60, (9,))
    out = model.network(ids_T[None], output_hidden_states=True)
    hidden_TH, taps_TC = model(ids_T, torch.arange(9), None, (1, 2, 4))
    assert torch.equal(taps_TC, torch.cat([out.hidden_states[k][0] for k in (1, 2, 4)], dim=-1))
    torch.testing.assert_close(model.logits(hidden_TH), out.logits[0], atol=1e-5, rtol=1e-5)
    assert model(ids_T, torch.arange(9), None)[1] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_side_by_side_run_as_if_alone(family, monkeypatch):
    """Padding of two kinds: within a block, and tokens of position 0 as a pack's stream and `fill_cache` have them."""
    monkeypatch.setattr(hf_module, "BLOCK_TOKENS", 24)  # two blocks
    model, lengths = adapter(family), (3, 12, 7)
    ids_T = torch.randint(3, 60, (sum(lengths) + 2,))
    positions_T = torch.cat([*map(torch.arange, lengths), torch.zeros(2, dtype=torch.int64)])
    hidden_TH, taps_TC = model(ids_T, positions_T, None, (1, 3))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone_hidden, alone_taps = model(ids_T[part], torch.arange(length), None, (1, 3))
        torch.testing.assert_close(hidden_TH[part], alone_hidden, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(taps_TC[part], alone_taps, atol=1e-5, rtol=1e-4)
        start += length
    assert not hidden_TH[start:].any()


def test_a_rope_that_depends_on_the_batch_runs_each_document_alone(monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = adapter("mistral", rope_parameters=rope)
    blocks = []
    monkeypatch.setattr(
        model, "_block", lambda ids, taps: blocks.append(ids.shape) or (torch.zeros(ids.numel(), 32), None)
    )
    model(torch.zeros(9, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 0]), None)
    assert blocks == [(1, 4), (1, 3)]


def test_online_and_cached_features_agree():
    model, data = adapter("gpt_neox"), documents(6)
    layout = RowLayout(positions=150, mask_rows=600, num_depths=4)
    (packed,) = pack_documents(data, layout)
    online = OnlineFeatures(model, (1, 3), "reference")
    cached = fill_cache(model, (1, 3), [document.input_ids[:-1] for document in data], Console(quiet=True))
    real = packed.doc_P >= 0
    both = [source.gather(source.index(packed, packed.source_D)) for source in (online, cached)]
    for left, right in zip(*both, strict=True):
        torch.testing.assert_close(left[real], right[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_head_fits(family):
    model = adapter(family)
    spec = model.spec
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.max_position_embeddings) == (64, 32, 5, SPAN)
    assert (spec.head_dim, spec.intermediate_size, spec.eos_token_ids) == (8, 48, (2,))
    head = new_drafter(model, num_layers=2, mask_token_id=63, seed=0, target_init=False, tap_ids=(1, 2, 4))
    assert torch.equal(head.lm_head.weight, model.lm_head.weight)
    assert torch.equal(head.embed_tokens.weight, model.embed_tokens.weight)


def test_rope_of_full_attention_is_the_heads():
    assert adapter("gemma3_text").spec.rope.theta == 1_000_000
    assert adapter("gpt2").spec.rope.theta == 10_000


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gemma2", GROUPED, "final_logit_softcapping 30"),
        ("granite", {"num_key_value_heads": 2, "logits_scaling": 8.0}, "logits_scaling 8"),
        ("cohere", {"num_key_value_heads": 2}, "logit_scale 0.0625"),
        ("phi", {}, "adds a bias"),
    ],
)
def test_logits_that_are_not_plain_are_refused(family, changes, key):
    with pytest.raises(PeagleError, match=f"{key}.* choose another target"):
        hf_spec(network(family, **changes))


def test_a_wrong_head_and_a_model_that_looks_ahead_are_found_out():
    model = adapter()
    model.lm_head = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(PeagleError, match="not its output matrix times"):
        check_network(model)
    model = adapter()
    original = model._block
    model._block = lambda ids, taps: (
        original(ids.flip(1), taps)[0].unflatten(0, ids.shape).flip(1).flatten(0, 1),
        None,
    )
    model.logits = lambda hidden: model.network(torch.arange(1, 17).reshape(2, 8)).logits.flatten(0, 1)
    with pytest.raises(PeagleError, match="sees tokens that follow"):
        check_network(model)


def test_taps_outside_are_refused():
    with pytest.raises(PeagleError, match="ids are 0 to 4"):
        adapter()(torch.zeros(3, dtype=torch.int64), torch.arange(3), None, (1, 5))


@pytest.fixture
def saved(tmp_path, monkeypatch):
    network("gpt_neox").save_pretrained(tmp_path / "neox")
    monkeypatch.setattr(hf_module, "load_tokenizer", lambda path: SimpleNamespace(chat_template=None))
    return tmp_path / "neox"


def test_loading_falls_back_with_a_note(saved):
    with pytest.raises(UnsupportedTarget):
        read_spec(saved)
    console = Console(record=True, width=200)
    target = load_training_target(str(saved), dtype=torch.float32, device=CPU, console=console)
    assert "neox is loaded through transformers: a head trained for it is served by vLLM" in console.export_text()
    assert (target.name, target.native, target.spec.family) == ("neox", False, "other")
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    sizes = target_sizes(saved)
    assert (sizes.hidden_size, sizes.num_layers, sizes.vocab_size, sizes.context) == (32, 5, 64, SPAN)


def test_a_target_with_attention_sinks_is_trained_for_through_transformers(tmp_path, monkeypatch):
    """The engine has sinks and windows in its cache; training attends without one."""
    network("gpt_oss", **FAMILIES["gpt_oss"]).save_pretrained(tmp_path)
    monkeypatch.setattr(hf_module, "load_tokenizer", lambda path: SimpleNamespace(chat_template=None))
    console = Console(record=True, width=200)
    target = load_training_target(str(tmp_path), dtype=torch.float32, device=CPU, console=console)
    assert (target.native, read_spec(tmp_path).family) == (False, "gpt_oss")
    assert "loaded through transformers: attention sinks need the engine's cache" in console.export_text()
    assert target_sizes(tmp_path).num_layers == 5


def test_models_nobody_knows_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    for call in (
        lambda: target_sizes(tmp_path),
        lambda: load_training_target(str(tmp_path), dtype=torch.float32, device=CPU, console=Console(quiet=True)),
    ):
        with pytest.raises(PeagleError, match=r"'abacus' is not supported.*transformers cannot load it either"):
            call()


def test_missing_tensors_are_refused(saved):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "model.safetensors")
    del tensors["gpt_neox.layers.3.mlp.dense_h_to_4h.weight"]
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(PeagleError, match=r"lacks 1 tensors.*layers\.3\.mlp"):
        load_training_target(str(saved), dtype=torch.float32, device=CPU, console=Console(quiet=True))


def test_lengths_of_a_block():
    index, real = hf_module._block_index(np.array([4, 0]), np.array([3, 2]))
    assert index.tolist() == [[4, 5, 6], [0, 1, 1]]
    assert real.tolist() == [[True] * 3, [True, True, False]]
