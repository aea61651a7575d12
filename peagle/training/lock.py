"""One run per output directory: two would write the same files and each undo what the other did."""

import os
from pathlib import Path

from peagle.errors import PeagleError

LOCK_NAME = ".lock"


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
