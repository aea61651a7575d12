"""The verb `profile`: time some decoding steps, profile as many more, and show both beside the machine's limits."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from peagle.bench.profile import Profile, Share
from peagle.bench.report import check_result_path, write_result
from peagle.bench.roofline import StepCost, copy_bandwidth, step_cost
from peagle.bench.stepping import SETTLED, Decoding, Window, profile_steps
from peagle.config import MAX_SPECULATIVE_TOKENS, EngineConfig, ProfileConfig, SpeculativeConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.meter import say
from peagle.models.hub import resolve_model
from peagle.models.spec import ModelSpec
from peagle.models.target import read_spec
from peagle.sampling import SamplingParams

_WARM_UP = 8  # steps
_SPARE = 4  # of the profiler's own start-up, and of a host that runs ahead of its results


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRow:
    """What one kind of kernel takes of a step (result names `profile-*`); on a CPU, of operation."""

    group: str
    calls_per_step: float
    ms_per_step: float
    share: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The same steps timed alone and under the profiler, and what they must cost."""

    window: Window
    profile: Profile
    cost: StepCost
    bandwidth: float

    def summary(self) -> dict[str, float | int | bool]:
        """The figures of a whole step, rounded, as they stand in a result file."""
        window, profile = self.window, self.profile
        floor_ms = self.cost.floor_ms(self.bandwidth)
        return {
            "ms_per_step": round(window.ms_per_step, 4),
            "tokens_per_second": round(window.tokens_per_second, 1),
            "acceptance_length": round(window.acceptance_length, 4),
            "mean_context": round(window.context, 1),
            "on_gpu": profile.on_gpu,
            "profiled_steps": profile.steps,
            "profiled_ms_per_step": round(profile.per_step(profile.span_us) / 1e3, 4),
            "busy_ms_per_step": round(profile.busy_ms, 4),
            "busy_share_profiled": round(profile.busy_share, 4),
            "host_ms_per_step": round(profile.per_step(profile.host_us) / 1e3, 4),
            "kernels_per_step": round(profile.per_step(profile.kernels), 1),
            "copies_per_step": round(profile.per_step(profile.copies), 1),
            "launches_per_step": round(profile.per_step(profile.launches), 1),
            "graph_launches_per_step": round(profile.per_step(profile.graph_launches), 2),
            "mbytes_per_step": round(self.cost.num_bytes / 1e6, 3),
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 1),
            "floor_ms": round(floor_ms, 4),
            "times_floor": round(window.ms_per_step / floor_ms, 2),
        }

    def rows(self) -> list[GroupRow]:
        """One row per group of kernels, longest first."""
        return [_row(share, self.profile) for share in self.profile.groups]


def run_profile(
    model: str,
    speculation: SpeculativeConfig | None,
    config: ProfileConfig,
    console: Console,
    *,
    out: Path | None = None,
    trace: Path | None = None,
) -> Measured:
    """Load, measure, print; with `out` also write a result file. Raises PeagleError where the context is too short."""
    for path, what in ((out, "result"), (trace, "trace")):
        if path is not None:
            check_result_path(path, Console(stderr=True), what=what)
    if out is not None and trace is not None and out.resolve() == trace.resolve():
        raise PeagleError(f"--out and --trace are both {out}: give each a file of its own")
    device = resolve_engine_device(config.device)
    spec = read_spec(resolve_model(model, weights=config.load_format != "dummy"))
    length = _needed_length(config, spec, _most_drafts(speculation))
    sys.stderr.write(f"peagle: loading {model} ...\n")
    bandwidth = copy_bandwidth(device)
    shared = ("load_format", "graphs", "async_scheduling", "draft_lm_head", "kernels", "dtype", "device")
    llm = LLM(
        model,
        speculative_config=speculation,
        max_model_len=length,
        max_num_seqs=config.concurrency,
        **{name: getattr(config, name) for name in shared},
    )
    drafts = speculation.max_drafts if speculation else 0
    window, profile, cost = measure(llm, drafts, config, length, resolve_dtype(config.dtype, device), trace)
    measured = Measured(window, profile, cost, bandwidth)
    drafting = _drafting(llm, speculation)
    _print(measured, f"{llm.target.name}, {drafting}, {config.concurrency} at once, {device}", drafts, console)
    if out is not None:
        prompts = "random tokens: what is accepted means nothing"
        settings = {"model": llm.target.name, "drafting": drafting, "prompts": prompts, **asdict(config)}
        results = {"summary": measured.summary(), "rows": measured.rows()}
        write_result(out, out.stem, settings | {"device": str(device)}, results)
        say(console, f"wrote {out}")
    return measured


def _print(measured: Measured, title: str, num_drafts: int, console: Console) -> None:
    """The tables, and with drafts what must not be read into them."""
    console.print(_summary_table(title, measured))
    if num_drafts:
        console.print(
            "What is accepted here means nothing, and tokens per second depend on it: prompts are random tokens, "
            "their answers no text a head was trained on. `ms per step` holds for any text.",
            style="yellow",
        )
    profile = measured.profile
    console.print(_shares_table("By what it does", profile, profile.groups))
    name = "Longest kernels" if profile.on_gpu else "Longest operations, without what they call"
    console.print(_shares_table(name, profile, profile.top))


