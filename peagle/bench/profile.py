"""Where the time of decoding steps goes: from the profiler's events to a few figures and two tables.

`summarise` is a pure function of events; `read_trace` gets them from a Chrome trace as `torch.profiler` writes it, this
engine's or another's. On a GPU time is that of kernels and copies there; on a CPU that of the operations, each without
those it calls.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from peagle.errors import PeagleError

Kind = Literal["kernel", "copy", "launch", "graph", "wait", "op", "step"]

STEP = "decoding step"  # the annotation around each call of `LLM.step`
OTHER = "other"
_TOP = 15

# The first group whose pattern a name contains. Names are those of this engine's kernels, of the libraries torch calls,
# of torch operations on the CPU, and of another engine's kernels.
_GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        (
            "draft layout",
            r"draft_layout|draft_rows|_lay_out|_copy_row|_slots\b|_slots_of|kv_slots|_expand_row|eagle_prepare|"
            r"prepare_inputs",
        ),
        ("slots", r"_collect_request|_commit_request"),
        ("KV cache write", r"_write_row|kv_write|reshape_and_cache"),
        ("experts", r"_expert_tile|_packed_tile|^_route$|^_combine$|fused_moe|moe_align"),
        (
            "sampling",
            r"_best_of|_scan_part|_maxima_of_groups|_collect$|_narrow$|_penalise|_apply_masks|sample|argmax|argmin|topk|"
            r"\bsort|radix|softmax|gumbel|_?accept|rejection|exponential|multinomial",
        ),
        ("attention", r"attend|attention|flash|fmha|paged|_decode_tile|_merge_chunks|scaled_dot_product"),
        ("norm, rotation, gate", r"norm|rsqrt|rope|rotary|rotate|_fill_tables|silu|swiglu|act_and_mul"),
        (
            "matmul",
            r"_stream_(?:tile|ring)|gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|wgmma|matmul|::mm\b|::bmm|addmm|linear|mkldnn|einsum|"
            r"dot_kernel",
        ),
        (
            "views, allocation",
            r"::_?(as_strided|view|reshape|split\w*|select|slice|narrow|expand|transpose|permute|t|unsqueeze|squeeze|"
            r"detach|alias|empty\w*|unbind|chunk|resize|unsafe_view|lift_fresh|result_type)_?\b",
        ),
        ("copy", r"memcpy|memset|copy|::to\b|::cat\b|CatArray|index|gather|scatter|fill|clone|contiguous"),
        (
            "elementwise",
            r"elementwise|reduce|::(add|sub|mul|div|pow|neg|where|cumsum|cumprod|clamp|eq|ne|lt|le|gt|ge|sum|mean)_?\b",
        ),
    )
)


class Event(NamedTuple):
    """Something the profiler saw. "launch" and "graph" are launches from the host, "wait" the host waiting."""

    name: str
    start_us: float
    duration_us: float
    kind: Kind

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class Share:
    """What one group of kernels, or one kernel, took over all steps."""

    label: str
    group: str
    calls: int
    us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Some decoding steps. Times are sums over them; `busy_us` counts overlapping kernels once.

    `host_us` is the time inside steps less what the host spent waiting for the GPU; `drafting_us` that from the layout
    of the drafter's rows to the end of a step, 0 where these kernels are not seen.
    """

    on_gpu: bool
    steps: int
    span_us: float
    busy_us: float
    host_us: float
    drafting_us: float
    kernels: int
    copies: int
    launches: int
    graph_launches: int
    groups: tuple[Share, ...]
    top: tuple[Share, ...]

    def per_step(self, figure: float) -> float:
        """A sum over the steps, per step."""
        return figure / self.steps

    @property
    def busy_share(self) -> float:
        """Of the time from the first kernel to the end of the last one."""
        return self.busy_us / self.span_us if self.span_us > 0 else 0.0

    @property
    def busy_ms(self) -> float:
        """Of one step."""
        return self.per_step(self.busy_us) / 1e3


