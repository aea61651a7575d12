"""Everything that `peagle eval` measures of one head on one target, by answers of the engine that serves it."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from peagle.bench.acceptance import SuiteAnswers
from peagle.bench.accuracy import Task, mark
from peagle.bench.eval_rows import AccuracyRow, Asked, CardRow, GroupRow, QuestionRow, group_row, set_row
from peagle.bench.groups import by_category, by_context, counts
from peagle.bench.lossless import EqualityRow, Judge, compare_answers
from peagle.bench.prompt_sets import NamedSet
from peagle.bench.settings import EvalConfig
from peagle.config import EngineConfig
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.engine.request import RequestOutput
from peagle.errors import PeagleError
from peagle.meter import Meter
from peagle.models.target import Target
from peagle.models.tokenizer import chat_prompt, encode


@dataclass(slots=True)
class Found:
    """What has been measured so far: the lists of a result file."""

    rows: list[GroupRow] = field(default_factory=list)
    categories: list[GroupRow] = field(default_factory=list)
    contexts: list[GroupRow] = field(default_factory=list)
    lossless: list[EqualityRow] = field(default_factory=list)
    accuracy: list[AccuracyRow] = field(default_factory=list)
    questions: list[QuestionRow] = field(default_factory=list)
    card: list[CardRow] = field(default_factory=list)

    def results(self) -> dict[str, Any]:
        """As a result file has it; accuracy stands in for the rows where no acceptance was measured."""
        lists = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not self.rows and self.accuracy:
            return {"rows": self.accuracy, "questions": self.questions}
        return {name: rows for name, rows in lists.items() if rows or name == "rows"}


class Evaluation:
    """One head on one target: answers everything that is asked for, at every K and temperature.

    Raises PeagleError where a prompt leaves no room for an answer.
    """

    def __init__(
        self,
        target: Target,
        drafter: Eagle3Drafter,
        sets: Sequence[NamedSet],
        tasks: Sequence[Task],
        config: EvalConfig,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._target, self._drafter, self._device = target, drafter, device
        self._sets, self._tasks, self._config, self._meter = sets, tasks, config, meter
        self._suites = {s.name: s.conversations for s in sets}
        share = math.ceil(config.lossless_prompts / max(len(sets), 1))
        self._checked = {name: asked[:share] for name, asked in self._suites.items() if share}
        self._plain: dict[float, list[RequestOutput]] = {}
        self._drafted: dict[tuple[int, float], list[RequestOutput]] = {}
        self._marked: list[tuple[Task, int, list[RequestOutput], list[RequestOutput]]] = []
        self._context = self._context_needed()
        self.found = Found()

    def run(self, save_part: Callable[[], object]) -> None:
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
            rows, questions = mark(task, drafted, plain, k)
            self.found.accuracy += rows
            self.found.questions += questions

    def _engine(self, k: int) -> LLM:
        total = sum(map(len, self._suites.values()))
        at_once = min(self._config.max_num_seqs, max([total, *(len(task.questions) for task in self._tasks)]))
        config = EngineConfig(
            max_num_seqs=at_once,
            max_model_len=self._context,
            draft_lm_head=self._config.draft_lm_head,
            kernels=self._config.kernels,
            dtype=self._config.dtype,
            device=self._config.device,
        )
        return LLM.from_parts(self._target, self._drafter, k, config)

    def _count(self, output: RequestOutput) -> None:
        self._meter.advance(tokens=len(output.token_ids))

    def _measure(self, llm: LLM, k: int, temperature: float) -> None:
        """One K at one temperature, and without drafts the answers to compare with, the first time."""
        config = self._config
        answers = SuiteAnswers(self._suites)
        self._meter.stage(f"K = {k}, T = {temperature:g}")
        settings: dict[str, Any] = {"temperature": temperature, "seed": config.seed, "on_finish": self._count}
        try:
            answers.run(llm, max_tokens=config.max_tokens, **settings)
        finally:
            self._add(answers, k, temperature)
        outputs = answers.finished()
        checked = [outputs[name][: len(asked)] for name, asked in self._checked.items()]
        self._drafted[k, temperature] = list(chain.from_iterable(checked))
        if self._checked and temperature not in self._plain:
            self._meter.stage(f"without drafts, T = {temperature:g}")
            plain = SuiteAnswers(self._checked)
            llm.set_speculation(False)
            plain.run(llm, max_tokens=config.max_tokens, **settings)
            llm.set_speculation(True)
            self._plain[temperature] = list(chain.from_iterable(plain.finished().values()))

    def _add(self, answers: SuiteAnswers, k: int, temperature: float) -> None:
        """Rows of every set that is finished."""
        found, accepted = self.found, answers.acceptance(k)
        for prompts in self._sets:
            result = accepted.get(prompts.name)
            if result is None:
                continue
            asked = Asked(prompts.name, k, temperature, self._config.seed)
            found.rows.append(set_row(asked, result, counts(result.requests, k)))
            categories = by_category(result.requests, [row.category for row in prompts.rows], k)
            if len(categories) > 1:
                found.categories += [group_row(asked, table, category=name) for name, table in categories.items()]
            contexts = by_context(result.requests, k)
            found.contexts += [group_row(asked, table, context=name) for name, table in contexts.items()]

    def _answer_tasks(self, llm: LLM, k: int) -> None:
        """Greedy answers to every task, with and without drafts."""
        for task in self._tasks:
            both: list[list[RequestOutput]] = []
            for drafts in (True, False):
                self._meter.stage(f"{task.name}, {f'K = {k}' if drafts else 'without drafts'}")
                llm.set_speculation(drafts)
                answers = SuiteAnswers({task.name: task.conversations})
                answers.run(llm, max_tokens=self._config.accuracy_tokens, temperature=0.0, on_finish=self._count)
                both.append(answers.finished()[task.name])
            self._marked.append((task, k, both[0], both[1]))
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
        """Tokens of the longest prompt and answer."""
        room, needed = self._target.spec.max_position_embeddings, 0
        asked = [(name, cs, self._config.max_tokens) for name, cs in self._suites.items()]
        asked += [(task.name, task.conversations, self._config.accuracy_tokens) for task in self._tasks]
        for name, conversations, tokens in asked:
            for place, messages in enumerate(conversations, 1):
                length = len(encode(self._target.tokenizer, chat_prompt(self._target.tokenizer, messages)))
                if length >= room:
                    raise PeagleError(
                        f"prompt {place} of {name} has {length} tokens, the model's context is {room}: leave the set "
                        "out, or take a file without that prompt"
                    )
                needed = max(needed, min(length + tokens, room))
        return needed
