"""Where a text stands in its grammar."""

from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """Where a request stands in its grammar. At the end of the grammar only the end of the text is allowed."""

    def fill(self, row_W: np.ndarray) -> None:
        """Set the bits, 32 tokens a word, of what may come next: never nothing."""

    def accept(self, token_id: int) -> bool:
        """Take a token; False, and nothing has changed, where the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Take back so many accepted tokens."""


class AnyText:
    """The matcher of no grammar, for requests that warm up what those with one need."""

    def fill(self, row_W: np.ndarray) -> None:
        """See `Matcher`."""
        row_W[:] = -1

    def accept(self, _: int) -> bool:
        """See `Matcher`."""
        return True

    def rollback(self, _: int) -> None:
        """See `Matcher`."""
