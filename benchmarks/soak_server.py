"""The server that `benchmarks.soak` runs: a process, what it holds, and what its metrics say."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common import ROOT
from peagle.errors import PeagleError

_START_SECONDS = 300.0
_LISTENING = re.compile(r"listening at (\S+)/v1, model (.+)")


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at one moment. Megabytes are of 2^20 bytes."""

    seconds: float
    rss_mib: float
    gpu_mib: float | None
    threads: int
    files: int  # open descriptors, connections among them


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; `process` is None where somebody else started it."""

    url: str
    process: subprocess.Popen[bytes] | None
    began: float

    def held(self) -> Held | None:
        """What it holds now; None where that cannot be said."""
        if self.process is None or not (folder := Path(f"/proc/{self.process.pid}")).is_dir():
            return None
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return Held(
            seconds=time.perf_counter() - self.began,
            rss_mib=int(status["VmRSS"].split()[0]) / 1024,
            gpu_mib=_gpu_mib(self.process.pid),
            threads=int(status["Threads"]),
            files=len(list((folder / "fd").iterdir())),
        )

    def metrics(self) -> dict[str, float]:
        """Every metric by its name, those that differ by labels only added up."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line and not line.startswith("#"):
                name, value = re.split(r"[ {]", line, maxsplit=1)[0], line.rsplit(" ", 1)[1]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def wait_idle(self, seconds: float = 30.0) -> dict[str, float]:
        """The metrics once nothing runs, or after `seconds`."""
        until = time.perf_counter() + seconds
        while (now := self.metrics())["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] > 0:
            if time.perf_counter() > until:
                break
            time.sleep(0.1)
        return now


@contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator[tuple[Server, str]]:
    """(server, name of its model) of a `peagle serve` with these arguments; it is ended afterwards."""
    command = [sys.executable, "-m", "peagle", "serve", *arguments, "--port", "0"]
    # In a session of its own: Ctrl-C ends the load early, not the server.
    with (
        log.open("wb") as stderr,
        subprocess.Popen(command, stderr=stderr, cwd=ROOT, start_new_session=True) as process,
    ):
        try:
            until = time.perf_counter() + _START_SECONDS
            while not (found := _LISTENING.search(log.read_text(errors="replace"))):
                if process.poll() is not None or time.perf_counter() > until:
                    last = " ".join(log.read_text(errors="replace").splitlines()[-1:])
                    raise PeagleError(f"the server did not start ({last}): run `peagle serve` by hand to see why")
                time.sleep(0.1)
            yield Server(found[1], process, time.perf_counter()), found[2].strip()
        finally:
            process.kill()


def end(server: Server, seconds: float = 60.0) -> int | None:
    """Ask the server to end and return its exit status; None where it is not ours."""
    if server.process is None:
        return None
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(seconds)


class Watch:
    """Samples what a server holds, in a thread."""

    def __init__(self, server: Server, interval: float) -> None:
        self.samples: list[Held] = []
        self._server, self._interval = server, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            if (held := self._server.held()) is not None:
                self.samples.append(held)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def slope(samples: Sequence[tuple[float, float]]) -> float | None:
    """Units per minute of (seconds, units) by least squares over the later half; None for fewer than three samples."""
    if not samples:
        return None
    middle = (samples[0][0] + samples[-1][0]) / 2
    later = [sample for sample in samples if sample[0] >= middle]
    if len(later) < 3:
        return None
    mean_x, mean_y = (sum(column) / len(later) for column in zip(*later, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in later)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in later) / spread if spread else None


def new_log() -> Path:
    """A file for the server's stderr, outside the repository."""
    return Path(tempfile.mkdtemp(prefix="peagle-soak-")) / "server.log"


def _gpu_mib(pid: int) -> float | None:
    """GPU memory of a process; where the driver does not tell processes apart, what is in use on the first GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    own = [row.split(", ") for row in _ask(tool, "--query-compute-apps=pid,used_memory")]
    mib = [used for owner, used in own if owner == str(pid)] or _ask(tool, "--query-gpu=memory.used", "--id=0")
    return float(mib[0]) if mib and mib[0].isdigit() else None


def _ask(tool: str, *query: str) -> list[str]:
    ran = subprocess.run([tool, *query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    return ran.stdout.splitlines() if ran.returncode == 0 else []
