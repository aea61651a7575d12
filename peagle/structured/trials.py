"""Trials of grammars in processes that can be stopped: a schema of a few lines can take hours and all memory.

One process stands ready, with xgrammar and the vocabulary loaded, and knows no work but to fork: each trial runs in a
child of its own, under limits of time and memory which the kernel keeps, and is gone afterwards. So one that hangs
costs nobody else anything, and nothing has to be loaded again. The ready process ends, its children with it, when the
socket to it closes, however the server came to its end.

Run as a module, this file is the ready process.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from peagle.errors import NoMemory, PeagleError, Unavailable, one_line

if TYPE_CHECKING:
    from peagle.structured.vocabulary import Vocabulary

TRIAL_SECONDS = 10.0
TRIAL_BYTES = 2**30
_START_SECONDS = 60.0  # to load xgrammar, which loads torch
_END_SECONDS = 1.0  # of a process that has closed its sockets
_GRACE_SECONDS = 2.0  # past its limit, for a machine that is busy
_NICENESS = 5  # the engine goes first
_BEGUN = b"+"


class Trials:
    """Tries out grammars of a vocabulary, several at once, from any thread. Begins with `start` or the first trial;
    close it, or use it in a `with` statement."""

    def __init__(
        self, vocabulary: "Vocabulary", *, seconds: float = TRIAL_SECONDS, max_bytes: int = TRIAL_BYTES
    ) -> None:
        """A trial may take `seconds` and `max_bytes` more than the process begins with."""
        self._vocabulary, self._seconds, self._max_bytes = vocabulary, seconds, max_bytes
        self._lock = threading.Lock()  # guards the next three
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the ready process, which leads the group of all; None before the start and after the end."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the ready process unless it runs, and wait for nothing. If that fails, a trial tries again."""
        with self._lock, suppress(OSError):
            self._started()

    def run(self, kind: str, form: str) -> None:
        """Compile a structural format, JSON text, and try it out; PeagleError that says what is wrong with the `kind`,
        Unavailable where no process can be started, or all are ended."""
        with self._child() as child:
            began = time.monotonic()
            child.settimeout(self._seconds + _GRACE_SECONDS)
            try:
                child.sendall(json.dumps([kind, form]).encode())
                child.shutdown(socket.SHUT_WR)
                answer = _received(child)
            except OSError:
                answer = b""
            took = time.monotonic() - began
        if self._closed:
            raise Unavailable("the server is shutting down: send the request to another one, or later")
        if not answer:
            raise PeagleError(f"{kind} {self._why(took)}: use a simpler one")
        error = json.loads(answer)
        if error is not None:
            raise PeagleError(error)

    def close(self) -> None:
        """End all processes at once."""
        with self._lock:
            self._closed = True
            self._end()

    def _why(self, took: float) -> str:
        """Which limit ended a trial that says nothing any more."""
        if took >= self._seconds:
            return f"takes more than {self._seconds:g} seconds to compile"
        return f"takes more than {self._max_bytes / 2**20:,.0f} MiB of memory to compile, or crashes the compiler"

    def _child(self) -> socket.socket:
        """A connection to a process that waits for its trial."""
        for _ in range(2):  # the ready process may have been ended from outside
            ours, theirs = socket.socketpair()
            with theirs, suppress(OSError):
                with self._lock:
                    socket.send_fds(self._started(), [b"."], [theirs.fileno()])
                theirs.close()
                ours.settimeout(_START_SECONDS)
                if ours.recv(1) == _BEGUN:
                    return ours
            ours.close()
            self._forget_if_ended()
        raise Unavailable("no process can be started to compile grammars in: send the request later")

    def _started(self) -> socket.socket:
        """The socket to the ready process."""
        if self._closed:
            raise Unavailable("the server is shutting down: send the request to another one, or later")
        if self._control is None:
            vocabulary = self._vocabulary
            setup = {
                "info": vocabulary.info.serialize_json(), "vocab_size": vocabulary.vocab_size,
                "stop_ids": vocabulary.stop_ids, "seconds": self._seconds, "max_bytes": self._max_bytes,
            }  # fmt: skip
            ours, theirs = socket.socketpair()
            with theirs, tempfile.TemporaryFile() as given:
                given.write(json.dumps(setup).encode())
                given.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is not for it, and its group can be ended as one
                )
            self._control = ours
        return self._control

    def _forget_if_ended(self) -> None:
        """Where the ready process is gone, have the next trial start another; others' trials go on where it is not."""
        with self._lock, suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(_END_SECONDS)
                self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._control = self._process = None


def _environment() -> dict[str, str]:
    """One thread, no GPU, and modules from where this process has them."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return {**os.environ, **alone}


def _received(connection: socket.socket) -> bytes:
    """All that comes before the other side closes or ends."""
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def _serve(control: socket.socket) -> None:
    """The ready process: a child for each connection that comes, until the server is gone."""
    setup = json.load(sys.stdin)
    import xgrammar

    from peagle.structured.vocabulary import Vocabulary

    info = xgrammar.TokenizerInfo.deserialize_json(setup["info"])
    vocabulary = Vocabulary(info, setup["vocab_size"], setup["stop_ids"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)
        for descriptor in descriptors:
            with socket.socket(fileno=descriptor) as connection, suppress(OSError):  # no memory for a fork
                if os.fork() == 0:
                    _try(connection, vocabulary, setup["seconds"], setup["max_bytes"])


def _try(connection: socket.socket, vocabulary: "Vocabulary", seconds: float, max_bytes: int) -> None:
    """The child: one trial, then the end. It says nothing if it ran out of memory, or time."""
    try:
        os.nice(_NICENESS)
        _limit_memory(max_bytes)
        connection.sendall(_BEGUN)
        kind, form = json.loads(_received(connection))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, whatever it is doing
        error = None
        try:
            vocabulary.try_out(vocabulary.compile(kind, form), kind)
        except (MemoryError, NoMemory):
            os._exit(1)
        except PeagleError as refused:
            error = str(refused)
        except Exception as broken:
            error = f"{kind} cannot be compiled ({one_line(broken)}): use another one"
        connection.sendall(json.dumps(error).encode())
    finally:
        os._exit(0)


def _limit_memory(max_bytes: int) -> None:
    """Limit this process to so much more address space than it has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/statm") as file:  # Linux has it
        taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + max_bytes, taken + max_bytes))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