def summarise(events: Sequence[Event], steps: int | None = None) -> Profile:
    """The profile of `steps` steps; None counts the events of kind "step".

    Raises PeagleError where there is no step or no work.
    """
    by_kind: dict[Kind, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    device = by_kind["kernel"] + by_kind["copy"]
    work = device or list(_without_callees(by_kind["op"]))
    count = len(by_kind["step"]) if steps is None else steps
    if count < 1 or not work:
        raise PeagleError(f"the profile has {count} steps and {len(work)} operations: profile at least one step")
    around = device or by_kind["step"] or work
    in_steps = sum(event.duration_us for event in by_kind["step"])
    return Profile(
        on_gpu=bool(device),
        steps=count,
        span_us=max(event.end_us for event in around) - min(event.start_us for event in around),
        busy_us=busy_time(work) if device else sum(event.duration_us for event in work),
        host_us=max(in_steps - sum(event.duration_us for event in by_kind["wait"]), 0.0),
        drafting_us=_drafting_time(by_kind["kernel"]),
        kernels=len(by_kind["kernel"]),
        copies=len(by_kind["copy"]),
        launches=len(by_kind["launch"]),
        graph_launches=len(by_kind["graph"]),
        groups=_shares(work, by_group=True),
        top=_shares(work, by_group=False)[:_TOP],
    )


def busy_time(events: Iterable[Event]) -> float:
    """Length of the union of the events' intervals."""
    busy, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        if event.end_us > end:
            busy += event.end_us - max(event.start_us, end)
            end = event.end_us
    return busy


def _drafting_time(kernels: Iterable[Event]) -> float:
    """From the first to the last kernel of each step's drafting (`kernels.draft_layout`, `kernels.commit`)."""
    total, begin = 0.0, None
    for event in sorted(kernels, key=lambda event: event.start_us):
        if "_lay_out_request" in event.name:
            begin = event.start_us
        elif "_commit_request" in event.name and begin is not None:
            total, begin = total + event.end_us - begin, None
    return total


def group_of(name: str, kind: Kind = "kernel") -> str:
    """What a kernel or operation does, by its name."""
    if kind == "copy":
        return "copy"
    return next((group for group, pattern in _GROUPS if pattern.search(name)), OTHER)


def read_trace(path: Path | str) -> list[Event]:
    """The events of a Chrome trace file, .json or .json.gz. Host events are those of the thread that did most."""
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = json.loads(raw)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise PeagleError(f"{path} is no Chrome trace ({' '.join(str(error).split())}): expected traceEvents") from None
    pairs = [(event, kind) for event in found if (kind := _kind(event)) is not None]
    threads = Counter(event.get("tid") for event, kind in pairs if kind == "op")
    main = threads.most_common(1)[0][0] if threads else None
    return [
        Event(event["name"], float(event["ts"]), float(event.get("dur", 0.0)), kind)
        for event, kind in pairs
        if kind != "op" or event.get("tid") == main
    ]


def _kind(event: dict[str, Any]) -> Kind | None:
    """Kind of a trace's event; None for what does not count."""
    category, name = event.get("cat"), str(event.get("name", ""))
    if category == "kernel":
        return "kernel"
    if category in ("gpu_memcpy", "gpu_memset"):
        return "copy"
    if category == "cpu_op":
        return "op"
    if category == "user_annotation":
        return "step" if name == STEP else None
    if category in ("cuda_runtime", "cuda_driver"):
        if "GraphLaunch" in name:
            return "graph"
        if "LaunchKernel" in name:
            return "launch"
        return "wait" if "Synchronize" in name else None
    return None


def _without_callees(ops: Iterable[Event]) -> Iterator[Event]:
    """Each operation of one thread with the time it spent itself."""
    open_ops: list[tuple[Event, float]] = []  # the operations around the current one, and their callees' time

    def close() -> Event:
        event, inside = open_ops.pop()
        if open_ops:
            caller, others = open_ops[-1]
            open_ops[-1] = (caller, others + event.duration_us)
        return event._replace(duration_us=max(event.duration_us - inside, 0.0))

    for event in sorted(ops, key=lambda event: (event.start_us, -event.duration_us)):
        while open_ops and open_ops[-1][0].end_us <= event.start_us:
            yield close()
        open_ops.append((event, 0.0))
    while open_ops:
        yield close()


def _shares(work: Iterable[Event], *, by_group: bool) -> tuple[Share, ...]:
    """Sums per group or per name, longest first."""
    calls, us = Counter[tuple[str, str]](), defaultdict[tuple[str, str], float](float)
    for event in work:
        group = group_of(event.name, event.kind)
        key = (group if by_group else event.name, group)
        calls[key] += 1
        us[key] += event.duration_us
    in_order = sorted(us, key=lambda key: -us[key])
    return tuple(Share(label, group, calls[label, group], us[label, group]) for label, group in in_order)
