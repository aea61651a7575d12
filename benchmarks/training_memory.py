"""Peak memory and speed of one training step against sequence length: every partition, every attention backend.

    python -m benchmarks.training_memory --out benchmarks/results/training-memory-gpt-oss-20b.json [--draw]

A 4-layer head of gpt-oss-20b's sizes with the full vocabulary, random features, one document of N supervised positions,
K = 8, r = 0.8. A step is everything the trainer does: forward and backward passes, normalising and clipping, Muon and
AdamW. Steps that run out of memory are reported as such. The roofline stands beside each row: the matmul work of the
rows at the device's bf16 peak.
"""

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import command
from peagle.bench.report import read_result, write_result
from peagle.config import TrainConfig
from peagle.drafters.eagle3 import DrafterConfig
from peagle.drafters.p_eagle import PEagleDrafter
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from peagle.training.attention import Backend
from peagle.training.batches import Batch, generator, make_batch, map_tensors
from peagle.training.distributed import SINGLE
from peagle.training.features import FeatureIndex, RowIndex
from peagle.training.flops import PackCost, named_peak
from peagle.training.gradients import GradientBuffer
from peagle.training.objective import Objective
from peagle.training.optim import MasterOptimizer, build_optimizers
from peagle.training.plan import plan_pack
from peagle.training.rows import draw_rows, pack_documents
from peagle.training.setup import plan_rule, row_layout

