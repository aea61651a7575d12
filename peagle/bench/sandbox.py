"""Run programs that a model wrote, each in a process of its own that can do little; see `sandbox_child.py`.

The confinement guards the machine against programs that go wrong. It is no judge of programs written to deceive a test
they share a process with.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from peagle.errors import PeagleError

SECONDS = 10  # of CPU time, and of waiting
MEMORY = 1 << 30  # bytes of address space
PASSED, FAILED, TIMED_OUT, KILLED = "passed", "failed", "timed out", "killed"
_CHILD = Path(__file__).with_name("sandbox_child.py")
_SECRET_BYTES = 16


def confinement() -> str:
    """What holds a program here, for people. Raises PeagleError where there is nothing that could."""
    return {
        "filter": f"a system call filter (no network, no writing, no processes), {SECONDS} s and {MEMORY >> 20} MiB",
        "limits": f"limits alone ({SECONDS} s, {MEMORY >> 20} MiB): it can write files and use the network, so do "
        "this in a container",
    }[_mode()]


def run_programs(programs: Sequence[str], *, seconds: int = SECONDS, memory: int = MEMORY) -> list[str]:
    """What became of every program: passed, failed, timed out or killed. As many run at once as there are cores."""
    mode = _mode()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(lambda program: _run(program, mode, seconds, memory), programs))


def _run(program: str, mode: str, seconds: int, memory: int) -> str:
    secret = secrets.token_hex(_SECRET_BYTES).encode()
    # Files, not pipes: nothing has to be read while it runs, and their size is limited.
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryDirectory(prefix="peagle-run-") as folder,
    ):
        given.write(secret + b"\n" + program.encode("utf-8", errors="replace"))
        given.seek(0)
        process = subprocess.Popen(
            [*_command(mode), str(seconds), str(memory)],
            stdin=given,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of its own, to be killed as one
        )
        try:
            status = process.wait(timeout=seconds + 2)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer.seek(0)
        if status == 0 and answer.read(len(secret) + 1) == secret:
            return PASSED
    if status in (-signal.SIGXCPU, -signal.SIGKILL):  # the soft limit of CPU time, or the hard one
        return TIMED_OUT
    return KILLED if status < 0 else FAILED


def _mode() -> str:
    if os.name != "posix":
        raise PeagleError("programs can be run on Linux and macOS only: mark HumanEval there, or leave it out")
    probe = subprocess.run([*_command("probe"), "0", "0"], capture_output=True, text=True, timeout=60)
    if probe.stdout not in ("filter", "limits"):
        raise PeagleError(f"programs cannot be run here: {probe.stderr.strip()[-200:] or 'the probe said nothing'}")
    return probe.stdout


def _command(mode: str) -> list[str]:
    return [sys.executable, "-I", "-B", str(_CHILD), mode]
