"""The demo: three prompts, each answered with P-EAGLE and by plain decoding, and what the difference is."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from peagle.acceptance import AcceptanceStats
from peagle.config import SpeculativeConfig
from peagle.errors import PeagleError
from peagle.speculation import DEFAULT_NUM_SPECULATIVE_TOKENS, shipped_head

if TYPE_CHECKING:
    from peagle.engine.engine import LLM
    from peagle.engine.request import RequestOutput

MODEL = "smollm2-135m"
_SLOWER = (
    "Drafts made it slower here, as they do where threads wait for each other or for other jobs on these cores: try it "
    "with OMP_NUM_THREADS=1, or on idle cores."
)
PROMPTS = (
    ("chat", "I have one free afternoon in a small seaside town. Suggest how to spend it, hour by hour."),
    ("code", "Write a Python function that counts how often each word occurs in a text, and show how to call it."),
    ("maths", "A train covers 180 km in 2 hours and then 120 km in 1 hour. Work out its average speed step by step."),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt answered both ways by the same loaded engine."""

    title: str
    drafted: "RequestOutput"
    plain: "RequestOutput"

    @property
    def identical(self) -> bool:
        """Whether speculation left every token as it was."""
        return self.drafted.token_ids == self.plain.token_ids


def load_demo() -> "LLM":
    """SmolLM2-135M-Instruct with its shipped head, in float32 so that the two ways can be compared token by token; on
    one thread, unless OMP_NUM_THREADS says otherwise."""
    head = shipped_head(MODEL)
    if head is None:
        raise PeagleError(
            f"the head for {MODEL} is not installed: run the demo from a checkout that has the folder heads/"
        )
    import torch

    from peagle.engine.engine import LLM

    if "OMP_NUM_THREADS" not in os.environ:  # threads spin while they wait for each other: on busy cores for minutes
        torch.set_num_threads(1)
    config = SpeculativeConfig(model=str(head), num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS)
    return LLM(MODEL, speculative_config=config, dtype="float32")


def run_demo(llm: "LLM", console: Console, *, max_tokens: int) -> list[Comparison]:
    """Answer every prompt both ways, the order alternating from prompt to prompt, and print the comparison."""
    _answer(llm, PROMPTS[0][1], 8, drafts=True)  # first calls pay for one-off work on weights and memory
    _answer(llm, PROMPTS[0][1], 8, drafts=False)
    comparisons = []
    for number, (title, prompt) in enumerate(PROMPTS):
        console.rule(f"[bold]{title}", align="left")
        console.print(prompt, style="bold", markup=False, highlight=False)
        plain = _answer(llm, prompt, max_tokens, drafts=False) if number % 2 else None
        drafted = _answer(llm, prompt, max_tokens, drafts=True, console=console)
        plain = plain or _answer(llm, prompt, max_tokens, drafts=False)
        comparisons.append(Comparison(title, drafted, plain))
        console.print(_one_line(comparisons[-1]), style="green", markup=False, highlight=False)
    console.print(summary_table(comparisons))
    if _ratio(comparisons) < 1:
        console.print(_SLOWER, style="yellow")
    return comparisons


def summary_table(comparisons: Sequence[Comparison]) -> Table:
    """Per prompt and overall: speed both ways, acceptance, and whether the outputs are identical."""
    title = f"{MODEL}, float32, greedy, K = {_num_drafts(comparisons)}; tokens/s, acceptance length (AL)"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("prompt")
    for heading in ("plain", "P-EAGLE", "ratio", "AL", "% accepted at 1, 2, ...", "identical"):
        table.add_column(heading, justify="right")
    for c in comparisons:
        table.add_row(*_cells(c.title, [c]))
    table.add_section()
    table.add_row(*_cells("all", comparisons), style="bold")
    return table


def _answer(
    llm: "LLM", prompt: str, max_tokens: int, *, drafts: bool, console: Console | None = None
) -> "RequestOutput":
    from peagle.sampling import SamplingParams

    def on_delta(_: int, text: str) -> None:
        # Both ways stream, so both pay for turning tokens into text; only one of them is shown.
        if console is not None:
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    llm.set_speculation(drafts)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    output = llm.chat([[{"role": "user", "content": prompt}]], params, on_delta=on_delta)[0]
    if console is not None:
        console.print()
    return output


def _one_line(c: Comparison) -> str:
    _, plain, drafted, ratio, length, shares, identical = _cells(c.title, [c])
    return (
        f"[P-EAGLE {drafted} tok/s, plain {plain} tok/s: {ratio}; acceptance length {length} "
        f"(accepted at 1, 2, ...: {shares} %); identical outputs: {identical}]"
    )


def _cells(title: str, comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    plain = _tokens_per_second([c.plain for c in comparisons])
    drafted = _tokens_per_second([c.drafted for c in comparisons])
    stats = _stats(comparisons)
    return (
        title,
        f"{plain:.1f}",
        f"{drafted:.1f}",
        f"{_ratio(comparisons):.2f}x",
        f"{stats.acceptance_length:.2f}",
        " ".join(f"{100 * share:.0f}" for share in stats.acceptance_per_position),
        "yes" if all(c.identical for c in comparisons) else "NO",
    )


def _ratio(comparisons: Sequence[Comparison]) -> float:
    """Speed with drafts over speed without."""
    return _tokens_per_second([c.drafted for c in comparisons]) / _tokens_per_second([c.plain for c in comparisons])


def _tokens_per_second(outputs: Sequence["RequestOutput"]) -> float:
    return sum(len(output.token_ids) for output in outputs) / sum(output.seconds for output in outputs)


def _stats(comparisons: Sequence[Comparison]) -> AcceptanceStats:
    total = AcceptanceStats()
    for c in comparisons:
        total.add(c.drafted.stats)
    return total


def _num_drafts(comparisons: Sequence[Comparison]) -> int:
    return len(_stats(comparisons).accepted_per_position)