GIB = 1024**3
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
SHAPES = {
    "gpt-oss-20b": ModelSpec(
        family="llama", vocab_size=201_088, hidden_size=2880, intermediate_size=8640, num_layers=24, num_heads=64,
        num_kv_heads=8, head_dim=64, rms_norm_eps=1e-5, rope=RopeSpec(theta=150_000.0, head_dim=64),
        max_position_embeddings=131_072, qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=False,
        bos_token_id=None, eos_token_ids=(200_002,),
    ),
    "smollm2-135m": ModelSpec(
        family="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope=RopeSpec(theta=100_000.0, head_dim=64),
        max_position_embeddings=131_072, qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=True,
        bos_token_id=None, eos_token_ids=(2,),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration of a step."""

    partition: str
    attention: str
    segments: int = 1
    chunk_rows: int | None = None
    compile: bool = False
    checkpoint: bool = False
    lengths: tuple[int, ...] = LENGTHS


SHORT = (2048, 4096, 8192)  # the slower forms of attention; every length of theirs compiles or allocates anew
CASES = (
    Case(partition="prefix-once", attention="kernel", chunk_rows=4096),
    Case(partition="flat", attention="kernel"),
    Case(partition="algorithm1", attention="kernel", segments=4),
    Case(partition="prefix-once", attention="kernel", chunk_rows=4096, checkpoint=True),
    Case(partition="algorithm1", attention="kernel", segments=2),
    Case(partition="algorithm1", attention="kernel", segments=8),
    Case(partition="prefix-once", attention="kernel", chunk_rows=2048, lengths=(8192,)),
    Case(partition="prefix-once", attention="kernel", lengths=(8192,)),
    Case(partition="prefix-once", attention="kernel", compile=True, lengths=(8192,)),
    Case(partition="prefix-once", attention="kernel", chunk_rows=16384, lengths=(65536,)),
    Case(partition="prefix-once", attention="reference", chunk_rows=4096, lengths=SHORT),
    Case(partition="flat", attention="reference", lengths=SHORT),
    Case(partition="prefix-once", attention="flex", chunk_rows=4096, lengths=SHORT),
    Case(partition="flat", attention="flex", lengths=SHORT),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One step. `seconds` is the median; the matmul work of the rows at the bf16 peak would take `roofline_seconds`."""

    partition: str
    segments: int
    chunk_rows: int | None
    attention: str
    compile: bool
    checkpoint_activations: bool
    positions: int
    rows: int
    chunks: int
    out_of_memory: bool
    peak_gib: float | None
    standing_gib: float  # parameters, gradients, optimiser state, features
    seconds: float | None
    rows_per_second: float | None
    positions_per_second: float | None
    matmul_flops: float
    roofline_seconds: float | None
    utilisation: float | None


class RandomFeatures:
    """Features of any content, already on the device."""

    def __init__(self, spec: ModelSpec, positions: int, device: torch.device) -> None:
        widths = (3 * spec.hidden_size, spec.hidden_size)
        self._both = [torch.randn(positions, width, device=device, dtype=torch.bfloat16) for width in widths]

    def index(self, *_: object) -> FeatureIndex:
        """Nothing to look up."""
        return RowIndex(torch.empty(0), torch.empty(0), None)

    def gather(self, _index: FeatureIndex) -> tuple[Tensor, Tensor]:
        """Taps and final hidden states."""
        return self._both[0], self._both[1]


class Bench:
    """A head of the given sizes with its optimisers; steps of any length and kind."""

    def __init__(self, spec: ModelSpec, device: torch.device, layers: int, depths: int) -> None:
        self.spec, self.device, self.depths = spec, device, depths
        torch.manual_seed(0)
        with device:
            self.drafter = PEagleDrafter(drafter_config(spec, layers))
            head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, dtype=torch.bfloat16)
        self.target = cast(TargetModel, SimpleNamespace(lm_head=head.requires_grad_(False)))
        self.optimizers: list[MasterOptimizer] = build_optimizers(self.drafter, 1e-6, 1e-6, "muon")
        self.gradients = GradientBuffer(list(self.drafter.parameters()), SINGLE)
        self.gradients.zero()
        for optimizer in self.optimizers:
            optimizer.step()  # the optimiser state exists from the first step on

    def row(self, case: Case, positions: int, repeats: int) -> MemoryRow:
        """Measure one configuration."""
        config = self._config(case, positions)
        features = RandomFeatures(self.spec, positions, self.device)
        standing = torch.cuda.memory_allocated(self.device)
        batch = self._batch(config, positions)
        self.drafter.checkpoint_activations = case.checkpoint
        backend = cast(Backend, case.attention)
        objective = Objective(self.drafter, self.target, features, config, backend=backend, dtype=torch.bfloat16)
        seconds: float | None
        try:
            seconds = self._seconds(objective, batch, repeats)
            peak = torch.cuda.max_memory_allocated(self.device) / GIB
        except torch.OutOfMemoryError:
            seconds, peak = None, None
        rows = int((batch.rows.doc_R >= 0).sum())
        flops = self._flops(batch)
        limit = named_peak(torch.cuda.get_device_name(self.device))
        return MemoryRow(
            partition=case.partition,
            segments=case.segments,
            chunk_rows=case.chunk_rows,
            attention=case.attention,
            compile=case.compile,
            checkpoint_activations=case.checkpoint,
            positions=positions,
            rows=rows,
            chunks=len(batch.plan.chunks),
            out_of_memory=seconds is None,
            peak_gib=peak,
            standing_gib=standing / GIB,
            seconds=seconds,
            rows_per_second=seconds and rows / seconds,
            positions_per_second=seconds and positions / seconds,
            matmul_flops=flops,
            roofline_seconds=limit and flops / limit,
            utilisation=seconds and limit and flops / limit / seconds,
        )

    def _config(self, case: Case, positions: int) -> TrainConfig:
        return TrainConfig(
            num_depths=self.depths,
            batch_positions=positions,
            supervised_share=1.0,
            partition=case.partition,
            segments=case.segments,
            chunk_rows=case.chunk_rows,
            compile=case.compile,
            checkpoint_activations=case.checkpoint,
            attention=case.attention,
        )

    def _batch(self, config: TrainConfig, positions: int) -> Batch:
        layout = row_layout(config, [], self.drafter.config, self.device)
        tokens = np.random.default_rng(0).integers(0, self.spec.vocab_size, positions + 2, np.int32)
        document = SimpleNamespace(input_ids=tokens, loss_mask=np.ones(positions + 2, np.bool_))
        (packed,) = pack_documents([document], layout)
        rows = draw_rows(packed, layout, generator(0, 0))
        rule = plan_rule(config)
        nowhere = RowIndex(torch.empty(0), torch.empty(0), None)
        batch = make_batch(packed, rows, plan_pack(rows, layout, rule), rule, nowhere, epoch=0, index=0)
        return map_tensors(batch, lambda tensor: tensor.to(self.device))

    def _seconds(self, objective: Objective, batch: Batch, repeats: int) -> float:
        self._step(objective, batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._step(objective, batch)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def _step(self, objective: Objective, batch: Batch) -> None:
        self.gradients.zero()
        outcome = objective(batch)
        self.gradients.add_totals(outcome.loss_sum, batch.totals[0])
        self.gradients.reduce()
        self.gradients.normalise_and_clip(1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def _flops(self, batch: Batch) -> float:
        real_R = batch.rows.doc_R.cpu().numpy() >= 0
        seen_R = batch.rows.position_R.cpu().numpy()[real_R] + 1
        charged = batch.plan.charged_rows
        targets = len(np.unique(batch.rows.target_R.cpu().numpy()[batch.rows.supervised_R.cpu().numpy()]))
        cost = PackCost(self.drafter.config, self.spec, trains_head=True, runs_target=False)
        return float(cost(seen_R, positions=len(batch.input_ids_P), charged=charged, targets=targets))


def drafter_config(spec: ModelSpec, layers: int) -> DrafterConfig:
    """A head as wide as its target."""
    return DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=spec.rope,
        max_position_embeddings=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.vocab_size,
        target_hidden_size=spec.hidden_size,
        tap_ids=(2, spec.num_layers // 2, spec.num_layers - 3),
        mask_token_id=spec.vocab_size - 1,
        norm_before_fc=True,
    )


def measure(bench: Bench, lengths: list[int], repeats: int, budget: float) -> Iterator[MemoryRow]:
    """All cases, short sequences first; a case that ran out of memory is not tried on longer ones.

    After `budget` seconds no further case is begun.
    """
    start = time.perf_counter()
    died: set[Case] = set()
    for positions in lengths:
        for case in CASES:
            late = time.perf_counter() - start > budget
            if case in died or positions not in case.lengths or late:
                continue
            row = bench.row(case, positions, repeats)
            if row.out_of_memory:
                died.add(case)
            gc.collect()
            torch.cuda.empty_cache()
            yield row


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Memory of a step beyond what stands, and rows/s, over the length of the sequence. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [row for row in rows if row["attention"] == "kernel" and not row["compile"] and not row["out_of_memory"]]
    names = {_legend(row): None for row in shown}
    for name in names:
        points = sorted((row for row in shown if _legend(row) == name), key=lambda row: row["positions"])
        x = [row["positions"] for row in points]
        left.plot(x, [row["peak_gib"] - row["standing_gib"] for row in points], marker="o", markersize=4, label=name)
        right.plot(x, [row["rows_per_second"] for row in points], marker="o", markersize=4, label=name)
    for axes, title in ((left, "GiB of a step beyond parameters and optimiser"), (right, "rows/s, whole steps")):
        axes.set(title=title, xlabel="positions", xscale="log", ylim=(0, None))
        axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.savefig(out, dpi=110)


def _legend(row: Mapping[str, Any]) -> str:
    segments = f", {row['segments']} segments" if row["partition"] == "algorithm1" else ""
    chunks = f", chunks of {row['chunk_rows']:,}" if row["chunk_rows"] else ""
    return f"{row['partition']}{segments}{chunks}{', checkpointed' if row['checkpoint_activations'] else ''}"


def main() -> None:
    """Measure and write the result file after every row, so that an interrupted run leaves what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw OUT beside it")
    parser.add_argument("--shape", choices=SHAPES, default="gpt-oss-20b")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depths", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no further case is begun")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(read_result(arguments.out)["results"]["rows"], arguments.out.with_suffix(".png"))
        return
    device = torch.device("cuda")
    bench = Bench(SHAPES[arguments.shape], device, arguments.layers, arguments.depths)
    settings: dict[str, Any] = {"command": command(), "shape": arguments.shape, "keep_ratio": 0.8, **vars(arguments)}
    settings["out"] = str(arguments.out)
    rows: list[MemoryRow] = []
    for row in measure(bench, arguments.lengths, arguments.repeats, arguments.budget):
        rows.append(row)
        print(row, flush=True)
        write_result(arguments.out, f"training-memory-{arguments.shape}", settings, {"rows": rows})


if __name__ == "__main__":
    main()
