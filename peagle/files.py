"""Files that are there as a whole or not at all, and one run per folder.

What is written is forced to the disk first: a rename that survives a power cut must not outlive the bytes it names.
"""

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import PeagleError

if TYPE_CHECKING:
    from torch import Tensor

LOCK_NAME = ".lock"
# Names of files and folders on their way: those of `replacing`, a head's, a checkpoint's.
_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}\.(tmp|new)")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` when the block ends; an error leaves `path` as it was.

    Where `path` is a link it stays one: its target is replaced. Raises PeagleError when the disk does not take it.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def sha256_of(file: Path) -> str:
    """Of all its bytes. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write a file, as `replacing` does. Raises PeagleError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)
        flush(temporary)


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Write a safetensors file, as readable as any other file. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the number of the system's error stands in its text alone
        found = re.search(r"os error (\d+)", str(error))
        raise OSError(int(found[1]) if found else errno.EIO, str(error)) from error
    path.chmod(mode)  # safetensors makes a file for its owner alone
    flush(path)


def flush(file: Path) -> None:
    """Force a file to the disk. Raises OSError."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def remove_stale(folder: Path) -> None:
    """Remove what writes that were killed left in `folder`; nobody may be writing there now."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(entry.name):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def write_error(path: Path, error: OSError) -> PeagleError:
    """The one-line form of a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PeagleError(
            f"no space left on the disk of {path.parent} while writing {path.name}: free some space and run the same "
            "command again, finished files are kept"
        )
    return PeagleError(f"cannot write {path} ({error.strerror}): make the folder writable or choose another --out")


def open_output(out: Path) -> None:
    """Make a folder, keep other runs from it, and clear what a killed one left. Raises PeagleError."""
    probe = out / ".writable"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()  # the lock of an earlier run may be there, in a folder that takes no new file
        probe.unlink()
        lock_output(out)
        remove_stale(out)
    except OSError as error:
        raise write_error(out, error) from error


def lock_output(out: Path) -> None:
    """Keep other processes from writing to the directory `out` until this one ends, however it ends.

    A POSIX lock, not flock: this process may take it again, and forked children that outlive it do not hold it. Where
    there is no fcntl, nothing is locked. Raises PeagleError when another process has the lock, OSError when `out`
    cannot be written.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    # Never closed: closing any descriptor of the file would give up the lock of the whole process.
    descriptor = os.open(out / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise PeagleError(f"another run is writing to {out}: wait for it to end, or choose another --out") from None
