"""`peagle train`: one head for one target, from a prepared data set.

OUT/recipe.json     settings, base model and data hash
OUT/train.jsonl     one line per report
OUT/checkpoint/     state to resume from, replaced every `save_interval` steps, on Ctrl-C and at the end
OUT/head/           the finished head
OUT/training.png    the log as a picture, where matplotlib is installed
OUT/.lock           empty; held while a run writes here

The schedule: warm-up over `warmup_steps`, then a cosine to 0 over the planned steps (`max_steps`, else epochs x packs).
With `max_seconds` the run also ends after that much training time (compilation, evaluations and earlier parts of a
resumed run included; loading and the feature cache not) and the cosine follows whichever of the two is further along.
"""

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.utils import clip_grad_norm_

from peagle.config import TrainConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.errors import PeagleError
from peagle.models.hub import resolve_model
from peagle.models.target import Target, load_target
from peagle.training.attention import Backend
from peagle.training.batches import Batch, Prefetcher, batches, epoch_packs
from peagle.training.dataset import Document, load_documents
from peagle.training.evaluate import Evaluation, evaluate
from peagle.training.features import FeatureSource, OnlineFeatures, fill_cache
from peagle.training.interrupt import Interrupt
from peagle.training.monitor import LogEntry, Monitor, Running, peak_memory_gib
from peagle.training.objective import Objective
from peagle.training.optim import OptimizerKind, build_optimizers, learning_rate_factor, set_learning_rate
from peagle.training.plots import plot_training
from peagle.training.rows import RowLayout
from peagle.training.setup import (
    Corpus,
    build_drafter,
    check_prepared_for,
    resolve_attention,
    row_layout,
    split_corpus,
)
from peagle.training.train_state import (
    Recipe,
    RunState,
    check_same_recipe,
    find_checkpoint,
    load_checkpoint,
    make_recipe,
    prepare_output,
    read_state,
    save_checkpoint,
    write_state,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run left behind. `evaluation` is None without held-out documents, or when the run was finished before."""

    head: Path
    state: RunState
    evaluation: Evaluation | None


def train(model: str, data: Path, out: Path, config: TrainConfig, console: Console) -> TrainResult:
    """Train a head for `model` on the data set at `data`; resume when `out` holds a checkpoint of the same recipe.

    Raises PeagleError for anything the user can fix, and KeyboardInterrupt after Ctrl-C, once a checkpoint is saved.
    """
    prepare_output(out)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    resolve_attention(config.attention, device)  # fail before the slow part
    documents, manifest = load_documents(data)
    data_hash = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    check_prepared_for(model, resolve_model(model), data, manifest)
    if not manifest.get("complete", True):
        console.print(f"{data} is not complete: training on the documents of its finished shards", soft_wrap=True)
    target = load_target(model, dtype=dtype, device=device)
    return train_head(target, documents, data_hash, out, config, console)


def train_head(
    target: Target, documents: list[Document], data_hash: str, out: Path, config: TrainConfig, console: Console
) -> TrainResult:
    """`train` with the target and the data already in memory; the target's device is the training device."""
    prepare_output(out)
    recipe = make_recipe(config, target.name, data_hash)
    checkpoint = find_checkpoint(out)
    state = RunState()
    if checkpoint is not None:
        state, saved = read_state(checkpoint)
        check_same_recipe(recipe, saved, out)
        if state.finished:
            console.print(f"{out} holds this run, finished after {state.step:,} steps: nothing to do")
            return TrainResult(head=out / "head", state=state, evaluation=None)
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    console.print(f"results go to {out}: head/ at the end, checkpoint/ and train.jsonl on the way", soft_wrap=True)
    trainer = Trainer(target, split_corpus(documents, config), out, config, recipe, state, console)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer.drafter, trainer.optimizers, trainer.running)
        console.print(f"resuming after step {state.step:,} ({state.seconds:.0f} s of training)")
    return trainer.run()


