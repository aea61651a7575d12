"""Tables: as Markdown, and on a terminal. A column is a heading and what its cell says of a row."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Json = Mapping[str, Any]
Cell = str | Callable[[Json], str]  # a format of the row's fields, such as "{tokens:,}", or a function of the row
Column = tuple[str, Cell]
_WORD = re.compile(r"^\s*\S+|\S+")  # an indented one keeps what is before it on its line


@dataclass(frozen=True, slots=True)
class Block:
    """One table: a title, a header, and rows of cells; `**` marks what is bold in Markdown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], rows: Sequence[Json]) -> "Block":
        """A line per row of a result."""
        cells = [[cell.format_map(r) if isinstance(cell, str) else cell(r) for _, cell in columns] for r in rows]
        return cls(title, [heading for heading, _ in columns], cells)

    @property
    def markdown(self) -> str:
        """The table without its title."""
        return markdown_table(self.header, self.rows)


def table_of(*columns: Column, order: Callable[[Json], Any] | None = None) -> Callable[[Sequence[Json]], str]:
    """What makes a Markdown table of rows: these columns, a line per row, sorted by `order` if that is given."""

    def render(rows: Sequence[Json]) -> str:
        return Block.of("", columns, rows if order is None else sorted(rows, key=order)).markdown

    return render


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is right-aligned."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ruler, *rows))


def figure(row: Json | None, key: str, form: str = "{:.2f}", *, times: float = 1, missing: str = "–") -> str:
    """A number of a row; `missing` where the row or the number is not there."""
    value = None if row is None else row.get(key)
    return missing if value is None else form.format(times * value)


def known(key: str, form: str, missing: str = "–") -> Cell:
    """The cell of a number that may be None."""
    return lambda row: figure(row, key, form, missing=missing)


def percent(key: str, form: str = "{:.0f} %") -> Cell:
    """The cell of a share, in percent."""
    return lambda row: figure(row, key, form, times=100)


def shares(key: str) -> Cell:
    """The cell of a share for each position."""
    return lambda row: " ".join(f"{share:.2f}" for share in row[key])


def print_block(console: "Console", block: Block) -> None:
    """Print a table on a terminal. One too wide wraps in its cells: nothing is cut, what is left might read alike. That
    takes three characters a column, borders included, and one for the last border; a narrower terminal does cut."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    lines = [[_plain(cell) for cell in cells] for cells in (block.header, *block.rows)]
    columns = list(zip(*lines, strict=True))
    widths = _widths(columns, console.width - 2 * len(columns) - 1)  # box and padding take the rest
    table = Table(title=Text(_plain(block.title)), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, (heading, width) in enumerate(zip(lines[0], widths, strict=True)):
        table.add_column(Text(heading), justify="left" if number == 0 else "right", overflow="fold", width=width)
    for cells in lines[1:]:
        table.add_row(*map(Text, cells))
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Of columns that share `room`: wide ones wrap between words as long as that will do, then inside the longest."""
    from rich.cells import cell_len

    words = [[cell_len(word) for cell in cells for word in _WORD.findall(cell)] for cells in columns]
    least = [max(lengths, default=1) for lengths in words]
    widths = [max(1, *map(cell_len, cells)) for cells in columns]
    while sum(widths) > max(room, len(widths)):
        widest = max(range(len(widths)), key=lambda n: (widths[n] > least[n], widths[n]))
        widths[widest] -= 1
    return widths


def _plain(text: str) -> str:
    return text.replace("**", "")
