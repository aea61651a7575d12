"""How scripts of benchmarks/ end: mistakes are one line, Ctrl-C keeps what there is, a GPU's results stay a GPU's."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import (
    attention,
    auto_k,
    common,
    decode_attention,
    graph_count,
    model_kernels,
    over_vllm,
    prompt_attention,
    savings,
    soak,
    step_kernels,
)
from benchmarks.common import RESULTS, amount, check_out, count, run_script
from peagle.bench.report import read_result
from peagle.errors import PeagleError


def test_numbers_of_flags():
    assert (count("3"), amount("0.5")) == (3, 0.5)
    for text in ("0", "-3"):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
            count(text)
    for text in ("0", "-1", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="finite number above 0"):
            amount(text)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (savings, ["--repeats", "0"]),
        (savings, ["--seconds", "nan"]),
        (auto_k, ["--concurrency", "4", "-1"]),
        (step_kernels, ["--batches", "0"]),
        (model_kernels, ["--keys", "0"]),
        (prompt_attention, ["--rows", "0"]),
        (soak, ["--minutes", "-1"]),
    ],
)
def test_numbers_that_cannot_be(script, flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    with pytest.raises(SystemExit):
        script._arguments()
    assert f"argument {flags[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("script", [savings, auto_k, step_kernels, model_kernels, prompt_attention])
def test_a_run_on_the_cpu_takes_no_gpu_result_s_place(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu"])
    with pytest.raises(PeagleError, match=r"-h200\.json is of a GPU"):
        script._arguments()


@pytest.mark.parametrize("script", [attention, decode_attention, graph_count, model_kernels, step_kernels])
def test_without_a_gpu_a_script_says_what_to_do(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--out", str(tmp_path / "a.json")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PeagleError, match=r"no CUDA GPU here: (run on one, or|what is timed is|there are no graphs)"):
        script._arguments()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert script._arguments().out == tmp_path / "a.json"


def test_where_a_result_can_go(tmp_path):
    check_out(RESULTS / "some-h200.json", cpu=False)
    check_out(tmp_path / "new" / "some-h200.json", cpu=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(PeagleError, match="cannot write the result"):
        check_out(tmp_path / "file" / "a.json", cpu=True)


def test_lengths_that_no_head_has(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a", "--device", "cpu", "--out", str(tmp_path / "a.json"), "--heads", "2", "8.5"])
    with pytest.raises(PeagleError, match=r"--heads has 8\.5: with 7 drafts a round, lengths are in 1 \.\. 8"):
        auto_k._arguments()


def test_a_server_that_is_not_there():
    with pytest.raises(PeagleError, match="names no model"):
        soak._elsewhere("http://127.0.0.1:1/v1")


@pytest.fixture
def signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PeagleError("no GPU: use one"), 2, "script: no GPU: use one\n"),
        (
            FileNotFoundError(2, "No such file", "a.json"),
            2,
            "script: cannot use a.json: No such file; check the path\n",
        ),
        (KeyboardInterrupt(), 130, "\nscript: interrupted; what was written until now is marked partial\n"),
    ],
)
def test_how_a_script_ends(error, status, said, monkeypatch, capsys):
    def main():
        raise error

    monkeypatch.setattr(sys, "argv", ["benchmarks/script.py"])
    with pytest.raises(SystemExit) as ended:
        run_script(main)
    assert (ended.value.code, capsys.readouterr().err) == (status, said)


@pytest.mark.usefixtures("signals")
def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_script(lambda: 1 / 0)


def test_comparing_with_vllm_refuses_other_files(tmp_path, monkeypatch):
    other, mine, theirs = (tmp_path / name for name in ("other.json", "mine.json", "theirs.json"))
    head = {"created": "2026", "machine": {}, "versions": {}}
    row = {"shape": "a", "concurrency": 1, "acceptance": "assumed", "tokens_per_second": 2.0}
    row |= {"method": "p-eagle", "num_speculative_tokens": 3}
    for path, partial, content in ((other, False, {"x": 1}), (mine, True, row), (theirs, False, row)):
        document = {**head, "name": path.stem, "settings": {"partial": partial}, "results": {"rows": [content]}}
        path.write_text(json.dumps(document))

    def compare(ours):
        flags = ["--ours", str(ours), "--theirs", str(theirs), "--out", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", ["over_vllm.py", *flags])
        over_vllm.main()

    with pytest.raises(PeagleError, match=r"other\.json is no result of engine_speed"):
        compare(other)
    compare(mine)
    result = read_result(tmp_path / "out.json")
    assert result["settings"]["partial"] is True
    assert result["settings"]["acceptance"].startswith("SYNTHETIC: ")
    assert result["results"]["rows"][0]["ratio"] == 1.0
    theirs.write_text(theirs.read_text().replace('"concurrency": 1', '"concurrency": 2'))
    with pytest.raises(PeagleError, match="nothing to compare"):
        compare(mine)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_a_partial_result(number, status, tmp_path):
    out = tmp_path / "auto.json"
    flags = ["--device", "cpu", "--shapes", "tiny", "--concurrency", "1", "--heads", "2", "--output-tokens", "8"]
    command = [sys.executable, "-m", "benchmarks.auto_k", *flags, "--repeats", "10000", "--out", str(out)]
    where = {**os.environ, "PYTHONPATH": str(common.ROOT)}
    process = subprocess.Popen(command, cwd=common.ROOT, env=where, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not out.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status, said
    assert "Traceback" not in said
    if number == signal.SIGINT:
        assert said.endswith("auto_k: interrupted; what was written until now is marked partial\n")
    assert read_result(out)["settings"]["partial"] is True
