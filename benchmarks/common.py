"""What the benchmark scripts share: prompt suites, where the shipped head is, flags, and how a script ends."""

import argparse
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.bench.prompt_sets import SHIPPED_SETS, find_set
from peagle.bench.report import check_result_path
from peagle.errors import PeagleError
from peagle.exits import INTERRUPTED_STATUS, USER_ERROR_STATUS, explain
from peagle.prompt_file import read_prompts

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
HEAD = ROOT / "heads" / "smollm2-135m-instruct-p-eagle"
RESULTS = ROOT / "benchmarks" / "results"
MODEL = "smollm2-135m"
SUITES = SHIPPED_SETS

Conversation = list[dict[str, str]]


def first_turns(suite: str, limit: int | None = None) -> list[Conversation]:
    """The first user turn of every row of a suite, or of the prompts file of that path, as a conversation."""
    rows = read_prompts(find_set(suite))
    return [list(row.messages) for row in rows[:limit]]


def say_progress(done: int, total: int, begun: float, what: str = "") -> None:
    """On stderr: how much is done, and how long the rest takes at this pace. `begun` is of `time.perf_counter`."""
    spent = time.perf_counter() - begun
    left = spent / done * (total - done)
    said = f"[{done}/{total}, {spent:.0f} s, about {left:.0f} s left] {what}"
    print(said.rstrip(), file=sys.stderr, flush=True)


def command() -> str:
    """The command that is running, from the repository's root."""
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    return subprocess.list2cmdline(["python", "-m", module, *sys.argv[1:]])


def count(text: str) -> int:
    """A flag's whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: give a whole number of at least 1")
    return value


def amount(text: str) -> float:
    """A flag's finite number above 0, for argparse."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{value} is out of range: give a finite number above 0")
    return value


def check_out(out: Path, *, cpu: bool) -> None:
    """Raise PeagleError for a result that cannot be written, or that would take the place of a GPU's."""
    if cpu and out.parent.resolve() == RESULTS and "h200" in out.stem:
        raise PeagleError(f"the result {out.name} is of a GPU: for a run on the CPU give another --out")
    check_result_path(out)


def check_gpu(why: str) -> None:
    """Raise PeagleError where there is no GPU; `why` says what needs one, or what to do without."""
    import torch  # late: who only reads results needs none

    if not torch.cuda.is_available():
        raise PeagleError(f"no CUDA GPU here: {why}")


def captured(call: Callable[[int], object], calls: int) -> "torch.cuda.CUDAGraph":
    """A CUDA graph of `calls` calls, each told its number; all are made before, to be compiled.

    That is on the current stream, unlike what torch recommends: kernels on a second one make all graphs slower from
    then on (`capturing`)."""
    import torch

    from peagle.engine.graphs import capturing

    def body() -> None:
        for i in range(calls):
            call(i)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, None, _capture_stream()):
        body()
    return graph


@cache
def _capture_stream() -> "torch.cuda.Stream":
    """The same for all captures: cuBLAS keeps memory for each stream."""
    import torch

    return torch.cuda.Stream()


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def run_script(main: Callable[[], object]) -> None:
    """Run a script: what the user can mend is one line and exit status 2, Ctrl-C is 130. SIGTERM ends it as well, with
    whatever it has started."""
    script = Path(sys.argv[0]).stem
    signal.signal(signal.SIGTERM, _end)
    try:
        main()
    except KeyboardInterrupt:
        print(f"\n{script}: interrupted; what was written until now is marked partial", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        print(f"{script}: {line}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
