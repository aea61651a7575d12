"""`peagle bench sweep`: methods x K x concurrency over prompt sets; every run is kept as soon as it is there.

Beside the result F.json stand F.runs.jsonl, a line per run, from which `--resume` goes on; F.k-table-METHOD.json, which
a server loads; and plots.
"""

import hashlib
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle.bench.closed_loop import Run
from peagle.bench.prompt_sets import find_set
from peagle.bench.report import check_result_path, command_line, provenance, read_result, write_result
from peagle.bench.serve import FAILED_STATUS
from peagle.bench.signals import ending_on_sigterm
from peagle.bench.sweep_plan import Cell, RunFile, Setup, fingerprint, in_turns, runs_of, setups_of
from peagle.bench.sweep_plots import PLOTS, plot_sweep
from peagle.bench.sweep_rows import Results, SweepRow, best_drafts
from peagle.bench.sweep_settings import EAGLE3, METHODS, P_EAGLE, PLAIN, SweepConfig
from peagle.bench.sweep_source import EngineSource, Source
from peagle.bench.sweep_tables import print_tables
from peagle.drafters.checkpoint import resolve_head
from peagle.errors import PeagleError
from peagle.files import write_atomic
from peagle.meter import say
from peagle.models.fingerprint import weights_fingerprint
from peagle.prompt_file import PromptRow, read_prompts

DEFINITIONS = {
    "tokens_per_second": "output tokens / seconds from the first request to the last token, prompts included",
    "acceptance_length": "1 + accepted drafts / rounds",
    "intervals": "95 %, by drawing prompts anew, the same ones on both sides of a speed-up; with fewer than 8 prompts "
    "Student's t over the repeats",
    "load": "a closed loop: as one request ends the next is sent",
}

_NAMED = 5  # runs with failures; the result has them all
_WRITE_EVERY = 5.0  # seconds between results, which are made anew; runs are written one by one
# The ends of the names of what may be made of a result.
_DERIVED = (*(f".k-table-{m}.json" for m in METHODS), *(f"-{n}.{s}" for n in PLOTS for s in ("png", "svg")))
# What belongs to one prompt set, one method or one setup alone.
_OF_SOME = ("datasets", "heads", "servers")
# Settings that say which runs there are, or what only some of them are: a grid that grows keeps the runs it has.
_GRID = (
    "methods", "k", "concurrency", "repeats", "seconds", "num_prompts", "prompts_per_client", "min_prompts",
    "command", "acceptance_lengths", *_OF_SOME,
)  # fmt: skip


def run_sweep(
    model: str, heads: Mapping[str, Path | str], config: SweepConfig, out: Path, console: Console, *, resume: bool
) -> None:
    """Measure with engines of this process and write everything beside `out`.

    `heads` by method. Raises PeagleError before anything is loaded for what cannot be measured; after a Ctrl-C the
    results so far are written, and KeyboardInterrupt goes on; SIGTERM likewise.
    """
    begin = time.perf_counter()
    methods = choose_methods(config, heads)
    check_out(out, resume=resume)
    sets = read_sets(config.datasets, config.seed)
    used = {method: heads[method] for method in methods if method != PLAIN}
    console.print(f"loading {model}", markup=False, highlight=False)
    source = EngineSource.load(model, used, sets, config, plain=PLAIN in methods)
    setting = {
        "command": command_line(),
        "target": source.target.name,
        "target_weights_fingerprint": weights_fingerprint(source.target.path),  # others may be called alike
        "datasets": _described(sets),
        "heads": {method: _identity(head) for method, head in used.items()},
        "source": "engines of one process that share the target",
    }
    sweep = Sweep(source, config, out, setting, console, begin=begin, resume=resume)
    sweep.measure(list(sets), setups_of(methods, config.k))


