"""`peagle train`: one head for one target, from a prepared data set.

OUT/recipe.json     settings, base model and data hash
OUT/train.jsonl     one line per report
OUT/checkpoint/     state to resume from, replaced every `save_interval` steps, on Ctrl-C, on SIGTERM and at the end
OUT/checkpoint-N/   the ones before it, of step N, with `keep` above 1
OUT/head/           the finished head
OUT/best/           the head with the highest acceptance length in decoding the held-out prompts
OUT/training.png    the log as a picture, where matplotlib is installed
OUT/.lock           empty; held while a run writes here

The schedule: warm-up over `warmup_steps`, then a cosine to 0 over the planned steps (`max_steps`, else epochs x packs).
With `max_seconds` the run also ends after that much training time, that of earlier parts of a resumed run included,
and the cosine follows whichever of the two is further along. Loading, the feature cache, compilation, evaluations and
checkpoints on the way are no training time.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from peagle.config import TrainConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import save_drafter
from peagle.errors import PeagleError, is_out_of_memory, one_line
from peagle.meter import say
from peagle.models.target import Target
from peagle.training.batches import Batch, Prefetcher, batches, map_tensors
from peagle.training.clock import Clock
from peagle.training.corpus import Corpus, cut_report, cut_to_context, load_prepared, split_corpus
from peagle.training.dataset import Document
from peagle.training.distributed import SINGLE, Ranks, process_group
from peagle.training.ema import WeightAverage
from peagle.training.evaluate import Evaluation, evaluate
from peagle.training.feature_store import read_store_manifest
from peagle.training.features import OnlineFeatures
from peagle.training.flops import PackCost, peak_flops
from peagle.training.graphs import Steps
from peagle.training.hf_target import load_training_target
from peagle.training.interrupt import Interrupt
from peagle.training.log_file import LogFile
from peagle.training.loggers import Loggers, RunInfo, check_loggers
from peagle.training.memory_advice import out_of_memory
from peagle.training.monitor import LogEntry, Monitor, Running, peak_memory_gib
from peagle.training.objective import Objective
from peagle.training.optim import OptimizerKind, build_optimizers, set_learning_rate
from peagle.training.placement import place
from peagle.training.plots import plot_training
from peagle.training.schedule import planned_steps, schedule_factor
from peagle.training.served import BEST, Served, held_out_prompts, read_best, serve
from peagle.training.setup import (
    build_drafter,
    feature_source,
    plan_rule,
    resolve_attention,
    row_layout,
    unused_settings,
)
from peagle.training.trail import Trail
from peagle.training.train_state import (
    CheckpointNotWritten,
    Recipe,
    RunState,
    load_checkpoint,
    make_recipe,
    prepare_output,
    resume_point,
    save_checkpoint,
    write_recipe,
    write_state,
)
from peagle.waiting import said_if_slow


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run left behind. `evaluation` is None without held-out documents, or when the run was finished before."""

    head: Path
    state: RunState
    evaluation: Evaluation | None


def train(model: str, data: Path, out: Path, config: TrainConfig, console: Console) -> TrainResult:
    """Train a head for `model` on the data set at `data`; resume when `out` holds a checkpoint of the same recipe.

    Raises PeagleError for anything the user can fix; once a checkpoint is saved, KeyboardInterrupt after Ctrl-C and
    SystemExit with status 143 after SIGTERM.
    """
    ranks = Ranks.from_environment(os.environ)
    console = console if ranks.is_main else Console(quiet=True)
    if ranks.is_main:
        prepare_output(out)
    device = ranks.own_device(resolve_device(config.device))
    dtype = resolve_dtype(config.dtype, device)
    resolve_attention(config.attention, device)  # fail before the slow part
    check_loggers(config.logger)
    if config.features is not None:
        read_store_manifest(Path(config.features))
    documents, digest = load_prepared(model, data, console)
    with process_group(ranks, device):
        target = load_training_target(model, dtype=dtype, device=device, console=console)
        return train_head(target, documents, digest, out, config, console, ranks)


