"""Whether answers are right: HumanEval (pass@1, by running the function that was written) and GSM8K (the number).

Speculation must not change a figure. Both tasks are asked as their prompt sets are, greedily, one answer per question.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from peagle.bench.eval_rows import AccuracyRow, QuestionRow
from peagle.bench.prompt_sets import load_sets, shipped_file
from peagle.bench.sandbox import PASSED, run_programs
from peagle.bench.statistics import share_interval
from peagle.engine.request import RequestOutput
from peagle.errors import PeagleError

KEY_FILES = {"humaneval": "humaneval_tests.jsonl", "gsm8k": "gsm8k_answers.jsonl"}
RIGHT, WRONG, NO_ANSWER = "right", "wrong", "no answer"
CUT = "cut"  # at the most tokens allowed, so that nobody knows what it would have become

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)  # the last one may be cut off by the end of the answer
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Question:
    """One question: what is asked, and the key to its answer, a row of the task's key file."""

    messages: list[dict[str, str]]
    key: dict[str, str]


@dataclass(frozen=True, slots=True)
class Task:
    """A named task."""

    name: str
    questions: tuple[Question, ...]

    @property
    def conversations(self) -> list[list[dict[str, str]]]:
        """What to ask."""
        return [question.messages for question in self.questions]


def load_task(name: str, limit: int | None = None) -> Task:
    """`limit` questions of a task, spread over its file. Raises PeagleError where its files were not installed."""
    path = shipped_file(KEY_FILES[name])
    if path is None:
        raise PeagleError(f"{KEY_FILES[name]} was not installed: run from a checkout that has benchmarks/data")
    keys = {row["id"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    (prompts,) = load_sets([name], limit)
    return Task(name, tuple(Question(list(row.messages), keys[row.id]) for row in prompts.rows))


def mark(
    task: Task, drafted: Sequence[RequestOutput], plain: Sequence[RequestOutput], num_drafts: int
) -> tuple[list[AccuracyRow], list[QuestionRow]]:
    """(a row for the answers with drafts and one for those without, a row for each answer of both).

    Answers that are the same are marked once.
    """
    equal = [a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True)]
    changed = [place for place, same in enumerate(equal) if not same]
    texts = [output.text for output in plain] + [drafted[place].text for place in changed]
    asked = [*task.questions, *(task.questions[place] for place in changed)]
    marked = _outcomes(task.name, asked, texts)
    without, with_drafts = marked[: len(plain)], marked[: len(plain)]
    for place, outcome in zip(changed, marked[len(plain) :], strict=True):
        with_drafts[place] = outcome
    rows, questions = list[AccuracyRow](), list[QuestionRow]()
    for found, outputs, k in ((with_drafts, drafted, num_drafts), (without, plain, 0)):
        outcomes = list(map(_unless_cut, found, outputs))
        rows.append(_row(task.name, outcomes, k, sum(equal)))
        questions += [
            QuestionRow(
                task=task.name,
                id=question.key["id"],
                num_speculative_tokens=k,
                outcome=outcome,
                tokens=len(output.token_ids),
                finish_reason=output.finish_reason,
            )
            for question, outcome, output in zip(task.questions, outcomes, outputs, strict=True)
        ]
    return rows, questions


def _unless_cut(outcome: str, output: RequestOutput) -> str:
    """The outcome; of an answer that was cut before it was right, that."""
    return CUT if output.finish_reason == "length" and outcome not in (RIGHT, PASSED) else outcome


def _row(task: str, outcomes: Sequence[str], num_drafts: int, equal: int) -> AccuracyRow:
    right = [outcome in (RIGHT, PASSED) for outcome in outcomes]
    share = share_interval(sum(right), len(right))
    return AccuracyRow(
        task=task,
        num_speculative_tokens=num_drafts,
        temperature=0.0,
        correct=sum(right),
        prompts=len(right),
        accuracy=round(share.value, 4),
        accuracy_interval=share.rounded(),
        equal_answers=equal,
        outcomes=dict(Counter(outcomes).most_common()),
    )


def _outcomes(task: str, questions: Sequence[Question], texts: Sequence[str]) -> list[str]:
    if task == "humaneval":
        return run_programs([program(q.key, text) for q, text in zip(questions, texts, strict=True)])
    return [mark_number(q.key["answer"], text) for q, text in zip(questions, texts, strict=True)]


# HumanEval


def program(key: dict[str, str], text: str) -> str:
    """The program that checks an answer: what the stub has before its function, the answer's code, the tests.

    The code is the first block in ``` that defines the function, else the first block, else the whole text. Code
    without the function is taken for its body and goes under the stub.
    """
    name, stub = key["entry_point"], key["stub"]
    defines = re.compile(rf"^\s*def {re.escape(name)}\b", re.MULTILINE)
    blocks = _BLOCK.findall(text)
    code = next((block for block in blocks if defines.search(block)), blocks[0] if blocks else text)
    before = stub[: stub.index(f"def {name}")]
    body = f"{before}\n{code}" if defines.search(code) else f"{stub}{_indented(code)}"
    return f"{body}\n\n{key['test']}\n\ncheck({name})\n"


def _indented(code: str) -> str:
    """A function's body at the depth that the stub's text has."""
    lines = code.strip("\n").splitlines()
    if any(line[:1].isspace() for line in lines[:1]):
        return "\n".join(lines)
    return "\n".join(f"    {line}" for line in lines)


# GSM8K


def mark_number(expected: str, text: str) -> str:
    """Right if the answer's number, see `answer_number`, equals the expected one."""
    found = answer_number(text)
    if found is None:
        return NO_ANSWER
    return RIGHT if found == _decimal(expected) else WRONG


def answer_number(text: str) -> Decimal | None:
    """The number that an answer gives: the last that is boxed, else that follows ####, else that it has; or None."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    marked = re.findall(r"####\s*(.*)", text)
    for part in (*boxed[-1:], *marked[-1:], text):
        numbers = _NUMBER.findall(part)
        if numbers:
            return _decimal(numbers[-1])
    return None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
