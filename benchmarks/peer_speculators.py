"""Forward + backward of the public `speculators` package's P-EAGLE model: time and peak memory, no optimiser.

The model, its row sampling, attention, fused loss and compilation are the package's own, used as its trainer uses them
(float32 parameters, bfloat16 autocast); `DEVIATIONS` lists every setting that is not its default, and why. One document
of N positions, all supervised, random features, up to the length that no longer fits the device or the time limit.
Where torch (2.11) cannot compile all of the forward around the fused loss: `--compile parts`, attention and mask only.

Hardware: one CUDA GPU; `--toy` runs the same code at tiny sizes on any CPU. Needs the wheel of `speculators` 0.9 and of
pydantic; the rest of what the package asks for serves its data path, which is not used.

    python -m benchmarks.peer_speculators --compile parts --out benchmarks/results/peer-speculators.json
"""

import argparse
import gc
import importlib
import os
import statistics
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, check_gpu, command
from peagle.bench.report import write_result
from peagle.errors import PeagleError

WARM_UPS, TIMED = 2, 3
GIB = 2**30
OUT_OF_MEMORY = "out of memory"
DEPTHS, KEEP_RATIO, KEEP_FLOOR = 8, 0.8, 0.0
SAMPLING = {"num_depths": DEPTHS, "down_sample_ratio": KEEP_RATIO, "down_sample_ratio_min": KEEP_FLOOR}
DEVIATIONS = {
    "num_layers": "4, default 1: the layers of the head it is compared with",
    "draft_arch": "llama, default qwen3: the compared head has no q/k norms; less work for the peer",
    "sliding window": "none, default 2,048 on every layer: the compared head attends to the whole document",
    "max_anchors": "none, default 512: the same rows as the compared head",
    "down_sample_ratio": f"{KEEP_RATIO}, default 0.7: the same rows as the compared head",
    "down_sample_ratio_min": f"{KEEP_FLOOR}, default 0.2: the same rows as the compared head",
    "weights": "random, where its trainer copies the target's embedding, output head and final norm",
    "data path": "none: features are random tensors on the device; its module speculators.train.data, of which the "
    "model uses one type alias, is replaced by a stub where openai, datasets or hs-connectors are missing",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a target and of the head trained for it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One model, run at several lengths."""

    shape: Shape
    checkpointing: bool  # the package's --gradient-checkpointing
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRow:
    """One length. Times are medians, in ms; the rest is None where the run ended in `failure`."""

    shape: str
    positions: int
    rows: int
    gradient_checkpointing: bool
    failure: str | None  # OUT_OF_MEMORY, or the error
    graphs_for: str  # "this length", or "any length": compiled with dynamic shapes
    graphs_compiled: int | None = None
    first_step_seconds: float | None = None  # compilation and kernel search included
    forward_ms: float | None = None
    backward_ms: float | None = None
    step_ms: float | None = None
    rows_per_second: float | None = None
    peak_gib: float | None = None  # torch.cuda.max_memory_allocated over the timed steps
    resident_gib: float | None = None  # parameters and features, before a step
    loss: float | None = None


GPT_OSS = Shape(
    name="gpt-oss-20b", hidden=2880, heads=64, kv_heads=8, head_dim=64, intermediate=8640, vocab=201_088
)  # fmt: skip
SMOLLM2 = Shape(name="smollm2-135m", hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49_152)
TOY = Shape(name="toy", hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, vocab=97, layers=2)
# The first length of a series gets graphs compiled for that very length; from the second on, the peer's automatic
# dynamic shapes give graphs that serve every length. Last in a series comes the length that may not fit.
ALL_SERIES = (
    Series(shape=SMOLLM2, checkpointing=False, lengths=(8192,)),
    Series(shape=GPT_OSS, checkpointing=False, lengths=(8192, 4096, 2048, 16384)),
    Series(shape=GPT_OSS, checkpointing=True, lengths=(8192, 16384, 32768)),
)
TOY_SERIES = tuple(Series(shape=TOY, checkpointing=flag, lengths=(32, 48)) for flag in (False, True))


def main() -> None:
    args = _arguments()
    peer = import_peer()
    device = torch.device("cpu" if args.toy else "cuda")
    if device.type == "cuda":
        check_gpu("run on one, or pass --toy for tiny sizes on the CPU")
    rows: list[PeerRow] = []
    for series in TOY_SERIES if args.toy else ALL_SERIES:
        if series.shape.name not in args.shapes and not args.toy:
            continue
        for row in run_series(peer, series, device, args):
            rows.append(row)
            print(f"[{time.perf_counter() - args.started:.0f} s] {_line(row)}", flush=True)
            write_result(args.out, args.out.stem, _settings(args), {"rows": rows})
    print(f"wrote {args.out}")
    if not rows or any(row.failure not in (None, OUT_OF_MEMORY) for row in rows):
        raise SystemExit("not every length was measured: see the rows above, and --compile parts")


def import_peer() -> types.ModuleType:
    """`speculators.models.peagle`, with a stub for the package's data path where that cannot be imported."""
    if find_spec("speculators") is None or find_spec("pydantic") is None:
        raise PeagleError("the packages speculators and pydantic are not installed: pip install --no-deps both wheels")
    if any(find_spec(name) is None for name in ("openai", "datasets", "hs_connectors")):
        stub = types.ModuleType("speculators.train.data")
        stub.__dict__["BatchType"] = dict[str, Any]
        sys.modules[stub.__name__] = stub
    return importlib.import_module("speculators.models.peagle")


def run_series(
    peer: types.ModuleType, series: Series, device: torch.device, args: argparse.Namespace
) -> Iterator[PeerRow]:
    """Rows of one series, up to the first length that fails or the time limit."""
    model = build_model(peer, series.shape, device)
    if series.checkpointing:
        model.gradient_checkpointing_enable()
    if args.compile == "parts":
        compile_parts(model)
    for index, length in enumerate(series.lengths):
        if time.perf_counter() - args.started > args.seconds:
            print(f"{args.seconds:g} s are over: {series.shape.name} ends before N = {length:,}", flush=True)
            break
        static = index == 0 or args.static
        row = measure(model, series, length, device, args.loss, static=static)
        if row.failure not in (None, OUT_OF_MEMORY) and not static:
            print(f"{_line(row)}; once more, compiled for this length", flush=True)
            row = measure(model, series, length, device, args.loss, static=True)
        yield row
        if row.failure is not None:
            break
    del model
    _free(device)


def build_model(peer: types.ModuleType, shape: Shape, device: torch.device) -> Any:
    """The package's P-EAGLE model as `from_training_args` configures it, with random weights instead of a target's."""
    config_module = importlib.import_module("speculators.config")
    greedy = importlib.import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
    llama_config = importlib.import_module("transformers").LlamaConfig
    layer = llama_config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131_072,
        pad_token_id=None,
    )
    # FlexAttention is its default; PyTorch has no backward of it on the CPU.
    layer._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    config = peer.PEagleSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.vocab,
        eagle_aux_hidden_state_layer_ids=[2, 12, 21],
        mask_token_id=shape.vocab - 1,
        speculators_config=config_module.SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[greedy(speculative_tokens=DEPTHS)],
            default_proposal_method="greedy",
            verifier=config_module.VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    torch.manual_seed(0)
    with device:
        model = peer.PEagleDraftModel(config)
        for table in (model.embed_tokens, model.lm_head, model.verifier_lm_head):  # NaN until loaded
            torch.nn.init.normal_(table.weight, std=0.02)
    if not model.embed_tokens.weight.requires_grad or model.lm_head.weight.requires_grad:
        raise PeagleError("the peer's default is trained embeddings and a frozen head; its model says otherwise")
    return model.train()