def run_server_sweep(
    model: str, servers: Mapping[Setup, str], config: SweepConfig, out: Path, console: Console, *, resume: bool
) -> int:
    """As `run_sweep`, over HTTP: `servers` are those that are up, one for each way to decode, all with the model. The
    exit status of the command: requests may fail."""
    from peagle.bench.sweep_server import ServerSource

    begin = time.perf_counter()
    if config.methods is not None:
        raise PeagleError("--methods and --base-url exclude each other: the servers say what is compared")
    check_out(out, resume=resume)
    sets = read_sets(config.datasets, config.seed)
    source = ServerSource(model, servers, sets, config)
    setting = {
        "command": command_line(),
        "target": model,
        "datasets": _described(sets),
        "servers": {setup.label: info.version for setup, info in source.infos.items()},
        "source": "a server for each way to decode, over HTTP",
        "k": sorted({setup.num_drafts for setup in servers}),
    }
    sweep = Sweep(source, config, out, setting, console, begin=begin, resume=resume)
    sweep.measure(list(sets), list(servers))
    return FAILED_STATUS if sweep.results.failed() else 0


class Sweep:
    """All runs of a sweep: the clock, the results so far and the files they go to."""

    def __init__(
        self, source: Source, config: SweepConfig, out: Path, setting: Mapping[str, Any], console: Console,
        *, begin: float, resume: bool, synthetic: bool = False,
    ) -> None:  # fmt: skip
        """`setting` says what is measured beside `config`; `begin` is since when the time counts. What is `synthetic`
        is the announcement's table: no K table is made of it, and its plots say so."""
        self._synthetic, self._written = synthetic, 0.0
        self._source, self._config, self._out, self._console = source, config, out, console
        self._plan: list[Cell] = []
        self._setting, self._begin = dict(setting), begin
        self.results = Results()
        self._here = provenance()
        self._commit = self._here["versions"]["commit"] or self._here["versions"]["peagle"]
        self._file, self._resume = RunFile(out, self._key), resume

    def _key(self, cell: Cell) -> str:
        """Fingerprint of what decides what the run of a cell is: a run of another is no run of this sweep."""
        decisive = {name: value for name, value in (asdict(self._config) | self._setting).items() if name not in _GRID}
        names = (cell.dataset, cell.setup.method, cell.setup.label)
        own = {part: [self._setting.get(part, {}).get(name) for name in names] for part in _OF_SOME}
        where = {"gpu": self._here["machine"]["gpu"], "torch": self._here["versions"]["torch"]}
        return fingerprint({**decisive, **where, **own, "requests": self._config.prompts_of(cell.concurrency)})

    def measure(self, datasets: Sequence[str], setups: Sequence[Setup]) -> bool:
        """Measure what is not there yet, as far as the time goes; write tables, plots and K tables. Whether all is
        there."""
        plan = list(in_turns(datasets, setups, self._config.concurrency, self._config.repeats))
        self._plan = [cell for _, cell in plan]
        read = self._file.read() if self._resume else ()
        there = {(repeat, cell): run for repeat, cell, run in read if not run.failed}
        for each in plan:
            if each in there:
                self.results.add(*each, there.pop(each))
        if there:
            say(self._console, f"left out: {len(there)} runs outside this grid, which stay in {self._file.path}")
        todo = [(repeat, cell) for repeat, cell in plan if not self.results.has(repeat, cell)]
        there_are = f"{len(plan) - len(todo)} of {len(plan)} runs are there"
        say(self._console, there_are if len(todo) < len(plan) else f"{len(plan)} runs to measure")
        if commits := self._other_commits():
            named = ", ".join(f"{count} of {commit}" for commit, count in commits.items())
            mixed = f"runs that are there: {named}; this is {self._commit}, which may be faster or slower"
            say(self._console, f"warning: {mixed}: give --out another name to measure all with one commit")
        with ending_on_sigterm():
            try:
                if todo:
                    self._warm_up(sorted({cell.setup for _, cell in todo}))
                left = self._run(todo)
            except BaseException:
                self._finish(missing=sum(not self.results.has(*each) for each in todo), report=True)
                raise
            if not self.results.runs:
                raise PeagleError(f"nothing was measured in {self._config.seconds:g} seconds: raise --seconds")
            self._finish(missing=left, report=True)
        return not left

    def _other_commits(self) -> dict[str, int] | None:
        """Runs by commit, where some are of another than this."""
        commits = self.results.commits()
        return commits if {*commits} - {self._commit} else None

    def _warm_up(self, setups: Sequence[Setup]) -> None:
        begin = said = time.perf_counter()
        for what in self._source.warm_up(setups):
            if self._is_over():
                return
            if time.perf_counter() - said > 5:
                said = time.perf_counter()
                say(self._console, f"warming up: {what}")
        say(self._console, f"warmed up in {time.perf_counter() - begin:.0f} s")

    def _run(self, todo: Sequence[tuple[int, Cell]]) -> int:
        """How many are left when the time is over."""
        clock = _Estimate()
        for done, (repeat, cell) in enumerate(todo):
            expected = clock.of(cell)
            if self._is_over(expected):
                say(self._console, f"the time is over, {len(todo) - done} runs are left")
                return len(todo) - done
            begin = time.perf_counter()
            run = replace(self._source.run(cell.dataset, cell.setup, cell.concurrency), commit=self._commit)
            clock.took(cell, time.perf_counter() - begin)
            self._file.add(repeat, cell, run)
            self.results.add(repeat, cell, run)
            if time.perf_counter() - self._written > _WRITE_EVERY:
                self._finish(missing=len(todo) - done - 1, report=False)
            self._progress(done + 1, len(todo), cell, run, sum(clock.of(c) for _, c in todo[done + 1 :]))
        return 0

    def _is_over(self, expected: float = 0.0) -> bool:
        """Whether the time is used up, or what takes so long would not end within it."""
        limit = self._config.seconds
        return limit is not None and time.perf_counter() - self._begin + expected > limit

    def _progress(self, done: int, total: int, cell: Cell, run: Run, left: float) -> None:
        failed = f", {run.failed} FAILED" if run.failed else ""
        length = f", AL {run.acceptance_length:.2f}" if cell.setup.num_drafts and run.rounds else ""
        say(
            self._console,
            f"[{done}/{total}, {time.perf_counter() - self._begin:.0f} s, about {left:.0f} s left] {cell.label}: "
            f"{run.tokens_per_second:,.0f} tok/s{length}{failed}",
        )

    def _finish(self, *, missing: int, report: bool) -> None:
        """Write the result; with `report` also what is made of it: tables, plots, K tables."""
        rows = self.results.rows()
        if not rows:
            say(self._console, "no run has ended: there is no result")
            return
        settings = {
            **asdict(self._config), **self._setting, "definitions": DEFINITIONS, "partial": bool(missing),
            "missing_runs": missing, "failed_runs": self.results.failed() or None, "commits": self._other_commits(),
        }  # fmt: skip
        write_result(self._out, self._out.stem, settings, {"rows": rows}, self._here)
        self._written = time.perf_counter()
        if report:
            self._report(rows, missing)

    def _report(self, rows: Sequence[SweepRow], missing: int) -> None:
        print_tables(Console(), [asdict(row) for row in rows], synthetic=self._synthetic)
        if missing:
            tables = "" if self._synthetic else "; K tables hold the concurrencies that are complete, and no others"
            say(self._console, f"PARTIAL: {missing} runs are missing, the same command with --resume goes on{tables}")
        self._report_failures(sum(row.failed for row in rows))
        whole = complete(rows, self._plan)
        written = [self._out] if self._synthetic else [self._out, *write_k_tables(whole, self._out)]
        written += _plots(rows, self._out, self._console, "SYNTHETIC acceptance" if self._synthetic else "")
        for ending in _DERIVED:
            if (stale := self._out.with_name(self._out.stem + ending)) not in written:
                stale.unlink(missing_ok=True)  # of a run before this one, of rows that are left out now
        say(self._console, "wrote " + ", ".join(map(str, written)))

    def _report_failures(self, requests: int) -> None:
        runs = self.results.failed()
        if runs:
            more = [f"and {len(runs) - _NAMED} more runs"] if len(runs) > _NAMED else []
            for line in (f"FAILED requests, in no figure: {requests}", *runs[:_NAMED], *more):
                say(self._console, line)
            say(self._console, "the same command with --resume measures runs with failures again")


