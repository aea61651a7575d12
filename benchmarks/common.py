"""What the benchmark scripts share: prompt suites, where the shipped head is, and the command line as a record."""

import subprocess
import sys
import time
from pathlib import Path

from peagle.bench.prompt_sets import SHIPPED_SETS, find_set
from peagle.prompt_file import read_prompts

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
