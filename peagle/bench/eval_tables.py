"""The tables of an evaluation: the same cells on a terminal and, as Markdown, in the documents."""

import sys
from collections.abc import Iterator

from rich.console import Console

from peagle.bench.markdown import Block, Cell, Column, Json, known, print_block, shares

_FILE_WIDTH = 200


def blocks(results: Json) -> Iterator[Block]:
    """The tables of a result file's `results`, those that have rows."""
    for name, title, columns in _BLOCKS:
        rows = results.get(name) or []
        if name in ("categories", "contexts") and rows:
            most = max(row["num_speculative_tokens"] for row in rows)  # the others are in the file
            rows = [row for row in rows if row["num_speculative_tokens"] == most]
            title = f"{title}, K = {most}"
        if rows and "task" not in rows[0]:
            yield Block.of(title, columns, rows)
    marked = [row for name in ("rows", "accuracy") for row in results.get(name) or [] if "task" in row]
    if marked:
        yield Block.of("Answers that are right", _ACCURACY, marked)


def markdown(results: Json) -> str:
    """All tables of a result file as Markdown; titles above all but the first."""
    parts = [
        ("" if number == 0 else f"{block.title}:\n\n") + block.markdown for number, block in enumerate(blocks(results))
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
    if row["acceptance_length"] is None:  # no draft was verified
        return "?"
    if row["acceptance_length_interval"] is None:  # of too few prompts
        return f"**{row['acceptance_length']:.2f}** [–]"
    low, high = row["acceptance_length_interval"]
    return f"**{row['acceptance_length']:.2f}** [{low:.2f}, {high:.2f}]"


def _part(name: str) -> tuple[Column, ...]:
    """The columns of a part of a set: of a category, or of a bucket of contexts."""
    return (
        ("set", "{suite}"),
        (name, lambda row: row[name] or "–"),
        ("T", "{temperature:g}"),
        ("AL [95 %]", _length),
        ("accepted at position 1, 2, ...", shares("accepted_share_per_position")),
        ("prompts", "{prompts}"),
        ("rounds", "{rounds:,}"),
    )


def _gap(row: Json) -> str:
    return "–" if row["largest_gap"] is None else f"{row['largest_gap']:.2g} of {row['limit']:.2g}"


def explained(whole: str) -> Cell:
    """The cell that says whether rounding explains what differs of so many answers, if any do."""
    return lambda row: "–" if row["equal"] == row[whole] else "yes" if row["explained"] else "**no**"


def _right(row: Json) -> str:
    low, high = row["accuracy_interval"]
    return f"**{100 * row['accuracy']:.1f} %** [{100 * low:.1f}, {100 * high:.1f}]"


_ACCURACY: tuple[Column, ...] = (
    ("task", "{task}"),
    ("drafts", lambda row: f"K = {row['num_speculative_tokens']}" if row["num_speculative_tokens"] else "none"),
    ("right", "{correct} of {prompts}"),
    ("share [95 %]", _right),
    ("same tokens as without", "{equal_answers} of {prompts}"),
    ("outcomes", lambda row: ", ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items())),
)
_BLOCKS: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    (
        "rows",
        "Acceptance",
        (
            ("set", "{suite}"),
            ("T", "{temperature:g}"),
            ("K", "{num_speculative_tokens}"),
            ("AL [95 %]", _length),
            ("AL without loops", known("acceptance_length_without_loops", "{:.2f}", "?")),
            ("accepted at position 1, 2, ...", shares("accepted_share_per_position")),
            ("once the one before was", shares("conditional_share_per_position")),
            ("prompts", "{prompts}"),
            ("tokens", "{tokens:,}"),
        ),
    ),
    ("categories", "By category", _part("category")),
    ("contexts", "By context at the round, tokens", _part("context")),
    (
        "lossless",
        "Answers with and without drafts",
        (
            ("drafts", "K = {num_speculative_tokens}"),
            ("T", "{temperature:g}"),
            ("same tokens", "**{equal} of {prompts}**"),
            ("tokens compared", "{tokens_compared:,}"),
            ("first difference", known("first_divergence", "{}")),
            ("largest gap", _gap),
            ("explained by rounding", explained("prompts")),
        ),
    ),
    (
        "card",
        "Beside the card",
        (
            ("set", "{suite}"),
            ("T", "{temperature:g}"),
            ("K", "{num_speculative_tokens}"),
            ("card", "{card:.3f}"),
            ("measured", "{measured:.3f}"),
            ("difference", "[{difference_interval[0]:+.3f}, {difference_interval[1]:+.3f}]"),
            ("by request", lambda row: "yes" if row["paired"] else "no"),
            ("verdict", "{verdict}"),
        ),
    ),
)
