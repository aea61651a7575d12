"""What the small kernels of a speculative step cost: the Triton kernel, the same work in torch operations, and the
bytes it must move.

One steady step of B requests with K = 7 drafts: B (K+1) target rows verified, 2 K B drafter rows laid out, K B drafts.
On a GPU each operation is captured in a CUDA graph many times over and the graph's replay is timed, so that no time of
the host counts: this is what the operation costs within the engine's own graph. Inputs are read again and again, so
what fits the L2 cache comes from there, as it does in the engine, where the operation before has just written it. The
file is written after each batch size, marked partial until the last. Hardware: one GPU.

    python -m benchmarks.step_kernels --out benchmarks/results/step-kernels-h200.json
    python -m benchmarks.step_kernels --device cpu --batches 1 --out /tmp/smoke.json  # does the script itself work?
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS, amount, captured, check_gpu, check_out, command, count, run_script, say_progress
from peagle.bench.report import write_result
from peagle.kernels.accept import accept
from peagle.kernels.commit import commit
from peagle.kernels.draft_layout import DraftLayout, LayoutSizes, draft_layout, kv_slots
from peagle.kernels.draft_rows import MaskRow, draft_rows
from peagle.kernels.expand_rows import expand_rows
from peagle.kernels.kv_write import kv_write
from peagle.kernels.logprobs import row_logprobs
from peagle.kernels.penalties import TokenHistory
from peagle.kernels.sample import sample
from peagle.kernels.token_masks import TokenMasks
from peagle.kernels.verify_rows import SlotRows, verify_rows
from peagle.sampling import MAX_LOGPROBS, RowSampling

_K, _BLOCK_SIZE, _MAX_MODEL_LEN, _POSITION = 7, 16, 8192, 2000
_KEPT = 3  # drafts kept per request
# Operations with one form here: log-probabilities have no other; the twin of filters sorts the whole vocabulary.
_ONLY = MappingProxyType({"log-probabilities": "torch", "sample verify filtered": "triton"})


@dataclass(frozen=True)
class Shape:
    """A target and its head, which has the target's hidden size and kv heads."""

    name: str
    hidden: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int


