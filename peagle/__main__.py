"""Entry point of the command `peagle` and of `python -m peagle`: Ctrl-C is one line from the first import on."""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from peagle.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("\npeagle: interrupted\n")
        sys.exit(130)  # as in peagle.exits, which may not be imported yet


if __name__ == "__main__":
    main()