class _Estimate:
    """Seconds that runs will take, from those that were: the same cell's, else those of as many requests at once."""

    def __init__(self) -> None:
        self._cells: dict[Cell, float] = {}

    def took(self, cell: Cell, seconds: float) -> None:
        self._cells[cell] = seconds

    def of(self, cell: Cell) -> float:
        """0 while nothing is known."""
        if cell in self._cells or not self._cells:
            return self._cells.get(cell, 0.0)
        alike = [s for other, s in self._cells.items() if other.concurrency == cell.concurrency]
        alike = alike or list(self._cells.values())
        return sum(alike) / len(alike)


def choose_methods(config: SweepConfig, heads: Mapping[str, object]) -> list[str]:
    """The methods to measure. Raises PeagleError for one that was asked for and has no head."""
    if config.methods is None:
        return [method for method in METHODS if method in heads or method == PLAIN]
    flags = {P_EAGLE: "--head DIR", EAGLE3: "--eagle3-head DIR"}
    for method in config.methods:
        if method != PLAIN and method not in heads:
            raise PeagleError(f"method {method} needs a head: add {flags[method]}, or leave it out of --methods")
    return list(config.methods)


def check_out(out: Path, *, resume: bool) -> None:
    """Raises PeagleError for a name that is none of a result, and for a result that would be lost or not written."""
    if out.suffix != ".json":
        raise PeagleError(f"--out is {out}: give a file name that ends in .json")
    there = next((path for path in (out, runs_of(out)) if path.exists()), None)
    if there is not None and not resume:
        raise PeagleError(f"{there} exists: add --resume to go on with it, or give another name")
    check_result_path(out)
    if out.exists() and "missing_runs" not in read_result(out)["settings"]:
        raise PeagleError(f"{out} is no sweep's result, --resume cannot go on with it: give another name")


