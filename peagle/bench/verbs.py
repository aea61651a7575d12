"""The verbs under `peagle bench`: argument parsing and calls, as in `peagle.cli`."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.bench.help import BENCH_SERVE_ALIASES, BENCH_SERVE_FLAGS
from peagle.bench.settings import BenchServeConfig
from peagle.flags import with_flags
from peagle.help import EXAMPLES

bench = typer.Typer(help="Measure: a server under load.", rich_markup_mode="rich")


@bench.command(epilog=EXAMPLES["bench serve"])
@with_flags(BenchServeConfig, BENCH_SERVE_FLAGS, BENCH_SERVE_ALIASES)
def serve(config: BenchServeConfig) -> None:
    """Put load on any OpenAI-compatible server; report latency, throughput and acceptance."""
    from peagle.bench.serve import run_bench_serve

    raise typer.Exit(run_bench_serve(config))


@bench.command(epilog=EXAMPLES["bench compare"])
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Result file of the earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Result file of the later run.")],
    show_all: Annotated[
        bool, typer.Option("--all", help="Show figures that did not move, or by noise, and mere counts too.")
    ] = False,
    fail_on_regression: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Exit status 1 if a figure got worse by more than this."),
    ] = None,
) -> None:
    """Compare two result files: what moved, by how much, and is it noise."""
    from peagle.bench.compare import run_compare
    from peagle.bench.eval_tables import wide_console

    status = run_compare(before, after, wide_console(), show_all=show_all, fail_on_regression=fail_on_regression)
    raise typer.Exit(status)
