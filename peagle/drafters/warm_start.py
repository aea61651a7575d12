"""A head that starts as another one: EAGLE-3 that is to draft in parallel, or P-EAGLE that is to learn more.

The other head's architecture rules: widths, norms, taps and draft vocabulary are its own. What it does not have (mask
parameters, further layers) starts as in a fresh head.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.eagle3 import FULL, DrafterConfig, Eagle3Drafter
from peagle.drafters.init import new_drafter
from peagle.drafters.p_eagle import drafter_for
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel
from peagle.models.spec import ModelSpec


def warm_drafter(
    head: Path | str,
    spec: ModelSpec,
    target: TargetModel,
    *,
    num_layers: int,
    mask_token_id: int | None,
    seed: int,
    target_init: bool,
    tap_ids: Sequence[int] | None = None,
    draft_vocab_size: int | None = None,
    sliding_window: int | None = None,
    sliding_layers: Sequence[int] | None = None,
) -> Eagle3Drafter:
    """A float32 head on the CPU, ready to train, that starts as the one at `head` (directory or Hub id).

    It has at least that head's layers. `mask_token_id` None makes an EAGLE-3 head. `tap_ids` and `draft_vocab_size` are
    what the run asks for, None for whatever the head has; so are `sliding_window` and `sliding_layers`, which may
    differ from the head's. Raises PeagleError where head, target and run disagree.
    """
    cpu = torch.device("cpu")
    start = load_drafter(head, target, spec, dtype=torch.float32, device=cpu, trainable=True)
    _check_agrees(start.config, str(head), num_layers, tap_ids, draft_vocab_size)
    config = _grown(start.config, num_layers, mask_token_id)
    fresh = new_drafter(
        spec,
        target,
        num_layers=num_layers,
        mask_token_id=mask_token_id,
        seed=seed,
        target_init=target_init,
        tap_ids=config.tap_ids,
        norm_before_fc=config.norm_before_fc,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
    )
    if sliding_window is not None:
        config = replace(config, layer_types=fresh.config.layer_types, sliding_window=sliding_window)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_for(config)
    own, theirs = drafter.state_dict(), start.state_dict()
    for name, value in fresh.state_dict().items():
        if name not in theirs and name in own and value.shape == own[name].shape:
            theirs[name] = value
    drafter.load_state_dict({name: value for name, value in theirs.items() if name in own}, strict=False)
    return drafter.train()


def _grown(config: DrafterConfig, num_layers: int, mask_token_id: int | None) -> DrafterConfig:
    """The head's config with further layers, which see everything before them, and with the run's mask token."""
    types = config.layer_types
    if types is not None:
        types = (*types, *[FULL] * (num_layers - config.num_layers))
    return replace(config, num_layers=num_layers, mask_token_id=mask_token_id, layer_types=types)


def _check_agrees(
    config: DrafterConfig, head: str, num_layers: int, tap_ids: Sequence[int] | None, draft_vocab_size: int | None
) -> None:
    if num_layers < config.num_layers:
        raise PeagleError(
            f"head {head} has {config.num_layers} layers, this run {num_layers}: a head cannot start as a deeper one, "
            f"use --num-layers {config.num_layers} or more"
        )
    if tap_ids is not None and tuple(tap_ids) != config.tap_ids:
        raise PeagleError(
            f"head {head} taps layers {list(config.tap_ids)}, this run asks for {list(tap_ids)}: its fc was trained on "
            "those, leave --tap-ids out"
        )
    if draft_vocab_size is not None and draft_vocab_size != config.draft_vocab_size:
        raise PeagleError(
            f"head {head} drafts {config.draft_vocab_size} tokens, this run asks for {draft_vocab_size}: leave "
            "--draft-vocab-size out to keep the head's"
        )
