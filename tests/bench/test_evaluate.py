"""`peagle eval` end to end on a tiny random model: files, figures, verdicts, interruption, and bad input."""

import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.tables import render_block
from peagle.bench import evaluation
from peagle.bench.card import ABOVE, AS_SAID, BELOW, compare_with_card, read_card, verdict
from peagle.bench.evaluate import NOT_AS_EXPECTED_STATUS, run_eval
from peagle.bench.report import read_result, write_result
from peagle.bench.settings import EvalConfig
from peagle.errors import PeagleError
from tests.models.tiny import tiny_gguf
from tests.test_cli import write_head

CONFIG = EvalConfig(sets=("prompts",), k=(2, 3), max_tokens=12, lossless_prompts=3, max_num_seqs=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF file, head, prompts file) of a random model."""
    folder = tmp_path_factory.mktemp("eval")
    before = os.environ.get("PEAGLE_CACHE")
    os.environ["PEAGLE_CACHE"] = str(folder / "cache")
    rows = [{"id": str(i), "category": "ab"[i % 2], "prompt": "hello " * (1 + 3 * i)} for i in range(8)]
    prompts = folder / "chats.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    yield tiny_gguf(folder / "tiny.gguf"), write_head(folder / "head"), prompts
    os.environ.pop("PEAGLE_CACHE")
    if before is not None:
        os.environ["PEAGLE_CACHE"] = before


def evaluate(tiny, out, **changes):
    model, head, prompts = tiny
    config = replace(CONFIG, **{"sets": (str(prompts),), **changes})
    return run_eval(str(head), str(model), config, Console(stderr=True), out=out)


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    """(exit status, result file) of one evaluation."""
    out = tmp_path_factory.mktemp("out") / "eval-tiny.json"
    return evaluate(tiny, out), out


def test_every_figure_follows_from_the_requests(measured):
    status, out = measured
    result = read_result(out)
    rows = result["results"]["rows"]
    assert status == 0
    assert [(r["num_speculative_tokens"], r["temperature"]) for r in rows] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    for row in rows:
        pairs = [tuple(map(int, pair.split("/"))) for pair in row["per_request"].split()]
        assert len(pairs) == row["prompts"] == 8
        assert row["rounds"] == sum(rounds for _, rounds in pairs)
        length = 1 + sum(accepted for accepted, _ in pairs) / row["rounds"]
        assert row["acceptance_length"] == pytest.approx(length, abs=1e-4)
        assert 1 + sum(row["accepted_share_per_position"]) == pytest.approx(length, abs=1e-3)
        low, high = row["acceptance_length_interval"]
        assert low <= row["acceptance_length"] <= high
    assert result["settings"]["partial"] is False
    assert result["settings"]["datasets"]["chats"]["prompts"] == 8
    assert "ids" not in result["settings"]["datasets"]["chats"]
    assert len(result["settings"]["head_sha256"]) == 64


def test_parts_add_up_to_the_set(measured):
    results = read_result(measured[1])["results"]
    for part, name in (("categories", "category"), ("contexts", "context")):
        for row in results["rows"]:
            key = (row["num_speculative_tokens"], row["temperature"])
            parts = [r for r in results[part] if (r["num_speculative_tokens"], r["temperature"]) == key]
            assert sum(r["rounds"] for r in parts) == row["rounds"]
            assert all(r[name] for r in parts)
    assert {row["category"] for row in results["categories"]} == {"a", "b"}


def test_drafts_change_no_answer(measured):
    rows = read_result(measured[1])["results"]["lossless"]
    assert [(r["equal"], r["prompts"], r["explained"]) for r in rows] == [(3, 3, True)] * 4


def test_the_file_fills_a_document(measured):
    text = render_block("eval-tiny", read_result(measured[1]))
    for words in ("| chats | 0 | 2 | **", "By category, K = 3:", "By context at the round", "**3 of 3**"):
        assert words in text


def test_a_changed_answer_fails(tiny, tmp_path, monkeypatch, capsys):
    original = evaluation.SuiteAnswers.finished

    def finished(self):
        outputs = original(self)
        for answers in outputs.values():
            if len(answers) == 3:  # those without drafts
                answers[0].token_ids[4] = (answers[0].token_ids[4] + 7) % 200
        return outputs

    monkeypatch.setattr(evaluation.SuiteAnswers, "finished", finished)
    status = evaluate(tiny, tmp_path / "a.json", k=(2,), temperatures=(0.0,))
    assert status == NOT_AS_EXPECTED_STATUS
    assert "NOT LOSSLESS" in capsys.readouterr().err
    (row,) = read_result(tmp_path / "a.json")["results"]["lossless"]
    assert (row["equal"], row["first_divergence"], row["explained"]) == (2, 4, False)


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_keeps_the_sets_that_were_finished(tiny, tmp_path, monkeypatch, capsys, number, ended):
    original, done = evaluation.Evaluation._count, []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job of the background lacks

    def count(self, output):
        original(self, output)
        done.append(output)
        if len(done) == 8 + 3 + 2:  # K = 2 at T = 0, without drafts, and two of eight answers at T = 1
            os.kill(os.getpid(), number)

    monkeypatch.setattr(evaluation.Evaluation, "_count", count)
    with pytest.raises(ended) as error:
        evaluate(tiny, tmp_path / "a.json")
    signal.signal(signal.SIGINT, before)
    assert ended is KeyboardInterrupt or error.value.code == 128 + signal.SIGTERM
    result = read_result(tmp_path / "a.json")
    assert result["settings"]["partial"] is True
    assert [(r["num_speculative_tokens"], r["temperature"]) for r in result["results"]["rows"]] == [(2, 0)]
    assert "marked partial" in capsys.readouterr().err


def test_a_run_that_is_interrupted_at_once_takes_no_result_s_place(tiny, measured, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a.json"
    out.write_bytes(measured[1].read_bytes())

    def count(self, output):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation.Evaluation, "_count", count)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny, out)
    assert out.read_bytes() == measured[1].read_bytes()
    said = capsys.readouterr().err
    assert f"{out} exists: what this run measures takes its place" in " ".join(said.split("\n"))
    assert "nothing was finished, there is no result" in said


# The card


def card_of(measured, path, change=0.0, paired=True, **settings):
    """A card that says what was measured, moved by a share of the length."""
    result = read_result(measured[1])
    rows = result["results"]["rows"]
    for row in rows:
        row["acceptance_length"] *= 1 + change
        if not paired:
            del row["per_request"]
    write_result(path, "acceptance", result["settings"] | settings, {"rows": rows})
    return path


def rows_of(measured):
    from peagle.bench.eval_rows import GroupRow

    result = read_result(measured[1])
    return [GroupRow(**row) for row in result["results"]["rows"]], result["settings"]


@pytest.mark.parametrize(
    ("change", "paired", "expected"),
    [(0.0, True, AS_SAID), (0.0, False, AS_SAID), (2.0, False, BELOW), (-0.6, False, ABOVE)],
)
def test_the_verdict(measured, tmp_path, change, paired, expected):
    rows, settings = rows_of(measured)
    card = read_card(tmp_path, card_of(measured, tmp_path / "card.json", change, paired))
    compared, notes = compare_with_card(rows, settings, card, "head")
    assert ([row.verdict for row in compared], notes) == ([expected] * 4, [])
    assert verdict(compared, card).startswith(BELOW if expected == BELOW else AS_SAID)


def test_many_figures_have_wider_intervals_than_one(measured, tmp_path):
    """At 95 % each, one of twenty figures would be called below its card for nothing."""
    rows, settings = rows_of(measured)
    card = read_card(tmp_path, card_of(measured, tmp_path / "card.json", paired=False))
    row = replace(rows[0], per_request="3/10 9/10 5/10 0/10 7/10 2/10 8/10 4/10")
    (alone,), _ = compare_with_card([row], settings, card, "head")
    among = compare_with_card([row] * 20, settings, card, "head")[0][0]
    width = [row.difference_interval[1] - row.difference_interval[0] for row in (alone, among)]
    assert width[1] > 1.1 * width[0] > 0


def test_the_command_fails_below_its_card(tiny, measured, tmp_path):
    model, head, prompts = tiny
    card = card_of(measured, tmp_path / "card.json", 2.0, paired=False)
    config = replace(CONFIG, sets=(str(prompts),), lossless_prompts=0)
    out = tmp_path / "a.json"
    assert run_eval(str(head), str(model), config, Console(), out=out, card=card) == NOT_AS_EXPECTED_STATUS
    assert read_result(out)["results"]["card"][0]["verdict"] == BELOW


def test_only_equal_conditions_are_compared(measured, tmp_path):
    rows, settings = rows_of(measured)
    longer = read_card(tmp_path, card_of(measured, tmp_path / "a.json", max_tokens=99))
    compared, notes = compare_with_card(rows, settings, longer, "head")
    assert compared == []
    assert "up to 99 tokens" in notes[0]
    datasets = {"chats": {"sha256": "other", "prompts": 8}}
    other = read_card(tmp_path, card_of(measured, tmp_path / "b.json", datasets=datasets))
    compared, notes = compare_with_card(rows, settings, other, "head")
    assert (len(compared), len(notes)) == (0, 4)
    unknown, notes = compare_with_card([replace(rows[0], suite="new")], settings, longer | {"settings": settings}, "h")
    assert (unknown, notes) == ([], ["the card does not have new K = 2 T = 0"])
    assert verdict([], longer).startswith("the card was NOT CHECKED")
    assert "--sets chats --k 2,3 --temperature 0,1 --max-tokens 99 (or fewer" in verdict([], longer)
    assert read_card(tmp_path, None) is None
    write_result(tmp_path / "c.json", "c", {}, {"rows": [{"x": 1}]})
    with pytest.raises(PeagleError, match="no acceptance"):
        read_card(tmp_path, tmp_path / "c.json")


def test_a_part_of_a_set_is_checked_against_the_same_part_alone(measured, tmp_path):
    rows, settings = rows_of(measured)
    part = settings | {"limit": 8, "datasets": {"chats": {"sha256": "p", "prompts": 8, "ids": ["0"]}}}
    same = read_card(tmp_path, card_of(measured, tmp_path / "a.json", limit=8, datasets=part["datasets"]))
    compared, notes = compare_with_card(rows, part, same, "head")
    assert (len(compared), notes) == (4, [])
    assert "--limit 8 (or" in verdict([], same)
    unhashed = read_card(tmp_path, card_of(measured, tmp_path / "b.json", datasets={}))
    assert len(compare_with_card(rows, settings, unhashed, "head")[0]) == 4
    assert compare_with_card(rows, part, unhashed, "head")[0] == []
    few = [replace(row, prompts=5) for row in rows]
    card = {"settings": unhashed["settings"], "results": {"rows": [vars_of(row) for row in few]}}
    compared, notes = compare_with_card(few, settings, card, "head")
    assert (compared, len(notes)) == ([], 4)
    assert "5 prompts are too few" in notes[0]


def vars_of(row):
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def test_few_prompts_have_no_interval_and_their_card_is_not_checked(tiny, measured, tmp_path, capsys):
    model, head, prompts = tiny
    config = replace(CONFIG, sets=(str(prompts),), lossless_prompts=0, limit=3, k=(2,), temperatures=(0.0,))
    out = tmp_path / "a.json"
    card = card_of(measured, tmp_path / "card.json")
    assert run_eval(str(head), str(model), config, Console(stderr=True), out=out, card=card) == 0
    result = read_result(out)
    (row,) = result["results"]["rows"]
    assert row["prompts"] == 3
    assert row["acceptance_length_interval"] is None
    assert result["settings"]["datasets"]["chats"]["ids"] == ["0", "2", "5"]
    shown = capsys.readouterr()
    assert "[–]" in shown.out
    assert "NOT CHECKED" in shown.err
    assert "without --limit" in shown.err
    assert "as the card says" not in shown.err


def test_acceptance_is_not_known_where_no_draft_was_verified(tiny, measured, tmp_path, capsys):
    """Answers of one token: 1.00 would say that every draft was refused."""
    out = tmp_path / "a.json"
    assert evaluate(tiny, out, max_tokens=1, k=(2,), temperatures=(0.0,), lossless_prompts=0) == 0
    results = read_result(out)["results"]
    for row in (results["rows"][0], *results["categories"]):
        assert (row["rounds"], row["acceptance_length"], row["acceptance_length_interval"]) == (0, None, None)
        assert row["accepted_share_per_position"] == row["conditional_share_per_position"] == []
    assert results["rows"][0]["acceptance_length_without_loops"] is None
    assert "| chats | 0 | 2 | ? | ? |  |  | 8 | 8 |" in render_block("eval-tiny", read_result(out))
    assert "1.00" not in capsys.readouterr().out
    rows, settings = rows_of((0, out))
    card = read_card(tmp_path, card_of(measured, tmp_path / "card.json", max_tokens=1))
    assert compare_with_card(rows, settings, card, "head") == ([], ["chats K = 2 T = 0: no draft was verified here"])


# Bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": ()}, "at least one"),
        ({"k": (3, 3)}, "only once"),
        ({"k": (17,)}, "1 .. 16"),
        ({"temperatures": (-1.0,)}, "0 .. 100"),
        ({"temperatures": (float("nan"),)}, "0 .. 100"),
        ({"limit": 0}, "at least 1"),
        ({"accuracy": ("mmlu",)}, "choose among humaneval, gsm8k"),
        ({"accuracy": ("humaneval",)}, "--run-code"),
        ({"sets": ("none",)}, "nothing is measured"),
    ],
)
def test_bad_settings_are_named(changes, words):
    with pytest.raises(PeagleError, match=words):
        EvalConfig(**changes)


def test_bad_input_is_named_before_anything_is_loaded(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.evaluate.load_target", lambda *_, **__: pytest.fail("loaded"))
    model, _, prompts = tiny
    for changes, words in (
        ({"sets": ("nothing",)}, "neither a file nor one of"),
        ({"sets": (str(prompts), str(prompts))}, "two prompt sets are called chats"),
    ):
        with pytest.raises(PeagleError, match=words):
            evaluate(tiny, tmp_path / "a.json", **changes)
    (tmp_path / "file").write_text("")
    with pytest.raises(PeagleError, match="cannot write the result"):
        evaluate(tiny, tmp_path / "file" / "a.json")
    with pytest.raises(PeagleError, match="is a folder"):
        evaluate(tiny, tmp_path)
    with pytest.raises(PeagleError, match="does not exist"):
        run_eval("no such head", str(model), CONFIG, Console())
    card, row = tmp_path / "card.json", {"suite": "chats", "temperature": 0.0, "prompts": 8, "acceptance_length": 2.0}
    row |= {"num_speculative_tokens": 2, "per_request": " ".join(["1/2"] * 8)}
    for part in (
        {"prompts": None},
        {"temperature": "warm"},
        {"suite": [1]},
        {"per_request": "1/2"},
        {"per_request": 5},
    ):
        write_result(card, "acceptance", {"max_tokens": 12}, {"rows": [row, row | part]})
        with pytest.raises(PeagleError, match=r"card\.json holds no acceptance per prompt set"):
            run_eval(str(tiny[1]), str(model), replace(CONFIG, sets=(str(prompts),)), Console(), card=card)
    write_result(card, "acceptance", {"datasets": [1]}, {"rows": [row]})
    with pytest.raises(PeagleError, match="holds no acceptance"):
        run_eval(str(tiny[1]), str(model), replace(CONFIG, sets=(str(prompts),)), Console(), card=card)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(PeagleError, match=r"bad\.jsonl:2"):
        evaluate(tiny, tmp_path / "a.json", sets=(str(bad),))


def test_a_prompt_beyond_the_context_is_named(tiny, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "hello " * 5000}))
    with pytest.raises(PeagleError, match="prompt 1 of long has"):
        evaluate(tiny, tmp_path / "a.json", sets=(str(long),))
