"""`peagle eval`: acceptance of a head on prompt sets, whether drafts change an answer, and whether the card is right.

What is measured is what is served: every figure comes from answers of the engine itself.
"""

import gc
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from peagle.bench.acceptance import SuiteAnswers, prompt_of
from peagle.bench.accuracy import Task, load_task, mark
from peagle.bench.answer_meter import AnswerMeter
from peagle.bench.card import BELOW, compare_with_card, read_card, verdict
from peagle.bench.eval_rows import DEFINITION, AccuracyRow, CardRow, GroupRow, group_row, set_row
from peagle.bench.eval_tables import print_tables
from peagle.bench.groups import by_category, by_context, counts
from peagle.bench.lossless import EqualityRow, Judge, compare_answers
from peagle.bench.prompt_sets import PromptSet, load_sets
from peagle.bench.report import check_result_path, read_result, write_result
from peagle.bench.sandbox import confinement
from peagle.bench.settings import EvalConfig
from peagle.config import EngineConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import load_drafter, resolve_head
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.storage import WEIGHTS_NAME
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.engine.speculation import check_depth, trained_depth
from peagle.errors import PeagleError
from peagle.models.target import Target, load_target
from peagle.models.tokenizer import encode

NOT_AS_EXPECTED_STATUS = 1  # below the card, or an answer that drafts changed for no reason that rounding explains


@dataclass(slots=True)
class Found:
    """What has been measured so far: the lists of a result file."""

    rows: list[GroupRow] = field(default_factory=list)
    categories: list[GroupRow] = field(default_factory=list)
    contexts: list[GroupRow] = field(default_factory=list)
    lossless: list[EqualityRow] = field(default_factory=list)
    accuracy: list[AccuracyRow] = field(default_factory=list)
    card: list[CardRow] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        """As a result file has it; accuracy stands in for the rows where no acceptance was measured."""
        lists = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not self.rows and self.accuracy:
            return {"rows": self.accuracy}
        return {name: rows for name, rows in lists.items() if rows or name == "rows"}


class Evaluation:
    """One head on one target: answers everything that is asked for, at every K and temperature."""

    def __init__(
        self,
        target: Target,
        drafter: Eagle3Drafter,
        sets: Sequence[PromptSet],
        tasks: Sequence[Task],
        config: EvalConfig,
        device: torch.device,
        meter: AnswerMeter,
    ) -> None:
        self._target, self._drafter, self._device = target, drafter, device
        self._sets, self._tasks, self._config, self._meter = sets, tasks, config, meter
        self._suites = {s.name: s.conversations for s in sets}
        share = math.ceil(config.lossless_prompts / max(len(sets), 1))
        self._checked = {name: asked[:share] for name, asked in self._suites.items() if share}
        self._plain: dict[float, list[RequestOutput]] = {}
        self._drafted: dict[tuple[int, float], list[RequestOutput]] = {}
        self._marked: list[tuple[Task, int, list[RequestOutput], list[RequestOutput]]] = []
        self.found = Found()

    def run(self, save_part: "Any") -> None:
        """Measure everything; `save_part` is called after each stage, and with what a Ctrl-C left of one."""
        for k in self._config.k:
            llm = self._engine(k)
            for temperature in self._config.temperatures if self._sets else ():
                try:
                    self._measure(llm, k, temperature)
                finally:
                    save_part()
            if k == self._config.k[-1]:
                self._answer_tasks(llm, k)
            del llm
            gc.collect()  # the next engine sizes its cache by the memory that is free
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self._compare()
        for task, k, drafted, plain in self._marked:
            self._meter.say(f"marking {task.name}")
            self.found.accuracy += mark(task, drafted, plain, k)

    def _engine(self, k: int) -> LLM:
        total = sum(map(len, self._suites.values()))
        at_once = min(self._config.max_num_seqs, max([total, *(len(task.questions) for task in self._tasks)]))
        config = EngineConfig(
            max_num_seqs=at_once,
            max_model_len=self._context_needed(),
            kernels=self._config.kernels,
            dtype=self._config.dtype,
            device=self._config.device,
        )
        return LLM.from_parts(self._target, self._drafter, k, config)

    def _measure(self, llm: LLM, k: int, temperature: float) -> None:
        """One K at one temperature, and without drafts the answers to compare with, the first time."""
        config = self._config
        answers = SuiteAnswers(self._suites)
        self._meter.stage(f"K = {k}, T = {temperature:g}")
        settings: dict[str, Any] = {"temperature": temperature, "seed": config.seed, "on_finish": self._meter.finish}
        try:
            answers.run(llm, max_tokens=config.max_tokens, **settings)
        finally:
            self._add(answers, k, temperature)
        outputs = answers.finished()
        self._drafted[k, temperature] = [o for name, asked in self._checked.items() for o in outputs[name][: len(asked)]]
        if self._checked and temperature not in self._plain:
            self._meter.stage(f"without drafts, T = {temperature:g}")
            plain = SuiteAnswers(self._checked)
            llm.set_speculation(False)
            plain.run(llm, max_tokens=config.max_tokens, **settings)
            llm.set_speculation(True)
            self._plain[temperature] = [o for outputs in plain.finished().values() for o in outputs]

    def _add(self, answers: SuiteAnswers, k: int, temperature: float) -> None:
        """Rows of every set that is finished."""
        seed, found = self._config.seed, self.found
        for prompts in self._sets:
            result = answers.acceptance(k).get(prompts.name)
            if result is None:
                continue
            name = prompts.name
            found.rows.append(set_row(name, result, counts(result.requests, k), k, temperature, seed))
            categories = by_category(result.requests, [row.category for row in prompts.rows], k)
            found.categories += [
                group_row(name, table, k, temperature, seed, category=category)
                for category, table in categories.items()
                if len(categories) > 1
            ]
            found.contexts += [
                group_row(name, table, k, temperature, seed, context=context)
                for context, table in by_context(result.requests, k).items()
            ]

    def _answer_tasks(self, llm: LLM, k: int) -> None:
        """Greedy answers to every task, with and without drafts."""
        for task in self._tasks:
            both = []
            for drafts in (True, False):
                self._meter.stage(f"{task.name}, {f'K = {k}' if drafts else 'without drafts'}")
                llm.set_speculation(drafts)
                answers = SuiteAnswers({task.name: task.conversations})
                answers.run(
                    llm, max_tokens=self._config.accuracy_tokens, temperature=0.0, on_finish=self._meter.finish
                )
                both.append(answers.finished()[task.name])
            self._marked.append((task, k, *both))
        llm.set_speculation(True)

    def _compare(self) -> None:
        """With no engine left: it and the judge would set the model's kernels against each other."""
        judge = Judge(self._target, self._device)
        seeds = [self._config.seed + place for asked in self._checked.values() for place in range(len(asked))]
        for (k, temperature), drafted in self._drafted.items():
            if temperature in self._plain:
                plain = self._plain[temperature]
                self.found.lossless.append(
                    compare_answers(judge, drafted, plain, seeds, num_drafts=k, temperature=temperature)
                )

    def _context_needed(self) -> int:
        """Tokens of the longest prompt and answer. Raises PeagleError where a prompt leaves no room for an answer."""
        room, needed = self._target.spec.max_position_embeddings, 0
        asked = [(name, cs, self._config.max_tokens) for name, cs in self._suites.items()]
        asked += [(task.name, task.conversations, self._config.accuracy_tokens) for task in self._tasks]
        llm_prompt = prompt_of
        for name, conversations, tokens in asked:
            for place, messages in enumerate(conversations, 1):
                length = len(encode(self._target.tokenizer, llm_prompt(self._target.tokenizer, messages)))
                if length >= room:
                    raise PeagleError(
                        f"prompt {place} of {name} has {length} tokens, the model's context is {room}: leave the set "
                        "out, or take a file without that prompt"
                    )
                needed = max(needed, min(length + tokens, room))
        return needed