def compile_parts(model: Any) -> None:
    """Compile the attention and its mask alone, should the package's compilation of the whole forward fail."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    attention = importlib.import_module("speculators.models.attention")
    attention.flex_attention = torch.compile(flex.flex_attention)  # type: ignore[attr-defined]
    if model._attn_impl == "simple_flex_attention":
        model._create_mask_fn = torch.compile(flex.create_block_mask)
    forward = type(model).forward
    model.forward = types.MethodType(getattr(forward, "__wrapped__", forward), model)


def measure(model: Any, series: Series, length: int, device: torch.device, loss_form: str, *, static: bool) -> PeerRow:
    """Warm up, then time forward and backward at one length, with fresh graphs for it if `static`."""
    if static:
        torch.compiler.reset()
    batch = random_batch(series.shape, length, device)
    losses = importlib.import_module("speculators.losses")
    loss = losses.resolve_loss_config("kl_div", loss_form if device.type == "cuda" else "eager")
    call = batch | SAMPLING | {"loss_config": loss, "max_anchors": None}
    rows = count_rows(length, device)
    failure, measured = None, {}
    try:
        measured = _timed(model, call, rows, device)
    except Exception as error:  # compilation can fail in many ways; the row says how
        text = " ".join(str(error).split())
        failure = OUT_OF_MEMORY if OUT_OF_MEMORY in text.lower() else f"{type(error).__name__}: {text[:300]}"
    model.zero_grad(set_to_none=True)
    return PeerRow(
        shape=series.shape.name,
        positions=length,
        rows=rows,
        gradient_checkpointing=series.checkpointing,
        failure=failure,
        graphs_for="this length" if static else "any length",
        **measured,
    )


def random_batch(shape: Shape, length: int, device: torch.device) -> dict[str, Tensor]:
    """What the package's collator hands its model for one document whose every position is supervised."""
    generator = torch.Generator(device).manual_seed(length)

    def normal(width: int) -> Tensor:
        return torch.randn(1, length, width, generator=generator, device=device, dtype=torch.bfloat16)

    ids = torch.randint(shape.vocab - 1, (1, length), generator=generator, device=device)
    return {
        "hidden_states": normal(3 * shape.hidden),
        "verifier_last_hidden_states": normal(shape.hidden),
        "input_ids": ids,
        "document_ids": torch.zeros_like(ids),
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "position_ids": 1 + torch.arange(length, device=device)[None],
    }


