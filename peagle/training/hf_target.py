"""Targets that the engine does not run, loaded through transformers: enough to train a head for them.

What training needs of a target is small: the taps, the final-normed hidden states, and the two tables. Any causal
language model of transformers has them, and none of its own code is loaded. Documents run one batch row each, padded on
the right: under causal attention nothing before the padding sees it, so no attention mask is needed, and a check with
real forwards proves both claims for the very model before it is used.

Serving such a target, with the head, is up to vLLM.

Shape suffixes: T flat tokens, B documents of a block, L its padded length, C concatenated taps, H target hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from peagle.models.hub import resolve_model
from peagle.models.layers import Attend
from peagle.models.spec import ModelSpec, UnsupportedTarget
from peagle.models.target import Target, display_name, load_target
from peagle.models.tokenizer import load_tokenizer
from peagle.training.features import fill_batches
from peagle.training.hf_spec import hf_spec, rope_rules, unknown_model

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
        return load_target(model, dtype=dtype, device=device)
    except UnsupportedTarget as error:
        target = load_hf_target(model, str(error), dtype=dtype, device=device)
    note = "a head trained for it is served by vLLM; `peagle generate` cannot run this target"
    console.print(f"{target.name} is loaded through transformers: {note}", soft_wrap=True, markup=False)
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
