"""The command line: help, one-line errors with their exit status, and generation end to end on a tiny model."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

from peagle import __version__
from peagle.bench.report import read_result
from peagle.bench.settings import BenchServeConfig, EvalConfig
from peagle.bench.sweep_settings import SweepConfig
from peagle.cli import app
from peagle.config import EngineConfig, PrepareConfig, ProfileConfig, SelfPromptConfig, ServeConfig, TrainConfig
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.p_eagle import DrafterConfig, PEagleDrafter
from peagle.errors import PeagleError
from peagle.exits import explain, run
from peagle.help import ENGINE_FLAGS
from peagle.models.layers import RopeSpec
from tests.models.tiny import SIZES, tiny_gguf

VERBS = (
    "generate", "chat", "self-prompts", "prepare", "extract", "train", "inspect", "export", "profile", "serve", "eval",
    "demo",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
JSON_FIELDS = [
    "prompt",
    "templated_prompt",
    "text",
    "token_ids",
    "finish_reason",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_length",
    "accepted_per_position",
    "tokens_per_second",
]


def environment(**extra):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}


def peagle(*arguments, **extra):
    command = [sys.executable, "-m", "peagle", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**extra), timeout=120)


def write_head(path, **changes):
    """A random head that fits the tiny llama target, in the full layout."""
    sizes = dict(
        hidden_size=SIZES["hidden_size"],
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, head_dim=12),
        max_position_embeddings=SIZES["max_position_embeddings"],
        vocab_size=SIZES["vocab_size"],
        draft_vocab_size=SIZES["vocab_size"],
        target_hidden_size=SIZES["hidden_size"],
        tap_ids=(0, 1, 2),
        mask_token_id=300,
    )
    torch.manual_seed(0)
    drafter = PEagleDrafter(DrafterConfig(**{**sizes, **changes}))
    torch.nn.init.normal_(drafter.mask_embedding)
    save_drafter(drafter, path, compact=False, base_model="tiny", extra={})
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(GGUF file, head, folder) of a random model; conversions go to a cache of their own."""
    folder = tmp_path_factory.mktemp("tiny")
    os.environ["PEAGLE_CACHE"] = str(folder / "cache")
    yield tiny_gguf(folder / "tiny.gguf"), write_head(folder / "head"), folder
    del os.environ["PEAGLE_CACHE"]


