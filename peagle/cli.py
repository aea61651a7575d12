"""The command line: argument parsing and calls. What a verb does lives in the rooms it calls.

Nothing heavy is imported before a verb runs, so that `peagle --help` answers at once.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.bench.help import EVAL_ALIASES, EVAL_FLAGS
from peagle.bench.settings import EvalConfig
from peagle.bench.verbs import bench
from peagle.config import (
    AnswerConfig,
    ChatConfig,
    EngineConfig,
    ExtractConfig,
    PrepareConfig,
    ProfileConfig,
    SelfPromptConfig,
    ServeConfig,
    SpeculativeConfig,
    TrainConfig,
)
from peagle.errors import PeagleError
from peagle.exits import USER_ERROR_STATUS, prepare_streams, run
from peagle.flags import Model, keep_names_whole, with_flags
from peagle.help import (
    ANSWER_FLAGS,
    ENGINE_ALIASES,
    ENGINE_FLAGS,
    EXAMPLES,
    EXTRACT_FLAGS,
    PREPARE_FLAGS,
    PROFILE_FLAGS,
    SELF_PROMPT_FLAGS,
    SERVE_FLAGS,
    SPECULATION_FLAGS,
    SPECULATION_METAVARS,
    TRAIN_FLAGS,
)
from peagle.speculation import SpeculationFlags, choose_speculation
from peagle.waiting import said_if_slow

if TYPE_CHECKING:
    from rich.console import Console

    from peagle.engine.engine import LLM

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")

HeadDir = Annotated[str, typer.Argument(metavar="DIR", help="Directory of a head.")]


def _use_recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Let the settings of a recipe stand in for the defaults of `train`; runs before any other flag is read."""
    if path is not None:
        from peagle.recipe_file import read_recipe

        context.default_map = read_recipe(path, TrainConfig, ("model", "data", "out"))
    return path


RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        is_eager=True,
        callback=_use_recipe,
        help="Settings from a .toml, .yaml or .json file, MODEL, data and out among them; flags given here win.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from peagle import __version__

        sys.stdout.write(f"peagle {__version__}\n")
        raise typer.Exit


@app.callback(epilog=EXAMPLES["peagle"])
def peagle(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """P-EAGLE speculative decoding: train a parallel drafter, measure it, generate losslessly with it, serve it."""


@app.command(epilog=EXAMPLES["generate"])
@with_flags(EngineConfig, ENGINE_FLAGS, ENGINE_ALIASES)
@with_flags(SpeculationFlags, SPECULATION_FLAGS, metavars=SPECULATION_METAVARS, parameter="drafts")
@with_flags(AnswerConfig, ANSWER_FLAGS, parameter="sampling")
def generate(
    model: Model,
    config: EngineConfig,
    drafts: SpeculationFlags,
    sampling: AnswerConfig,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One prompt.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            metavar="F.jsonl",
            help="Prompts as JSON lines: on each line an object with `prompt`, `turns` (the first) or `messages`.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it stands, without the chat template.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
) -> None:
    """Answer one prompt, or a file of prompts in one batch."""
    from peagle.prompt_file import PromptRow, read_prompts

    if (prompt is None) == (prompts_file is None):
        raise PeagleError("give either --prompt TEXT or --prompts-file F.jsonl")
    speculation = choose_speculation(model, drafts)
    rows = read_prompts(prompts_file) if prompts_file is not None else [PromptRow.of_user(prompt or "")]
    with said_if_slow(f"loading {model}"):
        from peagle.sampling import SamplingParams
        from peagle.terminal import print_answers

        params = SamplingParams(**asdict(sampling))
        llm = _load(model, drafts, speculation, config)
    print_answers(llm, rows, params, raw=raw, as_json=json)


@app.command(epilog=EXAMPLES["chat"])
@with_flags(EngineConfig, ENGINE_FLAGS, ENGINE_ALIASES)
@with_flags(SpeculationFlags, SPECULATION_FLAGS, metavars=SPECULATION_METAVARS, parameter="drafts")
@with_flags(ChatConfig, ANSWER_FLAGS, parameter="sampling")
def chat(model: Model, config: EngineConfig, drafts: SpeculationFlags, sampling: ChatConfig) -> None:
    """Talk with a model: streamed answers, several turns, acceptance length and speed after each.

    Where stdin is no terminal, each line of it is a message and there is no prompt. Stdout then has the answers alone
    (of gpt-oss the thoughts too, as marked), stderr the rest; the exit status is 2 if a message was refused.
    """
    speculation = choose_speculation(model, drafts)
    with said_if_slow(f"loading {model}"):
        from peagle.chat import run_chat
        from peagle.sampling import SamplingParams

        params = SamplingParams(**asdict(sampling))
        llm = _load(model, drafts, speculation, config)
    if run_chat(llm, params, piped=not sys.stdin.isatty()):
        raise typer.Exit(USER_ERROR_STATUS)


@app.command(epilog=EXAMPLES["serve"])
@with_flags(EngineConfig, ENGINE_FLAGS, ENGINE_ALIASES)
@with_flags(ServeConfig, SERVE_FLAGS, parameter="serving")
@with_flags(SpeculationFlags, SPECULATION_FLAGS, metavars=SPECULATION_METAVARS, parameter="drafts")
def serve(model: Model, config: EngineConfig, serving: ServeConfig, drafts: SpeculationFlags) -> None:
    """Serve a model behind the OpenAI API, until SIGTERM or Ctrl-C."""
    from peagle.server.run import serve as run_server

    speculation = choose_speculation(model, drafts)
    run_server(lambda: _load(model, drafts, speculation, config), model, serving, _stderr())


@app.command(epilog=EXAMPLES["self-prompts"])
@with_flags(SelfPromptConfig, SELF_PROMPT_FLAGS)
def self_prompts(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="F.jsonl", help="Prompts file to write; it must not exist yet.")],
    config: SelfPromptConfig,
) -> None:
    """Let a chat model make up user turns, as further prompts for `prepare`."""
    with said_if_slow("starting"):
        from peagle.training.self_prompts import self_prompts as run_self_prompts

    run_self_prompts(model, out, config, _stderr())


