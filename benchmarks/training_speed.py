"""Training speed of `peagle train` on one GPU: positions/s, rows/s, utilisation, and how busy the GPU is.

    python -m benchmarks.training_speed --shape smollm2-135m --seconds 40 --out FILE.json

The trainer itself runs, with a target of the given sizes and random weights and with documents of random tokens whose
lengths are those of a chat data set (a prompt of about 60 tokens, an answer of about 190). What is learned means
nothing; how fast it runs does not depend on that. GPU busy is NVML's share of time with a kernel running.
"""

import argparse
import json
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.common import command, run_script
from benchmarks.training_memory import SHAPES
from peagle.bench.report import write_result
from peagle.config import TrainConfig
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from peagle.models.target import Target
from peagle.training.dataset import Document
from peagle.training.trainer import train_head

QWEN = ModelSpec(
    family="qwen2", vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e6, head_dim=64),
    max_position_embeddings=32_768, qkv_bias=True, o_bias=False, mlp_bias=False, tie_word_embeddings=True,
    bos_token_id=None, eos_token_ids=(151_645,),
)  # fmt: skip
SPECS = {**{name: SHAPES[name] for name in ("smollm2-135m",)}, "qwen2.5-0.5b": QWEN}
WARM_UP_REPORTS = 2  # compilation and the allocator's first steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedOfTraining:
    """Medians over the reports after the warm-up."""

    shape: str
    method: str
    partition: str
    compile: bool
    cache_features: bool
    steps: int
    positions_per_second: float
    rows_per_second: float
    utilisation: float | None
    gpu_busy_percent: float
    data_wait_share: float
    peak_gib: float


class BusyMeter:
    """Samples NVML's utilisation in a thread, each time with the number of reports that the log holds by then."""

    def __init__(self, log: Path) -> None:
        self.samples: list[tuple[int, float]] = []
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "BusyMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._stop.wait(0.25):
            reports = self._log.read_text().count("\n") if self._log.exists() else 0
            self.samples.append((reports, float(torch.cuda.utilization())))

    def between(self, first: int, last: int) -> float:
        """Mean of the samples taken while the log held `first` to `last` - 1 reports."""
        return float(np.mean([share for reports, share in self.samples if first <= reports < last]))


def random_target(spec: ModelSpec, device: torch.device) -> Target:
    """A target of the given sizes, random weights of unit gain."""
    torch.manual_seed(0)
    with device:
        model = TargetModel(spec).to(torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template")
    fields: dict[str, Any] = {**dict.fromkeys(names), "added_tokens_decoder": {}}
    length = spec.vocab_size - 8
    tokenizer = type("Tokenizer", (SimpleNamespace,), {"__len__": lambda _self: length})(**fields)
    return Target(
        name="random", path=Path("random"), spec=spec, model=model.requires_grad_(False).eval(), tokenizer=tokenizer
    )


def random_documents(spec: ModelSpec, tokens: int) -> list[Document]:
    """Documents of about `tokens` tokens in all."""
    rng = np.random.default_rng(0)
    made: list[Document] = []
    total = 0
    while total < tokens:
        prompt, answer = (max(4, int(rng.lognormal(np.log(middle), 0.6))) for middle in (50, 160))
        ids = rng.integers(0, spec.vocab_size - 64, prompt + answer, np.int32)
        made.append(Document(f"{len(made)}", ids, np.arange(prompt + answer) >= prompt))
        total += prompt + answer
    return made


def measure(arguments: argparse.Namespace, method: str) -> SpeedOfTraining:
    """Train for a while and read the log."""
    spec, device = SPECS[arguments.shape], torch.device("cuda")
    config = TrainConfig(
        method=method,
        num_layers=4 if method == "p-eagle" else 1,
        train_embeddings=not arguments.frozen_tables,
        train_lm_head=not arguments.frozen_tables,
        partition=arguments.partition,
        compile=not arguments.eager,
        cache_features=not arguments.online,
        max_seconds=arguments.seconds,
        max_steps=100_000,
        save_interval=100_000,
        log_interval=20,
        serve_tokens=0,
        compact=arguments.frozen_tables,
    )
    with tempfile.TemporaryDirectory() as folder, BusyMeter(Path(folder) / "train.jsonl") as meter:
        out = Path(folder)
        target = random_target(spec, device)
        train_head(target, random_documents(spec, arguments.tokens), "random", out, config, Console())
        lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    every = [line for line in lines if "positions_per_second" in line]
    reports = every[WARM_UP_REPORTS:-1]
    first, last = reports[0], reports[-1]

    def median(name: str) -> float:
        return float(np.median([report[name] for report in reports]))

    rows = (last["rows"] - first["rows"]) / (last["positions"] - first["positions"])
    return SpeedOfTraining(
        shape=arguments.shape,
        method=method,
        partition=arguments.partition,
        compile=config.compile,
        cache_features=config.cache_features,
        steps=last["step"],
        positions_per_second=median("positions_per_second"),
        rows_per_second=rows * median("positions_per_second"),
        utilisation=median("mfu") if reports[0].get("mfu") is not None else None,
        gpu_busy_percent=meter.between(WARM_UP_REPORTS, len(every) - 1),
        data_wait_share=median("data_wait_share"),
        peak_gib=median("memory_gib"),
    )


def main() -> None:
    """One row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SPECS, required=True)
    parser.add_argument("--methods", nargs="+", choices=("p-eagle", "eagle3"), default=["p-eagle", "eagle3"])
    parser.add_argument("--partition", default="prefix-once")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--online", action="store_true", help="run the target at every step instead of caching")
    parser.add_argument("--frozen-tables", action="store_true", help="freeze embeddings and output rows")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"command": command(), **vars(arguments), "out": str(arguments.out)}
    rows = [measure(arguments, method) for method in arguments.methods]
    write_result(arguments.out, f"training-speed-{arguments.shape}", settings, {"rows": rows})
    for row in rows:
        print(row)


if __name__ == "__main__":
    run_script(main)
