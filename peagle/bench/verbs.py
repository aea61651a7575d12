"""The verbs under `peagle bench`: argument parsing and calls, as in `peagle.cli`."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.bench.help import BENCH_SERVE_ALIASES, BENCH_SERVE_FLAGS, SWEEP_FLAGS
from peagle.bench.settings import BenchServeConfig
from peagle.bench.sweep_settings import EAGLE3, P_EAGLE, SweepConfig
from peagle.errors import PeagleError
from peagle.flags import Model, with_flags
from peagle.help import EXAMPLES

bench = typer.Typer(
    help="Measure: a server under load, which K pays, and whether two results differ.",
    epilog=EXAMPLES["bench"],
    rich_markup_mode="rich",
)


@bench.command(epilog=EXAMPLES["bench serve"])
@with_flags(BenchServeConfig, BENCH_SERVE_FLAGS, BENCH_SERVE_ALIASES)
def serve(config: BenchServeConfig) -> None:
    """Put load on any OpenAI-compatible server; report latency, throughput and acceptance."""
    from peagle.bench.serve import run_bench_serve

    raise typer.Exit(run_bench_serve(config))


@bench.command(epilog=EXAMPLES["bench sweep"])
@with_flags(SweepConfig, SWEEP_FLAGS)
def sweep(
    model: Model,
    config: SweepConfig,
    out: Annotated[Path, typer.Option(metavar="F.json", help="Result; runs, K tables and plots go beside it.")],
    head: Annotated[
        str | None, typer.Option(metavar="DIR", help="P-EAGLE head (default: the one that ships for MODEL).")
    ] = None,
    eagle3_head: Annotated[str | None, typer.Option(metavar="DIR", help="EAGLE-3 head.")] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD:K=URL", help="Measure a running server, MODEL is its model; repeat for each method and K."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that are beside --out.")] = False,
) -> None:
    """Compare P-EAGLE, EAGLE-3 and no drafts over K and concurrency; write the K table a server can load.

    Exit status 1: requests to a server failed.
    """
    from rich.console import Console

    from peagle.bench.sweep import run_server_sweep, run_sweep
    from peagle.speculation import shipped_head

    console = Console(stderr=True)
    if base_url:
        from peagle.bench.sweep_server import parse_servers

        if head or eagle3_head:
            raise PeagleError("--base-url measures servers: leave --head and --eagle3-head out, servers have theirs")
        raise typer.Exit(run_server_sweep(model, parse_servers(base_url), config, out, console, resume=resume))
    given = {P_EAGLE: head or shipped_head(model), EAGLE3: eagle3_head}
    heads = {method: path for method, path in given.items() if path is not None}
    run_sweep(model, heads, config, out, console, resume=resume)


@bench.command(epilog=EXAMPLES["bench compare"])
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Result file of the earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Result file of the later run.")],
    show_all: Annotated[
        bool, typer.Option("--all", help="Show figures that did not move, or by noise, and mere counts too.")
    ] = False,
    fail_on_regression: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Exit status 1 if a figure got worse by more than this, beyond noise."),
    ] = None,
) -> None:
    """Compare two result files: what moved, by how much, and is it noise."""
    from peagle.bench.compare import run_compare
    from peagle.bench.eval_tables import wide_console

    status = run_compare(before, after, wide_console(), show_all=show_all, fail_on_regression=fail_on_regression)
    raise typer.Exit(status)