def measure(
    llm: LLM, num_drafts: int, config: ProfileConfig, length: int, dtype: torch.dtype, trace: Path | None
) -> tuple[Window, Profile, StepCost]:
    """Steps of `config.concurrency` random greedy requests, timed and then profiled."""
    spec, drafter = llm.target.spec, llm.drafter
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, spec.vocab_size, config.prompt_tokens).tolist() for _ in range(config.concurrency)]
    params = SamplingParams(max_tokens=length - config.prompt_tokens, temperature=0.0, ignore_eos=True)
    batch = Decoding(llm, prompts, params)
    sys.stderr.write("peagle: warming up ...\n")
    batch.settle()
    warm = batch.advance(_WARM_UP)
    about = max(2e-3 * warm.ms_per_step * config.steps, 1)
    sys.stderr.write(f"peagle: timing {config.steps} steps, then as many under the profiler: about {about:.0f} s ...\n")
    window = batch.advance(config.steps)
    profile = profile_steps(batch, config.steps, trace)
    cost = step_cost(
        spec,
        drafter.config if drafter else None,
        num_drafts,
        requests=config.concurrency,
        context=window.context,
        dtype=dtype,
        int8_head=config.draft_lm_head == "int8",
    )
    return window, profile, cost


def _needed_length(config: ProfileConfig, spec: ModelSpec, num_drafts: int) -> int:
    """Tokens of a request that does not end while it is measured, whatever is accepted: all drafts of one request, say,
    while another settles without any."""
    steps = _prompt_steps(config) + SETTLED + _WARM_UP + 2 * config.steps + _SPARE
    length = config.prompt_tokens + (steps + 1) * (num_drafts + 1)
    if length > spec.max_position_embeddings:
        raise PeagleError(
            f"{config.steps} steps after {config.prompt_tokens} prompt tokens may take {length} tokens, the model's "
            f"context is {spec.max_position_embeddings}: lower --steps or --prompt-tokens"
        )
    return length


def _prompt_steps(config: ProfileConfig) -> int:
    """How many the prompts of all take at most."""
    return config.concurrency * config.prompt_tokens // EngineConfig().max_num_batched_tokens + 1


def _most_drafts(speculation: SpeculativeConfig | None) -> int:
    """No step drafts more. How far "auto" may go is known only once the head is loaded."""
    if speculation is None:
        return 0
    open_ended = speculation.is_auto and speculation.max_speculative_tokens is None
    return MAX_SPECULATIVE_TOKENS if open_ended else speculation.max_drafts


def _drafting(llm: LLM, speculation: SpeculativeConfig | None) -> str:
    if llm.drafter is None or speculation is None:
        return "no drafts"
    return f"{llm.drafter.config.kind} K = {speculation.num_speculative_tokens}"


def _row(share: Share, profile: Profile) -> GroupRow:
    total = sum(group.us for group in profile.groups)
    return GroupRow(
        group=share.label,
        calls_per_step=round(profile.per_step(share.calls), 2),
        ms_per_step=round(profile.per_step(share.us) / 1e3, 5),
        share=round(share.us / total, 4) if total else 0.0,
    )


def _summary_table(title: str, measured: Measured) -> Table:
    """The figures of a whole step."""
    figures = measured.summary()
    table = Table(title=title, box=SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    busy = f"{100 * min(figures['busy_ms_per_step'] / figures['ms_per_step'], 1):.0f} %"
    lines: list[tuple[str, Any]] = [
        ("ms per step", f"{figures['ms_per_step']:.3f}"),
        ("tokens per second", f"{figures['tokens_per_second']:,.1f}"),
        ("tokens per request and step (of random prompts)", f"{figures['acceptance_length']:.2f}"),
        ("ms per step under the profiler", f"{figures['profiled_ms_per_step']:.3f}"),
    ]
    if measured.profile.on_gpu:
        lines += [
            ("GPU busy", f"{figures['busy_ms_per_step']:.3f} ms, {busy} of a step"),
            ("host at work, profiler included", f"{figures['host_ms_per_step']:.3f} ms"),
            ("kernels, copies", f"{figures['kernels_per_step']:.0f}, {figures['copies_per_step']:.0f}"),
            (
                "launches: kernels, graphs",
                f"{figures['launches_per_step']:.0f}, {figures['graph_launches_per_step']:.1f}",
            ),
        ]
    lines += [
        ("weights, keys and values read", f"{figures['mbytes_per_step']:,.1f} MB"),
        (
            "time that reading takes at least",
            f"{figures['floor_ms']:.3f} ms at the {figures['bandwidth_gb_per_s']:,.0f} GB/s of a copy",
        ),
        ("a step is longer by", f"{figures['times_floor']:.2f} times"),
    ]
    for label, value in lines:
        table.add_row(label, value)
    return table


def _shares_table(title: str, profile: Profile, shares: tuple[Share, ...]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("", overflow="ellipsis", no_wrap=True, max_width=72)
    for heading in ("calls per step", "ms per step", "share"):
        table.add_column(heading, justify="right")
    for share in shares:
        row = _row(share, profile)
        cells = (f"{row.calls_per_step:.1f}", f"{row.ms_per_step:.4f}", f"{100 * row.share:.1f} %")
        table.add_row(row.group, *cells)
    return table
