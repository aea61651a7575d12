"""Prompt files: the three spellings mean the same, and what is wrong is named with file and line."""

import json

import pytest

from peagle.errors import PeagleError
from peagle.prompt_file import PromptRow, read_prompts
from tests.test_repository import ROOT


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_prompt_turns_and_messages_mean_the_same(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Hi"},
        "",
        {"turns": ["Hi", "And then?"], "id": "x/1", "source": "s", "license": "MIT", "category": "chat"},
        {"messages": [{"role": "user", "content": "Hi", "extra": 1}, {"role": "assistant", "content": "old answer"}]},
    )
    prompt, turns, messages = read_prompts(path)
    assert prompt.messages == turns.messages == messages.messages == ({"role": "user", "content": "Hi"},)
    assert turns.later_turns == ("And then?",)
    assert (turns.id, turns.source, turns.license, turns.category) == ("x/1", "s", "MIT", "chat")


def test_history_and_system_message_stay(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    (row,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": messages}))
    assert row.messages == tuple(messages)


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"prompt": "one\u2028line"}')
    assert read_prompts(path)[0].messages[0]["content"] == "one\u2028line"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "Hi"', "not valid JSON at character"),
        ("[1]", "a JSON array"),
        ("null", "a JSON null"),
        ('{"prompt": ' + "1" * 5000 + "}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (r'{"prompt": "\ud800"}', "not valid Unicode text"),
        (r'{"turns": ["a", "\ud800"]}', "not valid Unicode text"),
        (r'{"prompt": "a", "id": "\ud800"}', "not valid Unicode text"),
        ('{"text": "Hi"}', "has none of"),
        ('{"prompt": "Hi", "turns": ["Hi"]}', "expected exactly one"),
        ('{"prompt": 3}', "'prompt' must be text"),
        ('{"prompt": " "}', "not empty"),
        ('{"turns": []}', "'turns' must be a list of texts"),
        ('{"turns": "Hi"}', "'turns' must be a list of texts"),
        ('{"messages": []}', "'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "'tool' is not one of"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "nothing to answer"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, says):
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(PeagleError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, says in (("missing", "cannot read"), ("empty", "holds no prompts"), ("binary", "not UTF-8")):
        with pytest.raises(PeagleError, match=says):
            read_prompts(tmp_path / f"{name}.jsonl")


@pytest.mark.parametrize(("name", "count"), [("mt_bench", 80), ("humaneval", 164), ("gsm8k", 1319), ("mbpp", 500)])
def test_shipped_prompt_sets_are_whole(name, count):
    rows = read_prompts(ROOT / "benchmarks" / "data" / f"{name}.jsonl")
    assert len({row.id for row in rows}) == count
    assert all(row.source == name and row.license for row in rows)


def test_ids_are_independent_of_the_folder_and_null_is_no_id(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "Hi"}, {"prompt": "Ho", "id": None, "source": None})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    rows = read_prompts(path)
    assert [row.id for row in rows] == ["p.jsonl:1", "p.jsonl:2"]
    assert rows[1].source == ""


def test_an_id_stands_for_one_row(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b"}, {"prompt": "c", "id": "x"})
    with pytest.raises(PeagleError, match=r"p.jsonl:3: id 'x' is taken by line 1"):
        read_prompts(path)


def test_a_prompt_of_the_command_line_is_unicode():
    with pytest.raises(PeagleError, match=r"the prompt is not valid Unicode text .*U\+DCFF at character 3"):
        PromptRow.of_user("ab\udcff")
