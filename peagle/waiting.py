"""What a command says while it has nothing to show yet: whoever waits wants to know for what."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def said_if_slow(what: str, seconds: float = 1.0) -> Iterator[None]:
    """A block that says on stderr what it does, once it has taken `seconds`. Of several ranks the first one speaks."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    timer = Timer(seconds, lambda: sys.stderr.write(f"peagle: {what} ...\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
