"""`peagle eval`: acceptance of a head on prompt sets, whether drafts change an answer, whether the card is right."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from peagle.bench.accuracy import Task, load_task
from peagle.bench.card import BELOW, Json, compare_with_card, read_card, verdict
from peagle.bench.eval_rows import DEFINITION
from peagle.bench.eval_tables import print_tables, wide_console
from peagle.bench.evaluation import Evaluation, Found
from peagle.bench.prompt_sets import NamedSet, load_sets
from peagle.bench.report import check_result_path, command_line, read_result, write_result
from peagle.bench.sandbox import confinement
from peagle.bench.settings import EvalConfig
from peagle.bench.signals import ending_on_sigterm
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.checkpoint import load_drafter, peek_head, resolve_head
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.speculation import check_depth, trained_depth
from peagle.files import sha256_of
from peagle.meter import Meter
from peagle.models.target import Target, load_target
from peagle.models.weights import weight_files

NOT_AS_EXPECTED_STATUS = 1  # below the card, or an answer that drafts changed for no reason that rounding explains

_NOTES = 6  # lines of what could not be compared with the card


def run_eval(
    head: str, model: str, config: EvalConfig, console: Console, *, out: Path | None = None, card: Path | None = None
) -> int:
    """Measure, print, write the result file; the exit status of the command.

    Raises PeagleError for bad input before anything is loaded. After Ctrl-C what is finished is in the file, marked
    partial, and KeyboardInterrupt goes on; SIGTERM likewise.
    """
    path = resolve_head(head)
    sets = load_sets(config.prompt_sets, config.limit)
    tasks = [load_task(name, config.limit) for name in config.accuracy]
    said = read_card(path, card) if sets else None
    name = path.resolve().name
    out = out or Path(f"eval-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    check_result_path(out, console)
    if "humaneval" in config.accuracy:
        warning = f"--run-code: programs that the model wrote will run here, confined by {confinement()}"
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    device = resolve_engine_device(config.device)
    console.print(f"loading {model}", markup=False, highlight=False)
    target, drafter = _load(path, model, config, device)
    settings = {
        **_provenance(path, sets),
        "head_kind": drafter.config.kind,
        "target": target.name,
        **asdict(config),
        "dtype": str(target.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "device": device.type,
    }
    answers = _answers(config, sets, tasks)
    console.print(f"{answers:,} answers, those without drafts included", markup=False, highlight=False)
    meter = Meter(console, "answers", answers)
    evaluation = Evaluation(target, drafter, sets, tasks, config, device, meter)

    def save(*, partial: bool) -> bool:
        """False where there is nothing yet: a result that is there already stays."""
        results, seconds = evaluation.found.results(), round(meter.seconds, 1)
        if results["rows"]:
            write_result(out, out.stem, {**settings, "partial": partial, "seconds": seconds}, results)
        return bool(results["rows"])

    try:
        with meter, ending_on_sigterm():
            evaluation.run(lambda: save(partial=True))
    except (KeyboardInterrupt, SystemExit):
        kept = f"what was finished is in {out}, marked partial"
        meter.say(f"Stopped: {kept if save(partial=True) else 'nothing was finished, there is no result'}")
        raise
    notes: list[str] = []
    if said is not None:
        evaluation.found.card, notes = compare_with_card(evaluation.found.rows, settings, said, name)
    save(partial=False)
    print_tables(wide_console(), read_result(out))
    return _conclude(evaluation.found, said, notes, meter, out)


def _load(head: Path, model: str, config: EvalConfig, device: torch.device) -> tuple[Target, Eagle3Drafter]:
    for k in config.k:
        check_depth(k, trained_depth(head))
    dtype = resolve_dtype(config.dtype, device)
    target = load_target(model, dtype=dtype, device=device, check=lambda spec: peek_head(head, spec))
    drafter = load_drafter(head, target.model, dtype=dtype, device=device, target_name=target.name)
    return target, drafter


def _provenance(head: Path, sets: Sequence[NamedSet]) -> dict[str, Any]:
    """What a result says of how it came about, of the head's files and of the prompts."""
    return {
        "command": command_line(),
        "head": head.resolve().name,
        "head_sha256": " ".join(sha256_of(file) for file in weight_files(head)),
        "datasets": {s.name: s.summary for s in sets},
        "definition": DEFINITION,
    }


def _conclude(found: Found, card: Json | None, notes: Sequence[str], meter: Meter, out: Path) -> int:
    """The last lines, and the exit status."""
    for note in notes[:_NOTES]:
        meter.say(f"not compared: {note}")
    if len(notes) > _NOTES:
        meter.say(f"not compared: {len(notes) - _NOTES} figures more")
    if found.rows:
        meter.say(verdict(found.card, card) if card is not None else "the head has no acceptance.json to compare with")
    unexplained = [row for row in found.lossless if not row.explained]
    if unexplained:
        meter.say("NOT LOSSLESS: answers with drafts differ from those without by more than rounding explains")
    meter.say(f"wrote {out} after {meter.seconds:,.0f} s")
    return NOT_AS_EXPECTED_STATUS if unexplained or any(row.verdict == BELOW for row in found.card) else 0


def _answers(config: EvalConfig, sets: Sequence[NamedSet], tasks: Sequence[Task]) -> int:
    """How many answers a run makes, for the time left."""
    share = math.ceil(config.lossless_prompts / max(len(sets), 1))
    drafted = len(config.k) * sum(len(s.rows) for s in sets)
    plain = sum(min(share, len(s.rows)) for s in sets)
    return len(config.temperatures) * (drafted + plain) + 2 * sum(len(task.questions) for task in tasks)
