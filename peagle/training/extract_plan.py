"""Before `peagle extract` writes anything: what goes into which shard, how large it gets, whether the disk has room."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from peagle.config import ExtractConfig
from peagle.errors import PeagleError
from peagle.models.fingerprint import weights_fingerprint
from peagle.models.target import display_name
from peagle.training.dataset import Document
from peagle.training.feature_store import (
    STORE_MANIFEST,
    WEIGHTS_KEY,
    FeatureShard,
    check_settings,
    dtype_name,
    finished_shards,
    plan_shards,
    read_store_manifest,
    stored_tokens,
)
from peagle.training.hf_spec import TargetSizes, target_sizes
from peagle.training.regenerate import file_sha256
from peagle.training.setup import choose_tap_ids, cut_to_context
from peagle.training.show import say

_GIB = 1024**3
FREE_SHARE = 0.8  # of the free disk that is filled without asking


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractPlan:
    """What is to be written where: documents of the data set, their stored tokens, and the ranges of the shards."""

    out: Path
    documents: list[Document]
    tokens_D: NDArray[np.int64]
    ranges: list[tuple[int, int]]
    tap_ids: tuple[int, ...]
    dtype: torch.dtype
    values_per_token: int  # C + H
    settings: dict[str, Any]

    def bytes(self, tokens: int) -> int:
        """Size of the features of so many tokens."""
        return tokens * self.values_per_token * self.dtype.itemsize

    def shard_tokens(self, index: int) -> int:
        """Stored tokens of a shard."""
        first, stop = self.ranges[index]
        return int(self.tokens_D[first:stop].sum())


def make_plan(
    model: str,
    path: Path,
    documents: list[Document],
    data: str,
    out: Path,
    config: ExtractConfig,
    dtype: torch.dtype,
    console: Console,
) -> ExtractPlan:
    """What is to be written for `model` at `path` and the documents of a data set with the hash `data`.

    Raises PeagleError for taps that do not exist and data that do not fit the target.
    """
    sizes = target_sizes(path)
    tap_ids = choose_tap_ids(config.tap_ids, sizes.num_layers)
    documents, note = cut_to_context(documents, sizes.context)
    if note:
        say(console, note)
    tokens_D = stored_tokens(documents)
    if not tokens_D.any():
        raise PeagleError(f"none of {len(documents)} documents has a supervised token: prepare the data again")
    _check_ids(documents, sizes)
    values = (len(tap_ids) + 1) * sizes.hidden_size
    shard_bytes = int(config.shard_gib * _GIB)
    return ExtractPlan(
        out=out,
        documents=documents,
        tokens_D=tokens_D,
        ranges=plan_shards(tokens_D, values * dtype.itemsize, shard_bytes),
        tap_ids=tap_ids,
        dtype=dtype,
        values_per_token=values,
        settings={
            "model": display_name(model),
            "target_config_sha256": file_sha256(path / "config.json"),
            WEIGHTS_KEY: weights_fingerprint(path),
            "data_hash": data,
            "tap_ids": list(tap_ids),
            "dtype": dtype_name(dtype),
            "context": sizes.context,
            "hidden_size": sizes.hidden_size,
            "shard_bytes": shard_bytes,
        },
    )


def _check_ids(documents: Sequence[Document], sizes: TargetSizes) -> None:
    largest = max(int(document.input_ids.max(initial=0)) for document in documents)
    if largest >= sizes.vocab_size:
        raise PeagleError(
            f"the data hold token id {largest}, the target has {sizes.vocab_size} tokens: "
            "use the target that the data were prepared with"
        )


def kept_shards(plan: ExtractPlan) -> list[FeatureShard]:
    """Finished shards of an earlier run with the same settings."""
    if not (plan.out / STORE_MANIFEST).exists():
        return []
    manifest = read_store_manifest(plan.out)
    if manifest.shards:
        check_settings(plan.out, manifest.settings, plan.settings, "choose another --out or delete the folder")
    return finished_shards(plan.out, manifest, plan.ranges)


def missing_shards(plan: ExtractPlan, kept: Sequence[FeatureShard]) -> list[int]:
    """Numbers of the shards that are still to be written."""
    finished = {record.index for record in kept}
    return [index for index in range(len(plan.ranges)) if index not in finished]


def _needed(plan: ExtractPlan, missing: Sequence[int]) -> int:
    """Bytes still to be written."""
    return plan.bytes(sum(plan.shard_tokens(index) for index in missing))


def estimate(plan: ExtractPlan, missing: Sequence[int], console: Console) -> None:
    """Print how large the features get, in all and per shard, and what the disk has free."""
    tokens, hidden = int(plan.tokens_D.sum()), plan.settings["hidden_size"]
    largest = plan.bytes(max(plan.shard_tokens(index) for index in range(len(plan.ranges))))
    rest = f", {shown(_needed(plan, missing))} still to be written" if len(missing) < len(plan.ranges) else ""
    say(
        console,
        f"{tokens:,} tokens x ({len(plan.tap_ids)} taps + 1) x {hidden:,} values x {plan.dtype.itemsize} bytes = "
        f"{shown(plan.bytes(tokens))} in {len(plan.ranges)} shards of up to {shown(largest)}"
        f"{rest}; {shown(free_disk(plan.out))} free",
    )


def ask_for_space(plan: ExtractPlan, missing: Sequence[int], yes: bool, console: Console) -> None:
    """Return if the missing shards may be written: raise PeagleError if they do not fit or the user says no."""
    need, free = _needed(plan, missing), free_disk(plan.out)
    if need > free:
        raise PeagleError(
            f"the features need {shown(need)} and the disk of {plan.out} has {shown(free)} free: free "
            f"{shown(need - free)}, choose another --out, or use less data"
        )
    if need <= FREE_SHARE * free or yes:
        return
    if console.is_terminal and sys.stdin.isatty():
        question = f"That fills {need / free:.0%} of the free disk. Go on? [y/N] "
        if console.input(question, markup=False).strip().lower() in ("y", "yes"):
            return
        raise PeagleError("nothing was written: choose another --out, or use less data")
    more = need / FREE_SHARE - free
    raise PeagleError(
        f"the features need {shown(need)}, more than {FREE_SHARE:.0%} of the {shown(free)} free on the disk of "
        f"{plan.out}: pass --yes to write them all the same, or free {shown(more)}"
    )


def free_disk(folder: Path) -> int:
    """Free bytes of the disk that `folder` is or will be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def shown(size: float) -> str:
    """A size for the terminal."""
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB else f"{size * 1024 / _GIB:,.1f} MiB"
