"""Result files and the tables made from them.

A result is one JSON file: `name`, `created` (UTC), `machine`, `versions`, `settings` (whatever it takes to run it
again, the command included) and `results` ({"rows": [...]}, one of the row classes below per row). Every number the
README shows is rendered from such a file (`peagle.bench.tables`).
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peagle
from peagle.errors import PeagleError

Json = Mapping[str, Any]

_PARTS = ("machine", "versions", "settings", "results")
_RESULT_REMEDY = "give a file that peagle wrote, with --out or --save-result"

# A list of numbers over several lines; JSON has no line break inside a text, so this is never part of one.
_NUMBERS = re.compile(r"\[\n\s+([-+.\deE,\s]+?)\n\s+\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceRow:
    """Acceptance of one prompt suite at one K and temperature (result names `acceptance-*`).

    The shares are unconditional: rounds in which position j was accepted / rounds. `..._without_loops` leaves out the
    rounds inside text that repeats itself, which any drafter guesses right. `head` is named where there are several.
    """

    suite: str
    num_speculative_tokens: int
    temperature: float
    acceptance_length: float
    acceptance_length_without_loops: float
    accepted_share_per_position: Sequence[float]
    accepted_share_per_position_without_loops: Sequence[float]
    looping_token_share: float
    prompts: int
    rounds: int
    tokens: int
    head: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """Speed with and without drafts on the same prompts in one run (result names `cpu-speed-*`)."""

    num_speculative_tokens: int
    tokens_per_second_plain: float
    tokens_per_second: float
    ratio: float
    acceptance_length: float
    prompts: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessRow:
    """How many prompts gave the same tokens with and without drafts (result names `lossless-*`)."""

    num_speculative_tokens: int
    batch_size: int
    temperature: float
    prompts: int
    identical: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LosslessSettingRow:
    """One engine setting against plain decoding (result names `lossless-gpu-*`).

    `first_divergence` is the smallest output index at which any two answers part. Two tokens at which they do are a
    `gap` apart; every one below `limit`, twice the numerical noise in the same units, makes the row `explained`.
    """

    dtype: str
    setting: str
    num_speculative_tokens: int
    temperature: float
    requests: int
    equal: int
    tokens_compared: int
    first_divergence: int | None
    largest_gap: float | None
    limit: float
    explained: bool
    preemptions: int
    cached_tokens: int
    acceptance_length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceRow:
    """Where an answer parts from the reference's: both tokens, -1 for none, and how far the worse is from the best."""

    dtype: str
    setting: str
    num_speculative_tokens: int
    temperature: float
    request: int
    index: int
    tokens: Sequence[int]
    gap: float | None
    explained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRow:
    """The last evaluation of a training run within a budget of positions or seconds (result names `train-curve*`).

    `acceptance_length` is that of decoding held-out prompts; the implied one comes from the held-out text's chains.
    """

    run: str
    budget: str
    step: int
    positions: int
    seconds: float
    acceptance_length: float
    implied_acceptance_length: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRow:
    """A server under load for minutes (result names `soak-*`). Pairs are before and after, both at rest.

    `different` counts requests whose answer was not that of the reference, `lost_or_doubled` those among them that run
    on alike after a gap or a repetition. `answers_ended` is the server's count, `answers_accounted` whether it fits the
    clients'. Slopes are over the later half.
    """

    concurrency: int
    minutes: float
    requests: int
    streamed: int
    answers: int
    tokens: int
    left: int
    rubbish: int
    refused: int
    different: int
    lost_or_doubled: int
    failed: int
    answers_ended: int
    answers_accounted: bool
    kv_usage_after: float
    idle_after: bool
    preemptions: int
    rss_mib: tuple[float, float] | None
    rss_mib_per_minute: float | None
    gpu_mib: tuple[float, float] | None
    gpu_mib_per_minute: float | None
    open_files: tuple[int, int] | None
    threads: tuple[int, int] | None
    exit_status: int | None
    passed: bool


def provenance() -> dict[str, Any]:
    """`machine` and `versions` of this process, as they stand in a result file; seconds if torch is not loaded."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": {"cpu": _cpu_name(), "cores": _cores(), "gpu": ", ".join(gpus) or None},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "peagle": peagle.__version__,
            "commit": _commit(),
        },
    }


def write_result(path: Path | str, name: str, settings: Json, results: Json, where: Json | None = None) -> None:
    """Write one result file, whole or not at all. Row dataclasses anywhere in `results` become objects.

    `where` is a `provenance` that was asked for before, so that nothing slow stands between a result and its file.
    """
    path = Path(path)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"name": name, "created": created, **(where or provenance()), "settings": settings, "results": results}
    text = json.dumps(document, indent=2, ensure_ascii=False, default=_as_json) + "\n"
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise PeagleError(
            f"cannot write the result {path}: {error.strerror}; choose a folder you may write to"
        ) from None


def check_result_path(path: Path) -> None:
    """Raise PeagleError where a result could not be written, before it takes hours to have one."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise PeagleError(f"the result {path} is a folder: give the name of a file in it")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PeagleError(
            f"cannot write the result {path}: {error.strerror}; choose a folder you may write to"
        ) from None


def read_result(path: Path | str) -> dict[str, Any]:
    """Read a result file and check that its keys are there. Raises PeagleError."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PeagleError(f"cannot read the result {path}: {error.strerror}; check the path") from None
    except (ValueError, RecursionError):  # no JSON, no text, or JSON beyond all measure
        raise PeagleError(f"{path} is no result file: it is not JSON; {_RESULT_REMEDY}") from None
    if not isinstance(document, dict):
        raise PeagleError(f"{path} is no result file: it is a JSON {type(document).__name__}; {_RESULT_REMEDY}")
    for name, kind in (("name", str), ("created", str), *((part, dict) for part in _PARTS)):
        if not isinstance(document.get(name), kind):
            what = "has another kind of" if name in document else "lacks"
            raise PeagleError(f"{path} is no result file: it {what} {name!r}; {_RESULT_REMEDY}")
    return document


def _as_json(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot stand in a result file")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str | None:
    """Commit of the checkout the code runs from, `-dirty` when files differ from it; None outside a checkout."""
    root = Path(peagle.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        described = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude", "*")
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
