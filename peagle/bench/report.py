"""Result files and the tables made from them.

A result is one JSON file: `name`, `created` (UTC), `machine`, `versions`, `settings` (whatever it takes to run it
again, the command included) and `results` ({"rows": [...]}, for each row a dataclass of what measured it). Every
number the README shows is rendered from such a file (`benchmarks/tables.py`).
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import peagle
from peagle.errors import PeagleError

Json = Mapping[str, Any]

_PARTS = ("machine", "versions", "settings", "results")
_RESULT_REMEDY = "give a file that peagle wrote, with --out or --save-result"

# A list of numbers over several lines; JSON has no line break inside a text, so this is never part of one.
_NUMBERS = re.compile(r"\[\n\s+([-+.\deE,\s]+?)\n\s+\]")


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


def command_line(arguments: Sequence[str] | None = None) -> str:
    """The `peagle` command that is running, or one with these arguments, as it is typed."""
    return shlex.join(["peagle", *(sys.argv[1:] if arguments is None else arguments)])


def write_result(path: Path | str, name: str, settings: Json, results: Json, where: Json | None = None) -> None:
    """Write one result file, whole or not at all. Row dataclasses anywhere in `results` become objects.

    `where` is a `provenance` that was asked for before, so that nothing slow stands between a result and its file.
    """
    path = Path(path)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    document = {"name": name, "created": created, **(where or provenance()), "settings": settings, "results": results}
    text = json.dumps(document, indent=2, ensure_ascii=False, default=_as_json) + "\n"
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    with _partial(path) as partial:
        # Half a character, of a server's answer or of a file's name, becomes its escape, which JSON has too.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(os.path.realpath(path))


def check_result_path(path: Path, console: Console | None = None, *, what: str = "result") -> None:
    """Raise PeagleError where a result could not be written, before it takes hours to have one; tell a console which
    file it will replace. `what` is what errors call it."""
    with _partial(path, what) as probe:
        if path.is_dir():
            raise PeagleError(f"the {what} {path} is a folder: give the name of a file in it")
        if path.exists() and not path.is_file():  # /dev/null, whose place a file would take
            raise PeagleError(f"the {what} {path} is a device or a pipe: give the name of a file")
        probe.touch()
    if console is not None and path.exists():
        text = f"{path} exists: what this run measures takes its place"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _partial(path: Path, what: str = "result") -> Iterator[Path]:
    """A file to become `path`, or what that links to, in a folder that is there; what is left of it goes.

    Raises PeagleError.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
    except OSError as error:
        message = f"cannot write the {what} {path}: {error.strerror}; choose a folder you may write to"
        raise PeagleError(message) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def read_result(path: Path | str) -> dict[str, Any]:
    """Read a result file and check that its keys are there; no number is beyond a float. Raises PeagleError."""
    path = Path(path)
    try:
        document = json.loads(path.read_text("utf-8"), parse_int=lambda t: int(t) if len(t) < 300 else float(t))
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