@app.command(epilog=EXAMPLES["prepare"])
@with_flags(PrepareConfig, PREPARE_FLAGS)
def prepare(
    model: Model,
    prompts: Annotated[
        list[Path],
        typer.Option(metavar="F.jsonl", help="Prompts, in the form `generate` takes; repeat for several files."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the shards; one begun before is continued.")],
    config: PrepareConfig,
) -> None:
    """Let the target answer training prompts, and store tokens and loss mask for `train`."""
    with said_if_slow("starting"):
        from peagle.training.regenerate import prepare as run_prepare

    run_prepare(model, prompts, out, config, _stderr())


@app.command(epilog=EXAMPLES["extract"])
@with_flags(ExtractConfig, EXTRACT_FLAGS)
def extract(
    model: Model,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder that `peagle prepare` wrote.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the features; one begun before is continued.")],
    config: ExtractConfig,
    yes: Annotated[bool, typer.Option("--yes", help="Fill the disk beyond 80 % without asking.")] = False,
) -> None:
    """Store the target's hidden states for `train --features`, and say first how large they get."""
    with said_if_slow("starting"):
        from peagle.training.extract import extract as run_extract

    run_extract(model, data, out, config, _stderr(), yes=yes)


@app.command(epilog=EXAMPLES["train"])
@with_flags(TrainConfig, TRAIN_FLAGS, aliases={"num_depths": "--max-depth"})
def train(
    model: Model,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder that `peagle prepare` wrote.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for checkpoints, log and head.")],
    config: TrainConfig,
    recipe: RecipeFile = None,  # noqa: ARG001  # has done its work when this runs
    resume: Annotated[
        bool, typer.Option("--resume", help="Insist on a run to go on with; one that is there is continued anyway.")
    ] = False,
) -> None:
    """Train a head for a target on the answers the target itself gave."""
    with said_if_slow("starting"):
        from peagle.training.train_state import require_checkpoint
        from peagle.training.trainer import train as run_train

    if resume:
        require_checkpoint(out)
    run_train(model, data, out, config, _stderr())


@app.command(epilog=EXAMPLES["inspect"])
def inspect(
    head: HeadDir,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Check the head against this target as well.")
    ] = None,
) -> None:
    """Say what a head is, what it fits, and what is wrong with it (exit status 2 if anything is)."""
    from peagle.drafters.inspect import inspect_head
    from peagle.models.hub import resolve_model
    from peagle.models.target import read_spec

    report = inspect_head(head, read_spec(resolve_model(target)) if target else None)
    if report.config is None:
        raise PeagleError(report.problems[0])
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if report.problems:
        raise typer.Exit(USER_ERROR_STATUS)


@app.command(epilog=EXAMPLES["export"])
def export(
    head: HeadDir,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the exported head.")],
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The head's target, where the head shares its tables.")
    ] = None,
) -> None:
    """Write a head in vLLM's full layout: every tensor and every config key spelled out."""
    with said_if_slow(f"reading {head}" + (f" and {target}" if target else "")):
        import torch

        from peagle.drafters.checkpoint import export_head
        from peagle.models.target import load_target

        model = load_target(target, dtype=torch.float32, device=torch.device("cpu")).model if target else None
    with said_if_slow(f"writing {out}"):
        export_head(head, model, out)
    sys.stdout.write(f"{out}: loads in vLLM as method eagle3 with parallel_drafting true\n")


