"""`peagle extract`: run the target over a data set once and keep its features on disk, for any number of runs.

What is computed for a shard depends on its documents alone, so a run that goes on after an interruption writes the same
files as one that never stopped.
"""

import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from peagle.config import ExtractConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.errors import PeagleError
from peagle.files import open_output
from peagle.meter import Meter, say
from peagle.models.fingerprint import file_sha256, weights_fingerprint
from peagle.models.hub import resolve_model
from peagle.models.target import Target, display_name
from peagle.training.corpus import cut_to_context, load_prepared
from peagle.training.dataset import Document
from peagle.training.feature_store import (
    STORE_MANIFEST,
    WEIGHTS_KEY,
    FeatureManifest,
    FeatureShard,
    check_settings,
    dtype_name,
    finished_shards,
    plan_shards,
    read_store_manifest,
    stored_tokens,
    write_feature_shard,
    write_store_manifest,
)
from peagle.training.features import document_features
from peagle.training.hf_target import TargetSizes, load_training_target, target_sizes
from peagle.training.setup import choose_tap_ids
from peagle.training.show import size_text

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractResult:
    """What the store in `out` holds now. `kept_shards` were there before this run."""

    out: Path
    shards: int
    kept_shards: int
    tokens: int


def extract(
    model: str, data: Path, out: Path, config: ExtractConfig, console: Console, *, yes: bool = False
) -> ExtractResult:
    """Write the target features of the data set at `data` to `out`; finished shards of an earlier run are kept.

    `yes` fills the disk beyond FREE_SHARE without asking. Raises PeagleError for input that cannot be used or a disk
    that is too small, and KeyboardInterrupt after Ctrl-C; finished shards stay in both cases.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    documents, digest = load_prepared(model, data, console)
    plan = make_plan(model, documents, digest, out, config, dtype, console)
    kept = kept_shards(plan)
    missing = missing_shards(plan, kept)
    estimate(plan, missing, console)
    if not missing:
        say(console, f"{out} is complete already ({len(kept)} shards): nothing to do")
        return _result(plan, kept, len(kept))
    ask_for_space(plan, missing, yes, console)
    open_output(out)
    target = load_training_target(model, dtype=dtype, device=device, console=console)
    manifest = FeatureManifest(settings=plan.settings, num_shards=len(plan.ranges), shards=list(kept))
    write_store_manifest(out, manifest)
    _extract_missing(plan, missing, manifest, target, console)
    result = _result(plan, manifest.shards, len(kept))
    say(console, f"{out}: features of {result.tokens:,} tokens; train with --features {out}")
    return result


def make_plan(
    model: str,
    documents: list[Document],
    data: str,
    out: Path,
    config: ExtractConfig,
    dtype: torch.dtype,
    console: Console,
) -> ExtractPlan:
    """What is to be written for `model` and the documents of a data set with the hash `data`.

    Raises PeagleError for taps that do not exist and data that do not fit the target.
    """
    path = resolve_model(model)
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
    smallest = min(int(document.input_ids.min(initial=0)) for document in documents)
    if smallest < 0 or largest >= sizes.vocab_size:
        raise PeagleError(
            f"the data hold token id {smallest if smallest < 0 else largest}, the target has {sizes.vocab_size} "
            "tokens, numbered from 0: use the target that the data were prepared with"
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
    rest = f", {size_text(_needed(plan, missing))} still to be written" if len(missing) < len(plan.ranges) else ""
    say(
        console,
        f"{tokens:,} tokens x ({len(plan.tap_ids)} taps + 1) x {hidden:,} values x {plan.dtype.itemsize} bytes = "
        f"{size_text(plan.bytes(tokens))} in {len(plan.ranges)} shards of up to {size_text(largest)}"
        f"{rest}; {size_text(free_disk(plan.out))} free",
    )


def ask_for_space(plan: ExtractPlan, missing: Sequence[int], yes: bool, console: Console) -> None:
    """Return if the missing shards may be written: raise PeagleError if they do not fit or the user says no."""
    need, free = _needed(plan, missing), free_disk(plan.out)
    if need > free:
        raise PeagleError(
            f"the features need {size_text(need)} and the disk of {plan.out} has {size_text(free)} free: free "
            f"{size_text(need - free)}, choose another --out, or use less data"
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
        f"the features need {size_text(need)}, more than {FREE_SHARE:.0%} of the {size_text(free)} free on the disk of "
        f"{plan.out}: pass --yes to write them all the same, or free {size_text(more)}"
    )


def free_disk(folder: Path) -> int:
    """Free bytes of the disk that `folder` is or will be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


class _ShardWriter:
    """Writes a shard while the next one is computed. Leaving the block finishes the one that is being written."""

    def __init__(self, plan: ExtractPlan, manifest: FeatureManifest) -> None:
        self._plan, self._manifest = plan, manifest
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._pending: Future[FeatureShard] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.settle()
        finally:
            self._pool.shutdown()

    def put(self, index: int, taps_TC: Tensor, hidden_TH: Tensor) -> None:
        """Hand over a shard, once the one before is on the disk."""
        self.settle()
        first, stop = self._plan.ranges[index]
        tokens = self._plan.tokens_D[first:stop].tolist()
        self._pending = self._pool.submit(write_feature_shard, self._plan.out, index, first, tokens, taps_TC, hidden_TH)

    def settle(self) -> None:
        """Wait for the shard that is being written and list it. Raises PeagleError if it could not be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._manifest.shards.append(pending.result())
            write_store_manifest(self._plan.out, self._manifest)


def _extract_missing(
    plan: ExtractPlan, missing: Sequence[int], manifest: FeatureManifest, target: Target, console: Console
) -> None:
    tokens = sum(plan.shard_tokens(index) for index in missing)
    try:
        with Meter(console, "tokens", tokens) as meter, _ShardWriter(plan, manifest) as writer:
            for index in missing:
                writer.put(index, *_shard_features(plan, index, target, meter))
                if not console.is_terminal:
                    say(console, f"shard {index + 1} of {len(plan.ranges)}: {plan.shard_tokens(index):,} tokens")
    except KeyboardInterrupt:
        done = f"{len(manifest.shards)} of {len(plan.ranges)} shards"
        say(console, f"Stopped: {done} are in {plan.out}. Run the same command again to go on.")
        raise


def _shard_features(plan: ExtractPlan, index: int, target: Target, meter: Meter) -> tuple[Tensor, Tensor]:
    """Taps [T, C] and hidden states [T, H] of a shard's documents in order, on the CPU."""
    first, stop = plan.ranges[index]
    documents = [
        document.input_ids[:-1]
        for document, tokens in zip(plan.documents[first:stop], plan.tokens_D[first:stop], strict=True)
        if tokens
    ]
    tokens, size = plan.shard_tokens(index), len(plan.tap_ids) * plan.settings["hidden_size"]
    taps_TC = torch.empty((tokens, size), dtype=plan.dtype)
    hidden_TH = torch.empty((tokens, plan.values_per_token - size), dtype=plan.dtype)
    for rows, features_XF in document_features(target.model, plan.tap_ids, documents):
        features_XF = features_XF.cpu()
        taps_TC[rows] = features_XF[:, :size]
        hidden_TH[rows] = features_XF[:, size:]
        meter.advance(len(rows), tokens=len(rows))
    return taps_TC, hidden_TH


def _result(plan: ExtractPlan, shards: Sequence[FeatureShard], kept: int) -> ExtractResult:
    tokens = sum(sum(record.tokens) for record in shards)
    return ExtractResult(out=plan.out, shards=len(shards), kept_shards=kept, tokens=tokens)