def read_sets(names: Sequence[str], seed: int) -> dict[str, list[PromptRow]]:
    """Prompts by set, each in a random order: files are sorted, and a small cell takes the first ones only.

    A set is called by its name, or as its file is. Raises PeagleError for what cannot be read.
    """
    sets: dict[str, list[PromptRow]] = {}
    for name in names:
        path = find_set(name)
        label = path.stem.replace("_", "-")
        if label in sets:
            raise PeagleError(f"two prompt sets are called {label}: rename a file, or leave one out")
        sets[label] = read_prompts(path)
        random.Random(seed).shuffle(sets[label])
    return sets


def complete(rows: Sequence[SweepRow], plan: Iterable[Cell]) -> list[SweepRow]:
    """The rows of those concurrencies that lack no cell of the plan: a K is best only among all."""
    there = {(row.dataset, row.concurrency, Setup(row.method, row.num_speculative_tokens)) for row in rows}
    lacking = {cell.concurrency for cell in plan if (cell.dataset, cell.concurrency, cell.setup) not in there}
    return [row for row in rows if row.concurrency not in lacking]


def write_k_tables(rows: Sequence[SweepRow], out: Path) -> list[Path]:
    """The fastest K per concurrency of every method that drafts, as `k_table` of a speculative config takes it. None
    without decoding without drafts, which may be the fastest, and none for concurrencies at which requests failed."""
    failing = {row.concurrency for row in rows if row.failed}
    rows = [row for row in rows if row.concurrency not in failing]
    if not any(row.method == PLAIN for row in rows):
        return []
    paths = []
    for method in sorted({row.method for row in rows} - {PLAIN}):
        table = best_drafts(rows, method)
        if table:
            path = out.with_name(f"{out.stem}.k-table-{method}.json")
            write_atomic(path, (json.dumps({str(c): k for c, k in table.items()}) + "\n").encode())
            paths.append(path)
    return paths


def _plots(rows: Sequence[SweepRow], out: Path, console: Console, note: str) -> list[Path]:
    try:
        return plot_sweep(rows, out, note)
    except PeagleError as error:
        say(console, str(error))
        return []


def _identity(head: Path | str) -> dict[str, str]:
    """Name of a head's folder, after its parent's where training runs call theirs alike, and digest of its files."""
    folder = resolve_head(head).resolve()
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    name = f"{folder.parent.name}/{folder.name}" if folder.name in ("head", "best") else folder.name
    return {"name": name, "sha256": digest.hexdigest()}


def _described(sets: Mapping[str, Sequence[PromptRow]]) -> dict[str, dict[str, str | int]]:
    """What a result says of its prompt sets."""
    described: dict[str, dict[str, str | int]] = {}
    for name, rows in sets.items():
        text = json.dumps([list(row.messages) for row in rows], ensure_ascii=False)
        described[name] = {"prompts": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return described
