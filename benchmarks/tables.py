"""Markdown tables of result files, chosen by the beginning of the result's name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from benchmarks import engine_tables
from benchmarks.speed_shapes import SYNTHETIC
from benchmarks.target_tables import targets
from peagle.bench import eval_tables
from peagle.bench.markdown import Cell, Json, figure, known, markdown_table, percent, shares, table_of
from peagle.bench.sweep_tables import announcement_tables, sweep_tables
from peagle.errors import PeagleError

_EVALUATIONS = ("eval-", "accuracy-")  # several tables each
_BY_CHANCE = ("engine-speed-", "peer-vllm-", "auto-k-", "over-vllm")  # what they accept is no head's doing


def render_from(name: str, read: Callable[[str], Json | None]) -> str:
    """The block of a name, from one result or, for "targets", from several; `read` says None of what is not there."""
    return targets(read) if name == "targets" else render_block(name, read(name))


def render_block(name: str, result: Json | None) -> str:
    """Markdown for one result: its table and a line that says where it was measured. None: not measured yet."""
    if result is None:
        return f"*Not measured yet: `benchmarks/results/{name}.json` will fill this table.*"
    if name.startswith(_EVALUATIONS):
        return f"{eval_tables.markdown(result['results'])}\n\n{_measured_on(name, result)}"
    for prefix, render in _TABLES.items():
        if name.startswith(prefix):
            said = _acceptance_by_chance(result) if name.startswith(_BY_CHANCE) else ""
            return f"{said}{render(result['results']['rows'])}\n\n{_measured_on(name, result)}"
    raise PeagleError(
        f"no table is known for the result {name!r}: names start with {', '.join((*_EVALUATIONS, *_TABLES))}"
    )


def _acceptance_by_chance(result: Json) -> str:
    """A line to stand above a table of such acceptance; results of earlier versions do not say it themselves."""
    said = result["settings"].get("acceptance", SYNTHETIC)
    return f"{said.replace('SYNTHETIC:', 'SYNTHETIC acceptance:', 1)}\n\n"


def _acceptance(rows: Sequence[Json]) -> str:
    several = any(row.get("head") for row in rows)  # results of earlier versions name none
    return table_of(
        *((("head", "{head}"),) if several else ()),
        ("suite", "{suite}"),
        ("T", "{temperature:g}"),
        ("K", "{num_speculative_tokens}"),
        ("AL", "**{acceptance_length:.2f}**"),
        ("AL without loops", "{acceptance_length_without_loops:.2f}"),
        ("accepted at position 1, 2, ...", shares("accepted_share_per_position")),
        ("prompts", "{prompts}"),
        ("tokens", "{tokens:,}"),
    )(rows)


def _heads(rows: Sequence[Json]) -> str:
    """Acceptance length alone: one line per head and K, a column per suite."""
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    lines = dict.fromkeys((row["head"], row["num_speculative_tokens"]) for row in rows)
    of = {(row["head"], row["num_speculative_tokens"], row["suite"]): row["acceptance_length"] for row in rows}
    return markdown_table(
        ("head", "K", *suites),
        [(head, str(k), *(f"{of[head, k, suite]:.2f}" for suite in suites)) for head, k in lines],
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


def _unless(failed: str, cell: Cell, said: str = "") -> Cell:
    """The cell of a row that did not fail; else what is `said` in its place."""

    def render(row: Json) -> str:
        chosen = said if row[failed] else cell
        return chosen.format_map(row) if isinstance(chosen, str) else chosen(row)

    return render


def _latency(name: str, share: str) -> Cell:
    return lambda row: figure(row["latency_ms"][name], share, "{:,.1f}")


# Longer beginnings stand before shorter ones.
_TABLES: Mapping[str, Callable[[Sequence[Json]], str]] = MappingProxyType(
    {
        "acceptance-": _acceptance,
        "heads-": _heads,
        "cpu-speed-": table_of(
            ("K", "{num_speculative_tokens}"),
            ("plain tok/s", "{tokens_per_second_plain:.1f}"),
            ("P-EAGLE tok/s", "{tokens_per_second:.1f}"),
            ("ratio", "**{ratio:.2f}x**"),
            ("AL", "{acceptance_length:.2f}"),
            ("prompts", "{prompts}"),
            ("tokens", "{tokens:,}"),
        ),
        "lossless-gpu-": table_of(
            ("setting", "{setting}"),
            ("K", lambda row: str(row["num_speculative_tokens"] or "")),
            ("precision", "{dtype}"),
            ("T", "{temperature:g}"),
            ("identical outputs", "**{equal} of {requests}**"),
            ("tokens", "{tokens_compared:,}"),
            ("largest gap", known("largest_gap", "{:.2g}")),
            ("noise", "{limit:.2g}"),
            ("explained", eval_tables.explained("requests")),
        ),
        "lossless-": table_of(
            ("T", "{temperature:g}"),
            ("K", "{num_speculative_tokens}"),
            ("requests at once", "{batch_size}"),
            ("identical outputs", "{identical} of {prompts}"),
        ),
        "train-curve": table_of(
            ("run", "{run}"),
            ("within", "{budget}"),
            ("AL", "**{acceptance_length:.2f}**"),
            ("AL implied by held-out text", known("implied_acceptance_length", "{:.2f}", missing="")),
            ("positions", "{positions:,}"),
            ("seconds", "{seconds:,.0f}"),
            ("step", "{step:,}"),
        ),
        "training-memory-": table_of(
            ("partition", _way),
            ("attention", "{attention}"),
            ("positions", "{positions:,}"),
            ("rows", "{rows:,}"),
            (
                "GiB for the step",
                _unless("out_of_memory", lambda row: f"{row['peak_gib'] - row['standing_gib']:.1f}", "out of memory"),
            ),
            ("s", _unless("out_of_memory", "{seconds:.2f}")),
            ("rows/s", _unless("out_of_memory", "{rows_per_second:,.0f}")),
            ("of bf16 peak", _unless("out_of_memory", percent("utilisation"))),
            order=lambda row: row["positions"],
        ),
        "training-speed-": table_of(
            ("shape", "{shape}"),
            ("method", "{method}"),
            ("positions/s", "**{positions_per_second:,.0f}**"),
            ("rows/s", "{rows_per_second:,.0f}"),
            ("of bf16 peak", percent("utilisation")),
            ("waiting for data", percent("data_wait_share")),
        ),
        "engine-speed-": engine_tables.engine_speed,
        "savings-": engine_tables.savings,
        "auto-k-": engine_tables.auto_k,
        "step-kernels-": engine_tables.step_kernels,
        "model-kernels-": engine_tables.model_kernels,
        "prompt-attention-": engine_tables.prompt_attention,
        "over-vllm": engine_tables.over_vllm,
        "peer-vllm-": engine_tables.engine_speed,
        "profile-": table_of(
            ("part of a step", "{group}"),
            ("calls", "{calls_per_step:.0f}"),
            ("ms", "{ms_per_step:.3f}"),
            ("share", percent("share")),
        ),
        "serve-": table_of(
            ("model", "{model}"),
            ("prompts", lambda row: row["dataset"] + (" (partial)" if row["partial"] else "")),
            ("at once", "{peak_concurrency}"),
            ("tok/s", "**{output_throughput:,.1f}**"),
            ("TTFT ms", _latency("ttft", "p50")),
            ("TPOT ms", _latency("tpot", "p50")),
            ("p99", _latency("tpot", "p99")),
            ("E2E ms", _latency("e2el", "p50")),
            ("AL", lambda row: figure(row["acceptance"], "acceptance_length")),
            ("completed", "{completed}"),
            ("failed", "{failed}"),
        ),
        "client-overhead": table_of(
            ("client", "{client}"),
            (
                "tokens",
                lambda row: f"{row['tokens_per_chunk']} every {row['tokens_per_chunk'] * row['interval_ms']:g} ms",
            ),
            ("chunks/s", "{chunks_per_second:,.0f}"),
            ("TPOT added", percent("tpot_added", "{:+.2f} %")),
            ("E2E added", percent("e2e_added", "{:+.2f} %")),
            ("TTFT added", "{ttft_added_ms:+.1f} ms"),
            ("client's CPU", known("client_cpu_share", "{:.2f} cores", missing="")),
        ),
        "peer-": table_of(
            ("shape", lambda row: row["shape"] + (" (checkpointed)" if row["gradient_checkpointing"] else "")),
            ("positions", "{positions:,}"),
            ("rows", "{rows:,}"),
            ("forward ms", _unless("failure", "{forward_ms:,.0f}", "{failure}")),
            ("backward ms", _unless("failure", "{backward_ms:,.0f}")),
            ("sum ms", _unless("failure", "{step_ms:,.0f}")),
            ("rows/s", _unless("failure", "{rows_per_second:,.0f}")),
            ("peak GiB", _unless("failure", "{peak_gib:.1f}")),
            ("resident GiB", _unless("failure", "{resident_gib:.1f}")),
            order=lambda row: (row["shape"], row["gradient_checkpointing"], row["positions"]),
        ),
        "soak-": table_of(
            ("clients at once", "{concurrency}"),
            ("minutes", "{minutes:.1f}"),
            ("requests answered", "{requests:,}"),
            ("tokens", "{tokens:,}"),
            ("left", "{left:,}"),
            ("rubbish", "{rubbish:,}"),
            ("different", "**{different}**"),
            ("lost or doubled", "**{lost_or_doubled}**"),
            ("failed", "**{failed}**"),
            ("KV cache after", percent("kv_usage_after", "{:g} %")),
            ("RSS MiB/min", known("rss_mib_per_minute", "{:+.2f}")),
            ("GPU MiB/min", known("gpu_mib_per_minute", "{:+.2f}")),
        ),
        "sweep-": sweep_tables,
        "announcement-": announcement_tables,
    }
)


def _measured_on(name: str, result: Json) -> str:
    machine, versions = result["machine"], result["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    partial = "**partial**: it ended before all was measured; " if result["settings"].get("partial") else ""
    versions_of = f"torch {versions['torch']}, peagle {versions['peagle']} ({versions['commit'] or 'no commit'})"
    line = f"<sub>{partial}{where}; {versions_of}; {result['created'][:10]}; [JSON](benchmarks/results/{name}.json)"
    command = result["settings"].get("command")
    return line + (f"; `{command}`</sub>" if command else "</sub>")
