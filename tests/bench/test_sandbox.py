"""Programs that go wrong, or try to pass without coming to their end, are contained and counted as failed."""

import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import pytest

from peagle.bench import sandbox_child
from peagle.bench.sandbox import FAILED, KILLED, PASSED, TIMED_OUT, confinement, run_programs

HAS_FILTER = "filter" in confinement()
needs_filter = pytest.mark.skipif(not HAS_FILTER, reason="the kernel has no system call filter")
MEMORY = 1 << 29


def run(*programs):
    return run_programs(programs, seconds=1, memory=MEMORY)


def test_programs_run_to_their_end_or_fail():
    assert run("assert 1 + 1 == 2", "assert False", "def (", "raise KeyboardInterrupt", "import math, typing, re") == [
        PASSED,
        FAILED,
        FAILED,
        FAILED,
        PASSED,
    ]


@pytest.mark.parametrize(
    "program",
    [
        "print('passed'); import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.write(1, b'passed'); os._exit(0)",
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'passed' * 999)\n  except OSError: pass\nos._exit(0)",
        "raise SystemExit(0)",
        "import atexit, os; atexit.register(print, 'passed'); exit()",
    ],
)
def test_nothing_stands_in_for_the_end(program):
    assert run(program) == [FAILED]


def test_time_memory_and_output_are_limited():
    began = time.monotonic()
    assert run("while True: pass", "import time; time.sleep(60)") == [TIMED_OUT, TIMED_OUT]
    assert run("while True: print('x' * 10**6)") == [TIMED_OUT]
    assert time.monotonic() - began < 40
    assert run("x = bytearray(8 << 30)") == [FAILED]
    assert run("x = []\nwhile True: x.append(bytearray(1 << 20))")[0] in (FAILED, TIMED_OUT, KILLED)
    assert run("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()")[0] in (FAILED, TIMED_OUT, KILLED)


@needs_filter
@pytest.mark.parametrize(
    "attack",
    [
        "import os; os.fork()",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: raise SystemExit",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/sh', ['sh', '-c', 'true'])",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.setsid()",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
        "open('here', 'w')",
        "import os; os.mkdir('here')",
        "import os; os.open(os.devnull, os.O_RDWR)",
        "import os; os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid()))",
        "import os; os.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0))",
        "import socket; socket.sethostname(socket.gethostname()) if socket.gethostname() else exit()",
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getpid())",  # SIGIO would end another process
        "import fcntl, os, struct; fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, os.getpid()))",  # F_SETOWN_EX
        "import fcntl, socket, struct; fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', 1))",  # FIOSETOWN
        "import ctypes, os; assert ctypes.CDLL(None).syscall(437, -100, b'x', 0, 0) >= 0",  # openat2
    ],
)
def test_what_a_test_does_not_need_is_refused(attack):
    assert run(attack) == [FAILED]


@needs_filter
def test_no_file_of_others_is_touched(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("kept")
    attacks = [
        f"open({str(mine)!r}, 'w').write('gone')",
        f"open({str(mine)!r}, 'a').write('more')",
        f"import os; os.unlink({str(mine)!r})",
        f"import os; os.rename({str(mine)!r}, {str(tmp_path / 'other')!r})",
        f"import os; os.chmod({str(mine)!r}, 0)",
        f"import os; os.truncate({str(mine)!r}, 0)",
        f"import os; os.symlink('/', {str(tmp_path / 'link')!r})",
        f"import os; os.utime({str(mine)!r}, (0, 0))",
    ]
    assert run(*attacks) == [FAILED] * len(attacks)
    assert mine.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [mine]
    assert run(f"assert open({str(mine)!r}).read() == 'kept'; import json, decimal") == [PASSED]


def test_folders_and_processes_are_gone_afterwards():
    before = set(Path(tempfile.gettempdir()).glob("peagle-run-*"))
    run("assert True", "while True: pass")
    assert set(Path(tempfile.gettempdir()).glob("peagle-run-*")) <= before


def test_without_a_filter_the_limits_hold_and_the_warning_says_so(monkeypatch):
    monkeypatch.setattr("peagle.bench.sandbox._mode", lambda: "limits")
    assert "container" in confinement()
    assert run("assert True", "while True: pass", "x = bytearray(8 << 30)") == [PASSED, TIMED_OUT, FAILED]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_well_formed(machine):
    code = sandbox_child.filter_code(machine)
    assert len(code) < 4096
    returns = {sandbox_child._ALLOW, *(sandbox_child._ERROR | e for e in (1, 38))}
    for place, (operation, if_true, if_false, value) in enumerate(code):
        assert place + 1 + max(if_true, if_false) < len(code) or operation == sandbox_child._RETURN
        assert operation != sandbox_child._RETURN or value in returns
    assert code[-1] == (sandbox_child._RETURN, 0, 0, sandbox_child._ALLOW)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="numbers of another processor")
def test_the_numbers_are_those_of_this_kernel():
    headers = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not headers.is_file():
        pytest.skip("the kernel's headers are not installed")
    numbers = dict(line.split()[1:3] for line in headers.read_text().splitlines() if line.startswith("#define __NR_"))
    for name, (number, _) in sandbox_child._REFUSED.items():
        assert numbers.get(f"__NR_{name}", str(number)) == str(number), name
    assert os.O_WRONLY & sandbox_child._WRITES
