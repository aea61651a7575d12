"""`peagle bench serve` against a server that misbehaves on demand."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from benchmarks.tables import render_block
from peagle.bench.report import read_result
from peagle.bench.serve import FAILED_STATUS, run_bench_serve
from peagle.bench.settings import BenchServeConfig
from peagle.errors import PeagleError
from tests.bench.fake_api import TOKENS, fake_api
from tests.test_cli import environment

QUIET = Console(quiet=True)


def custom(folder, *prompts):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return {"dataset_name": "custom", "dataset_path": str(path), "shuffle": False}


def bench(api, folder, **settings):
    """(exit status, result file) of a run."""
    chosen = {"base_url": api.url, "result_dir": str(folder), "result_filename": "out.json", **settings}
    status = run_bench_serve(BenchServeConfig(**chosen), QUIET)
    (written,) = folder.glob("*.json")
    return status, read_result(written)


def test_a_whole_run(tmp_path, capsys):
    prompts = [f"question {n}" for n in range(12)]
    with fake_api(per_chunk=2) as api:
        settings = {"max_concurrency": 3, "num_warmups": 2, "goodput": "e2el:10000", "save_detailed": True}
        status, result = bench(api, tmp_path, **custom(tmp_path, *prompts), **settings)
    row = result["results"]["rows"][0]
    assert status == 0
    assert (row["completed"], row["failed"], row["partial"]) == (12, 0, False)
    assert row["output_tokens"] == 12 * len(TOKENS)
    assert row["prompt_tokens"] == 12 * 3
    assert row["peak_concurrency"] == api.peak == 3
    assert row["goodput"]["good"] == 12
    assert row["acceptance"]["source"] == "counters"
    assert (row["acceptance"]["rounds"], row["acceptance"]["acceptance_length"]) == (48, 2.5)  # warm-ups left out
    assert row["acceptance"]["per_position"] == [0.75, 0.5, 0.25]
    assert row["tokens_per_chunk"] == 2
    assert 10 <= row["latency_ms"]["ttft"]["p50"] < 1000
    assert re.search(
        r"\| tiny \| custom \| 3 \| \*\*[\d.,]+\*\* \| .* \| 2.50 \| 12 \| 0 \|", render_block("serve-x", result)
    )
    settings = result["settings"]
    assert settings["server"] == {"version": "1.2.3", "models": [{"id": "tiny"}]}
    assert settings["prompts"]["sent"] == 12
    assert re.fullmatch("[0-9a-f]{64}", settings["prompts"]["sha256"])
    requests = result["results"]["requests"]
    assert [request["id"] for request in requests] == [f"prompts.jsonl:{n + 1}" for n in range(12)]
    assert {request["text"] for request in requests} == {"".join(TOKENS)}
    sent = [body["messages"][0]["content"] for body in api.bodies]
    assert sorted(sent[2:]) == sorted(prompts)
    shown = capsys.readouterr().out
    assert "acceptance length   2.500 (the server's counters" in shown
    assert "1 + accepted drafts / rounds" in shown
    assert "12 of 12 requests" in shown


def test_a_mistake_of_its_own_is_no_failed_request(tmp_path, monkeypatch):
    async def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("peagle.bench.load.ask", broken)
    with fake_api() as api, pytest.raises(ZeroDivisionError):
        bench(api, tmp_path, **custom(tmp_path, "x", "y"))


def test_failures_are_counted_by_kind_and_averaged_nowhere(tmp_path, capsys):
    prompts = [
        "good", "status 500", "status 500", "status 400", "disconnect", "error", "garbage", "cut", "empty", "abort",
        "hang", "html",
    ]  # fmt: skip
    with fake_api(metrics=False) as api:
        status, result = bench(api, tmp_path, **custom(tmp_path, *prompts), timeout=1.0)
    row = result["results"]["rows"][0]
    assert status == FAILED_STATUS
    assert row["failures"] == {
        "HTTP 500": 2, "HTTP 400": 1, "disconnect": 2, "error in the stream": 1, "unreadable answer": 2,
        "empty answer": 1, "aborted": 1, "timeout": 1,
    }  # fmt: skip
    assert (row["completed"], row["failed"]) == (1, 11)
    assert row["output_tokens"] == len(TOKENS)
    assert row["latency_ms"]["e2el"]["p99"] < 1000
    assert render_block("serve-x", result).splitlines()[2].endswith("| – | 1 | 11 |")
    details = {request["id"].split(":")[1]: request["detail"] for request in result["results"]["requests"][1:]}
    assert details["2"] == "as you wish"
    assert details["6"] == "the engine fell over"
    assert "{not json" in details["7"]
    assert row["acceptance"] is None
    shown = capsys.readouterr().out
    assert "FAILED: 11 (2 x HTTP 500" in shown
    assert "\n  HTTP 400: as you wish\n" in shown
    assert "acceptance: not reported by this server" in shown


@pytest.mark.parametrize(
    "event",
    [
        *(
            f'{{"choices": [], "usage": {{"prompt_tokens": {asked}, "completion_tokens": {said}}}}}'
            for asked, said in [(3, '"four"'), (3, -4), (3, 2.5), (3, "NaN"), (3, "1e999"), (3, 10**12), ('"x"', 4)]
        ),
        '{"peagle": {"rounds": 1, "draft_tokens": "3", "accepted_tokens": 1, "accepted_per_position": [1]}}',
        '{"peagle": {"rounds": 1, "draft_tokens": 3, "accepted_tokens": 1, "accepted_per_position": [null]}}',
        "[" * 100_000,
    ],
    ids=lambda event: event[-40:],
)
def test_what_is_no_number_of_tokens_is_in_no_figure(tmp_path, event):
    with fake_api() as api:
        status, result = bench(api, tmp_path, **custom(tmp_path, "good", f"event {event}"))
    row = result["results"]["rows"][0]
    assert (status, row["failures"]) == (FAILED_STATUS, {"unreadable answer": 1})
    assert row["output_tokens"] == len(TOKENS)


def test_half_a_character_and_colours_of_a_server_spoil_neither_file_nor_terminal(tmp_path, capsys):
    half = 'event {"choices": [{"index": 0, "delta": {"content": "\\ud800"}, "finish_reason": "stop"}]}'
    error = 'event {"error": {"message": "red \\u001b[31m \\ud800"}}'
    with fake_api() as api:
        _, result = bench(api, tmp_path, **custom(tmp_path, half, error), save_detailed=True)
    first, second = result["results"]["requests"]
    assert first["text"].startswith("one \ud800")
    assert second["detail"].split() == ["red", "[31m"]
    assert "\x1b" not in capsys.readouterr().out


def test_requests_are_not_sent_on_to_where_a_server_moved(tmp_path):
    with fake_api() as api:
        _, result = bench(api, tmp_path, **custom(tmp_path, "status 307"))
    (request,) = result["results"]["requests"]
    assert request["failure"] == "HTTP 307"
    assert request["detail"] == f"moved to {api.url}/v1/completions: give that server with --base-url"
    assert len(api.bodies) == 1


def test_every_request_fails(tmp_path, capsys):
    with fake_api(metrics=False) as api:
        status, result = bench(api, tmp_path, **custom(tmp_path, "status 503", "status 503"))
    assert status == FAILED_STATUS
    assert result["results"]["rows"][0]["failures"] == {"HTTP 503": 2}
    assert render_block("serve-x", result).splitlines()[2].endswith("| – | – | – | – | – | 0 | 2 |")
    shown = capsys.readouterr().out
    assert "no request was completed" in shown
    assert "TTFT" not in shown


def test_a_server_without_usage(tmp_path):
    with fake_api() as api:
        _, result = bench(api, tmp_path, **custom(tmp_path, "no usage"))
    row = result["results"]["rows"][0]
    assert (row["tokens_from"], row["output_tokens"]) == ("chunks", len(TOKENS))


def test_completions_and_random_tokens(tmp_path):
    with fake_api() as api:
        bench(api, tmp_path, **custom(tmp_path, "plain"), backend="openai")
        bench(api, tmp_path, dataset_name="random", num_prompts=2, random_input_len=5)
        assert [body["prompt"] for body in api.bodies[:1]] == ["plain"]
        assert [len(body["prompt"]) for body in api.bodies[1:]] == [5, 5]
        with pytest.raises(PeagleError, match="random tokens are no conversation"):
            bench(api, tmp_path, dataset_name="random", backend="openai-chat")


def test_the_server_is_asked_first(tmp_path):
    with fake_api(models=("a", "b"), key="secret") as api:
        ask = custom(tmp_path, "x")
        with pytest.raises(PeagleError, match=r"refuses the key \(HTTP 401\): give --api-key"):
            bench(api, tmp_path, **ask)
        with pytest.raises(PeagleError, match="serves a, b: choose one with --model"):
            bench(api, tmp_path, **ask, api_key="secret")
        with pytest.raises(PeagleError, match=r"model 'c' is not served at .*: there is a, b"):
            bench(api, tmp_path, **ask, api_key="secret", model="c")
        assert not api.bodies
        status, result = bench(api, tmp_path, **ask, api_key="secret", model="b")
        assert status == 0
        assert api.bodies[0]["model"] == "b"
    assert "secret" not in json.dumps(result)
    with pytest.raises(PeagleError, match=r"no server answers at .*peagle serve MODEL.*--base-url"):
        bench(api, tmp_path, **ask, api_key="secret")


def test_random_prompts_that_the_server_cannot_take(tmp_path):
    sizes = {"dataset_name": "random", "num_prompts": 1, "random_input_len": 90}
    with fake_api(max_model_len=100) as api:
        with pytest.raises(
            PeagleError, match=r"prompts of 90 tokens and answers of 11 exceed the 100 .*--random-input-len"
        ):
            bench(api, tmp_path, **sizes, random_output_len=11)
        assert not api.bodies
        assert bench(api, tmp_path, **sizes, random_output_len=10)[0] == 0


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_sent(tmp_path):
    (tmp_path / "file").write_text("")
    for asked in ({"save_result": True}, {"save_detailed": True}, {"result_filename": "x.json"}):
        config = BenchServeConfig(base_url="http://127.0.0.1:9", result_dir=str(tmp_path / "file"), **asked)
        with pytest.raises(PeagleError, match=r"cannot write the result .*choose a folder you may write to"):
            run_bench_serve(config, QUIET)


def test_the_file_is_there_before_the_report(tmp_path, monkeypatch):
    """What is slow, such as imports, was done before the load; nothing stands between the load and its file."""
    there, asked = [], []

    def provenance():
        asked.append(len(api.bodies))
        return {"machine": {}, "versions": {}}

    monkeypatch.setattr("peagle.bench.serve.provenance", provenance)
    monkeypatch.setattr("peagle.bench.report.provenance", lambda: pytest.fail("asked again"))
    monkeypatch.setattr(
        "peagle.bench.serve_view.print_report", lambda *_: there.append((tmp_path / "out.json").exists())
    )
    before = signal.getsignal(signal.SIGINT)
    with fake_api() as api:
        assert bench(api, tmp_path, **custom(tmp_path, "x"))[0] == 0
    assert (there, asked) == ([True], [0])
    assert signal.getsignal(signal.SIGINT) is before


def test_the_report_explains_what_it_shows(tmp_path, capsys):
    with fake_api(metrics=False) as api:
        bench(api, tmp_path, **custom(tmp_path, "x"), percentile_metrics=("ttft",), tokenizer="org/model")
    shown = capsys.readouterr().out
    assert "TTFT: time to first token" in shown
    assert "p95, p99: of 1 requests that is hardly more than the slowest one" in shown
    for absent in ("TPOT", "goodput", "failures:", "accepted drafts / rounds"):
        assert absent not in shown


def test_what_is_no_api(tmp_path):
    with fake_api() as api, pytest.raises(PeagleError, match="/v1/models answers HTTP 404"):
        bench(api, tmp_path, **custom(tmp_path, "x"), **{"base_url": api.url + "/elsewhere"})


def test_names_of_models_that_are_none(tmp_path):
    with fake_api(models=(5,)) as api, pytest.raises(PeagleError, match="is no list of models"):
        bench(api, tmp_path, **custom(tmp_path, "x"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\ud800", "a\nb"], ids=["nul", "long", "half", "lines"])
def test_any_name_of_a_model_makes_the_name_of_a_file(tmp_path, name):
    with fake_api(models=(name,)) as api:
        bench(api, tmp_path, **custom(tmp_path, "x"), result_filename=None, save_result=True)


def test_a_failed_warm_up_stops_the_run(tmp_path):
    with fake_api() as api, pytest.raises(PeagleError, match=r"warm-up request failed \(HTTP 500: as you wish\)"):
        bench(api, tmp_path, **custom(tmp_path, "status 500"), num_warmups=1)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("peagle.bench.serve.find_spec", lambda name: None)
    with pytest.raises(PeagleError, match=r"pip install 'peagle\[bench\]'"):
        run_bench_serve(BenchServeConfig(), QUIET)


def test_requests_arrive_at_the_rate(tmp_path):
    with fake_api() as api:
        start = time.perf_counter()
        _, result = bench(api, tmp_path, **custom(tmp_path, *"abcdefghij"), request_rate=20.0, burstiness=100.0)
    assert 0.35 < result["results"]["rows"][0]["seconds"] < time.perf_counter() - start
    assert result["settings"]["request_rate"] == 20.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_what_there_is(tmp_path, number):
    """Without --save-result too: the folder is where the command runs."""
    custom(tmp_path, "good", "good", "status 500", "hang", "never")
    with fake_api() as api:
        command = [
            sys.executable, "-m", "peagle", "bench", "serve", "--base-url", api.url, "--dataset-name", "custom",
            "--dataset-path", "prompts.jsonl", "--disable-shuffle", "--max-concurrency", "1",
        ]  # fmt: skip
        running = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        until = time.perf_counter() + 60
        while len(api.bodies) < 4:
            assert time.perf_counter() < until
            assert running.poll() is None
            time.sleep(0.01)
        for _ in range(5):  # impatience does not lose the result
            os.kill(running.pid, number)
            time.sleep(0.02)
        _, errors = running.communicate(timeout=60)
    assert running.returncode in (128 + number, -number)  # the last ones may come as the interpreter ends
    assert "Traceback" not in errors
    [path] = tmp_path.glob("serve-tiny-custom-*.json")
    assert f"partial results: {path.name}" in errors
    result = read_result(path)
    row = result["results"]["rows"][0]
    assert row["partial"]
    assert result["settings"]["stopped_by"] == number.name
    counts = ("completed", "failed", "unfinished", "not_sent")
    assert [row[name] for name in counts] == [2, 1, 1, 1]


def signalled_in(stage, folder, number, *more):
    """(status, stderr) of a run that gets a signal while the server holds its requests of a stage back."""
    custom(folder, "hang", "good")
    with fake_api() as api:
        command = [
            sys.executable, "-m", "peagle", "bench", "serve", "--base-url", api.url, "--dataset-name", "custom",
            "--dataset-path", "prompts.jsonl", "--disable-shuffle", "--max-concurrency", "1",
            "--result-filename", "out.json", *more,
        ]  # fmt: skip
        if stage == "boot":
            api.stalled = "/version"
        running = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
        until = time.perf_counter() + 60
        while not (api.waiting if stage == "boot" else api.bodies):
            assert time.perf_counter() < until
            assert running.poll() is None
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(running.pid, number)
        _, errors = running.communicate(timeout=60)
    assert "Traceback" not in errors
    return running.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["boot", "warm-up"])
def test_a_signal_before_the_load_ends_the_run_with_its_own_status(tmp_path, stage, number):
    status, errors = signalled_in(stage, tmp_path, number, "--num-warmups", "1")
    assert status in ((128 + number,) if stage == "warm-up" else (128 + number, -number))  # 143 either way for a shell
    assert ("peagle: interrupted" in errors) == (number == signal.SIGINT)
    assert not (tmp_path / "out.json").exists()


def test_a_run_that_measures_nothing_takes_no_result_s_place(tmp_path):
    (tmp_path / "out.json").write_text("of a run before")
    status, errors = signalled_in("load", tmp_path, signal.SIGTERM)
    assert status == 143
    assert "no request has ended: out.json stays as it was" in errors
    assert (tmp_path / "out.json").read_text() == "of a run before"


def test_a_result_that_is_replaced_is_named(tmp_path):
    console = Console(file=io.StringIO(), width=40)
    path = tmp_path / "out.json"
    with fake_api() as api:
        config = {"base_url": api.url, "result_dir": str(tmp_path), **custom(tmp_path, "x")}
        for _ in range(2):
            assert "takes its place" not in console.file.getvalue()
            assert run_bench_serve(BenchServeConfig(**config, result_filename="out.json"), console) == 0
    assert f"{path} exists: what this run measures takes its place" in console.file.getvalue()
    assert read_result(path)["results"]["rows"]


def test_the_announcements_command_lines(tmp_path):
    with fake_api(models=("openai/gpt-oss-20b",)) as api:
        variables = {"MODEL": "openai/gpt-oss-20b", "BASE_URL": api.url, "F": str(tmp_path / "prompts.jsonl")}
        custom(tmp_path, "a", "b")
        lines = [
            "peagle bench serve --dataset-name hf --dataset-path philschmid/mt-bench --num-prompts 80 "
            "--max-concurrency 1 --model $MODEL --base-url $BASE_URL --temperature 0.0 --hf-output-len 2048",
            "peagle bench serve --dataset-name custom --dataset-path $F --num-prompts 2 --max-concurrency 1 "
            "--model $MODEL --base-url $BASE_URL --temperature 0.0 --custom-output-len 2048",
        ]
        for line, count in zip(lines, (80, 2)):
            api.bodies.clear()
            script = line.replace("peagle", f"{sys.executable} -m peagle", 1)
            ran = subprocess.run(script, shell=True, env=environment(**variables), capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
            assert f"{count} of {count} requests" in ran.stdout
            assert len(api.bodies) == count
            assert {(body["max_tokens"], body["temperature"]) for body in api.bodies} == {(2048, 0.0)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"goodput": "ttft:100 ttft:5"}, "goodput has ttft twice"),
        ({"request_rate": 1e-200, "burstiness": 1e-200}, "leaves years between requests"),
    ],
)
def test_settings_that_make_no_load(settings, message):
    with pytest.raises(PeagleError, match=message):
        BenchServeConfig(**settings)


def test_an_ipv6_host_stands_in_brackets():
    assert (
        BenchServeConfig(host="::1", port=80).server
        == BenchServeConfig(host="[::1]", port=80).server
        == "http://[::1]:80"
    )


def test_a_password_in_the_url_stays_out_of_the_result(tmp_path, monkeypatch):
    with fake_api() as api:
        url = api.url.replace("http://", "http://me:hush@")
        monkeypatch.setattr("sys.argv", ["peagle", "bench", "serve", "--base-url", url])
        status, result = bench(api, tmp_path, **custom(tmp_path, "a question"), base_url=url)
    assert status == 0
    assert "hush" not in json.dumps(result)
