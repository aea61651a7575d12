"""The verbs under `peagle bench`: argument parsing and calls, as in `peagle.cli`."""

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