def count_rows(length: int, device: torch.device) -> int:
    """Rows the package's sampler makes. With every position supervised the number depends on nothing drawn."""
    data = importlib.import_module("speculators.models.peagle.data")
    mask = torch.ones(1, length, dtype=torch.bool, device=device)
    return len(data.generate_cod_sample_indices(seq_length=length, loss_mask=mask, **SAMPLING)[0])


def _timed(model: Any, call: dict[str, Any], rows: int, device: torch.device) -> dict[str, Any]:
    """The measured fields of a row."""
    counters = importlib.import_module("torch._dynamo.utils").counters["stats"]
    compiled_before = counters["unique_graphs"]
    _free(device)
    resident = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    steps = []
    for index in range(WARM_UPS + TIMED):
        if index == WARM_UPS and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps.append(_step(model, call, device))
    timed = steps[WARM_UPS:]
    forward, backward, total = (
        statistics.median(seconds)
        for seconds in ([s[0] for s in timed], [s[1] for s in timed], [s[0] + s[1] for s in timed])
    )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "graphs_compiled": int(counters["unique_graphs"] - compiled_before),
        "first_step_seconds": round(steps[0][0] + steps[0][1], 2),
        "forward_ms": round(forward * 1e3, 2),
        "backward_ms": round(backward * 1e3, 2),
        "step_ms": round(total * 1e3, 2),
        "rows_per_second": round(rows / total, 1),
        "peak_gib": round(peak / GIB, 3),
        "resident_gib": round(resident / GIB, 3),
        "loss": round(steps[-1][2], 5),
    }


def _step(model: Any, call: dict[str, Any], device: torch.device) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward as the package's trainer calls them, and the loss."""
    model.zero_grad(set_to_none=True)
    _wait(device)
    start = time.perf_counter()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        _, loss, _ = model(**call)
    _wait(device)
    middle = time.perf_counter()
    loss.backward()
    _wait(device)
    return middle - start, time.perf_counter() - middle, loss.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _line(row: PeerRow) -> str:
    name = f"{row.shape} N={row.positions:,} rows={row.rows:,}" + (
        " checkpointed" if row.gradient_checkpointing else ""
    )
    if row.failure is not None:
        return f"{name}: {row.failure}"
    return (
        f"{name}: {row.forward_ms} + {row.backward_ms} = {row.step_ms} ms, {row.rows_per_second:,.0f} rows/s, peak "
        f"{row.peak_gib} GiB ({row.resident_gib} resident), first step {row.first_step_seconds} s, loss {row.loss}"
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": command(),
        "peer": {name: version(name) for name in ("speculators", "pydantic")},
        "depths": DEPTHS,
        "keep_ratio": KEEP_RATIO,
        "keep_floor": KEEP_FLOOR,
        "documents": "one, every position supervised, random features",
        "precision": "float32 parameters, bfloat16 autocast, as the peer's trainer",
        "attention": "eager (CPU)" if args.toy else "FlexAttention (simple_flex_attention, its default)",
        "loss": f"kl_div, {'eager (CPU)' if args.toy else args.loss} (its default: fused Triton kernels)",
        "trained": "embeddings, fc, mask_hidden, layers, norm; the output head is frozen, as its trainer does it",
        "compile": "the whole forward, as the peer does it" if args.compile == "whole" else "attention and mask only",
        "warm_ups": WARM_UPS,
        "timed_steps": TIMED,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "deviations_from_its_defaults": DEVIATIONS,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "peer-speculators.json")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: a check that the script runs")
    parser.add_argument("--shapes", nargs="+", default=[GPT_OSS.name, SMOLLM2.name])
    parser.add_argument("--compile", choices=("whole", "parts"), default="whole")
    parser.add_argument(
        "--loss",
        choices=("fused", "eager"),
        default="fused",
        help="its Triton kernels, or torch; torch 2.11 cannot compile the whole forward around the kernels",
    )
    parser.add_argument("--static", action="store_true", help="compile for every length anew; takes longer to compile")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no length after this many seconds")
    args = parser.parse_args()
    args.started = time.perf_counter()
    return args


if __name__ == "__main__":
    main()
