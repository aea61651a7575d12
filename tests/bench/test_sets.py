"""Data sets of a load: whose rows, in which order, how long; and what a user is told of files that are wrong."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.sets import load_prompts
from peagle.bench.settings import NAMED_SETS, BenchServeConfig
from peagle.errors import PeagleError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(**settings):
    return load_prompts(BenchServeConfig(**settings))


def texts(prompts):
    return [prompt.messages[-1]["content"] for prompt in prompts.prompts]


@pytest.mark.parametrize(("name", "count"), list(zip(NAMED_SETS, (80, 164, 1319, 500))))
def test_sets_that_are_shipped(name, count):
    found = loaded(dataset_name=name)
    assert len(found.prompts) == found.rows == count
    assert {prompt.output_len for prompt in found.prompts} == {256}


def test_the_announcements_data_set_is_the_shipped_one():
    hub = loaded(dataset_name="hf", dataset_path="philschmid/mt-bench", num_prompts=80, hf_output_len=2048)
    assert texts(hub) == texts(loaded(dataset_name="mt-bench"))
    assert {prompt.output_len for prompt in hub.prompts} == {2048}


def test_the_order_is_the_seeds(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(50)])
    file = {"dataset_name": "custom", "dataset_path": path}
    assert texts(loaded(**file, shuffle=False)) == [f"p{n}" for n in range(50)]
    first, again, other = (texts(loaded(**file, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other)
    assert texts(loaded(**file, seed=1, num_prompts=7)) == first[:7]


def test_rows_are_repeated_only_if_allowed(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}])
    file = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 5, "shuffle": False}
    repeated, once = loaded(**file), loaded(**file, oversample=False)
    assert texts(repeated) == ["a", "b", "a", "b", "a"]
    assert len({prompt.id for prompt in repeated.prompts}) == 5
    assert "2 rows for 5 requests" in repeated.warnings[0]
    assert texts(once) == ["a", "b"]
    assert "2 prompts, not 5" in once.warnings[0]


def test_lengths_of_custom_rows(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "output_tokens": 7}, {"prompt": "b", "output_tokens": 9}])
    file = {"dataset_name": "custom", "dataset_path": path, "shuffle": False}
    assert [p.output_len for p in loaded(**file, custom_output_len=2048).prompts] == [2048, 2048]
    assert [p.output_len for p in loaded(**file, custom_output_len=-1).prompts] == [7, 9]
    assert [p.output_len for p in loaded(**file, output_len=5).prompts] == [5, 5]
    write(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(PeagleError, match=r"row p\.jsonl:1 has no output_tokens"):
        loaded(**file, custom_output_len=-1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', r"p\.jsonl:2: a JSON array"),
        ('{"prompt": "a"}\n{"text": "b"}\n', r"p\.jsonl:2: has none of 'prompt'"),
        ('{"prompt": "a", "output_tokens": 0}\n', r"p\.jsonl:1: 'output_tokens' is 0"),
        ('{"prompt": ""}\n', r"p\.jsonl:1: 'prompt' must be text"),
        ("", "holds no prompts"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path, text, said):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(PeagleError, match=said):
        loaded(dataset_name="custom", dataset_path=str(path))


def test_categories(tmp_path):
    rows = [{"turns": ["a"], "category": "math"}, {"turns": ["b", "c"], "category": "rag"}]
    file = {"dataset_name": "spec-bench", "dataset_path": write(tmp_path / "q.jsonl", rows)}
    assert texts(loaded(**file, category="rag")) == ["b"]
    with pytest.raises(PeagleError, match="'qa': there are math, rag"):
        loaded(**file, category="qa")


def test_a_placeholder_is_no_prompt(tmp_path):
    rows = [
        {"question_id": "x", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}
    ]
    with pytest.raises(PeagleError, match="placeholder"):
        loaded(dataset_name="speed-bench", dataset_path=write(tmp_path / "q.jsonl", rows))


def test_sharegpt(tmp_path):
    path = tmp_path / "s.json"
    human, gpt = {"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}
    path.write_text(json.dumps([{"id": "x", "conversations": [human, gpt]}, {"conversations": [gpt, human]}]))
    file = {"dataset_name": "sharegpt", "dataset_path": str(path)}
    found = loaded(**file)
    assert texts(found) == ["hello"]
    assert found.prompts[0].id == "x"
    path.write_text(json.dumps([{"conversations": [human]}, {"items": []}]))
    with pytest.raises(PeagleError, match=r"s\.json, row 2: has no 'conversations', only items"):
        loaded(**file)
    path.write_text("[{]")
    with pytest.raises(PeagleError, match="not valid JSON"):
        loaded(**file)
    path.write_text(json.dumps([{"conversations": [human]}, {"conversations": [human | {"from": ["human"]}]}]))
    assert texts(loaded(**file)) == ["hello"]  # the other one is begun by nobody that is known


@pytest.mark.parametrize(
    "columns", [{"question": ["q"], "answer": ["a"]}, {"prompt": [["q", "later"]]}, {"prompt": ["q"], "task_id": ["t"]}]
)
def test_a_local_copy_of_a_hub_data_set(tmp_path, columns):
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"question": ["never"]}), folder / "train-00000-of-00001.parquet")
    parquet.write_table(pa.table(columns), folder / "test-00000-of-00001.parquet")
    assert texts(loaded(dataset_name="hf", dataset_path=str(tmp_path / "set"))) == ["q"]
    with pytest.raises(PeagleError, match="no data files of split 'dev'"):
        loaded(dataset_name="hf", dataset_path=str(tmp_path / "set"), hf_split="dev")


def test_missing_columns_are_named(tmp_path):
    parquet.write_table(pa.table({"image": ["x"], "label": [1]}), tmp_path / "x.parquet")
    with pytest.raises(PeagleError, match=r"x\.parquet, row 1: has none of the columns turns.*only image, label"):
        loaded(dataset_name="hf", dataset_path=str(tmp_path / "x.parquet"))


def test_without_the_library_that_reads_parquet(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("peagle.bench.foreign_sets.find_spec", lambda name: None)
    with pytest.raises(PeagleError, match=r"x\.parquet needs pyarrow to be read: pip install pyarrow"):
        loaded(dataset_name="hf", dataset_path=str(tmp_path / "x.parquet"))


def test_without_the_library_of_the_hub(monkeypatch):
    monkeypatch.setattr("peagle.bench.foreign_sets.find_spec", lambda name: None)
    with pytest.raises(PeagleError, match="pip install datasets, or download it"):
        loaded(dataset_name="hf", dataset_path="some/thing")


def test_what_the_library_of_the_hub_does(monkeypatch):
    class Library:
        def load_dataset(name, subset, split):
            if name == "no/net":
                raise ConnectionError("no route\nto host")
            table = [{"prompt": "q"}]
            return table if split else ({"a": table, "b": table} if name == "two/splits" else {"test": table, "x": []})

    monkeypatch.setattr("peagle.bench.foreign_sets.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "datasets", Library)
    assert texts(loaded(dataset_name="hf", dataset_path="a/b")) == ["q"]
    assert texts(loaded(dataset_name="hf", dataset_path="two/splits", hf_split="a")) == ["q"]
    with pytest.raises(PeagleError, match="splits a, b: choose"):
        loaded(dataset_name="hf", dataset_path="two/splits")
    with pytest.raises(PeagleError, match=r"no route to host.*local copy"):
        loaded(dataset_name="hf", dataset_path="no/net")


@pytest.mark.parametrize("name", ["hf", "custom", "spec-bench", "speed-bench", "sharegpt"])
def test_sets_that_need_a_path(name):
    with pytest.raises(PeagleError, match="--dataset-path"):
        loaded(dataset_name=name)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(2, 3000), st.integers(0, 9))
def test_random_tokens(count, length, vocabulary, seed):
    settings = {"num_prompts": count, "random_input_len": length, "random_vocab_size": vocabulary, "seed": seed}
    found, again = (loaded(dataset_name="random", **settings) for _ in range(2))
    assert found.digest == again.digest
    assert "NOTHING about acceptance" in found.warnings[0]
    assert [len(prompt.token_ids) for prompt in found.prompts] == [length] * count
    assert all(0 <= token < vocabulary for prompt in found.prompts for token in prompt.token_ids)


def test_the_digest_is_of_what_is_sent(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "other").mkdir()
    files = [write(tmp_path / "p.jsonl", rows), write(tmp_path / "other" / "p.jsonl", rows)]
    first, moved = (loaded(dataset_name="custom", dataset_path=path) for path in files)
    longer = loaded(dataset_name="custom", dataset_path=files[0], output_len=9)
    assert first.digest == moved.digest != longer.digest
