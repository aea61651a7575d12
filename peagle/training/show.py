"""What `prepare` and `extract` show: sizes, and one document with its supervised tokens in colour."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from peagle.training.dataset import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_GIB = 1024**3


def size_text(size: float) -> str:
    """A size in bytes, for people."""
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB else f"{size * 1024 / _GIB:,.1f} MiB"


def print_document(
    console: Console, tokenizer: "PreTrainedTokenizerFast", document: Document, *, max_tokens: int = 400
) -> None:
    """Print the document's first `max_tokens` tokens, special tokens spelled out: a wrong loss mask is seen at once.

    Supervised text is green; where the console has no colours it stands between ⟦ and ⟧.
    """
    total = len(document.input_ids)
    plain = console.color_system is None
    text = Text()
    for start, end in _runs(document.loss_mask[:max_tokens]):
        piece = str(tokenizer.decode(document.input_ids[start:end].tolist(), skip_special_tokens=False))
        supervised = bool(document.loss_mask[start])
        if supervised and plain:
            piece = f"⟦{piece}⟧"
        text.append(piece, style="bold green" if supervised else "dim")
    if total > max_tokens:
        text.append(f" ... ({total - max_tokens} more tokens)", style="italic")
    header = f"{document.id}: {int(document.loss_mask.sum())} of {total} tokens are supervised (highlighted)"
    console.print(Text(header, style="bold"))
    console.print(text, soft_wrap=True)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of every longest run of equal values."""
    if not len(mask):
        return []
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return list(pairwise(edges))
