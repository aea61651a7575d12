"""The tables of an evaluation: the same cells on a terminal and, as Markdown, in the documents."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from peagle.bench.markdown import Block, markdown_table, print_block

Json = Mapping[str, Any]
Cells = tuple[str, ...]
_FILE_WIDTH = 200


def blocks(results: Json) -> Iterator[Block]:
    """The tables of a result file's `results`, those that have rows."""
    for name, title, header, cells in _BLOCKS:
        rows = results.get(name) or []
        if name in ("categories", "contexts") and rows:
            most = max(row["num_speculative_tokens"] for row in rows)  # the others are in the file
            rows = [row for row in rows if row["num_speculative_tokens"] == most]
            title = f"{title}, K = {most}"
        if rows and "task" not in rows[0]:
            yield Block(title, header, [cells(row) for row in rows])
    marked = [row for name in ("rows", "accuracy") for row in results.get(name) or [] if "task" in row]
    if marked:
        yield Block("Answers that are right", _ACCURACY_HEADER, [_accuracy(row) for row in marked])


def markdown(results: Json) -> str:
    """All tables of a result file as Markdown; titles above all but the first."""
    parts = [
        ("" if number == 0 else f"{block.title}:\n\n") + markdown_table(block.header, block.rows)
        for number, block in enumerate(blocks(results))
    ]
    return "\n\n".join(parts)


def wide_console() -> Console:
    """Standard output; where it is a file, lines are as long as tables need."""
    return Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)


def print_tables(console: Console, result: Json) -> None:
    """All tables of a result file on a terminal, and what its figures mean."""
    for block in blocks(result["results"]):
        print_block(console, block)
    settings = result["settings"]
    if settings.get("datasets"):
        text = f"{settings['definition']}. Intervals: 95 %, by a bootstrap over requests; [–]: too few."
        console.print(text, markup=False, highlight=False)


def _length(row: Json) -> str:
    if row["acceptance_length_interval"] is None:  # of too few prompts
        return f"**{row['acceptance_length']:.2f}** [–]"
    low, high = row["acceptance_length_interval"]
    return f"**{row['acceptance_length']:.2f}** [{low:.2f}, {high:.2f}]"


def _shares(row: Json, name: str) -> str:
    return " ".join(f"{share:.2f}" for share in row[name])


def _set(row: Json) -> Cells:
    return (
        row["suite"],
        f"{row['temperature']:g}",
        str(row["num_speculative_tokens"]),
        _length(row),
        f"{row['acceptance_length_without_loops']:.2f}",
        _shares(row, "accepted_share_per_position"),
        _shares(row, "conditional_share_per_position"),
        str(row["prompts"]),
        f"{row['tokens']:,}",
    )


def _part(name: str) -> Callable[[Json], Cells]:
    def cells(row: Json) -> Cells:
        return (
            row["suite"],
            row[name] or "–",
            f"{row['temperature']:g}",
            _length(row),
            _shares(row, "accepted_share_per_position"),
            str(row["prompts"]),
            f"{row['rounds']:,}",
        )

    return cells


def _lossless(row: Json) -> Cells:
    equal = row["equal"] == row["prompts"]
    gap = "–" if row["largest_gap"] is None else f"{row['largest_gap']:.2g} of {row['limit']:.2g}"
    return (
        f"K = {row['num_speculative_tokens']}",
        f"{row['temperature']:g}",
        f"**{row['equal']} of {row['prompts']}**",
        f"{row['tokens_compared']:,}",
        "–" if row["first_divergence"] is None else str(row["first_divergence"]),
        gap,
        "–" if equal else "yes" if row["explained"] else "**no**",
    )


def _accuracy(row: Json) -> Cells:
    low, high = row["accuracy_interval"]
    drafts = row["num_speculative_tokens"]
    return (
        row["task"],
        f"K = {drafts}" if drafts else "none",
        f"{row['correct']} of {row['prompts']}",
        f"**{100 * row['accuracy']:.1f} %** [{100 * low:.1f}, {100 * high:.1f}]",
        f"{row['equal_answers']} of {row['prompts']}",
        ", ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items()),
    )


def _card(row: Json) -> Cells:
    low, high = row["difference_interval"]
    return (
        row["suite"],
        f"{row['temperature']:g}",
        str(row["num_speculative_tokens"]),
        f"{row['card']:.3f}",
        f"{row['measured']:.3f}",
        f"[{low:+.3f}, {high:+.3f}]",
        "yes" if row["paired"] else "no",
        row["verdict"],
    )


_PART_HEADER = ("T", "AL [95 %]", "accepted at position 1, 2, ...", "prompts", "rounds")
_ACCURACY_HEADER = ("task", "drafts", "right", "share [95 %]", "same tokens as without", "outcomes")
_BLOCKS: tuple[tuple[str, str, Cells, Callable[[Json], Cells]], ...] = (
    (
        "rows",
        "Acceptance",
        (
            "set", "T", "K", "AL [95 %]", "AL without loops", "accepted at position 1, 2, ...",
            "once the one before was", "prompts", "tokens",
        ),
        _set,
    ),
    ("categories", "By category", ("set", "category", *_PART_HEADER), _part("category")),
    ("contexts", "By context at the round, tokens", ("set", "context", *_PART_HEADER), _part("context")),
    (
        "lossless",
        "Answers with and without drafts",
        ("drafts", "T", "same tokens", "tokens compared", "first difference", "largest gap", "explained by rounding"),
        _lossless,
    ),
    (
        "card",
        "Beside the card",
        ("set", "T", "K", "card", "measured", "difference", "by request", "verdict"),
        _card,
    ),
)  # fmt: skip