def fails(capsys, *arguments):
    """Run in this process, expect exit status 2 and one line on stderr, return the line."""
    status = run(app, [str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    lines = [
        line for line in err.splitlines() if not line.startswith(("peagle: loading", "peagle: conv", "peagle: no head"))
    ]
    assert status == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("peagle: ")
    assert not out
    return lines[0]


def flags_of(verb):
    """The names of all its flags."""
    command = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]
    return {name for flag in command.params for name in (*flag.opts, *flag.secondary_opts) if "--" in name}


@pytest.mark.parametrize("verb", ["", *VERBS, "bench", "bench serve", "bench sweep", "bench compare"])
def test_help_shows_examples(verb):
    done = peagle(*verb.split(), "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "Examples" in done.stdout
    assert f"peagle {verb}".strip() in done.stdout.split("Examples")[1]


@pytest.mark.parametrize("flag", ["--k", "--concurrency", "--datasets"])
def test_an_empty_list_is_not_taken_for_the_default(flag, capsys):
    line = fails(capsys, "bench", "sweep", "model", "--out", "a.json", flag, "")
    assert line == f"peagle: {flag} is empty: give at least one, or leave it out"


def test_help_without_a_verb():
    done = peagle()
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize(
    ("verb", "config"),
    [
        ("self-prompts", SelfPromptConfig),
        ("prepare", PrepareConfig),
        ("train", TrainConfig),
        ("profile", ProfileConfig),
        ("serve", ServeConfig),
        ("bench serve", BenchServeConfig),
        ("bench sweep", SweepConfig),
        ("eval", EvalConfig),
    ],
)
def test_every_setting_has_a_flag(verb, config):
    text = peagle(*verb.split(), "--help", COLUMNS="200").stdout
    for field in fields(config):
        assert "--" + field.name.replace("_", "-") in text


def test_what_is_said_of_the_engines_flags_stands_once():
    sources = "".join((ROOT / "peagle" / name).read_text() for name in ("help.py", "bench/help.py"))
    texts = ENGINE_FLAGS["Engine"].values()
    assert {text: sources.count(text) for text in texts} == dict.fromkeys(texts, 1)


@pytest.mark.parametrize("verb", [*VERBS, "bench serve", "bench sweep", "bench compare"])
def test_no_flag_is_cut_short_on_a_narrow_terminal(verb):
    words = set(peagle(*verb.split(), "--help", COLUMNS="80").stdout.replace(",", " ").split())
    assert flags_of(verb) <= words


def test_the_engines_flags_have_vllms_names(monkeypatch):
    built = []
    monkeypatch.setattr("peagle.cli._load", lambda _, drafts, *chosen: built.append(chosen))
    monkeypatch.setattr("peagle.chat.run_chat", lambda llm, params, piped: None)
    assert run(app, ["chat", "m"]) == 0
    line = (
        "chat m --head d --num-speculative-tokens auto --gpu-memory-utilization 0.5 --max-num-seqs 2 --block-size 32 "
        "--max-num-batched-tokens 64 --max-model-len 128 --no-enable-prefix-caching --enforce-eager --kernels torch"
    )
    assert run(app, line.split()) == 0
    assert built[0] == (None, EngineConfig())
    assert built[1][0].is_auto
    assert built[1][1] == EngineConfig(
        gpu_memory_utilization=0.5, max_num_seqs=2, block_size=32, max_num_batched_tokens=64, max_model_len=128,
        enable_prefix_caching=False, graphs=False, kernels="torch",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate",), "Missing argument 'MODEL'"),
        (("generate", "m", "--colour"), "No such option: --colour"),
        (("generate", "m", "--max-tokens", "many"), "--max-tokens"),
        (("fly",), "No such command 'fly'"),
        (("generate", "m"), "either --prompt TEXT or --prompts-file"),
        (("generate", "m", "--prompt", "a", "--prompts-file", "b"), "either --prompt TEXT or --prompts-file"),
        (("generate", "m", "--prompts-file", "missing.jsonl"), "cannot read the prompts file missing.jsonl"),
        (("generate", "m", "--prompt", "a", "--speculative-config", '{"model": '), "not valid JSON at character"),
        (("generate", "m", "--prompt", "a", "--speculative-config", "[]"), "a JSON array, expected an object"),
        (
            ("generate", "m", "--prompt", "a", "--speculative-config", '{"model": "d"}'),
            "lacks 'num_speculative_tokens'",
        ),
        (("generate", "m", "--prompt", "a", "--speculative-config", "{}", "--head", "d"), "leave out --head"),
        (("generate", "m", "--prompt", "a", "--head", "d", "--num-speculative-tokens", "0"), "from 1 to 16"),
        (("generate", "m", "--prompt", "a", "--num-speculative-tokens", "3"), "add --head DIR"),
        (("generate", "m", "--prompt", "a", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "m", "--prompt", "a", "--min-p", "nan"), "min_p is nan"),
        (("generate", "m", "--prompt", "a", "--repetition-penalty", "0"), "repetition_penalty is 0.0"),
        (("generate", "m", "--prompt", "a", "--dtype", "int3"), "dtype 'int3' is not supported"),
        (("generate", "no-such-model", "--prompt", "a"), "model 'no-such-model' not found"),
        (("chat", "no-such-model", "--top-p", "0"), "top_p is 0.0"),
        (("inspect", "no-such-head"), "no-such-head"),
        (("inspect", "./heads/nosuch"), "head ./heads/nosuch does not exist"),
        (("generate", "m", "--prompt", "a", "--head", "d", "--num-speculative-tokens", "40"), "use --no-speculation"),
        (("bench", "compare", "none.json", "none.json"), "cannot read the result none.json: No such file or directory"),
        (("export", "no-such-head", "--out", "x"), "no-such-head"),
        (("train", "m", "--data", "d", "--out", "o", "--num-layers", "0"), "num_layers is 0"),
        (("train", "m", "--data", "d", "--out", "o", "--tap-ids", "1,b"), "--tap-ids is '1,b'"),
        (("train", "m", "--data", "d", "--out", "o", "--max-depth", "0"), "num_depths is 0"),
        (("train", "m", "--data", "d", "--out", "o", "--resume"), "o holds no checkpoint to go on from"),
        (("train", "no-such-model", "--data", "no-such-data", "--out", "o"), "no-such"),
        (("prepare", "no-such-model", "--prompts", "missing.jsonl", "--out", "o"), "missing.jsonl"),
        (("profile", "m", "--steps", "0"), "steps is 0"),
        (("profile", "m", "--load-format", "fast"), "load_format 'fast' is not known"),
        (("self-prompts", "m", "--out", "o.jsonl"), "Missing option '--count'"),
        (("self-prompts", "m", "--out", "o.jsonl", "--count", "0"), "count is 0"),
        (("self-prompts", "m", "--out", "o.jsonl", "--count", "1", "--temperature", "0"), "temperature is 0"),
        (("self-prompts", "m", "--out", "o.jsonl", "--count", "1", "--top-p", "2"), "top_p is 2.0"),
        (("self-prompts", "m", "--out", "o.jsonl", "--count", "1", "--seed", "-1"), "seed is -1"),
        (("self-prompts", "m", "--out", ".", "--count", "1"), "exists already"),
        (("self-prompts", "m", "--out", "no/o.jsonl", "--count", "1"), "no is not a folder"),
        (("self-prompts", "no-such-model", "--out", "o.jsonl", "--count", "1"), "model 'no-such-model' not found"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in fails(capsys, *arguments)


def test_a_bad_command_line_in_a_process():
    done = peagle("generate", "no-such-model", "--prompt", "a")
    assert done.returncode == 2
    *said, line = done.stderr.splitlines()
    assert "model 'no-such-model' not found" in line
    assert said in ([], ["peagle: loading no-such-model ..."])  # on a slow machine


def test_errors_of_the_system_become_one_line():
    full = explain(OSError(errno.ENOSPC, "No space left on device", "out/shard"))
    assert full is not None
    assert "out/shard: No space left on device; free some space" in full
    denied = explain(PermissionError(errno.EACCES, "Permission denied", "out"))
    assert denied is not None
    assert "choose a folder you may write to" in denied
    assert explain(PeagleError("two\nlines")) == "two lines"
    assert "out of memory" in str(explain(MemoryError("x")))
    assert explain(ValueError("a bug")) is None


def test_bugs_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("peagle.cli.choose_speculation", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(app, ["chat", "m"])


def test_generate_json_end_to_end(tiny):
    model, head, folder = tiny
    prompts = folder / "prompts.jsonl"
    said = [{"role": role, "content": text} for role, text in (("user", "o"), ("assistant", "l"), ("user", "he"))]
    rows = ({"prompt": "hello"}, {"turns": ["hell", "later"]}, {"messages": said})
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    common = ("generate", model, "--prompts-file", prompts, "--max-tokens", 12, "--json", "--temperature", 0.8)
    common = (*common, "--seed", 3)
    drafted = peagle(*common, "--head", head, "--num-speculative-tokens", 3)
    plain = peagle(*common, "--head", head, "--no-speculation")
    assert drafted.returncode == plain.returncode == 0, drafted.stderr + plain.stderr
    with_drafts, without = ([json.loads(line) for line in done.stdout.splitlines()] for done in (drafted, plain))
    assert len(with_drafts) == len(rows)
    for record, reference in zip(with_drafts, without, strict=True):
        assert list(record) == JSON_FIELDS
        assert record["token_ids"] == reference["token_ids"]
        assert record["text"] == reference["text"]
        assert record["num_draft_tokens"] == 3 * record["num_rounds"] > 0
        assert sum(record["accepted_per_position"]) == record["num_accepted_tokens"]
        assert reference["num_draft_tokens"] == 0
    assert [record["prompt"] for record in with_drafts] == ["hello", "hell", "he"]
    assert with_drafts[1]["templated_prompt"] == "<|im_start|>hell<|im_end|>"


def test_generate_streams_text_and_prints_figures(tiny, capsys):
    model, head, _ = tiny
    config = json.dumps(
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "parallel_drafting": True}
    )
    plain = ("generate", str(model), "--prompt", "hello", "--raw", "--max-tokens", "8")
    arguments = (*plain, "--speculative-config", config)
    for flags, is_said in ((arguments, False), (plain, True), ((*plain, "--no-speculation"), False)):
        assert run(app, list(flags)) == 0
        assert ("no head ships for" in capsys.readouterr().err) == is_said
    assert run(app, list(arguments)) == 0
    out, err = capsys.readouterr()
    assert run(app, [*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["prompt"] == record["templated_prompt"] == "hello"
    assert out == record["text"] + "\n"
    assert "8 tokens, " in err
    assert "acceptance length 1." in err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(target_hidden_size=24), "hidden size 24"),
        (dict(vocab_size=300, draft_vocab_size=300, mask_token_id=299), "vocabulary size 300"),
        (dict(tap_ids=(0, 1, 9)), "taps layer 9"),
    ],
)
def test_a_head_for_another_target_is_refused(tiny, capsys, tmp_path, changes, says):
    head = write_head(tmp_path / "head", **changes)
    arguments = ("generate", tiny[0], "--prompt", "hello", "--head", head, "--num-speculative-tokens", 2)
    assert says in fails(capsys, *arguments)
    assert run(app, ["inspect", str(head), "--target", str(tiny[0])]) == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--head", "nosuch"), "head nosuch does not exist"),
        (("--head", "heads/nosuch"), "head heads/nosuch does not exist"),
        (("--device", "tpu"), "device 'tpu' is not known"),
        (("--device", "mps"), "device 'mps' is not supported"),
        (("--kernels", "triton", "--device", "cpu"), "triton"),
        (("--max-model-len", "1000000"), "max_model_len is 1000000"),
    ],
)
def test_what_is_wrong_is_said_before_the_weights_are_read(tiny, capsys, tmp_path, monkeypatch, flags, says):
    monkeypatch.setattr("peagle.models.target.load_model", lambda *_, **__: pytest.fail("read the weights"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "heads").mkdir()
    monkeypatch.chdir(tmp_path)
    assert says in fails(capsys, "generate", tiny[0], "--prompt", "hello", *flags)


def test_a_head_is_looked_at_before_the_weights_are_read(tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.models.target.load_model", lambda *_, **__: pytest.fail("read the weights"))
    head = write_head(tmp_path / "head")

    def said(**changes):
        config = {"model": str(head), "num_speculative_tokens": 3, **changes}
        return fails(capsys, "generate", tiny[0], "--prompt", "a", "--speculative-config", json.dumps(config))

    assert "parallel_drafting is false" in said(parallel_drafting=False)
    assert "k_table nosuch cannot be read" in said(num_speculative_tokens="auto", k_table="nosuch")
    (weights,) = head.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    assert str(weights) in said()


def test_a_prompt_longer_than_the_context(tiny, capsys):
    line = fails(capsys, "generate", tiny[0], "--raw", "--prompt", "x " * SIZES["max_position_embeddings"])
    assert f"context of {SIZES['max_position_embeddings']}" in line


def test_self_prompts_then_prepare_several_files(tiny, capsys, tmp_path):
    model, _, _ = tiny
    drawn, own, out = tmp_path / "self.jsonl", tmp_path / "own.jsonl", tmp_path / "data"
    own.write_text('{"id": "own/1", "prompt": "hello"}\n')
    draw = ("self-prompts", model, "--out", drawn, "--count", 40, "--max-tokens", 120, "--temperature", 1.5)
    assert run(app, [str(argument) for argument in draw]) == 0, capsys.readouterr()
    assert "different user turns of 40 drawn" in capsys.readouterr().err
    count = len(drawn.read_text().splitlines())
    assert count > 2
    assert "exists already" in fails(capsys, *draw)
    answer = ("prepare", model, "--prompts", drawn, "--prompts", own, "--out", out, "--max-tokens", 4)
    assert run(app, [str(argument) for argument in answer]) == 0, capsys.readouterr()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["sources"]["self_prompted"] == {"licenses": ["output of tiny.gguf"], "prompts": count}
    assert manifest["totals"]["documents"] == count + 1


def test_inspect_and_export(tiny, capsys, tmp_path):
    _, head, _ = tiny
    assert run(app, ["inspect", str(head)]) == 0
    assert f"{'problems':<24} none" in capsys.readouterr().out
    assert run(app, ["export", str(head), "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "config.json").is_file()
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    fails(capsys, "export", head, "--out", tmp_path / "file" / "below")


def test_profile(tiny, capsys, tmp_path):
    model, head, _ = tiny
    out, trace = tmp_path / "profile-tiny.json", tmp_path / "trace.json"
    common = ["profile", str(model), "--head", str(head), "--num-speculative-tokens", "3", "--prompt-tokens", "16"]
    settings = ["--concurrency", "2", "--steps", "3", "--device", "cpu", "--out", str(out), "--trace", str(trace)]
    assert run(app, [*common, *settings]) == 0
    said, progress = capsys.readouterr()
    assert [line.split()[1] for line in progress.splitlines() if line.endswith(" ...")] == [
        "loading",
        "warming",
        "timing",
    ]
    assert "P-EAGLE K = 3, 2 at once, cpu" in said
    assert "matmul" in said
    assert "accepted here means nothing" in " ".join(said.split())
    result = read_result(out)
    summary = result["results"]["summary"]
    assert (summary["on_gpu"], summary["profiled_steps"]) == (False, 3)
    assert summary["ms_per_step"] > 0
    assert sum(row["share"] for row in result["results"]["rows"]) == pytest.approx(1, abs=0.01)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "context is 256: lower --steps" in fails(capsys, *common, "--steps", "200")


def test_profile_of_random_weights(capsys, tmp_path):
    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--load-format", "dummy", "--steps", "2", "--prompt-tokens", "8", "--device", "cpu"]
    assert run(app, ["profile", str(tmp_path), *arguments]) == 0
    said = capsys.readouterr().out
    assert "no drafts, 1 at once, cpu" in said
    assert "means nothing" not in said


def test_ctrl_c_leaves_the_chat_with_status_130(tiny):
    command = [sys.executable, "-m", "peagle", "chat", str(tiny[0])]
    keyboard, terminal = os.openpty()
    pipes = dict(stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        assert process.stdout.readline().startswith("Type a message")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    os.close(keyboard), os.close(terminal)
    assert process.returncode == 130
    assert "peagle: interrupted" in err
    assert "Traceback" not in err


def test_what_is_piped_into_a_chat_is_answered_line_by_line(tiny):
    command = [sys.executable, "-m", "peagle", "chat", str(tiny[0]), "--max-tokens", "5", "--seed", "1"]
    done = subprocess.run(
        command, input="hello\n\nhe\n", capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert not any(noise in done.stdout for noise in (">", "[", "Type a message"))
    assert done.stderr.count(" tokens, ") == 2


def test_cpu_memory_that_runs_out_is_one_line():
    message = "[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    line = explain(RuntimeError(message + "allocate 400 bytes. Error code 12 (Cannot allocate memory)"))
    assert line == ("out of memory (tried to allocate 400 bytes): use a smaller batch, fewer tokens or a smaller model")


def test_ctrl_c_during_the_first_imports():
    code = (
        "import sys, peagle.__main__ as entry\n"
        "class Interrupts:\n"
        "    def find_spec(self, *_): raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "entry.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stderr) == (130, "\npeagle: interrupted\n")


def test_streams_that_are_closed_or_lack_characters(tiny):
    command = f"{sys.executable} -m peagle generate {tiny[0]} --raw --prompt hé --max-tokens 4 --temperature 3 --seed 1"
    for more, extra in (
        (">&- <&-", {}),
        ("", {"PYTHONIOENCODING": "ascii"}),
        ("--json", {"PYTHONIOENCODING": "ascii"}),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{command} {more}"], capture_output=True, env=environment(**extra), timeout=120
        )
        assert done.returncode == 0, done.stderr
        if more == "--json":
            assert json.loads(done.stdout.decode("utf-8"))["prompt"] == "hé"


def test_bytes_that_are_no_text_on_the_command_line(tiny):
    command = [sys.executable, "-m", "peagle", "generate", str(tiny[0]), "--prompt", b"a\xff"]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=120)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"the prompt is not valid Unicode text" in done.stderr


def test_the_version_is_told_at_once():
    done = peagle("--version")
    assert (done.returncode, done.stdout) == (0, f"peagle {__version__}\n")
