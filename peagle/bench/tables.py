"""Markdown tables of result files, chosen by the beginning of the result's name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from peagle.bench import engine_tables, eval_tables
from peagle.bench.markdown import markdown_table
from peagle.bench.sweep_tables import announcement_tables, sweep_tables
from peagle.errors import PeagleError

Json = Mapping[str, Any]

_EVALUATIONS = ("eval-", "accuracy-")  # several tables each


def render_block(name: str, result: Json | None) -> str:
    """Markdown for one result: its table and a line that says where it was measured. None: not measured yet."""
    if result is None:
        return f"*Not measured yet: `benchmarks/results/{name}.json` will fill this table.*"
    if name.startswith(_EVALUATIONS):
        return f"{eval_tables.markdown(result['results'])}\n\n{_measured_on(name, result)}"
    for prefix, render in _TABLES.items():
        if name.startswith(prefix):
            return f"{render(result['results']['rows'])}\n\n{_measured_on(name, result)}"
    raise PeagleError(
        f"no table is known for the result {name!r}: names start with {', '.join((*_EVALUATIONS, *_TABLES))}"
    )


def _acceptance(rows: Sequence[Json]) -> str:
    header = ("suite", "T", "K", "AL", "AL without loops", "accepted at position 1, 2, ...", "prompts", "tokens")
    several = any(row.get("head") for row in rows)  # results of earlier versions name none
    return markdown_table(
        ("head", *header) if several else header,
        [
            (
                *((row["head"],) if several else ()),
                row["suite"],
                f"{row['temperature']:g}",
                str(row["num_speculative_tokens"]),
                f"**{row['acceptance_length']:.2f}**",
                f"{row['acceptance_length_without_loops']:.2f}",
                " ".join(f"{share:.2f}" for share in row["accepted_share_per_position"]),
                str(row["prompts"]),
                f"{row['tokens']:,}",
            )
            for row in rows
        ],
    )


def _speed(rows: Sequence[Json]) -> str:
    header = ("K", "plain tok/s", "P-EAGLE tok/s", "ratio", "AL", "prompts", "tokens")
    return markdown_table(
        header,
        [
            (
                str(row["num_speculative_tokens"]),
                f"{row['tokens_per_second_plain']:.1f}",
                f"{row['tokens_per_second']:.1f}",
                f"**{row['ratio']:.2f}x**",
                f"{row['acceptance_length']:.2f}",
                str(row["prompts"]),
                f"{row['tokens']:,}",
            )
            for row in rows
        ],
    )


def _lossless(rows: Sequence[Json]) -> str:
    return markdown_table(
        ("T", "K", "requests at once", "identical outputs"),
        [
            (
                f"{row['temperature']:g}",
                str(row["num_speculative_tokens"]),
                str(row["batch_size"]),
                f"{row['identical']} of {row['prompts']}",
            )
            for row in rows
        ],
    )


def _lossless_settings(rows: Sequence[Json]) -> str:
    return markdown_table(
        ("setting", "K", "precision", "T", "identical outputs", "tokens", "largest gap", "2 x noise", "explained"),
        [
            (
                row["setting"],
                str(row["num_speculative_tokens"] or ""),
                row["dtype"],
                f"{row['temperature']:g}",
                f"**{row['equal']} of {row['requests']}**",
                f"{row['tokens_compared']:,}",
                "–" if row["largest_gap"] is None else f"{row['largest_gap']:.2g}",
                f"{row['limit']:.2g}",
                _explained(row),
            )
            for row in rows
        ],
    )


def _explained(row: Json) -> str:
    return "–" if row["equal"] == row["requests"] else "yes" if row["explained"] else "**no**"


def _curve(rows: Sequence[Json]) -> str:
    return markdown_table(
        ("run", "within", "AL", "AL implied by held-out text", "positions", "seconds", "step"),
        [
            (
                row["run"],
                row["budget"],
                f"**{row['acceptance_length']:.2f}**",
                "" if row["implied_acceptance_length"] is None else f"{row['implied_acceptance_length']:.2f}",
                f"{row['positions']:,}",
                f"{row['seconds']:,.0f}",
                f"{row['step']:,}",
            )
            for row in rows
        ],
    )


def _heads(rows: Sequence[Json]) -> str:
    """Acceptance length alone: one line per head and K, a column per suite."""
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    lines = dict.fromkeys((row["head"], row["num_speculative_tokens"]) for row in rows)
    of = {(row["head"], row["num_speculative_tokens"], row["suite"]): row["acceptance_length"] for row in rows}
    return markdown_table(
        ("head", "K", *suites),
        [(head, str(k), *(f"{of[head, k, suite]:.2f}" for suite in suites)) for head, k in lines],
    )


def _training_memory(rows: Sequence[Json]) -> str:
    header = ("partition", "attention", "positions", "rows", "GiB for the step", "s", "rows/s", "of bf16 peak")
    return markdown_table(
        header,
        [
            (
                _way(row),
                row["attention"],
                f"{row['positions']:,}",
                f"{row['rows']:,}",
                *_step_figures(row),
            )
            for row in sorted(rows, key=lambda row: row["positions"])
        ],
    )


def _way(row: Json) -> str:
    """A partition and what was set with it."""
    notes = [
        f"{row['segments']} segments" if row["partition"] == "algorithm1" else "",
        f"chunks of {row['chunk_rows']:,}" if row["chunk_rows"] else "",
        "checkpointed" if row["checkpoint_activations"] else "",
        "compiled" if row["compile"] else "",
    ]
    said = ", ".join(note for note in notes if note)
    return f"{row['partition']} ({said})" if said else str(row["partition"])


def _step_figures(row: Json) -> tuple[str, str, str, str]:
    if row["out_of_memory"]:
        return ("out of memory", "", "", "")
    return (
        f"{row['peak_gib'] - row['standing_gib']:.1f}",
        f"{row['seconds']:.2f}",
        f"{row['rows_per_second']:,.0f}",
        f"{100 * row['utilisation']:.0f} %",
    )


def _training_speed(rows: Sequence[Json]) -> str:
    header = ("shape", "method", "positions/s", "rows/s", "of bf16 peak", "waiting for data")
    return markdown_table(
        header,
        [
            (
                row["shape"],
                row["method"],
                f"**{row['positions_per_second']:,.0f}**",
                f"{row['rows_per_second']:,.0f}",
                f"{100 * row['utilisation']:.0f} %",
                f"{100 * row['data_wait_share']:.0f} %",
            )
            for row in rows
        ],
    )


def _peer(rows: Sequence[Json]) -> str:
    header = ("shape", "positions", "rows", "forward ms", "backward ms", "sum ms", "rows/s", "peak GiB", "resident GiB")
    return markdown_table(
        header,
        [
            (
                row["shape"] + (" (checkpointed)" if row["gradient_checkpointing"] else ""),
                f"{row['positions']:,}",
                f"{row['rows']:,}",
                *_peer_figures(row),
            )
            for row in sorted(rows, key=lambda row: (row["shape"], row["gradient_checkpointing"], row["positions"]))
        ],
    )


def _peer_figures(row: Json) -> tuple[str, ...]:
    if row["failure"] is not None:
        return (row["failure"], "", "", "", "", "")
    return (
        *(f"{row[key]:,.0f}" for key in ("forward_ms", "backward_ms", "step_ms")),
        f"{row['rows_per_second']:,.0f}",
        f"{row['peak_gib']:.1f}",
        f"{row['resident_gib']:.1f}",
    )


def _profile(rows: Sequence[Json]) -> str:
    return markdown_table(
        ("part of a step", "calls", "ms", "share"),
        [
            (
                row["group"],
                f"{row['calls_per_step']:.0f}",
                f"{row['ms_per_step']:.3f}",
                f"{100 * row['share']:.0f} %",
            )
            for row in rows
        ],
    )


def _client_overhead(rows: Sequence[Json]) -> str:
    header = ("client", "tokens", "chunks/s", "TPOT added", "E2E added", "TTFT added", "client's CPU")
    return markdown_table(
        header,
        [
            (
                row["client"],
                f"{row['tokens_per_chunk']} every {row['tokens_per_chunk'] * row['interval_ms']:g} ms",
                f"{row['chunks_per_second']:,.0f}",
                f"{100 * row['tpot_added']:+.2f} %",
                f"{100 * row['e2e_added']:+.2f} %",
                f"{row['ttft_added_ms']:+.1f} ms",
                "" if row["client_cpu_share"] is None else f"{row['client_cpu_share']:.2f} cores",
            )
            for row in rows
        ],
    )


def _serve(rows: Sequence[Json]) -> str:
    """Loads put on servers, a line each."""
    header = (
        "model",
        "prompts",
        "at once",
        "tok/s",
        "TTFT ms",
        "TPOT ms",
        "p99",
        "E2E ms",
        "AL",
        "completed",
        "failed",
    )
    return markdown_table(
        header,
        [
            (
                row["model"],
                row["dataset"] + (" (partial)" if row["partial"] else ""),
                str(row["peak_concurrency"]),
                f"**{row['output_throughput']:,.1f}**",
                _latency(row, "ttft", "p50"),
                _latency(row, "tpot", "p50"),
                _latency(row, "tpot", "p99"),
                _latency(row, "e2el", "p50"),
                _served_length(row["acceptance"]),
                str(row["completed"]),
                str(row["failed"]),
            )
            for row in rows
        ],
    )


def _latency(row: Json, name: str, figure: str) -> str:
    spread = row["latency_ms"][name]
    return "–" if spread is None else f"{spread[figure]:,.1f}"


def _served_length(acceptance: Json | None) -> str:
    length = None if acceptance is None else acceptance["acceptance_length"]
    return "–" if length is None else f"{length:.2f}"


def _soak(rows: Sequence[Json]) -> str:
    header = (
        "clients at once", "minutes", "requests answered", "tokens", "left", "rubbish", "different", "lost or doubled",
        "failed", "KV cache after", "RSS MiB/min", "GPU MiB/min",
    )  # fmt: skip
    return markdown_table(
        header,
        [
            (
                str(row["concurrency"]),
                f"{row['minutes']:.1f}",
                f"{row['requests']:,}",
                f"{row['tokens']:,}",
                f"{row['left']:,}",
                f"{row['rubbish']:,}",
                f"**{row['different']}**",
                f"**{row['lost_or_doubled']}**",
                f"**{row['failed']}**",
                f"{100 * row['kv_usage_after']:g} %",
                *("–" if row[key] is None else f"{row[key]:+.2f}" for key in _SLOPES),
            )
            for row in rows
        ],
    )


_SLOPES = ("rss_mib_per_minute", "gpu_mib_per_minute")
_TABLES: Mapping[str, Callable[[Sequence[Json]], str]] = MappingProxyType(
    {
        "acceptance-": _acceptance,
        "heads-": _heads,
        "cpu-speed-": _speed,
        "lossless-gpu-": _lossless_settings,  # before any shorter beginning
        "lossless-": _lossless,
        "train-curve": _curve,
        "training-memory-": _training_memory,
        "training-speed-": _training_speed,
        "engine-speed-": engine_tables.engine_speed,
        "savings-": engine_tables.savings,
        "auto-k-": engine_tables.auto_k,
        "step-kernels-": engine_tables.step_kernels,
        "model-kernels-": engine_tables.model_kernels,
        "over-vllm": engine_tables.over_vllm,
        "peer-vllm-": engine_tables.engine_speed,  # before any shorter beginning
        "profile-": _profile,
        "serve-": _serve,
        "client-overhead": _client_overhead,
        "peer-": _peer,
        "soak-": _soak,
        "sweep-": sweep_tables,
        "announcement-": announcement_tables,
    }
)


def _measured_on(name: str, result: Json) -> str:
    machine, versions = result["machine"], result["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    partial = "**partial**: it ended before all was measured; " if result["settings"].get("partial") else ""
    versions_of = f"torch {versions['torch']}, peagle {versions['peagle']} ({versions['commit'] or 'no commit'})"
    line = (
        f"<sub>{partial}{where}; {versions_of}; {result['created'][:10]}; [JSON](benchmarks/results/{name}.json)"
    )  # fmt: skip
    command = result["settings"].get("command")
    return line + (f"; `{command}`</sub>" if command else "</sub>")
