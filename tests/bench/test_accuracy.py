"""How answers are read and marked: code out of Markdown, numbers out of text."""

import json
from decimal import Decimal
from itertools import pairwise

import pytest

from peagle.acceptance import AcceptanceStats
from peagle.bench.accuracy import (
    CUT,
    NO_ANSWER,
    RIGHT,
    WRONG,
    Question,
    Task,
    answer_number,
    load_task,
    mark,
    mark_number,
    program,
)
from peagle.bench.prompt_sets import load_sets, shipped_file
from peagle.bench.sandbox import FAILED, PASSED, run_programs
from peagle.engine.request import RequestOutput

KEY = {
    "entry_point": "double",
    "stub": 'import math\n\ndef half(x):\n    return x / 2\n\ndef double(x):\n    """Twice."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", PASSED),
        ("```\nprint(1)\n```\nthen\n```py\ndef double(x):\n    return 2 * x\n```", PASSED),
        ("```python\ndef double(x):\n    return int(half(x) * 4)\n", PASSED),  # cut off; uses the stub's helper
        ("    return math.floor(2 * x)\n", PASSED),
        ("return 2 * x", PASSED),
        ("```python\nreturn 2 * x\n```", PASSED),
        ("```python\ndef double(x):\n    return x\n```", FAILED),
        ("I cannot do that.", FAILED),
        ("", FAILED),
        ("```python\ndef double(x):\n    return 2 * x\ndef check(candidate):\n    pass\n```\n", PASSED),
        ("```python\ndef double(x):\n    return 0\ndef check(candidate):\n    pass\n```\n", FAILED),  # ours comes last
    ],
)
def test_code_is_found_in_an_answer(text, outcome):
    assert run_programs([program(KEY, text)]) == [outcome]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she makes $18 a day.", "18"),
        ("16 - 7 = 9, times 2 is 18.", "18"),
        ("#### 1,234\nThat was 3 steps.", "1234"),
        (r"The answer is \boxed{42}, of 50.", "42"),
        ("It is -3.50", "-3.50"),
        ("nothing", None),
        ("$70,000.", "70000"),
    ],
)
def test_a_number_is_found_in_an_answer(text, number):
    assert answer_number(text) == (None if number is None else Decimal(number))


def test_numbers_are_compared_by_value():
    assert mark_number("18", "18.00 dollars") == RIGHT
    assert mark_number("1234", "1,234") == RIGHT
    assert mark_number("18", "19") == WRONG
    assert mark_number("18", "none") == NO_ANSWER


def output(text, tokens, reason="stop"):
    return RequestOutput("", [1], text, tokens, reason, AcceptanceStats(), [], 0.0)


def test_both_ways_are_marked_and_equal_answers_counted():
    task = Task("gsm8k", tuple(Question([], {"id": f"q{answer}", "answer": answer}) for answer in "1234"))
    plain = [output("1", [1]), output("2", [2]), output("9", [9]), output("", [8])]
    drafted = [output("1", [1]), output("7", [7]), output("3", [3]), output("4", [4])]
    (with_drafts, without), questions = mark(task, drafted, plain, 5)
    assert (with_drafts.num_speculative_tokens, with_drafts.correct, with_drafts.equal_answers) == (5, 3, 1)
    assert with_drafts.outcomes == {RIGHT: 3, WRONG: 1}
    outcomes = {RIGHT: 2, WRONG: 1, NO_ANSWER: 1}
    assert (without.num_speculative_tokens, without.correct, without.outcomes) == (0, 2, outcomes)
    low, high = without.accuracy_interval
    assert low <= 0.5 <= high
    assert [(q.id, q.num_speculative_tokens, q.outcome) for q in questions] == [
        ("q1", 5, RIGHT), ("q2", 5, WRONG), ("q3", 5, RIGHT), ("q4", 5, RIGHT),
        ("q1", 0, RIGHT), ("q2", 0, RIGHT), ("q3", 0, WRONG), ("q4", 0, NO_ANSWER),
    ]  # fmt: skip


def test_an_answer_that_was_cut_is_not_called_wrong():
    task = Task("gsm8k", tuple(Question([], {"id": answer, "answer": answer}) for answer in "123"))
    answers = [output("1", [1, 2], "length"), output("so 7", [2], "length"), output("", [3], "length")]
    (row, _), questions = mark(task, answers, answers, 5)
    assert (row.correct, row.outcomes) == (1, {CUT: 2, RIGHT: 1})
    assert [(q.outcome, q.tokens, q.finish_reason) for q in questions[:2]] == [(RIGHT, 2, "length"), (CUT, 1, "length")]


def test_every_question_has_its_key():
    for name, count in (("humaneval", 164), ("gsm8k", 1319)):
        task = load_task(name)
        assert len(task.questions) == count
        if name == "humaneval":
            assert all(q.key["stub"].strip() in q.messages[0]["content"] for q in task.questions)
            assert all(f"def {q.key['entry_point']}" in q.key["stub"] for q in task.questions)
        else:
            assert all(answer_number(q.key["answer"]) is not None for q in task.questions)
    assert [q.key["id"] for q in load_task("gsm8k", 3).questions] == [ids_of("gsm8k")[place] for place in (0, 439, 879)]
    ids = [json.loads(line)["id"] for line in shipped_file("gsm8k_answers.jsonl").read_text().splitlines()]
    assert ids == ids_of("gsm8k")


def ids_of(name):
    return [row.id for row in load_sets([name])[0].rows]


@pytest.mark.parametrize("limit", [1, 7, 8, 79, 80, 99])
def test_a_part_of_a_set_is_spread_over_it(limit):
    (whole,), (part,) = load_sets(["mt_bench"]), load_sets(["mt_bench"], limit)
    count = min(limit, 80)
    places = [whole.rows.index(row) for row in part.rows]
    assert len(places) == count
    assert places[0] == 0
    assert {after - before for before, after in pairwise([*places, 80])} <= {80 // count, 80 // count + 1}
    assert part.whole == (limit >= 80)
    if limit >= 8:
        assert len({row.category for row in part.rows}) == 8
