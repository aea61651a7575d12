"""Entry point of the command `peagle` and of `python -m peagle`: Ctrl-C is one line from the first import on."""

import signal
import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from peagle.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("\npeagle: interrupted\n")
        sys.exit(130)  # as in peagle.exits, which may not be imported yet
    finally:  # everything is done: one more Ctrl-C while the interpreter ends is no traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
