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
from peagle.drafters.p_eagle import drafter_for
from peagle.errors import PeagleError
from peagle.models.decoder import TargetModel


def load_start(
    head: Path | str,
    target: TargetModel,
    *,
    num_layers: int,
    tap_ids: Sequence[int] | None = None,
    draft_vocab_size: int | None = None,
) -> Eagle3Drafter:
    """The head to start from (directory or Hub id), float32 on the CPU.

    The other arguments are what the run asks for, None for whatever the head has. Raises PeagleError where head, target
    and run disagree.
    """
    cpu = torch.device("cpu")
    start = load_drafter(head, target, dtype=torch.float32, device=cpu, trainable=True)
    _check_agrees(start.config, str(head), num_layers, tap_ids, draft_vocab_size)
    return start


def warm_drafter(start: Eagle3Drafter, fresh: Eagle3Drafter, seed: int) -> Eagle3Drafter:
    """A head ready to train that is `start` as far as that goes and `fresh` in what it lacks, on the CPU.

    Further layers and the mask token are those of `fresh`, and so is its sliding window, if it has one.
    """
    wanted, config = fresh.config, start.config
    types, window = config.layer_types, config.sliding_window
    if wanted.sliding_window is not None:
        types, window = wanted.layer_types, wanted.sliding_window
    elif types is not None:  # further layers see everything before them
        types = (*types, *[FULL] * (wanted.num_layers - config.num_layers))
    config = replace(
        config, num_layers=wanted.num_layers, mask_token_id=wanted.mask_token_id, layer_types=types,
        sliding_window=window,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_for(config)
    own, theirs = drafter.state_dict(), start.state_dict()
    for name, value in fresh.state_dict().items():
        if name not in theirs and name in own and value.shape == own[name].shape:
            theirs[name] = value
    drafter.load_state_dict({name: value for name, value in theirs.items() if name in own}, strict=False)
    return drafter.train()


def _check_agrees(
    config: DrafterConfig, head: str, num_layers: int, tap_ids: Sequence[int] | None, draft_vocab_size: int | None
) -> None:
    if num_layers < config.num_layers:
        raise PeagleError(
            f"head {head} has {config.num_layers} layers, this run {num_layers}: a run cannot have fewer than the head "
            f"it starts from, use --num-layers {config.num_layers} or more"
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
