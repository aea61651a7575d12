"""The same speeds from vLLM: same shapes, drafters, prompts and acceptance as benchmarks/engine_speed.py, same rows.

vLLM 0.25.1 runs in an environment of its own, because it pins its torch:

    python3.12 -m venv vllm-env && vllm-env/bin/pip install vllm==0.25.1
    python -m benchmarks.peer_vllm --python vllm-env/bin/python --out benchmarks/results/peer-vllm-h200.json

On a machine without a package index give --kit DIR instead: a folder whose `site` holds vLLM and what it imports, and
perhaps `modelinfos`, vLLM's cache of what its model classes can do, which spares it a minute. That vLLM then runs with
this interpreter and torch.

Every engine is a process. Booting takes vLLM about two minutes, mostly on one core, so --together engines boot at once;
then they measure one after the other while the others are stopped. Each has its own caches below --work. P-EAGLE runs
on vLLM's V1 model runner only, the others are fastest on V2. A step's time is that of a round of every request: seconds
x requests x mean acceptance length / tokens, because vLLM's front end may see two steps at once. Hardware: one GPU.

    python -m benchmarks.peer_vllm --kit KIT --shapes smollm2-135m qwen3-8b --k 7 3 --seconds 560 --out FILE
"""

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import command, run_script
from benchmarks.engine_speed import dummy_drafter, dummy_target
from benchmarks.speed_shapes import (
    CONCURRENCY,
    EAGLE3,
    OUTPUT_TOKENS,
    P_EAGLE,
    PLAIN,
    PROMPT_TOKENS,
    REAL_SHAPES,
    SHAPES,
    SYNTHETIC,
    EngineSpeedRow,
    Setup,
    drafter_config,
    geometric_rate,
    hf_config,
    plan,
    random_prompts,
)
from peagle.bench.profile import Profile, read_trace, summarise
from peagle.bench.report import write_result
from peagle.bench.stepping import SETTLED
from peagle.devices import resolve_device
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.eagle3 import DrafterConfig
from peagle.models.spec import ModelSpec, spec_from_hf

_WORKER = Path(__file__).with_name("peer_vllm_worker.py")
_SPARE_TOKENS = 64  # of a request's cache
_WITHOUT_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first; greedy decoding does not sample
}

Json = Mapping[str, Any]


@dataclass(slots=True)
class Worker:
    """One engine's process and its job file; the files beside it are how the two talk."""

    setup: Setup
    job: Path
    process: subprocess.Popen[bytes]
    is_over: bool = False

    @property
    def is_ready(self) -> bool:
        return self.job.with_suffix(".ready").exists()

    @property
    def is_done(self) -> bool:
        return self.job.with_suffix(".done").exists()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def go(self) -> None:
        """Let it measure."""
        self.signal(signal.SIGCONT)
        self.job.with_suffix(".go").touch()

    def signal(self, number: signal.Signals) -> None:
        """To it and to the processes it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kill it, with the processes it started; once, since its number may be another's afterwards."""
        if not self.is_over:
            self.is_over = True
            self.signal(signal.SIGKILL)
            self.process.wait()

    def result(self) -> Json | None:
        """What it measured so far."""
        file = self.job.with_suffix(".result")
        return json.loads(file.read_text()) if file.exists() else None

    def last_words(self) -> str:
        """The end of its log, for a message."""
        lines = self.job.with_suffix(".log").read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return "\n".join([*errors[:3], *lines[-5:]])


def main() -> None:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    setups = _shape_setups(args)
    deadline = time.monotonic() + args.seconds if args.seconds else float("inf")
    rows: list[EngineSpeedRow] = []
    versions: set[str] = set()
    for begin in range(0, len(setups), args.together):
        for setup, result in _measure(args, setups[begin : begin + args.together], deadline):
            versions.add(result["vllm"])
            rows += _rows(args, setup, result)
            _write(args, rows, versions)
    print(f"wrote {args.out}" if rows else "nothing was measured", file=sys.stderr)


def _shape_setups(args: argparse.Namespace) -> list[Setup]:
    groups = plan(args.shapes, args.methods, args.k, equal=args.equal)
    setups = [setup for group in groups for setup in group]
    device = resolve_device("auto")
    for shape in dict.fromkeys(setup.shape for setup in setups):
        _target_dir(args, shape).mkdir(parents=True, exist_ok=True)
        (_target_dir(args, shape) / "config.json").write_text(json.dumps(hf_config(shape)))
        target = dummy_target(shape, torch.bfloat16, device)
        for method in {setup.method for setup in setups if setup.shape == shape} - {PLAIN}:
            folder = _draft_dir(args, shape, method)
            save_drafter(dummy_drafter(target, method), folder, compact=False, base_model=shape, extra={})
        del target
        _free()
    return setups


