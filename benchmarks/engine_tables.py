"""Markdown tables of the engine's own benchmarks: steps, savings, the choice of K, kernels, other engines."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peagle.bench.markdown import Json, figure, markdown_table, table_of

Engines = Mapping[tuple[str, int, int], Json]  # by method, K and concurrency


def engine_speed(rows: Sequence[Json]) -> str:
    """A line per engine, a pair of columns per concurrency: ms of a step and tokens per second; ratios below."""
    at_once = sorted({row["concurrency"] for row in rows})
    lines: dict[tuple[str, ...], dict[int, Json]] = {}
    for row in rows:
        lines.setdefault(_engine(row), {})[row["concurrency"]] = row
    speeds = (f"c={c}: ms a step, tok/s" for c in at_once)
    header = ("shape", "method", "K", "AL", *speeds, "drafting ms", "GPU busy", "x floor")
    table = markdown_table(
        header,
        [
            (
                *engine,
                *(_step_and_speed(of.get(concurrency)) for concurrency in at_once),
                " ".join(figure(of.get(concurrency), "drafting_ms") for concurrency in at_once),
                " ".join(
                    figure(of.get(concurrency), "gpu_busy_share", "{:.0f} %", times=100) for concurrency in at_once
                ),
                " ".join(figure(of.get(concurrency), "times_floor", "{:.1f}") for concurrency in at_once),
            )
            for engine, of in lines.items()
        ],
    )
    ratios = [said for shape in dict.fromkeys(row["shape"] for row in rows) for said in _ratios(shape, rows)]
    return "\n\n".join((table, "\n".join(f"- {said}" for said in ratios))) if ratios else table


def _ratios(shape: str, rows: Sequence[Json]) -> Iterator[str]:
    """What the rows of a shape say about one another."""
    of = engines_of(shape, rows)
    drafts = sorted({k for method, k, _ in of if method == "p-eagle"}, reverse=True)
    for k in drafts:
        # At equal acceptance lengths tokens per second are as the steps' times, whatever the lengths.
        if times := _each(of, ("eagle3", k), ("p-eagle", k), "ms_per_step"):
            yield f"{shape}: P-EAGLE over EAGLE-3 at equal acceptance, K = {k}: {times}"
        if times := _each(of, ("eagle3", k), ("p-eagle-32k", k), "ms_per_step"):
            yield f"{shape}: the same where both draft from 32,000 tokens, K = {k}: {times}"
        if times := _each(of, ("p-eagle", k), ("p-eagle-int8", k), "ms_per_step"):
            yield f"{shape}: a step with the output layer of drafts in 16 bits over one in 8, K = {k}: {times}"
    if times := _each(of, ("p-eagle", 7), ("p-eagle", 1), "drafting_ms"):
        yield f"{shape}: drafting with K = 7 over drafting with K = 1: {times}"
    for k in drafts[:1]:
        if times := _each(of, ("p-eagle", k), ("none", 0), "tokens_per_second"):
            yield f"{shape}: P-EAGLE with K = {k} over no speculation, at the acceptance assumed: {times}"


def engines_of(shape: str, rows: Sequence[Json]) -> Engines:
    """The rows of a shape; of a method and K at two acceptance lengths, those at the lengths of P-EAGLE."""
    own = sorted((row for row in rows if row["shape"] == shape), key=lambda row: row["acceptance"] == "equal")
    return {(row["method"], row["num_speculative_tokens"], row["concurrency"]): row for row in own}


def over(of: Engines, above: tuple[str, int], below: tuple[str, int], key: str) -> Iterator[tuple[int, float]]:
    """One engine's figure over another's, at every concurrency at which both have one."""
    for concurrency in sorted({concurrency for _, _, concurrency in of}):
        value, other = ((of.get((*engine, concurrency)) or {}).get(key) for engine in (above, below))
        if value and other:
            yield concurrency, value / other


def _each(of: Engines, above: tuple[str, int], below: tuple[str, int], key: str) -> str:
    return ", ".join(f"**{value:.2f}** at c = {concurrency}" for concurrency, value in over(of, above, below, key))


def _engine(row: Json) -> tuple[str, ...]:
    note = " (equal AL)" if row["acceptance"] == "equal" else ""
    drafts = str(row["num_speculative_tokens"] or "")
    return (row["shape"], row["method"] + note, drafts, f"{row['acceptance_length']:.2f}")


def _step_and_speed(row: Json | None) -> str:
    if row is None:
        return ""
    return f"{row['ms_per_step']:.2f}, **{row['tokens_per_second']:,.0f}**"


def savings(rows: Sequence[Json]) -> str:
    """A line per shape and saving that is left out, a column per concurrency."""
    at_once = sorted({row["concurrency"] for row in rows})
    of = {(row["shape"], row["left_out"], row["concurrency"]): row for row in rows}
    lines = dict.fromkeys((row["shape"], row["left_out"]) for row in rows)
    header = ("shape", "step without", *(f"c={c}: ms, change" for c in at_once))
    return markdown_table(header, [(*line, *(_saving(of.get((*line, c))) for c in at_once)) for line in lines])


def _saving(row: Json | None) -> str:
    if row is None:
        return "–"
    whole = row["left_out"] == "nothing"
    return f"{row['ms_per_step']:.3f}" + ("" if whole else f", **{100 * (row['times_all'] - 1):+.1f} %**")


def auto_k(rows: Sequence[Json]) -> str:
    """A line per shape and head; for every concurrency what the engine's choice of K makes of no speculation, in the
    first batch, later, and what the best fixed K makes of it."""
    at_once = sorted({row["concurrency"] for row in rows})
    of: dict[tuple[str, float, int], dict[str, Json]] = {}
    for row in rows:
        of.setdefault((row["shape"], row["acceptance_length"], row["concurrency"]), {})[row["policy"]] = row
    lines = dict.fromkeys((shape, length) for shape, length, _ in of)
    columns = [f"c={c}: {what}" for c in at_once for what in ("auto (first batch)", "best fixed K")]
    return markdown_table(
        ("shape", "AL at K=7", *columns),
        [
            (shape, f"{length:.2f}", *(cell for c in at_once for cell in _auto(of.get((shape, length, c)))))
            for shape, length in lines
        ],
    )


def _auto(policies: Mapping[str, Json] | None) -> tuple[str, str]:
    if policies is None:
        return "–", "–"
    auto, first = policies["auto"], policies["auto, first batch"]
    fixed = max((row for name, row in policies.items() if name.startswith("K=")), key=lambda row: row["times_plain"])
    return (
        f"**{auto['times_plain']:.2f}x** ({first['times_plain']:.2f}x), mean K {auto['mean_drafts']:.1f}",
        f"{fixed['times_plain']:.2f}x, {fixed['policy']}",
    )


def step_kernels(rows: Sequence[Json]) -> str:
    """A line per shape and operation, a column per batch size: Triton, torch and the floor, in microseconds."""
    batches = sorted({row["batch"] for row in rows})
    of = {(row["shape"], row["kernel"], row["batch"], row["backend"]): row for row in rows}
    lines = dict.fromkeys((row["shape"], row["kernel"]) for row in rows)
    header = ("shape", "operation", *(f"B={b}: us Triton, torch, floor" for b in batches))
    return markdown_table(
        header,
        [
            (*line, *(_forms(*(of.get((*line, b, form)) for form in ("triton", "torch"))) for b in batches))
            for line in lines
        ],
    )


def _forms(triton: Json | None, torch: Json | None) -> str:
    some = triton or torch
    if some is None:
        return "–"
    return f"**{figure(triton, 'us', '{:.1f}')}**, {figure(torch, 'us', '{:.1f}')}, {some['floor_us']:.2f}"


def model_kernels(rows: Sequence[Json]) -> str:
    """A line per shape, operation and rows: both forms and the floor, in microseconds."""
    of: dict[tuple[Any, ...], dict[str, Json]] = {}
    for row in rows:
        line = (row["shape"], row["operation"], row["requests"], row["rows"], row["keys"])
        of.setdefault(line, {})[row["backend"]] = row
    header = ("shape", "operation", "requests x rows", "keys", "Triton us", "torch us", "floor us", "x floor")
    return markdown_table(
        header,
        [
            (
                shape,
                operation,
                f"{requests} x {count}",
                f"{keys:,}" if keys else "",
                *(f"{1e3 * forms[form]['ms']:.1f}" if form in forms else "–" for form in ("triton", "torch")),
                f"{1e3 * next(iter(forms.values()))['floor_ms']:.2f}",
                f"**{min(form['times_floor'] for form in forms.values()):.1f}**",
            )
            for (shape, operation, requests, count, keys), forms in of.items()
        ],
    )


def prompt_attention(rows: Sequence[Json]) -> str:
    """A line per shape, prompts and rows: every form in microseconds of the GPU, the engine's two with the host's, the
    others with those of a first call if it was timed."""
    of: dict[tuple[Any, ...], dict[str, Json]] = {}
    for row in rows:
        of.setdefault((row["shape"], row["prompts"], row["rows"], row["mean_row"]), {})[row["form"]] = row
    forms = dict.fromkeys(row["form"] for row in rows)
    return markdown_table(
        ("shape", "prompts", "rows", "mean row's", *forms),
        [(line[0], *(f"{n:,}" for n in line[1:]), *(_form(some.get(f)) for f in forms)) for line, some in of.items()],
    )


def _form(row: Json | None) -> str:
    if row is None:
        return "–"
    other = row["host_ms"] if row["fresh_ms"] is None else row["fresh_ms"]
    return f"**{1e3 * row['gpu_ms']:.1f}**" + ("" if other is None else f" ({1e3 * other:,.0f})")


# A line per shape and concurrency: the best engine of either side.
over_vllm = table_of(
    ("shape", "{shape}"),
    ("requests at once", "{concurrency}"),
    ("ours", "{ours}"),
    ("tok/s", "{ours_tokens_per_second:,.0f}"),
    ("vLLM's", "{theirs}"),
    ("tok/s", "{theirs_tokens_per_second:,.0f}"),
    ("ratio", "**{ratio:.3f}x**"),
)
