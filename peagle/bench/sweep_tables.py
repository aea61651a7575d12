"""The tables of a sweep: tokens per second and speed-ups by K and concurrency, as the P-EAGLE announcement has them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.bench.announcement import ANNOUNCED, BEST_DRAFTS, SPEEDUP_AT_64
from peagle.bench.markdown import Block, markdown_table, print_block
from peagle.bench.sweep_settings import EAGLE3, METHODS, P_EAGLE
from peagle.meter import say

if TYPE_CHECKING:
    from rich.console import Console

Json = Mapping[str, Any]
_Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header and lines
_ANNOUNCED_HEADER = ("set", "concurrency", "announced, B200", "ours", "ours: K of P-EAGLE, of EAGLE-3", "announced K")


def sweep_blocks(rows: Sequence[Json]) -> Iterator[Block]:
    """For every prompt set: all cells, then the best K of each method side by side."""
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        header, lines = _cells(own)
        yield Block(f"**{dataset}**: output tokens per second (times decoding without drafts)", header, lines)
        header, lines = _best(own)
        if lines:
            yield Block(f"**{dataset}**: the best K at each concurrency", header, lines)


def announcement_blocks(rows: Sequence[Json]) -> Iterator[Block]:
    """The speed-ups of P-EAGLE over EAGLE-3 beside the announced ones, then the sweep's own tables."""
    note = (
        "SYNTHETIC acceptance: drafts are kept by chance, with the acceptance lengths of the P-EAGLE announcement; "
        "weights are random. Speed-ups are P-EAGLE's best K over EAGLE-3's best K"
    )
    yield Block(note, _ANNOUNCED_HEADER, list(_comparisons(rows)))
    yield from sweep_blocks(rows)


def sweep_tables(rows: Sequence[Json]) -> str:
    """The tables of a sweep as Markdown."""
    return _markdown(sweep_blocks(rows))


def announcement_tables(rows: Sequence[Json]) -> str:
    """The tables of the announcement's sweep as Markdown."""
    return _markdown(announcement_blocks(rows))


def print_tables(console: "Console", rows: Sequence[Json], *, synthetic: bool) -> None:
    """Drawn on a terminal, Markdown elsewhere: a file is read by others."""
    blocks = (announcement_blocks if synthetic else sweep_blocks)(rows)
    if console.is_terminal:
        for block in blocks:
            print_block(console, block)
    else:
        say(console, _markdown(blocks))


def _markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join(f"{block.title}\n\n{markdown_table(block.header, block.rows)}" for block in blocks)


def _cells(rows: Sequence[Json]) -> _Table:
    """A line per method and K; the fastest K of a method at a concurrency is bold."""
    at_once = sorted({row["concurrency"] for row in rows})
    fastest = {id(row) for c in at_once for m in METHODS if (row := fastest_row(rows, m, c)) is not None}
    lines = []
    for method, k in sorted({(r["method"], r["num_speculative_tokens"]) for r in rows}, key=_order):
        of = {r["concurrency"]: r for r in rows if (r["method"], r["num_speculative_tokens"]) == (method, k)}
        known = of[max(of)]["acceptance_length"]
        length = "" if not k else "?" if known is None else f"{known:.2f}"
        cells = [_cell(of.get(c), bold=id(of.get(c)) in fastest and k > 0) for c in at_once]
        lines.append((method, str(k or ""), length, *cells))
    return ("method", "K", "AL", *(f"c={c}" for c in at_once)), lines


def _order(setup: tuple[str, int]) -> tuple[int, int]:
    return METHODS.index(setup[0]), setup[1]


def _cell(row: Json | None, *, bold: bool) -> str:
    if row is None:
        return ""
    speed = f"{row['tokens_per_second']:,.{0 if row['tokens_per_second'] >= 100 else 1}f}"
    gain = row["speedup_over_none"]
    factor = f" ({gain:.2f}x)" if gain is not None and row["num_speculative_tokens"] else ""
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return (f"**{speed}**" if bold else speed) + factor + failed


def _best(rows: Sequence[Json]) -> _Table:
    """K and speed-up of each method's best, and of P-EAGLE over EAGLE-3; with 95 % intervals."""
    at_once = sorted({row["concurrency"] for row in rows})
    lines = []
    for method in (P_EAGLE, EAGLE3):
        best = [fastest_row(rows, method, c) for c in at_once]
        if any(row is not None and row["speedup_over_none"] is not None for row in best):
            lines.append((f"{method} over none", *(_gain(row, "none", with_k=True) for row in best)))
    over = [fastest_row(rows, P_EAGLE, c) for c in at_once]
    if any(row is not None and row["speedup_over_eagle3"] is not None for row in over):
        lines.append(("p-eagle over eagle3", *(_gain(row, "eagle3", with_k=False) for row in over)))
    return ("speed-up", *(f"c={c}" for c in at_once)), lines


def _gain(row: Json | None, base: str, *, with_k: bool) -> str:
    if row is None or row[f"speedup_over_{base}"] is None:
        return ""
    reach = row[f"speedup_over_{base}_interval"]
    within = "" if reach is None else f" [{reach[0]:.2f}–{reach[1]:.2f}]"
    drafts = f"K={row['num_speculative_tokens']}: " if with_k else ""
    return f"{drafts}**{row[f'speedup_over_{base}']:.2f}x**{within}"


def fastest_row(rows: Sequence[Json], method: str, concurrency: int) -> Json | None:
    """A method's row with the most tokens per second; None where it has none."""
    own = (row for row in rows if (row["method"], row["concurrency"]) == (method, concurrency))
    return max(own, key=lambda row: row["tokens_per_second"], default=None)


def _comparisons(rows: Sequence[Json]) -> Iterator[tuple[str, ...]]:
    """A line per set at the concurrencies of which the announcement says something."""
    announced_k = f"{BEST_DRAFTS[P_EAGLE]}, {BEST_DRAFTS[EAGLE3]}"
    for name, announced in ANNOUNCED.items():
        own = [row for row in rows if row["dataset"] == name]
        low, high = SPEEDUP_AT_64
        for c, said in ((1, f"{announced.speedup_at_1:.2f}x"), (64, f"{low:.2f}x to {high:.2f}x")):
            fast, slow = fastest_row(own, P_EAGLE, c), fastest_row(own, EAGLE3, c)
            if fast is not None and slow is not None:
                drafts = f"{fast['num_speculative_tokens']}, {slow['num_speculative_tokens']}"
                yield announced.title, str(c), said, _gain(fast, "eagle3", with_k=False), drafts, announced_k
