"""The report of `peagle bench serve` on a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peagle.bench.counters import DEFINITION
from peagle.bench.latency import DEFINITIONS
from peagle.bench.settings import BenchServeConfig
from peagle.meter import say

if TYPE_CHECKING:
    from rich.console import Console

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "chunk": "chunk gap", "e2el": "E2E"}


def print_report(console: "Console", row: Mapping[str, Any], config: BenchServeConfig) -> None:
    """Print one load's figures and what they mean; `row` as `Measured.results` makes it."""
    from rich.table import Table

    if row["partial"]:
        say(console, "PARTIAL: the run was stopped before its end")
    say(console, "\n".join((*_counts(row), "")))
    if not row["completed"]:
        return
    table = Table(title="latency, ms", title_justify="left")
    shares = [f"p{share:g}" for share in config.metric_percentiles]
    for column in ("", "mean", *shares):
        table.add_column(column, justify="right" if column else "left")
    for name in config.percentile_metrics:
        spread = row["latency_ms"][name]
        cells = [_ms(spread[key]) for key in ("mean", *shares)] if spread else ["–"] * (1 + len(shares))
        table.add_row(_TITLES[name], *cells)
    console.print(table)
    rare = [share for share in config.metric_percentiles if row["completed"] * (100 - share) < 100 > share]
    if rare:
        names = ", ".join(f"p{share:g}" for share in rare)
        say(console, f"{names}: of {row['completed']} requests that is hardly more than the slowest one")
    say(console, "\n".join((*_acceptance(row["acceptance"]), "", *_definitions(row, config))))


def _ms(value: float) -> str:
    """With three digits: a load that is run again differs in the fourth, mostly in the third."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _definitions(row: Mapping[str, Any], config: BenchServeConfig) -> list[str]:
    """What those figures mean that are shown."""
    shown = [*config.percentile_metrics, "tokens", "throughput"]
    shown += ["goodput"] * (row["goodput"] is not None) + ["failures"] * bool(row["failed"])
    lines = [f"{_TITLES.get(name, name)}: {text}." for name, text in DEFINITIONS.items() if name in shown]
    measured = row["acceptance"] is not None and row["acceptance"]["acceptance_length"] is not None
    return [*lines, f"{DEFINITION}."] if measured else lines


def _counts(row: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{row['model']}, {row['dataset']}: {row['completed']} of {row['asked']} requests in {row['seconds']:.2f} s"
    ]
    if row["failed"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in row["failures"].items())
        lines.append(f"FAILED: {row['failed']} ({kinds}); they are in no figure below")
        lines += [f"  {kind}: {detail}" for kind, detail in row["failure_examples"].items() if detail]
    if row["unfinished"] or row["not_sent"]:
        lines.append(f"unfinished: {row['unfinished']}, never sent: {row['not_sent']}")
    if not row["completed"]:
        return [*lines, "no request was completed: there is nothing to report"]
    lines += [
        f"requests/s          {row['request_throughput']:,.3f}",
        f"output tokens/s     {row['output_throughput']:,.1f}",
        f"all tokens/s        {row['total_throughput']:,.1f}",
        f"tokens              {row['prompt_tokens']:,} in prompts, {row['output_tokens']:,} in answers "
        f"(from {row['tokens_from']}), {row['tokens_per_chunk'] or 0:.2f} a chunk",
        f"concurrency         {row['peak_concurrency']} at most, {row['mean_concurrency']:.1f} on average",
    ]
    goodput = row["goodput"]
    if goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        lines.append(f"goodput             {goodput['per_second']:,.3f} requests/s ({goodput['good']} within {limits})")
    return lines


def _acceptance(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return ["acceptance: not reported by this server"]
    if figures["acceptance_length"] is None:
        return ["acceptance: nothing was drafted"]
    where = "said with each answer" if figures["source"] == "requests" else "the server's counters, all its traffic"
    lines = [
        f"acceptance length   {figures['acceptance_length']:.3f} ({where})",
        f"acceptance rate     {100 * figures['acceptance_rate']:.1f} % ({figures['accepted_tokens']:,} of "
        f"{figures['draft_tokens']:,} drafts, {figures['rounds']:,} rounds)",
    ]
    if figures["per_position"]:
        lines += [
            f"by position         {_shares(figures['per_position'])}",
            f"  given the last    {_shares(figures['per_position_conditional'])}",
        ]
    return lines


def _shares(values: Sequence[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.3f}" for value in values)