def train_head(
    target: Target,
    documents: list[Document],
    data: str,
    out: Path,
    config: TrainConfig,
    console: Console,
    ranks: Ranks = SINGLE,
) -> TrainResult:
    """`train` with the target and the data already in memory, `data` being their hash.

    The target's device is the training device. Of several ranks, connected by now, rank 0 alone writes to `out`.
    """
    if ranks.is_main:
        prepare_output(out)
    # On record is what a step sums over, however many ranks share the work.
    recipe = make_recipe(replace(config, accumulate=config.accumulate * ranks.world), target.name, data)
    checkpoint, state = resume_point(out, recipe, ranks)
    if state.finished:
        say(console, f"{out} holds this run, finished after {state.step:,} steps: nothing to do")
        return TrainResult(head=out / "head", state=state, evaluation=None)
    if ranks.is_main:
        write_recipe(out, recipe)
    say(console, f"results go to {out}: recipe.json, train.jsonl and checkpoint/ on the way, head/ at the end")
    documents, note = cut_to_context(documents, target.spec.max_position_embeddings)
    for line in (unused_settings(config), note):
        if line:
            say(console, line)
    with said_if_slow("building the head and its rows"):
        trainer = Trainer(target, split_corpus(documents, config), out, config, recipe, state, console, ranks)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trainer.placement, trainer.optimizers, trainer.running, trainer.average)
        say(console, f"resuming after step {state.step:,} ({state.seconds:.0f} s of training)")
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
        ranks: Ranks = SINGLE,
    ) -> None:
        weight = target.model.embed_tokens.weight
        self.device = weight.device
        self.target, self.corpus, self.out, self.config, self.recipe = target, corpus, out, config, recipe
        self.state, self.console, self.ranks = state, console, ranks
        self.drafter = build_drafter(target, corpus.documents, config, weight.dtype, self.device)
        self.placement = place(self.drafter, config.parallel, ranks)
        self.optimizers = build_optimizers(
            self.drafter, config.muon_lr, config.adamw_lr, cast(OptimizerKind, config.optimizer), self.placement.own
        )
        self.gradients = self.placement.gradients(counters=2 + 4 * config.num_depths)
        decay, updated = config.ema_decay, self.placement.updated.items()
        self.average = None if decay is None else WeightAverage(updated, decay)
        self.running = Running(config.num_depths, self.device)
        tap_ids, data_hash = self.drafter.config.tap_ids, str(recipe["data_hash"])
        self.features = feature_source(config, target, corpus, data_hash, tap_ids, console)
        self.layout = row_layout(config, corpus.train, self.drafter.config, self.device, ranks)
        graphs = config.graphs and self.device.type == "cuda" and self.placement.own is None
        self.rule = replace(plan_rule(config), fixed=graphs)
        self.planned = planned_steps(corpus, self.layout, config, ranks)
        backend = resolve_attention(config.attention, self.device)
        self.objective = Objective(
            self.drafter, target.model, self.features, config, backend=backend, dtype=weight.dtype
        )
        self.drafter.checkpoint_activations = config.checkpoint_activations
        self.steps = Steps(self.objective, self.gradients, self.optimizers, config.clip_norm, graphs=graphs)
        asked = corpus.held_out if config.serve_tokens and target.native else []
        self.prompts = held_out_prompts(asked, config.serve_tokens, target.spec.max_position_embeddings)
        self.served: Served | None = None  # of the newest evaluation
        self.best = read_best(out) if state.step else 1.0  # acceptance length of the head in OUT/best
        self._factor = 0.0  # of the last step, for the log
        self._flops = 0  # of all packs in this process
        self._trail = Trail(corpus.train, self.layout, config)
        online = target.native and isinstance(self.features, OnlineFeatures)
        self._cost = PackCost(self.drafter.config, target.spec, trains_head=config.train_lm_head, runs_target=online)

    def run(self) -> TrainResult:
        """Train to the end of the plan, save, export the head."""
        monitor = self._monitor()
        monitor.note(self._plan())
        with (
            monitor,
            Interrupt(monitor.note, patient=self.ranks.world > 1) as interrupt,
            Prefetcher(self._packs(), self.device) as data,
        ):
            if self.config.compile:
                self._compile(monitor)
            clock = Clock(self.state, data, peak_flops(self.device, self.target.model.embed_tokens.weight.dtype))
            try:
                self._loop(data, monitor, clock, interrupt)
                return self._finish(monitor, clock)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise out_of_memory(error, self.state.step, self.config, self.layout) from error

    def _loop(self, data: Prefetcher, monitor: Monitor, clock: Clock, interrupt: Interrupt) -> None:
        """Steps, reports, evaluations and checkpoints, until the plan is done or somebody wants an end."""
        first = self.state.step
        while True:
            # Rank 0's clock and signals count for all: the ranks must stop at the same step.
            seconds, stop = self.ranks.share([clock.seconds, interrupt.asked])
            if stop:
                self._save(clock)
                monitor.note(f"saved after step {self.state.step:,}; run the same command to resume")
                interrupt.leave()
            if self.state.step >= self.planned or seconds >= (self.config.max_seconds or math.inf):
                return
            if self.state.step == first:
                with said_if_slow("the first step, which compiles its kernels on a GPU"):
                    self._step(data, seconds)
                monitor.note(f"first step done, a report follows every {self.config.log_interval} steps")
            else:
                self._step(data, seconds)
            if self.state.step % self.config.log_interval == 0:
                self._report(monitor, clock)
            if self.state.step < self.planned:
                with clock.paused():
                    if self.state.step % (self.config.eval_interval or self.config.save_interval) == 0:
                        self._evaluate(monitor, clock)
                    if self.state.step % self.config.save_interval == 0:
                        self._try_to_save(monitor, clock)

    def _packs(self) -> Iterator[Batch]:
        """The packs of this rank from where the run stands, without end."""
        place, seed = self.state.place, self.config.seed
        return batches(self.corpus.train, self.layout, self.rule, self.features, seed, place, self.ranks)

    def _compile(self, monitor: Monitor) -> None:
        """Run the first pack once for nothing, so that no training time goes into compiling."""
        start = time.perf_counter()
        monitor.note("compiling the training step")
        self.steps.run_pack(map_tensors(next(self._packs()), lambda tensor: tensor.to(self.device)))
        self.gradients.zero()
        monitor.note(f"compiled in {time.perf_counter() - start:.0f} s")

    def _monitor(self) -> Monitor:
        """The log, the progress line and the loggers: of rank 0, and for show on the others."""
        log, names = (self.out / "train.jsonl", self.config.logger) if self.ranks.is_main else (None, ())
        loggers = Loggers(names, RunInfo(self.out, self.recipe, self.state.step), partial(say, self.console))
        return Monitor(LogFile(log, keep_to_step=self.state.step), self.console, loggers)

    def _step(self, data: Prefetcher, seconds: float) -> None:
        """One optimiser step over `accumulate` packs. Nothing here waits for the device."""
        self._factor = schedule_factor(self.state.step, self.planned, seconds, self.config)
        set_learning_rate(self.optimizers, self._factor)
        self.gradients.zero()
        for _ in range(self.config.accumulate):
            batch = data.next()
            self._trail.add(self.state.step + 1, batch)
            self._flops += self._cost.of(batch)
            self.steps.run_pack(batch)
            self.state = self.state.after(batch, self.ranks.world)
        self.gradients.reduce()
        loss, norm = self.steps.update()
        if self.average is not None:
            self.average.update(self.state.step)
        self.state = replace(self.state, step=self.state.step + 1)
        self.running.add(self.state.step, loss, norm, self.gradients.counters)

    def _report(self, monitor: Monitor, clock: Clock) -> None:
        """Read the running statistics (the one wait for the device), check them and log them."""
        report = self.running.report()
        self._trail.check(report.bad_step)
        self._trail.forget()
        self._count(clock)
        state, rates = self.state, clock.lap(self.state, self._flops)
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
            positions_per_second=rates.positions_per_second,
            rows_per_second=rates.rows_per_second,
            mfu=rates.mfu,
            data_wait_share=rates.data_wait_share,
            memory_gib=peak_memory_gib(self.device),
        )
        done = max(state.step / self.planned, entry.seconds / (self.config.max_seconds or math.inf))
        waited = monitor.log_waits
        monitor.step(entry, min(1.0, done))
        if any(self.ranks.share([monitor.log_waits and not waited])):
            self._try_to_save(monitor, clock)  # the disk has begun to refuse: what it still takes is a checkpoint

    def _count(self, clock: Clock) -> None:
        """Read what all ranks together have trained on, which is counted on the device, and for how long."""
        positions, rows = self.running.totals()
        self.state = replace(self.state, positions=positions, rows=rows, seconds=clock.seconds)

    def _save(self, clock: Clock) -> None:
        """Write a checkpoint, never one of a run that has gone wrong."""
        self._trail.check(int(self.running.bad_step.item()))
        self._count(clock)
        save_checkpoint(
            self.out, self.placement, self.optimizers, self.running, self.state, self.recipe,
            average=self.average, keep=self.config.keep,
        )  # fmt: skip

    def _try_to_save(self, monitor: Monitor, clock: Clock) -> None:
        """A checkpoint on the way; a disk that does not take it ends no run, whose steps would be lost."""
        try:
            self._save(clock)
        except CheckpointNotWritten as error:
            monitor.note(f"step {self.state.step:,}: {error}; training goes on")

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """A block in which the drafter holds the averaged weights, if there are any: what is evaluated and exported.

        Whole weights, on every rank: all of them must enter it.
        """
        with nullcontext() if self.average is None else self.average.swapped_in(), self.placement.gathered():
            yield

    def _evaluate(self, monitor: Monitor, clock: Clock) -> Evaluation | None:
        """Evaluate on the held-out documents, if there are any, and log the result."""
        corpus = self.corpus
        if not corpus.held_out:
            return None
        with self._averaged():
            if not self.ranks.is_main:
                return None
            result = evaluate(self.objective, corpus.held_out, corpus.training, self.layout, self.rule, self.device)
            monitor.held_out(self.state.step, result)
            self._count(clock)
            self._serve(monitor, result)
        return result

    def _serve(self, monitor: Monitor, evaluation: Evaluation) -> None:
        """Decode the held-out prompts, if there are any, and keep the head if none before it did as well."""
        self.served = None
        if not self.prompts:
            return
        drafts, tokens = self.config.served_drafts, self.config.serve_tokens
        try:
            served = self.served = serve(self.target, self.drafter, self.prompts, drafts, tokens)
            monitor.served(self.state.step, served)
            if served.acceptance_length > self.best:
                self._export(BEST, evaluation)
                self.best = served.acceptance_length
        except PeagleError as error:  # no memory for it, or a full disk: no reason to lose the run
            monitor.note(f"step {self.state.step:,}: {error}; training goes on")

    def _finish(self, monitor: Monitor, clock: Clock) -> TrainResult:
        """Last report, checkpoint and evaluation, the head, and only then the mark that the run is finished.

        Whatever fails after the checkpoint, the same command resumes here without a step of training.
        """
        if self.running.steps.item() > 0:
            self._report(monitor, clock)
        self._save(clock)
        evaluation = self._evaluate(monitor, clock)
        with self._averaged():
            if self.ranks.is_main:
                self._export("head", evaluation)
        self.state = replace(self.state, finished=True)
        if self.ranks.is_main:
            write_state(self.out / "checkpoint", self.state, self.recipe)
            monitor.note(f"head after {self.state.step:,} steps: {self.out / 'head'}")
            self._plot(monitor)
        return TrainResult(head=self.out / "head", state=self.state, evaluation=evaluation)

    def _plot(self, monitor: Monitor) -> None:
        """Draw the log. The head is there: no failure here may fail the run."""
        try:
            plot_training(self.out / "train.jsonl", self.out / "training.png")
        except Exception as error:  # no matplotlib, or whatever it or the disk come up with
            monitor.note(f"training.png was not drawn ({one_line(error)})")

    def _export(self, name: str, evaluation: Evaluation | None) -> None:
        """Write the head as it is now to OUT/`name`."""
        state = self.state
        provenance = {
            "recipe": self.recipe,
            "steps": state.step,
            "positions": state.positions,
            "supervised_rows": state.rows,
            "training_seconds": round(state.seconds, 1),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "held_out": None if evaluation is None else asdict(evaluation),
            "served": None if self.served is None else asdict(self.served),
        }
        save_drafter(
            self.drafter,
            self.out / name,
            compact=self.config.compact,
            base_model=self.target.name,
            extra=provenance,
            target=self.target.model,
            int8_layers=self.config.int8,
        )

    def _plan(self) -> str:
        corpus, config, layout = self.corpus, self.config, self.layout
        trained = sum(parameter.numel() for parameter in self.drafter.parameters() if parameter.requires_grad)
        limit = "" if config.max_seconds is None else f", at most {config.max_seconds:g} s"
        cut = cut_report(corpus.train, layout)
        mask = "none" if (token := self.drafter.config.mask_token_id) is None else token
        left_out = f", {corpus.left_out:,} left out as nothing in their reach is supervised" if corpus.left_out else ""
        ranks = f" on each of {self.ranks.world} ranks" if self.ranks.world > 1 else ""
        return (
            f"{corpus.training:,} documents to train on, {len(corpus.held_out):,} held out{left_out}; "
            f"{trained / 1e6:.1f} M trained parameters, mask token {mask}, taps "
            f"{list(self.drafter.config.tap_ids)}; {self.planned:,} steps of {config.accumulate} x "
            f"{layout.positions:,} positions and up to {layout.mask_rows:,} mask rows, in chunks of "
            f"{layout.chunk_size:,}{ranks}{limit}{cut and '; '}{cut}"
        )
