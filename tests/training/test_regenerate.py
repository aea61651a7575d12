"""`peagle prepare`: the same data whatever the sharding, crash or resume; refusals in one line."""

import errno
import hashlib
import json
import os
import shutil
from io import StringIO
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from peagle.config import PrepareConfig
from peagle.errors import PeagleError
from peagle.models.hub import resolve_model
from peagle.models.tokenizer import load_tokenizer
from peagle.training import regenerate, shards
from peagle.training.dataset import load_documents
from peagle.training.regenerate import prepare
from tests.models.tiny import hf_model

MODEL = "smollm2-135m"
EOS = 2
CONFIG = PrepareConfig(max_tokens=8, temperatures=(0.0, 0.7), shard_size=4, max_prompt_tokens=200)


class FakeLLM:
    """Answers with words drawn from (prompt ids, seed, temperature), as the engine's sampling rule would."""

    def __init__(self):
        self.tokenizer = load_tokenizer(resolve_model(MODEL))
        self.target = SimpleNamespace(spec=SimpleNamespace(eos_token_ids=(EOS,)))
        self.calls = 0
        self.fail_at = None
        self.failure = None
        self.params = []
        self.prompts = []

    def generate(self, prompts, params, *, on_delta=None, on_finish=None):
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.failure
        outputs = []
        for index, (ids, param) in enumerate(zip(prompts, params, strict=True)):
            self.params.append(param)
            self.prompts.append(list(ids))
            key = f"{list(ids)} {param.temperature} {param.seed if param.temperature else 0}"
            digest = hashlib.sha256(key.encode()).digest()
            token_ids = [1000 + byte for byte in digest[: 1 + digest[0] % param.max_tokens]]
            reason = "length" if len(token_ids) == param.max_tokens else "stop"
            if reason == "stop":
                token_ids.append(EOS)
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            outputs.append(SimpleNamespace(text=text, token_ids=token_ids, finish_reason=reason))
            if on_finish:
                on_finish(index, outputs[-1])
        return outputs


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(regenerate, "load_engine", lambda model, config, max_model_len: fake)
    return fake


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"id": f"p{i}", "source": "odd" if i % 2 else "even", "license": "MIT", "category": "chat", "turns": turns}
        for i, turns in enumerate([["Hello"], ["What is 2+2?", "And 3+3?"], ["Sing", "Louder", "Stop"], ["Bye"], ["x"]])
    ]
    return write_prompts(tmp_path / "prompts.jsonl", rows)


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(prompts, out, config=CONFIG):
    stream = StringIO()
    result = prepare(MODEL, prompts, out, config, Console(file=stream, width=300))
    return result, stream.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def test_data_set_and_manifest(llm, prompts, tmp_path):
    result, shown = run(prompts, tmp_path / "out")
    documents, manifest = load_documents(tmp_path / "out")
    assert [d.id for d in documents] == ["p0", "p1", "p2", "p3", "p4"] * 2
    assert result.documents == 10
    assert (result.shards, result.kept_shards) == (3, 0)
    assert result.tokens == sum(len(d.input_ids) for d in documents) == manifest["totals"]["tokens"]
    assert result.supervised_tokens == sum(int(d.loss_mask.sum()) for d in documents)
    assert manifest["settings"]["temperatures"] == [0.0, 0.7]
    assert manifest["sources"]["even"] == {"licenses": ["MIT"], "prompts": 3}
    assert manifest["prompt_files"][0]["name"] == "prompts.jsonl"
    assert sum(manifest["totals"]["finish_reasons"].values()) == 10
    assert "shard 3 of 3" in shown
    assert "⟦" in shown  # one sample conversation
    table = pq.read_table(tmp_path / "out" / "shard-00000.parquet")
    assert table.column("license").to_pylist() == ["MIT"] * 4
    assert table.column("temperature").to_pylist() == [0.0] * 4


def test_later_turns_extend_the_exact_ids(llm, prompts, tmp_path):
    run(prompts, tmp_path / "out", PrepareConfig(max_tokens=8))
    documents, _ = load_documents(tmp_path / "out")
    sung = documents[2]
    starts = [ids for ids in llm.prompts if sung.input_ids[: len(ids)].tolist() == ids]
    assert len(starts) == 3  # all three prompts of the dialogue are prefixes of its document


def test_prompts_go_longest_first(llm, prompts, tmp_path):
    run(prompts, tmp_path / "out", PrepareConfig(max_tokens=8))
    lengths = [len(ids) for ids in llm.prompts[:5]]
    assert lengths == sorted(lengths, reverse=True)


