"""What the server takes of a core: streams and whole answers, many at once, over an engine that computes nothing.

The server runs in a process of its own (`benchmarks.instant_server`). A core's worth is events, or requests, divided by
the CPU seconds of that process: other work on the machine moves it less than what is counted per second. The client
reads now and then, all connections in turn, so that no chunk wakes it. Each of the settings is measured once per
repeat, in turn, and the repeat with the least CPU counts. Hardware: any with 2 cores; six minutes.

    python -m benchmarks.server_speed
"""

import argparse
import json
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from benchmarks.common import RESULTS, ROOT, command, say_progress
from peagle.bench.report import write_result

SETTINGS = {
    "h11, nothing frozen": ("--h11", "--no-freeze"),
    "h11": ("--h11",),
    "httptools": (),
}
_READ_SECONDS, _PROBE_SECONDS = 0.004, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of the server. `step_ms` 0 is an engine that never keeps it waiting."""

    concurrency: int
    step_ms: float
    requests: int
    tokens: int  # of each request
    stream: bool = True
    tokens_per_round: int = 4


LOADS = (
    Load(concurrency=64, step_ms=15.0, requests=256, tokens=512),
    Load(concurrency=256, step_ms=40.0, requests=1024, tokens=256),
    Load(concurrency=256, step_ms=0.0, requests=1024, tokens=256),
    Load(concurrency=64, step_ms=0.0, requests=2048, tokens=1, stream=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """One load on one setting (result name `server-speed-cpu`)."""

    setting: str
    load: Load
    events: int
    seconds: float
    cpu_seconds: float  # of the server's process
    events_per_core: float  # for each CPU second
    requests_per_core: float
    tokens_per_core: float
    tokens_per_second: float
    requests_per_second: float
    health_ms_p50: float
    health_ms_max: float


@dataclass(slots=True)
class Connection:
    """One client, which asks again as soon as it is answered."""

    sock: socket.socket
    left: int  # requests to come
    tail: bytes = b""


@dataclass(slots=True)
class Probe:
    """Asks for /health while others stream."""

    url: str
    times: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask until it is over."""
        while not self.over.wait(_PROBE_SECONDS):
            began = time.perf_counter()
            urllib.request.urlopen(f"{self.url}/health").read()
            self.times.append(1000 * (time.perf_counter() - began))


def measure(setting: str, load: Load) -> SpeedRow:
    """Start a server, let it warm up, and put the load on it."""
    with _server(SETTINGS[setting], load) as port:
        url = f"http://127.0.0.1:{port}"
        drive(port, load, load.concurrency)
        probe, cpu, began = Probe(url), _cpu_seconds(url), time.perf_counter()
        thread = threading.Thread(target=probe.run)
        thread.start()
        try:
            events = drive(port, load, load.requests)
            seconds, cpu = time.perf_counter() - began, _cpu_seconds(url) - cpu
        finally:
            probe.over.set()
            thread.join()
    tokens, times = load.requests * load.tokens, sorted(probe.times)
    return SpeedRow(
        setting=setting, load=load, events=events, seconds=seconds, cpu_seconds=cpu, events_per_core=events / cpu,
        requests_per_core=load.requests / cpu, tokens_per_core=tokens / cpu, tokens_per_second=tokens / seconds,
        requests_per_second=load.requests / seconds, health_ms_p50=times[len(times) // 2], health_ms_max=times[-1],
    )  # fmt: skip


def drive(port: int, load: Load, requests: int) -> int:
    """Have `requests` answered, which the concurrency divides; the events that came."""
    asked = {"prompt": "Name three rivers.", "max_tokens": load.tokens, "ignore_eos": True, "stream": load.stream}
    body = json.dumps({**asked, "temperature": 0}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    request, events, open_ones = head.encode() + b"\r\n\r\n" + body, 0, load.concurrency
    with selectors.DefaultSelector() as selector:
        for _ in range(load.concurrency):
            sock = socket.create_connection(("127.0.0.1", port))
            connection = Connection(sock, requests // load.concurrency - 1)
            selector.register(sock, selectors.EVENT_READ, connection)
            sock.sendall(request)
        while open_ones:
            time.sleep(_READ_SECONDS)
            for key, _ in selector.select(0):
                connection = cast(Connection, key.data)
                data = connection.sock.recv(2**20)
                events += data.count(b"data: {")
                connection.tail = (connection.tail + data)[-8:]
                if not data:
                    raise RuntimeError("the server closed a connection")
                if not connection.tail.endswith(b"\r\n0\r\n\r\n" if load.stream else b"}"):
                    continue
                connection.tail = b""
                if connection.left:
                    connection.left -= 1
                    connection.sock.sendall(request)
                else:
                    selector.unregister(connection.sock)
                    connection.sock.close()
                    open_ones -= 1
    return events


@contextmanager
def _server(flags: Sequence[str], load: Load) -> Iterator[int]:
    own = ("--step-ms", str(load.step_ms), "--tokens-per-round", str(load.tokens_per_round))
    arguments = [sys.executable, "-m", "benchmarks.instant_server", *own, *flags]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield int(cast(IO[str], process.stdout).readline())
        finally:
            process.terminate()


def _cpu_seconds(url: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = re.search(r"^process_cpu_seconds_total (\S+)", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("the server's metrics have no CPU time: run it on Linux")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "server-speed-cpu.json")
    args = parser.parse_args()
    rows: list[SpeedRow] = []
    began, done = time.perf_counter(), 0
    for load in LOADS:
        measured: dict[str, list[SpeedRow]] = {setting: [] for setting in SETTINGS}
        for _ in range(args.repeats):
            for setting, tries in measured.items():
                tries.append(measure(setting, load))
                done += 1
                row = tries[-1]
                said = f"{setting}, c={load.concurrency}: {row.events_per_core:,.0f} events, "
                said += f"{row.requests_per_core:,.0f} requests a core, /health {row.health_ms_p50:.0f} ms"
                say_progress(done, len(LOADS) * len(SETTINGS) * args.repeats, began, said)
        rows += [min(tries, key=lambda row: row.cpu_seconds) for tries in measured.values()]
    settings = {
        "command": command(), "repeats": args.repeats, "chosen": "of the repeats the one with the least CPU time",
        "definition": "per core: divided by the CPU seconds of the server's process, its engine thread included",
    }  # fmt: skip
    write_result(args.out, args.out.stem, settings, {"rows": rows})
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
