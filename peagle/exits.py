"""How a command ends: 0; 2 with one line on what the user can change; 130 after Ctrl-C. Bugs keep their traceback."""

import errno
import os
import re
import sys
from io import TextIOWrapper
from typing import TextIO

import typer

from peagle.errors import PeagleError, is_out_of_memory

# click's UsageError; typer carries its own copy of click in some versions and does not export the class.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130


def prepare_streams() -> None:
    """Make the standard streams usable whatever the shell gave: closed, or in an encoding that lacks characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order each takes its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until the end
    _reconfigure(sys.stdin, errors="surrogateescape")  # bad bytes then get an error of ours, not a traceback
    _reconfigure(sys.stdout, errors="replace")
    _reconfigure(sys.stderr, errors="replace")


def write_utf8() -> None:
    """Switch stdout to UTF-8, for output that another program reads."""
    _reconfigure(sys.stdout, encoding="utf-8")


def _reconfigure(stream: TextIO, *, encoding: str | None = None, errors: str | None = None) -> None:
    if isinstance(stream, TextIOWrapper):  # a caller may have put something else in place
        stream.reconfigure(encoding=encoding, errors=errors)


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command line and return its exit status; errors of the user become one line on stderr."""
    try:
        status = app(args=arguments or ["--help"], prog_name="peagle", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED_STATUS
    except BrokenPipeError:
        # The reader went away, as in `peagle generate ... | head -1`; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        sys.stderr.write(f"peagle: {line}\n")
        return USER_ERROR_STATUS
    if status == INTERRUPTED_STATUS:
        sys.stderr.write("\npeagle: interrupted\n")
    return status if isinstance(status, int) else 0


def explain(error: Exception) -> str | None:
    """One line for an error that the user can do something about; None for anything else."""
    if isinstance(error, PeagleError):
        line = str(error)
    elif isinstance(error, USAGE_ERROR):
        context = getattr(error, "ctx", None)
        message = error.format_message()  # type: ignore[attr-defined]  # click's, see USAGE_ERROR
        line = f"{message} (see {context.command_path if context else 'peagle'} --help)"
    elif isinstance(error, OSError):
        line = _explain_os_error(error)
    elif is_out_of_memory(error):
        line = f"out of memory ({_memory_wanted(error)}): use a smaller batch, fewer tokens or a smaller model"
    else:
        return None
    return " ".join(line.split())


def _explain_os_error(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write{where}: {reason}; free some space or choose another folder, then run the command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission for{where}: {reason}; choose a folder you may write to"
    return f"cannot use{where}: {reason}; check the path"


def _memory_wanted(error: Exception) -> str:
    """The part of a message that says how much was asked for, where it says so; else its first sentence."""
    wanted = re.search(r"tried to allocate \d+ bytes", str(error))
    return wanted[0] if wanted else str(error).split(". ")[0]