def _measure(args: argparse.Namespace, setups: Sequence[Setup], deadline: float) -> Iterator[tuple[Setup, Json]]:
    """Boot some engines at once, then let each measure alone. One that fails is reported and left out."""
    if time.monotonic() > deadline:
        return
    workers = [_start(args, setup) for setup in setups]
    try:
        _wait_for(workers, deadline)
        for worker in workers:
            worker.signal(signal.SIGSTOP)  # an idle engine's loop takes time from the one that is measured
        for worker in workers:
            if not worker.is_ready or worker.has_ended:
                print(f"{worker.setup.label} did not start:\n{worker.last_words()}", file=sys.stderr, flush=True)
                worker.end()
                continue
            if time.monotonic() > deadline:
                return
            print(f"measuring {worker.setup.label}", file=sys.stderr, flush=True)
            worker.go()
            while not (worker.is_done or worker.has_ended or time.monotonic() > deadline):
                time.sleep(0.1)
            if not worker.is_done:
                print(f"{worker.setup.label} did not finish:\n{worker.last_words()}", file=sys.stderr, flush=True)
            result = worker.result()
            worker.end()
            if result is not None:
                yield worker.setup, result
    finally:
        for worker in workers:
            worker.end()


def _wait_for(workers: Sequence[Worker], deadline: float) -> None:
    """Until every engine is ready or has given up."""
    begin = time.monotonic()
    while time.monotonic() < deadline and not all(worker.is_ready or worker.has_ended for worker in workers):
        time.sleep(0.2)
    ready = sum(worker.is_ready for worker in workers)
    print(f"{ready} of {len(workers)} engines ready in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _start(args: argparse.Namespace, setup: Setup) -> Worker:
    """Write the job of a setup and start its process."""
    name = setup.label.replace(" ", "-").replace("=", "")
    folder = args.work / "engines" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = folder / "job.json"
    job.write_text(json.dumps(make_job(args, setup, folder)))
    caches = {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
    }
    environment = {**os.environ, **_WITHOUT_NETWORK, **caches, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    if args.kit is not None:
        environment["PYTHONPATH"] = str((args.kit / "site").resolve())
        if (args.kit / "modelinfos").is_dir():
            shutil.copytree(args.kit / "modelinfos", folder / "cache" / "modelinfos")
    with open(job.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            [args.python, str(_WORKER), str(job.resolve())],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Worker(setup, job, process)


def make_job(args: argparse.Namespace, setup: Setup, folder: Path) -> dict[str, Any]:
    """What a worker is told."""
    drafts, spec = setup.num_drafts, spec_from_hf(hf_config(setup.shape))
    drafter = drafter_config(spec, setup.method) if drafts else None
    prompts = random_prompts(spec.vocab_size, max(args.concurrency))
    rate = geometric_rate(setup.acceptance_length, drafts) if drafts else None
    longest = PROMPT_TOKENS + args.output_tokens + _SPARE_TOKENS
    return {
        "target": str(_target_dir(args, setup.shape).resolve()),
        "draft": str(_draft_dir(args, setup.shape, setup.method).resolve()) if drafts else None,
        "num_drafts": drafts,
        "parallel": setup.method == P_EAGLE,
        "runner": _runner(args, setup),
        "rates": None if rate is None else [rate**i for i in range(1, drafts + 1)],  # vLLM's count all rounds
        "batches": {c: prompts[:c] for c in args.concurrency},
        "repeats": args.repeats,
        "output_tokens": args.output_tokens,
        "settle": SETTLED,
        "profile": [c for c in args.profile if c in args.concurrency],
        "traces": str((folder / "traces").resolve()),
        "kv_bytes": _kv_bytes(spec, drafter, max(args.concurrency) * longest),
    }


def _runner(args: argparse.Namespace, setup: Setup) -> str | None:
    """vLLM's variable for its model runner; None leaves the choice to vLLM, whose P-EAGLE knows one only."""
    if args.runner == "auto":
        return None if setup.method == P_EAGLE else "1"
    return "1" if args.runner == "v2" else "0"


def _kv_bytes(spec: ModelSpec, drafter: DrafterConfig | None, tokens: int) -> int:
    layers = spec.num_layers + (drafter.num_layers if drafter else 0)
    per_token = layers * 2 * spec.num_kv_heads * spec.head_dim * 2
    return int(1.2 * per_token * max(tokens, 2 * 2048))  # room for rounding up, and for one request of full length


def _rows(args: argparse.Namespace, setup: Setup, result: Json) -> list[EngineSpeedRow]:
    """One row per concurrency that was measured."""
    profiles = _profiles(args, setup, result)
    return [
        peer_row(setup, int(concurrency), windows, profiles.get(int(concurrency)))
        for concurrency, windows in result["windows"].items()
        if any(window["tokens"] for window in windows)
    ]


def peer_row(setup: Setup, concurrency: int, seen: Sequence[Json], profile: Profile | None) -> EngineSpeedRow:
    """The row of some repeats as the worker saw them; those without a window do not count."""
    windows = [window for window in seen if window["tokens"]]
    rounds, accepted, tokens = (sum(window[key] for window in windows) for key in ("rounds", "accepted", "tokens"))
    measured = 1 + accepted / rounds if rounds else 1.0
    ms = [_ms_per_step(window, concurrency) for window in windows]
    lengths = [window["prompt_tokens"] + window["first_token"] + window["tokens"] / 2 for window in windows]
    return EngineSpeedRow(
        shape=setup.shape,
        method=setup.method,
        num_speculative_tokens=setup.num_drafts,
        concurrency=concurrency,
        acceptance=setup.acceptance,
        acceptance_length=setup.acceptance_length,
        acceptance_length_measured=round(measured, 4),
        ms_per_step=round(median(ms), 4),
        ms_per_step_lowest=round(min(ms), 4),
        ms_per_step_highest=round(max(ms), 4),
        tokens_per_second=round(1e3 * setup.acceptance_length * concurrency / median(ms), 1),
        repeats=len(ms),
        steps=round(tokens / (measured * concurrency)),
        mean_context=round(sum(lengths) / len(lengths) / concurrency, 1),
        gpu_busy_ms=round(profile.busy_ms, 4) if profile else None,
        gpu_busy_share=round(min(profile.busy_ms / median(ms), 1.0), 4) if profile else None,
        kernels_per_step=round(profile.per_step(profile.kernels), 1) if profile else None,
        launches_per_step=round(profile.per_step(profile.launches), 1) if profile else None,
        graph_launches_per_step=round(profile.per_step(profile.graph_launches), 2) if profile else None,
    )


def _ms_per_step(window: Json, concurrency: int) -> float:
    """At the acceptance length that the window had."""
    length = 1 + window["accepted"] / window["rounds"] if window["rounds"] else 1.0
    return 1e3 * window["seconds"] * length * concurrency / window["tokens"]


def _profiles(args: argparse.Namespace, setup: Setup, result: Json) -> dict[int, Profile]:
    """Profiles by concurrency; the traces' order is that in which they were made."""
    folder = args.work / "engines" / setup.label.replace(" ", "-").replace("=", "") / "traces"
    traces = sorted(folder.rglob("*.json*"), key=lambda path: path.stat().st_mtime)
    found: dict[int, Profile] = {}
    on_gpu = [events for events in map(read_trace, traces) if any(event.kind == "kernel" for event in events)]
    for (concurrency, seen), events in zip(result.get("profiled", {}).items(), on_gpu, strict=False):
        steps = round((seen["rounds"] or seen["all_tokens"]) / int(concurrency))
        found[int(concurrency)] = summarise(events, steps)
    return found


def _write(args: argparse.Namespace, rows: Sequence[EngineSpeedRow], versions: set[str]) -> None:
    settings = {
        "command": command(),
        "acceptance": SYNTHETIC,
        "engine": f"vLLM {', '.join(sorted(versions))}",
        "runner": "V1 for p-eagle, V2 for the others" if args.runner == "auto" else args.runner.upper(),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": args.output_tokens,
        "prompts": "random",
        "dtype": "bfloat16",
        "definition": "tokens per second = acceptance length x requests / time of a step, prefill left out",
    }
    write_result(args.out, args.out.stem, settings, {"rows": rows})


def _target_dir(args: argparse.Namespace, shape: str) -> Path:
    return args.work / "models" / shape


def _draft_dir(args: argparse.Namespace, shape: str, method: str) -> Path:
    return args.work / "models" / f"{shape}-{method}"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--kit", type=Path, metavar="DIR", help="a folder with vLLM in `site`")
    parser.add_argument("--work", type=Path, default=Path("peer-vllm-work"), help="for models, caches and logs")
    parser.add_argument("--together", type=int, default=4, help="engines that boot at once and share the GPU's memory")
    parser.add_argument("--runner", choices=["auto", "v1", "v2"], default="auto")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(REAL_SHAPES))
    parser.add_argument("--methods", nargs="+", choices=[P_EAGLE, EAGLE3, PLAIN], default=[P_EAGLE, EAGLE3, PLAIN])
    parser.add_argument("--k", nargs="+", type=int, default=[7, 3])
    parser.add_argument("--equal", action="store_true", help="also EAGLE-3 at P-EAGLE's acceptance lengths")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCY))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", nargs="*", type=int, default=[1], help="concurrencies to profile as well")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, help="per request")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    args = parser.parse_args()
    if args.kit is not None and not (args.kit / "site").is_dir():
        parser.error(f"{args.kit} has no folder `site`")
    return args


if __name__ == "__main__":
    run_script(main)