def run_eval(
    head: str, model: str, config: EvalConfig, console: Console, *, out: Path | None = None, card: Path | None = None
) -> int:
    """Measure, print, write the result file; the exit status of the command.

    Raises PeagleError for bad input before anything is loaded. After Ctrl-C what is finished is in the file, marked
    partial, and KeyboardInterrupt goes on.
    """
    path = resolve_head(head)
    sets = load_sets(config.prompt_sets, config.limit)
    tasks = [load_task(name, config.limit) for name in config.accuracy]
    said = read_card(path, card) if sets else None
    name = path.resolve().name
    out = out or Path(f"eval-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    check_result_path(out)
    if "humaneval" in config.accuracy:
        console.print(f"--run-code: programs that the model wrote will run here, confined by {confinement()}", style="yellow")
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    for k in config.k:
        check_depth(k, trained_depth(path))
    target = load_target(model, dtype=dtype, device=device)
    drafter = load_drafter(path, target.model, target.spec, dtype=dtype, device=device, target_name=target.name)
    settings = {
        "head": name,
        "head_sha256": _sha256(path / WEIGHTS_NAME),
        "head_kind": drafter.config.kind,
        "target": target.name,
        **asdict(config),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "datasets": {s.name: {"sha256": s.sha256, "prompts": len(s.rows)} for s in sets},
        "definition": DEFINITION,
    }
    meter = AnswerMeter(console, _answers(config, sets, tasks))
    evaluation = Evaluation(target, drafter, sets, tasks, config, device, meter)

    def save(*, partial: bool) -> None:
        seconds = round(meter.seconds, 1)
        write_result(out, out.stem, {**settings, "partial": partial, "seconds": seconds}, evaluation.found.results())

    try:
        with meter:
            evaluation.run(lambda: save(partial=True))
    except KeyboardInterrupt:
        save(partial=True)
        meter.say(f"Stopped: what was finished is in {out}, marked partial")
        raise
    notes: list[str] = []
    if said is not None:
        evaluation.found.card, notes = compare_with_card(evaluation.found.rows, settings, said, name)
    save(partial=False)
    print_tables(Console(), read_result(out))
    return _conclude(evaluation.found, said is not None, notes, meter, out)


def _conclude(found: Found, has_card: bool, notes: Sequence[str], meter: AnswerMeter, out: Path) -> int:
    """The last lines, and the exit status."""
    for note in notes:
        meter.say(f"not compared: {note}")
    if found.rows:
        meter.say(verdict(found.card) if has_card else "the head has no acceptance.json to compare with")
    unexplained = [row for row in found.lossless if not row.explained]
    if unexplained:
        meter.say("NOT LOSSLESS: answers with drafts differ from those without by more than rounding explains")
    meter.say(f"wrote {out} after {meter.seconds:,.0f} s")
    return NOT_AS_EXPECTED_STATUS if unexplained or any(row.verdict == BELOW for row in found.card) else 0


def _answers(config: EvalConfig, sets: Sequence[PromptSet], tasks: Sequence[Task]) -> int:
    """How many answers a run makes, for the time left."""
    share = math.ceil(config.lossless_prompts / max(len(sets), 1))
    drafted = len(config.k) * sum(len(s.rows) for s in sets)
    plain = sum(min(share, len(s.rows)) for s in sets)
    return len(config.temperatures) * (drafted + plain) + 2 * sum(len(task.questions) for task in tasks)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