def test_sharding_changes_nothing(llm, prompts, tmp_path):
    run(prompts, tmp_path / "a")
    run(prompts, tmp_path / "b", PrepareConfig(max_tokens=8, temperatures=(0.0, 0.7), shard_size=3))
    a, b = (load_documents(tmp_path / name)[0] for name in "ab")
    assert [d.input_ids.tolist() for d in a] == [d.input_ids.tolist() for d in b]
    seeds = {param.seed for param in llm.params}
    assert len(seeds) == 10  # one per prompt and temperature, equal over turns and runs


@pytest.mark.parametrize("failure", [RuntimeError("killed"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 4, 6])
def test_resume_gives_the_same_bytes(llm, prompts, tmp_path, failure, call):
    run(prompts, tmp_path / "whole")
    llm.calls, llm.fail_at, llm.failure = 0, call, failure
    with pytest.raises(type(failure)):
        run(prompts, tmp_path / "out")
    kept = {name: data for name, data in contents(tmp_path / "out").items() if name != "manifest.json"}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"] is False
    llm.fail_at = None
    result, shown = run(prompts, tmp_path / "out")
    assert result.kept_shards == len(kept)
    assert ("Resuming" in shown) == bool(kept)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shard_without_manifest_entry_is_made_again(llm, prompts, tmp_path, monkeypatch):
    run(prompts, tmp_path / "whole")
    written = []

    def crash_after_two(folder, manifest):
        written.append(1)
        if len(written) == 3:  # the opening manifest, the first shard's, then the crash
            raise RuntimeError("killed")
        shards.write_manifest(folder, manifest)

    monkeypatch.setattr(regenerate, "write_manifest", crash_after_two)
    with pytest.raises(RuntimeError):
        run(prompts, tmp_path / "out")
    assert (tmp_path / "out" / "shard-00001.parquet").exists()
    assert len(load_documents(tmp_path / "out")[1]["shards"]) == 1
    monkeypatch.undo()
    monkeypatch.setattr(regenerate, "load_engine", lambda model, config, max_model_len: llm)
    assert run(prompts, tmp_path / "out")[0].kept_shards == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_deleted_shard_is_made_again(llm, prompts, tmp_path):
    run(prompts, tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "shard-00001.parquet").unlink()
    assert run(prompts, tmp_path / "out")[0].kept_shards == 2
    assert contents(tmp_path / "out") == before


def test_finished_data_set_is_left_alone(prompts, tmp_path, monkeypatch, llm):
    run(prompts, tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr(regenerate, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    result, shown = run(prompts, tmp_path / "out")
    assert "complete already" in shown
    assert (result.documents, result.kept_shards) == (10, 3)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"temperatures": (0.0,)}, "temperat"),
    ],
)
def test_other_settings_are_refused(llm, prompts, tmp_path, change, name):
    run(prompts, tmp_path / "out")
    before = contents(tmp_path / "out")
    values = {"max_tokens": 8, "temperatures": (0.0, 0.7), "shard_size": 4, "max_prompt_tokens": 200, **change}
    with pytest.raises(PeagleError, match=f"was prepared with {name}.*choose another --out or delete"):
        run(prompts, tmp_path / "out", PrepareConfig(**values))
    assert contents(tmp_path / "out") == before


def test_other_prompts_are_refused(llm, prompts, tmp_path):
    run(prompts, tmp_path / "out")
    prompts.write_text(prompts.read_text() + '{"prompt": "more"}\n')
    with pytest.raises(PeagleError, match="prompts_sha256"):
        run(prompts, tmp_path / "out")


def test_settings_may_change_while_nothing_is_finished(llm, prompts, tmp_path):
    llm.fail_at, llm.failure = 1, RuntimeError("killed")
    with pytest.raises(RuntimeError):
        run(prompts, tmp_path / "out")
    assert run(prompts, tmp_path / "out", PrepareConfig(max_tokens=4))[0].documents == 5


def test_ctrl_c_says_how_to_go_on(llm, prompts, tmp_path):
    llm.fail_at, llm.failure = 4, KeyboardInterrupt()
    stream = StringIO()
    with pytest.raises(KeyboardInterrupt):
        prepare(MODEL, prompts, tmp_path / "out", CONFIG, Console(file=stream, width=300))
    assert "Stopped: 1 of 3 shards are in" in stream.getvalue()
    assert "Run the same command again" in stream.getvalue()
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".tmp")]


