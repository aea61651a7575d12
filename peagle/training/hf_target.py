"""Targets that the engine does not run, loaded through transformers: enough to train a head for them.

What training needs of a target is small: the taps, the final-normed hidden states, and the two tables. Any causal
language model of transformers has them, and none of its own code is loaded. Documents run one batch row each, padded on
the right: under causal attention nothing before the padding sees it, so no attention mask is needed, and a check with
real forwards proves both claims for the very model before it is used.

Serving such a target, with the head, is up to vLLM.

Shape suffixes: T flat tokens, B documents of a block, L its padded length, C concatenated taps, H target hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from peagle.errors import PeagleError, one_line
from peagle.meter import say
from peagle.models.decoder import TargetModel
from peagle.models.hub import resolve_model
from peagle.models.layers import Attend, RopeSpec
from peagle.models.spec import DEFAULT_ROPE_THETA, ModelSpec, UnsupportedTarget
from peagle.models.target import Target, display_name, load_target, read_spec
from peagle.models.tokenizer import load_tokenizer
from peagle.training.features import fill_batches
from peagle.waiting import said_if_slow

# Padded tokens of one forward: transformers keeps the stream of every layer, not only the tapped ones.
BLOCK_TOKENS = 8192
# RoPE rules whose angles depend on the longest sequence of the batch: such documents must run alone.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Largest relative error of what must be equal: half precision adds up other orders of summation over many layers.
TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}


def load_training_target(model: str, *, dtype: torch.dtype, device: torch.device, console: Console) -> Target:
    """`load_target`, or the same through transformers where the engine does not know the model; a note says so.

    Raises PeagleError for a model that neither can use.
    """
    try:
        if not read_spec(resolve_model(model)).sinks:
            with said_if_slow(f"loading {model}"):
                return load_target(model, dtype=dtype, device=device)
        reason = "attention sinks need the engine's cache, which training does without"
        note = reason
    except UnsupportedTarget as error:
        reason, note = str(error), "a head trained for it is served by vLLM; `peagle generate` cannot run this target"
    with said_if_slow(f"loading {model}"):
        target = load_hf_target(model, reason, dtype=dtype, device=device)
    say(console, f"{target.name} is loaded through transformers: {note}")
    return target


def load_hf_target(model: str, reason: str, *, dtype: torch.dtype, device: torch.device) -> Target:
    """A frozen target through transformers. `reason` says why the engine does not run it, for an error.

    Raises PeagleError when transformers does not know it either, or where it computes something training cannot use.
    """
    path = resolve_model(model)
    network = _load_network(path, reason, dtype)
    network.to(device)
    spec = hf_spec(network)
    adapter = HFTargetModel(network, spec).eval()
    check_network(adapter)
    # Structurally what training reads of a TargetModel; `native` False keeps everything else away from it.
    typed = cast(TargetModel, adapter)
    return Target(
        name=display_name(model), path=path, spec=spec, model=typed, tokenizer=load_tokenizer(path), native=False
    )


def _load_network(path: Path, reason: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM

    try:
        network, report = auto.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, AttributeError) as error:
        raise unknown_model(reason, error) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise PeagleError(
            f"{path} lacks {len(missing)} tensors of {type(network).__name__} ({missing[0]}): download the model again"
        )
    return network.requires_grad_(False).eval()


class HFTargetModel(nn.Module):
    """A causal language model of transformers with the interface that training uses of a `TargetModel`."""

    def __init__(self, network: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        self.embed_tokens: Any = network.get_input_embeddings()
        self.lm_head: Any = network.get_output_embeddings()
        self._alone = rope_rules(network).get("rope_type") in LENGTH_DEPENDENT_ROPE

    @torch.no_grad()
    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, _attend: Attend | None, tap_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Final-normed hidden states [T, H] and taps [T, len(tap_ids) * H] of documents laid end to end.

        A document begins wherever `positions_T` is 0; one of a single token is padding and gives zeros. The network's
        own causal attention takes the place of `attend`. Waits for the device once, to learn the lengths. Tap k is
        `hidden_states[k]`, the stream entering layer k; the stream after the last layer is not among them.
        """
        if tap_ids and not 0 <= min(tap_ids) <= max(tap_ids) < self.spec.num_layers:
            raise PeagleError(
                f"taps {list(tap_ids)}: through transformers the ids are 0 to {self.spec.num_layers - 1}; choose others"
            )
        hidden_size, weight = self.spec.hidden_size, self.lm_head.weight
        hidden_TH = torch.zeros((len(positions_T), hidden_size), dtype=weight.dtype, device=weight.device)
        taps_TC = hidden_TH.new_zeros((len(positions_T), len(tap_ids) * hidden_size)) if tap_ids else None
        starts_D = np.flatnonzero(positions_T.cpu().numpy() == 0)
        lengths_D = np.diff(starts_D, append=len(positions_T))
        starts_D, lengths_D = starts_D[lengths_D > 1], lengths_D[lengths_D > 1]
        for members in _blocks(lengths_D, self._alone):
            index_BL, real_BL = _block_index(starts_D[members], lengths_D[members])
            real = torch.from_numpy(index_BL[real_BL]).to(weight.device)
            source = torch.from_numpy(np.flatnonzero(real_BL)).to(weight.device)
            hidden_XH, taps_XC = self._block(input_ids_T[torch.from_numpy(index_BL).to(weight.device)], tap_ids)
            hidden_TH.index_copy_(0, real, hidden_XH.index_select(0, source))
            if taps_TC is not None and taps_XC is not None:
                taps_TC.index_copy_(0, real, taps_XC.index_select(0, source))
        return hidden_TH, taps_TC

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits over the vocabulary, [T, V], of final-normed hidden states."""
        logits_TV: Tensor = self.lm_head(hidden_TH)
        return logits_TV

    def _block(self, ids_BL: Tensor, tap_ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B * L, H] and taps [B * L, C] of right-padded documents."""
        out = self.network.base_model(ids_BL, use_cache=False, output_hidden_states=bool(tap_ids))
        taps_XC = torch.cat([out.hidden_states[k] for k in tap_ids], dim=-1).flatten(0, 1) if tap_ids else None
        return out.last_hidden_state.flatten(0, 1), taps_XC


