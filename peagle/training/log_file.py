"""OUT/train.jsonl: one JSON object a line, whole lines only, kept in memory while the disk does not take them."""

import json
import os
from pathlib import Path
from typing import Any

from peagle.files import write_atomic


class LogFile:
    """Appends records. A write that fails costs nothing: its lines wait and go out with the next one that succeeds."""

    def __init__(self, path: Path | None, *, keep_to_step: int) -> None:
        """Lines beyond `keep_to_step` are dropped, for those steps will run again, and torn ones, as a kill leaves.

        Without a path nothing is written: of several ranks one keeps the log.
        """
        self.path = path
        self.kept = _truncate(path, keep_to_step) if path else []  # the records of earlier parts of the run
        self.problem: str | None = None  # why the newest write failed; None if it did not
        self._size = path.stat().st_size if path and path.exists() else 0  # bytes of whole lines
        self._waiting: list[bytes] = []

    @property
    def waiting(self) -> int:
        """Lines that are not in the file yet."""
        return len(self._waiting)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record. Raises nothing: see `problem`."""
        if self.path is not None:
            self._waiting.append(json.dumps(record).encode() + b"\n")
            self.flush()

    def flush(self) -> None:
        """Try to write what waits."""
        if self.path is None:
            return
        data = b"".join(self._waiting)
        try:
            with self.path.open("ab") as stream:
                # Half a line of an earlier try would spoil the next one. Shrinking needs no space.
                os.truncate(stream.fileno(), self._size)
                stream.write(data)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        self.problem = None
        self._size += len(data)
        self._waiting.clear()


def _truncate(path: Path, keep_to_step: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = [_parsed(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    kept = [record for record in records if record is not None and record["step"] <= keep_to_step]
    write_atomic(path, "".join(f"{json.dumps(record)}\n" for record in kept).encode())
    return kept


def _parsed(line: str) -> dict[str, Any] | None:
    """The record of a line, None when it is not a whole one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
