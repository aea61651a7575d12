"""`peagle serve` over an engine that computes nothing: what is left is the way from tokens to a client.

Server, engine thread, tokenizer and text streams are the real ones; only the step is another. It gives every running
request the next tokens of a fixed text, as one round that accepted all its drafts, and takes as long as it is told.
The port stands on the first line of stdout; SIGTERM ends it.

    python -m benchmarks.instant_server --step-ms 15 --tokens-per-round 4
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import MODEL, first_turns
from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.server.app import make_app
from peagle.server.engine_thread import EngineThread
from peagle.server.metrics import Metrics
from peagle.server.run import bind, listen, run_server

MOST = 4096  # requests at once


class InstantCore:
    """What an `EngineThread` needs of an `EngineCore`."""

    synthetic = None

    def __init__(self, pool: Any, text_ids: Sequence[int], tokens_per_round: int, step_seconds: float) -> None:
        """`pool` is only for the metrics."""
        self.device, self.max_num_seqs = torch.device("cpu"), MOST
        self.scheduler = SimpleNamespace(
            running=[], waiting=[], pool=pool, num_preemptions=0, prefix_queries=0, prefix_hits=0
        )
        self._text, self._round, self._seconds = list(text_ids), tokens_per_round, step_seconds
        self._due = 0.0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running)

    def add(self, request: Request) -> None:
        """Take a request: it runs from the next step on."""
        request.started = time.perf_counter()
        self.scheduler.running.append(request)

    def abort(self, request: Request) -> None:
        """End a request now."""
        request.finish_reason = request.finish_reason or "abort"
        self.scheduler.running.remove(request)

    def abort_all(self) -> None:
        """End every request."""
        for request in list(self.scheduler.running):
            self.abort(request)

    def step(self) -> list[Request]:
        """A round for every request, once the step's time is over."""
        now = time.perf_counter()
        self._due = max(self._due + self._seconds, now)  # a late step is made up for by no later one
        time.sleep(self._due - now)  # as an engine that waits for its device: others may run
        advanced = list(self.scheduler.running)
        for request in advanced:
            first = len(request.output_ids)
            at = first % (len(self._text) - self._round)
            kept = request.emit(self._text[at : at + self._round])
            request.record_round(first, min(self._round - 1, kept), self._round - 1)
        self.scheduler.running[:] = [request for request in advanced if request.finish_reason is None]
        return advanced


def instant_llm(tokens_per_round: int, step_seconds: float) -> LLM:
    """SmolLM2 with all that is around it, but for its core."""
    llm = LLM(MODEL, num_kv_blocks=64, max_model_len=1024, device="cpu")
    text = "\n".join(turns[0]["content"] for turns in first_turns("gsm8k", 20))
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    llm.core = InstantCore(llm.core.scheduler.pool, ids, tokens_per_round, step_seconds)  # type: ignore[assignment]
    llm.num_speculative_tokens = tokens_per_round - 1
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-round", type=int, default=4)
    parser.add_argument("--h11", action="store_true", help="as where httptools is not installed")
    parser.add_argument("--no-freeze", action="store_true", help="collect garbage among what was loaded, too")
    args = parser.parse_args()
    if args.h11:
        sys.modules["httptools"] = None  # type: ignore[assignment]
    config, metrics = ServeConfig(max_waiting=MOST, drain_seconds=0.0, log_level="warning"), Metrics(MODEL)
    llm = instant_llm(args.tokens_per_round, args.step_ms / 1000)
    engine = EngineThread(llm, max_waiting=MOST, observer=metrics)
    with bind("127.0.0.1", 0) as sock:
        engine.start()
        while not engine.is_ready:
            time.sleep(0.01)
        if not args.no_freeze:
            gc.freeze()
        listen(sock)
        print(sock.getsockname()[1], flush=True)
        run_server(make_app(engine, llm, config, metrics), engine, config, sock)


if __name__ == "__main__":
    main()
