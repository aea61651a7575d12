"""`peagle extract`: run the target over a data set once and keep its features on disk, for any number of runs.

What is computed for a shard depends on its documents alone, so a run that goes on after an interruption writes the same
files as one that never stopped.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from peagle.config import ExtractConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.models.hub import resolve_model
from peagle.models.target import Target
from peagle.training.dataset import data_hash, load_documents
from peagle.training.extract_plan import ExtractPlan, ask_for_space, estimate, kept_shards, make_plan, missing_shards
from peagle.training.feature_store import (
    FeatureManifest,
    FeatureShard,
    write_feature_shard,
    write_store_manifest,
)
from peagle.training.features import document_features
from peagle.training.hf_target import load_training_target
from peagle.training.lock import lock_output
from peagle.training.setup import check_prepared_for
from peagle.training.shards import remove_stale, write_error
from peagle.training.show import say


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
    documents, data_manifest = load_documents(data)
    path = resolve_model(model)
    check_prepared_for(model, path, data, data_manifest)
    if not data_manifest.get("complete", True):
        say(console, f"{data} is not complete: extracting for the documents of its finished shards")
    plan = make_plan(model, path, documents, data_hash(data_manifest), out, config, dtype, console)
    kept = kept_shards(plan)
    missing = missing_shards(plan, kept)
    estimate(plan, missing, console)
    if not missing:
        say(console, f"{out} is complete already ({len(kept)} shards): nothing to do")
        return _result(plan, kept, len(kept))
    ask_for_space(plan, missing, yes, console)
    _open(plan)
    target = load_training_target(model, dtype=dtype, device=device, console=console)
    manifest = FeatureManifest(settings=plan.settings, num_shards=len(plan.ranges), shards=list(kept))
    write_store_manifest(out, manifest)
    _extract_missing(plan, manifest, target, console)
    result = _result(plan, manifest.shards, len(kept))
    say(console, f"{out}: features of {result.tokens:,} tokens; train with --features {out}")
    return result


def _open(plan: ExtractPlan) -> None:
    """Make the folder, keep other runs from it and clear what a killed one left."""
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        lock_output(plan.out)
        remove_stale(plan.out)
    except OSError as error:
        raise write_error(plan.out, error) from error


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


def _extract_missing(plan: ExtractPlan, manifest: FeatureManifest, target: Target, console: Console) -> None:
    missing = missing_shards(plan, manifest.shards)
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
    )  # fmt: skip
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    total = sum(plan.shard_tokens(index) for index in missing)
    task = progress.add_task("target features", total=total, rate=0.0)

    def advance(tokens: int) -> None:
        shown = progress.tasks[0]
        progress.update(task, advance=tokens, rate=(shown.completed + tokens) / (shown.elapsed or 1.0))

    try:
        with progress, _ShardWriter(plan, manifest) as writer:
            for index in missing:
                writer.put(index, *_shard_features(plan, index, target, advance))
                if not console.is_terminal:
                    say(console, f"shard {index + 1} of {len(plan.ranges)}: {plan.shard_tokens(index):,} tokens")
    except KeyboardInterrupt:
        done = f"{len(manifest.shards)} of {len(plan.ranges)} shards"
        say(console, f"Stopped: {done} are in {plan.out}. Run the same command again to go on.")
        raise


def _shard_features(
    plan: ExtractPlan, index: int, target: Target, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor]:
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
        advance(len(rows))
    return taps_TC, hidden_TH


def _result(plan: ExtractPlan, shards: Sequence[FeatureShard], kept: int) -> ExtractResult:
    tokens = sum(sum(record.tokens) for record in shards)
    return ExtractResult(out=plan.out, shards=len(shards), kept_shards=kept, tokens=tokens)