@pytest.mark.parametrize("full_at", [1, 2, 3])
def test_full_disk(llm, prompts, tmp_path, monkeypatch, full_at):
    calls = []

    def fsync(_descriptor):
        calls.append(1)
        if len(calls) > full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PeagleError, match=r"no space left on the disk .* free some space") as caught:
        run(prompts, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not [name for name in contents(tmp_path / "out") if name.endswith(".tmp")]
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    assert run(prompts, tmp_path / "out")[0].kept_shards == (full_at - 1) // 2
    run(prompts, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_unwritable_folder_is_found_before_the_model_loads(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(regenerate, "load_engine", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PeagleError, match=r"cannot write .* choose another --out"):
            run(prompts, out)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    with pytest.raises(PeagleError, match=r"cannot write .*manifest\.json \(Read-only\)"):
        run(prompts, tmp_path / "out")


def test_shards_of_unknown_origin_are_not_overwritten(prompts, tmp_path, llm):
    out = tmp_path / "out"
    out.mkdir()
    (out / "shard-00000.parquet").write_text("precious")
    with pytest.raises(PeagleError, match=r"holds shards but no manifest\.json"):
        run(prompts, out)
    assert (out / "shard-00000.parquet").read_text() == "precious"


def test_long_prompts_are_left_out_and_counted(llm, tmp_path):
    rows = [{"id": "ok", "turns": ["Hi", "word " * 100, "never asked"]}, {"id": "long", "prompt": "word " * 100}]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    result, shown = run(prompts, tmp_path / "out", PrepareConfig(max_tokens=8, max_prompt_tokens=80))
    assert result.skipped == {"later_turn_too_long": 1, "prompt_too_long": 1}
    (document,) = load_documents(tmp_path / "out")[0]
    assert document.id == "ok"
    assert document.loss_mask[-1]  # the turn that was not asked leaves nothing behind
    assert "left out, prompt_too_long: 1" in shown
    with pytest.raises(PeagleError, match="no prompt was answered"):
        run(prompts, tmp_path / "none", PrepareConfig(max_tokens=8, max_prompt_tokens=5))


def test_limit_and_several_files(llm, prompts, tmp_path):
    more = write_prompts(tmp_path / "more.jsonl", [{"prompt": "more"}])
    assert run([prompts, more], tmp_path / "all", PrepareConfig(max_tokens=4))[0].documents == 6
    assert run([prompts, more], tmp_path / "two", PrepareConfig(max_tokens=4, limit=2))[0].documents == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard_size": 0}, "shard_size is 0"),
        ({"temperatures": ()}, "temperatures are"),
        ({"temperatures": (0.7, 0.7)}, "each only once"),
        ({"temperatures": (-1.0,)}, "temperature is -1.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 10**6}, "below the model's context"),
    ],
)
def test_bad_settings(prompts, tmp_path, settings, message):
    with pytest.raises(PeagleError, match=message):
        run(prompts, tmp_path / "out", PrepareConfig(**settings))
    assert not (tmp_path / "out").exists()


def test_bad_prompt_row_names_file_and_line(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": }\n')
    with pytest.raises(PeagleError, match=r"p\.jsonl:2: not valid JSON"):
        run(prompts, tmp_path / "out")


def test_a_real_engine_answers_greedily_and_repeatably(tmp_path, prompts):
    model = hf_model("llama", vocab_size=49152, eos_token_id=EOS)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (resolve_model(MODEL) / name).exists():
            shutil.copy(resolve_model(MODEL) / name, tmp_path / "model" / name)
    config = {"max_tokens": 6, "temperatures": (0.0, 0.9), "max_num_seqs": 3, "device": "cpu"}
    console = Console(file=StringIO())
    prepare(str(tmp_path / "model"), prompts, tmp_path / "a", PrepareConfig(**config), console)
    prepare(str(tmp_path / "model"), prompts, tmp_path / "b", PrepareConfig(**config, shard_size=3), console)
    documents, again = (load_documents(tmp_path / name)[0] for name in "ab")
    assert [d.input_ids.tolist() for d in documents] == [d.input_ids.tolist() for d in again]
    assert documents[0].input_ids.tolist() != documents[5].input_ids.tolist()  # T = 0 and T = 0.9
    for document in documents[:5]:
        with torch.no_grad():
            logits = model(torch.tensor(document.input_ids[None].astype("int64"))).logits[0]
        chosen = logits.argmax(dim=-1)[:-1].numpy()
        assert (chosen == document.input_ids[1:])[document.loss_mask[1:]].all()
    assert [int(d.loss_mask.sum()) for d in documents[:5]] == [6, 12, 18, 6, 6]