def _blocks(lengths_D: NDArray[np.int64], alone: bool) -> list[NDArray[np.int64]]:
    """Document numbers of each padded block, longest first; blocks of one where documents must run alone."""
    if alone:
        return [np.array([d]) for d in range(len(lengths_D))]
    return fill_batches(lengths_D, BLOCK_TOKENS)


def _block_index(starts_B: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(flat token of every place of a block, whether it is a real one), both [B, L]; padding repeats the last token."""
    within_BL = np.broadcast_to(np.arange(lengths_B.max()), (len(lengths_B), lengths_B.max()))
    return starts_B[:, None] + np.minimum(within_BL, lengths_B[:, None] - 1), within_BL < lengths_B[:, None]


@torch.no_grad()
def check_network(model: HFTargetModel) -> None:
    """Run a few tokens: logits must be the output matrix times the hidden state, and nothing may see what follows it.

    Raises PeagleError otherwise.
    """
    network, spec = model.network, model.spec
    weight = model.lm_head.weight
    ids_BL = torch.arange(1, 17, device=weight.device).reshape(2, 8) % spec.vocab_size
    out = network(ids_BL, use_cache=False, output_hidden_states=True)
    hidden_XH, _ = model._block(ids_BL, ())
    if len(out.hidden_states) != spec.num_layers + 1 or out.hidden_states[0].shape[-1] != spec.hidden_size:
        raise PeagleError(f"{type(network).__name__} does not report one hidden state per layer: choose another target")
    tolerance = TOLERANCE.get(weight.dtype, 0.1)
    if _error(model.logits(hidden_XH), out.logits.flatten(0, 1)) > tolerance:
        raise PeagleError(
            f"the logits of {type(network).__name__} are not its output matrix times its hidden state: only plain "
            "logits can be trained on, choose another target"
        )
    short_XH, _ = model._block(ids_BL[:, :5], ())
    if _error(short_XH, hidden_XH.unflatten(0, (2, 8))[:, :5].flatten(0, 1)) > tolerance:
        raise PeagleError(
            f"{type(network).__name__} sees tokens that follow: only causal models can be targets, choose another one"
        )


def _error(value: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    difference = (value.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item()


# Keys that put something between the output matrix and the logits, and the value with which they do nothing.
LOGIT_KEYS: Mapping[str, float | None] = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "output_multiplier_scale": 1.0,
}


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What is known of a target before its weights are loaded. `context` is its longest sequence in tokens."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    context: int


def target_sizes(path: Path) -> TargetSizes:
    """Sizes of the model at `path`, be it the engine's or one for transformers. Raises PeagleError for neither."""
    try:
        spec = read_spec(path)
    except UnsupportedTarget as error:
        config = _read_config(path, str(error))
        keys = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
        return TargetSizes(*(_whole(config, key) for key in keys))
    return TargetSizes(spec.hidden_size, spec.num_layers, spec.vocab_size, spec.max_position_embeddings)


def _read_config(path: Path, reason: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False).get_text_config()
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise unknown_model(reason, error) from error


def unknown_model(reason: str, error: Exception) -> PeagleError:
    """What to say of a model that the engine does not run, for `reason`, and transformers does not load."""
    return PeagleError(f"{reason}; transformers cannot load it either ({one_line(error)})")


def hf_spec(network: Any) -> ModelSpec:
    """Sizes of the target and of a fresh Llama-style head for it, from a transformers config.

    The head's RoPE is its own: the target's base without scaling, over whole heads. Raises PeagleError for a target
    whose tables or logits do not fit a head.
    """
    config = network.config.get_text_config()
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    _check_tables(network, embedding, head)
    vocab, hidden = head.weight.shape
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head_dim = _whole(config, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise PeagleError(
            f"{heads} heads, {kv_heads} key/value heads, head_dim {head_dim}: no head of the Llama kind can take over "
            "these sizes; choose another target"
        )
    eps = [getattr(config, key, None) for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")]
    theta = float(rope_rules(network).get("rope_theta") or DEFAULT_ROPE_THETA)
    return ModelSpec(
        family="other",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size", 4 * hidden),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(next(filter(None, eps), 1e-6)),
        rope=RopeSpec(theta=theta, head_dim=head_dim),
        max_position_embeddings=_whole(config, "max_position_embeddings"),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_word_embeddings=embedding.weight is head.weight,
        bos_token_id=next(iter(_token_ids(network, "bos_token_id")), None),
        eos_token_ids=_token_ids(network, "eos_token_id"),
    )


def _check_tables(network: Any, embedding: Any, head: Any) -> None:
    name = type(network).__name__
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise PeagleError(
            f"{name} has no plain embedding and output matrix to train a head with: choose another target"
        )
    if embedding.weight.shape != head.weight.shape:
        raise PeagleError(
            f"{name} has an embedding of {tuple(embedding.weight.shape)} and an output matrix of "
            f"{tuple(head.weight.shape)}: a head needs both alike, choose another target"
        )
    config = network.config.get_text_config()
    for key, neutral in LOGIT_KEYS.items():
        value = getattr(config, key, None)
        if value is not None and value != neutral:
            raise PeagleError(
                f"{name} computes logits with {key} {value:g}: only plain logits, the output matrix times the hidden "
                "state, can be trained on; choose another target"
            )
    if head.bias is not None:
        raise PeagleError(
            f"{name} adds a bias to its logits: only plain logits can be trained on, choose another target"
        )


def _whole(config: Any, key: str, default: int | None = None) -> int:
    value = getattr(config, key, None)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise PeagleError(
            f"{type(config).__name__} has {key} {value!r}: expected a whole number; choose another target"
        )
    return value


def rope_rules(network: Any) -> Mapping[str, Any]:
    """The RoPE parameters of full attention, {} for a model without RoPE."""
    rules = getattr(network.config.get_text_config(), "rope_parameters", None) or {}
    nested = rules.get("full_attention")
    return nested if isinstance(nested, Mapping) else rules


def _token_ids(network: Any, key: str) -> tuple[int, ...]:
    """The ids of the first source that names any, generation settings first."""
    for source in (network.generation_config, network.config.get_text_config()):
        value = getattr(source, key, None)
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()
