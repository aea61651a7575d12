"""train.jsonl on a disk that fills up: no line is lost, none is torn."""

import errno
import json
import os
from pathlib import Path

import pytest

from peagle.training.log_file import LogFile


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.fixture
def disk(monkeypatch):
    """A disk that, while `disk["full"]`, takes 7 bytes of a write and then fails."""
    state, real = {"full": False}, Path.open

    class Full:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.stream.__enter__()
            return self

        def __exit__(self, *exception):
            self.stream.__exit__(*exception)

        def fileno(self):
            return self.stream.fileno()

        def write(self, data):
            self.stream.write(data[:7])
            self.stream.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(self, mode="r", *arguments, **named):
        stream = real(self, mode, *arguments, **named)
        return Full(stream) if state["full"] and "a" in mode else stream

    monkeypatch.setattr(Path, "open", opened)
    return state


def test_lines_wait_for_a_disk_that_is_full(tmp_path, disk):
    log = LogFile(tmp_path / "train.jsonl", keep_to_step=0)
    log.append({"step": 1})
    disk["full"] = True
    log.append({"step": 2})
    log.append({"step": 3})
    assert (log.problem, log.waiting) == (os.strerror(errno.ENOSPC), 2)
    assert log.path.read_bytes().startswith(b'{"step": 1}\n'), "what was whole stays"
    disk["full"] = False
    log.append({"step": 4})
    assert (log.problem, log.waiting) == (None, 0)
    assert steps(log.path) == [1, 2, 3, 4]


def test_a_torn_line_is_gone_after_a_restart(tmp_path, disk):
    log = LogFile(tmp_path / "train.jsonl", keep_to_step=0)
    log.append({"step": 1})
    disk["full"] = True
    log.append({"step": 2})
    disk["full"] = False
    resumed = LogFile(log.path, keep_to_step=1)
    assert resumed.kept == [{"step": 1}]
    resumed.append({"step": 2})
    assert steps(log.path) == [1, 2]


def test_lines_of_steps_that_run_again_are_dropped(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    log = LogFile(path, keep_to_step=2)
    log.append({"step": 3, "loss": 1.0})
    assert steps(path) == [1, 2, 3]


def test_a_file_that_cannot_be_opened_is_a_problem_and_no_error(tmp_path):
    log = LogFile(tmp_path / "missing" / "train.jsonl", keep_to_step=0)
    log.append({"step": 1})
    assert log.problem == os.strerror(errno.ENOENT)
    log.path.parent.mkdir()
    log.flush()
    assert steps(log.path) == [1]