SHAPES = {
    "smollm2": Shape("SmolLM2-135M", 576, 3, 64, 49_152, 16_384),
    "qwen3-8b": Shape("Qwen3-8B", 4096, 8, 128, 151_936, 32_000),
    "gpt-oss": Shape("gpt-oss-20b", 2880, 8, 64, 201_088, 32_000),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRow:
    """One operation in one form. `floor_us` is its bytes over the memory's bandwidth; a launch alone takes 1 to 2."""

    shape: str
    batch: int
    kernel: str
    backend: str
    us: float
    mbytes: float
    floor_us: float


Call = Callable[[str], object]  # takes the backend


class Step:
    """The tensors of one step of a batch."""

    def __init__(self, shape: Shape, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.shape, self.batch, self.device = shape, batch, device
        self.rows = batch * (_K + 1)
        blocks = _MAX_MODEL_LEN // _BLOCK_SIZE
        self.tables = torch.randperm(batch * blocks, device=device).view(batch, blocks)
        self.request = torch.arange(batch, device=device).repeat_interleave(_K + 1)
        self.positions = (_POSITION + torch.arange(_K + 1, device=device)).repeat(batch)
        self.start = torch.arange(batch + 1, device=device) * (_K + 1)
        self.tokens = torch.randint(0, shape.draft_vocab, (batch, _K + 1), device=device)
        self.drafts = self.tokens[:, :-1].clone()
        self.drafts[:, _KEPT] += 1
        self.slot = torch.arange(batch, device=device)
        self.layout = self.lay_out("torch")

    def lay_out(self, backend: str) -> DraftLayout:
        return draft_layout(
            self.tokens.view(-1), self.positions, self.tokens[:, _KEPT], self.start, self.start[:-1] + _KEPT,
            self.tables, LayoutSizes(0, _K, self.batch * 2 * _K, _BLOCK_SIZE, _MAX_MODEL_LEN), self.slot,
            backend=backend,
        )  # fmt: skip

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device).bfloat16()

    def sampling(self, rows: int) -> RowSampling:
        """Rows at temperature 0.8."""
        index, ones = torch.arange(rows, device=self.device), torch.ones(rows, device=self.device)
        return RowSampling(0.8 * ones, index * 0, ones, index * 2**33, index, filtered=False)

    def on_request_calls(self, logits: Tensor) -> list[tuple[str, int, Call]]:
        """What steps do for requests that ask for it: penalties, a grammar's mask, filters, log-probabilities."""
        batch, size, vocab = self.batch, logits.numel(), self.shape.vocab
        history = TokenHistory(batch, vocab, logits.device)
        history.factors_S4[:batch] = torch.tensor([1.1, 0.1, 0.1, 0.0], device=logits.device)
        masks = TokenMasks(batch, _K + 1, vocab, logits.device)
        masks.bits_SRW.random_()
        plain = self.sampling(self.rows)
        filtered = replace(plain, top_k=plain.top_k + 50, top_p=0.9 * plain.top_p, filtered=True)
        tokens = logits.argmax(dim=1)
        return [
            (
                "penalties",
                (2 + 4) * size + (4 + 1) * batch * vocab,
                lambda b: history.apply(logits, self.slot, self.drafts, backend=b),
            ),
            (
                "token masks",
                4 * size + masks.bits_SRW[:-1].numel() * 4,
                lambda b: masks.apply(logits, self.slot, backend=b),
            ),
            ("sample verify filtered", 2 * size, lambda b: sample(logits, filtered, backend=b)),
            ("log-probabilities", 2 * size, lambda _: row_logprobs(logits, tokens, MAX_LOGPROBS)),
        ]

    def slot_calls(self) -> list[tuple[str, int, Call]]:
        """The first and the last operation of a step, on the state of the slots."""
        batch, width = self.tables.shape

        def padded(state: Tensor) -> Tensor:
            return torch.cat((state, torch.zeros_like(state[:1])))

        first = torch.full((batch,), _POSITION, device=self.device)
        tables = padded(self.tables.to(torch.int32))
        read, written = (
            SlotRows(padded(self.tokens[:, 0]), padded(first), padded(self.drafts), tables) for _ in range(2)
        )
        accepted = accept(self.tokens, self.drafts, self.slot, backend="torch")
        results = accepted.count_B, accepted.next_token_B, accepted.emitted_BV, accepted.count_B, self.drafts
        return [
            (
                "verify_rows",
                8 * (4 * self.rows + batch * (2 * _K + 4 + width)),
                lambda b: verify_rows(read, self.slot, _K, _BLOCK_SIZE, _MAX_MODEL_LEN, backend=b),
            ),
            (
                "commit",
                8 * batch * (4 * _K + 10),
                lambda b: commit(written, self.slot, first, *results, backend=b),
            ),
        ]  # fmt: skip

    def calls(self) -> list[tuple[str, int, Call]]:
        """(operation, bytes it has to move, call) of each operation."""
        s, batch, drafter_rows = self.shape, self.batch, self.batch * 2 * _K
        live = batch * (_K + _KEPT)
        table, features = self.normal(s.draft_vocab, s.hidden), self.normal(self.rows, s.hidden)
        mask = MaskRow(0, *self.normal(2, s.hidden))
        qkv = self.normal(drafter_rows, 4 * s.kv_heads, s.head_dim)
        k, v = qkv[:, -2 * s.kv_heads : -s.kv_heads], qkv[:, -s.kv_heads :]
        caches = torch.zeros(
            2, s.kv_heads, batch * _MAX_MODEL_LEN + 1, s.head_dim, dtype=torch.bfloat16, device=self.device
        )
        logits, draft_logits = self.normal(self.rows, s.vocab), self.normal(batch * _K, s.draft_vocab)
        ids = torch.arange(s.draft_vocab, device=self.device) * 3
        rows, draft_rows_ = self.sampling(self.rows), self.sampling(batch * _K)
        layout_bytes = 8 * (3 * self.rows + 5 * drafter_rows + batch * (_K + live // batch + 3)) + 2 * drafter_rows
        return [
            *self.slot_calls(),
            ("draft_layout", layout_bytes, self.lay_out),
            (
                "kv_slots",
                8 * 4 * self.rows,
                lambda b: kv_slots(self.tables, self.request, self.positions, _BLOCK_SIZE, _MAX_MODEL_LEN, backend=b),
            ),
            ("accept", 8 * batch * (3 * _K + 5), lambda b: accept(self.tokens, self.drafts, self.slot, backend=b)),
            (
                "draft_rows",
                2 * s.hidden * 2 * (drafter_rows + batch * (_KEPT + 1)),
                lambda b: draft_rows(self.layout, features, table, mask, backend=b),
            ),
            (
                "expand_rows",
                2 * qkv[0].numel() * (drafter_rows + batch * (_KEPT + 1)),
                lambda b: expand_rows(self.layout, qkv[: self.rows].flatten(1), qkv[-1].flatten(), backend=b),
            ),
            (
                "kv_write",
                2 * 2 * 2 * live * s.kv_heads * s.head_dim,
                lambda b: kv_write(caches[0], caches[1], self.layout.slots, k, v, backend=b),
            ),
            ("sample verify greedy", 2 * logits.numel(), lambda b: sample(logits, None, backend=b)),
            ("sample verify drawn", 2 * logits.numel(), lambda b: sample(logits, rows, backend=b)),
            ("sample drafts greedy", 2 * draft_logits.numel(), lambda b: sample(draft_logits, None, ids, backend=b)),
            (
                "sample drafts drawn",
                2 * draft_logits.numel() + 8 * s.draft_vocab,
                lambda b: sample(draft_logits, draft_rows_, ids, backend=b),
            ),
            *self.on_request_calls(logits),
        ]


@torch.inference_mode()
def main() -> None:
    args = _arguments()
    found: list[KernelRow] = []
    cases = [(SHAPES[name], batch) for name in args.shapes for batch in args.batches]
    begun = time.perf_counter()
    for done, (shape, batch) in enumerate(cases, start=1):
        for kernel, size, call in Step(shape, batch, args.device).calls():
            found += _measure(args, shape, batch, kernel, size, call)
        _write(args, found, partial=done < len(cases))
        say_progress(done, len(cases), begun)
    print(f"wrote {args.out}")


def _write(args: argparse.Namespace, found: list[KernelRow], *, partial: bool) -> None:
    settings = {
        "command": command(),
        "dtype": "bfloat16",
        "num_drafts": _K,
        "kept_drafts": _KEPT,
        "bandwidth_tb_per_s": args.bandwidth,
        "timing": "replay of a CUDA graph" if args.device == "cuda" else "calls from the host",
        "partial": partial,
    }
    write_result(args.out, args.out.stem, settings, {"rows": found})


def _measure(args: argparse.Namespace, shape: Shape, batch: int, kernel: str, size: int, call: Call) -> list[KernelRow]:
    timed = _replayed if args.device == "cuda" else _called
    rows = [
        KernelRow(
            shape=shape.name,
            batch=batch,
            kernel=kernel,
            backend=backend,
            us=round(timed(bind(call, backend), args.seconds), 3),
            mbytes=round(size / 1e6, 4),
            floor_us=round(size / args.bandwidth / 1e6, 4),
        )
        for backend in args.backends
        if _ONLY.get(kernel, backend) == backend
    ]
    if not rows:
        return []
    times = ", ".join(f"{row.backend} {row.us:.1f}" for row in rows)
    print(f"{shape.name} B={batch} {kernel}: {times}, bytes {rows[0].floor_us:.1f} us", flush=True)
    return rows


def _replayed(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call within a CUDA graph: median of five runs."""
    calls = 20
    graph = captured(lambda _: work(), calls)

    def microseconds(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / replays / calls

    microseconds(2)
    replays = max(1, min(200, int(1e6 * seconds / 5 / calls / microseconds(2))))
    return float(np.median([microseconds(replays) for _ in range(5)]))


def _called(work: Callable[[], object], seconds: float) -> float:
    """Microseconds of a call on the CPU: the median of as many as fit the time."""
    work()
    times: list[float] = []
    while sum(times) < seconds * 1e6 or not times:
        start = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "step-kernels-h200.json")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=count, default=[1, 8, 64])
    parser.add_argument("--backends", nargs="+", choices=["triton", "torch"], help="default: both on a GPU, else torch")
    parser.add_argument("--seconds", type=amount, default=0.05, help="time of one measurement")
    parser.add_argument("--bandwidth", type=amount, default=4.8, help="of the GPU's memory, TB/s")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    if args.device == "cuda":
        check_gpu("run on one, or try the script itself with --device cpu")
    check_out(args.out, cpu=args.device == "cpu")
    if args.backends is None:
        args.backends = ["triton", "torch"] if args.device == "cuda" else ["torch"]
    return args


if __name__ == "__main__":
    run_script(main)