class Trainer:
    """One run: everything it needs built once, then `run`."""

    def __init__(
        self,
        target: Target,
        corpus: Corpus,
        out: Path,
        config: TrainConfig,
        recipe: Recipe,
        state: RunState,
        console: Console,
    ) -> None:
        weight = target.model.embed_tokens.weight
        self.device = weight.device
        self.target, self.corpus, self.out, self.config, self.recipe = target, corpus, out, config, recipe
        self.state, self.console = state, console
        backend = resolve_attention(config.attention, self.device)
        self.layout: RowLayout = row_layout(config, backend, corpus.train)
        self.planned = planned_steps(corpus, self.layout, config)
        self.drafter: PEagleDrafter = build_drafter(target, corpus.documents, config, weight.dtype, self.device)
        kind: OptimizerKind = "muon" if config.optimizer == "muon" else "adamw"
        self.optimizers = build_optimizers(self.drafter, config.muon_lr, config.adamw_lr, kind)
        self.running = Running(config.num_depths, self.device)
        self.features = self._feature_source(backend)
        self.objective = self._objective(config, backend)
        # Eager: a second set of compiled graphs, without gradients, would cost more than the evaluations of a run.
        self.held_out_objective = self._objective(replace(config, compile=False), backend)
        self._trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        self._factor = 0.0  # of the last step, for the log

    def _objective(self, config: TrainConfig, backend: Backend) -> Objective:
        dtype = self.target.model.embed_tokens.weight.dtype
        return Objective(self.drafter, self.target.model, self.features, config, backend=backend, dtype=dtype)

    def _feature_source(self, backend: Backend) -> FeatureSource:
        tap_ids = self.drafter.config.tap_ids
        if not self.config.cache_features:
            return OnlineFeatures(self.target.model, tap_ids, backend)
        # The last token of a document is only ever a label.
        ids = [document.input_ids[:-1] for document in self.corpus.documents]
        return fill_cache(self.target.model, tap_ids, ids, self.console)

    def run(self) -> TrainResult:
        """Train to the end of the plan, save, export the head."""
        source = batches(self.corpus.train, self.layout, self.features, self.config.seed, self.state.place)
        monitor = Monitor(self.out / "train.jsonl", self.console, keep_to_step=self.state.step)
        monitor.note(self._plan())
        with (
            monitor,
            Interrupt(
                lambda: monitor.note("finishing this step, then saving; Ctrl-C again stops at once")
            ) as interrupt,
            Prefetcher(source, self.device) as data,
        ):
            clock = _Clock(self.state, data)
            while self.state.step < self.planned and clock.seconds < (self.config.max_seconds or math.inf):
                self._step(data.next(), clock.seconds)
                if self.state.step % self.config.log_interval == 0:
                    self._report(monitor, clock)
                if self.state.step % self.config.save_interval == 0 and self.state.step < self.planned:
                    self._evaluate(monitor)
                    self._save(clock)
                if interrupt.asked:
                    self._save(clock)
                    monitor.note(f"saved after step {self.state.step:,}; run the same command to resume")
                    raise KeyboardInterrupt
            return self._finish(monitor, clock)

    def _step(self, batch: Batch, seconds: float) -> None:
        """One optimiser step. Nothing here waits for the device."""
        self._factor = schedule_factor(self.state.step, self.planned, seconds, self.config)
        set_learning_rate(self.optimizers, self._factor)
        outcome = self.objective(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        norm = clip_grad_norm_(self._trained, self.config.clip_norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.state = self.state.after(batch)
        self.running.add(self.state.step, outcome.loss, norm, outcome.statistics)

    def _report(self, monitor: Monitor, clock: "_Clock") -> None:
        """Read the running statistics (the one wait for the device), check them and log them."""
        report = self.running.report()
        self._check_finite(report.bad_step)
        state, interval = self.state, clock.lap(self.state)
        entry = LogEntry(
            step=state.step,
            epoch=state.epoch,
            seconds=clock.seconds,
            positions=state.positions,
            rows=state.rows,
            loss=report.loss,
            depth_accuracy=report.depths.accuracy,
            prefix_accuracy=report.depths.prefix_accuracy,
            acceptance_length=report.depths.acceptance_length,
            learning_rate_factor=self._factor,
            gradient_norm=report.gradient_norm,
            positions_per_second=interval.positions_per_second,
            data_wait_share=interval.data_wait_share,
            memory_gib=peak_memory_gib(self.device),
        )
        done = max(state.step / self.planned, entry.seconds / (self.config.max_seconds or math.inf))
        monitor.step(entry, min(1.0, done))

    def _check_finite(self, bad_step: int) -> None:
        if bad_step >= 0:
            raise PeagleError(
                f"the loss or its gradient became NaN or infinite at step {bad_step}: lower muon_lr "
                f"({self.config.muon_lr}) or adamw_lr ({self.config.adamw_lr}) and start in another output directory"
            )

    def _save(self, clock: "_Clock") -> None:
        """Write a checkpoint, never one of a run that has gone wrong."""
        self._check_finite(int(self.running.bad_step.item()))
        self.state = replace(self.state, seconds=clock.seconds)
        save_checkpoint(self.out, self.drafter, self.optimizers, self.running, self.state, self.recipe)

    def _evaluate(self, monitor: Monitor) -> Evaluation | None:
        """Evaluate on the held-out documents, if there are any, and log the result."""
        corpus = self.corpus
        if not corpus.held_out:
            return None
        result = evaluate(self.held_out_objective, corpus.held_out, corpus.training, self.layout, self.device)
        monitor.held_out(self.state.step, result)
        return result

    def _finish(self, monitor: Monitor, clock: "_Clock") -> TrainResult:
        """Last report, checkpoint and evaluation, the head, and only then the mark that the run is finished.

        Whatever fails after the checkpoint, the same command resumes here without a step of training.
        """
        if self.running.steps.item() > 0:
            self._report(monitor, clock)
        self._save(clock)
        evaluation = self._evaluate(monitor)
        self._export(evaluation)
        self.state = replace(self.state, finished=True)
        write_state(self.out / "checkpoint", self.state, self.recipe)
        monitor.note(f"head after {self.state.step:,} steps: {self.out / 'head'}")
        self._plot(monitor)
        return TrainResult(head=self.out / "head", state=self.state, evaluation=evaluation)

    def _plot(self, monitor: Monitor) -> None:
        """Draw the log where matplotlib is installed. The head is there: no failure here may fail the run."""
        if find_spec("matplotlib") is None:
            return
        try:
            plot_training(self.out / "train.jsonl", self.out / "training.png")
        except Exception as error:  # whatever matplotlib or the disk come up with
            monitor.note(f"training.png was not drawn ({' '.join(str(error).split())[:200]})")

    def _export(self, evaluation: Evaluation | None) -> None:
        state = self.state
        provenance = {
            "recipe": self.recipe,
            "steps": state.step,
            "positions": state.positions,
            "supervised_rows": state.rows,
            "training_seconds": round(state.seconds, 1),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "held_out": None if evaluation is None else asdict(evaluation),
        }
        save_drafter(
            self.drafter,
            self.out / "head",
            compact=self.config.compact,
            base_model=self.target.name,
            extra=provenance,
            target=self.target.model,
            int8_layers=self.config.int8,
        )

    def _plan(self) -> str:
        corpus, config, layout = self.corpus, self.config, self.layout
        trained = sum(parameter.numel() for parameter in self._trained)
        limit = "" if config.max_seconds is None else f", at most {config.max_seconds:g} s"
        return (
            f"{corpus.training:,} documents to train on, {len(corpus.held_out):,} held out; "
            f"{trained / 1e6:.1f} M trained parameters, mask token {self.drafter.config.mask_token_id}, taps "
            f"{list(self.drafter.config.tap_ids)}; {self.planned:,} steps of {layout.positions:,} positions and up to "
            f"{layout.mask_rows:,} mask rows{limit}"
        )


class _Clock:
    """Training seconds over all parts of a run, and rates since the last lap."""

    def __init__(self, state: RunState, data: Prefetcher) -> None:
        self._data = data
        self._start = time.perf_counter() - state.seconds
        self._lap_start, self._lap_positions, self._lap_waited = self.seconds, state.positions, 0.0

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._start

    def lap(self, state: RunState) -> "_Interval":
        """Rates since the last call; call it right after a wait for the device, or they mean nothing."""
        seconds, waited = self.seconds, self._data.waited
        elapsed = max(seconds - self._lap_start, 1e-9)
        interval = _Interval(
            positions_per_second=(state.positions - self._lap_positions) / elapsed,
            data_wait_share=(waited - self._lap_waited) / elapsed,
        )
        self._lap_start, self._lap_positions, self._lap_waited = seconds, state.positions, waited
        return interval


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interval:
    positions_per_second: float
    data_wait_share: float


def planned_steps(corpus: Corpus, layout: RowLayout, config: TrainConfig) -> int:
    """Optimiser steps of the whole run."""
    if config.max_steps is not None:
        return config.max_steps
    packs = sum(1 for _ in epoch_packs(corpus.train, layout, config.seed, 0))
    return max(1, round(config.epochs * packs))


def schedule_factor(step: int, planned: int, seconds: float, config: TrainConfig) -> float:
    """Share of the peak learning rates for 0-based `step` after `seconds` of training."""
    factor = learning_rate_factor(step, planned, config.warmup_steps)
    if config.max_seconds is None or step < config.warmup_steps:
        return factor
    return min(factor, 0.5 * (1.0 + math.cos(math.pi * min(1.0, seconds / config.max_seconds))))