@app.command(epilog=EXAMPLES["profile"])
@with_flags(ProfileConfig, PROFILE_FLAGS, ENGINE_ALIASES)
@with_flags(SpeculationFlags, SPECULATION_FLAGS, metavars=SPECULATION_METAVARS, parameter="drafts")
def profile(
    model: Model,
    config: ProfileConfig,
    drafts: SpeculationFlags,
    out: Annotated[Path | None, typer.Option(metavar="F.json", help="Write the figures as a result file.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="F.json", help="Keep the profiler's Chrome trace.")] = None,
) -> None:
    """Say where the time of decoding steps goes: GPU, host, launches, and what each kind of kernel takes."""
    speculation = choose_speculation(model, drafts)
    with said_if_slow("starting"):
        from peagle.bench.profiling import run_profile

    run_profile(model, speculation, config, _stdout(), out=out, trace=trace)


@app.command("eval", epilog=EXAMPLES["eval"])
@with_flags(EvalConfig, EVAL_FLAGS, EVAL_ALIASES)
def evaluate(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="Directory of a head, or Hub id.")],
    model: Model,
    config: EvalConfig,
    card: Annotated[
        Path | None, typer.Option(metavar="F.json", help="Result to compare with (default: HEAD's acceptance.json).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="F.json", help="Result file (default: one named after head and time).")
    ] = None,
) -> None:
    """Measure a head: acceptance per set, category and context, losslessness, accuracy; does its card hold?

    Exit status 1: below the card, or answers that drafts changed beyond rounding.
    """
    with said_if_slow("starting"):
        from peagle.bench.evaluate import run_eval

    raise typer.Exit(run_eval(head, model, config, _stderr(), out=out, card=card))


@app.command(epilog=EXAMPLES["demo"])
def demo(max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 96) -> None:
    """Answer three prompts with SmolLM2-135M, with and without its shipped head, and compare."""
    from peagle.demo import load_demo, run_demo

    if max_tokens < 1:
        raise PeagleError(f"--max-tokens is {max_tokens}: it must be at least 1")
    run_demo(load_demo(), _stdout(), max_tokens=max_tokens)


def _stdout() -> "Console":
    from rich.console import Console

    return Console()


def _stderr() -> "Console":
    """Where progress goes; results go to stdout."""
    from rich.console import Console

    return Console(stderr=True)


def _load(model: str, drafts: SpeculationFlags, speculation: SpeculativeConfig | None, config: EngineConfig) -> "LLM":
    from peagle.engine.engine import LLM

    llm = LLM(model, speculative_config=speculation, **asdict(config))
    if drafts.speculation and speculation is None:
        sys.stderr.write(f"peagle: no head ships for {model}, it decodes without drafts: --head DIR names one\n")
    return llm


def main() -> None:
    """Run the command line of this process and leave with its status; `peagle.__main__` is the entry point."""
    prepare_streams()
    if "--help" in sys.argv:
        keep_names_whole()
    sys.exit(run(app, sys.argv[1:]))
