"""Tables: as Markdown, and on a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Block:
    """One table: a title, a header, and rows of cells; `**` marks what is bold in Markdown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows))


def print_block(console: "Console", block: Block) -> None:
    """Print a table on a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(_plain(block.title)), box=SIMPLE_HEAD, title_justify="left")
    for number, heading in enumerate(block.header):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in block.rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console.print(table)


def _plain(text: str) -> str:
    return text.replace("**", "")
