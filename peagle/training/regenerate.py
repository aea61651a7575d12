"""`peagle prepare`: the target answers every prompt itself, and its answers become a training data set.

A run is a list of jobs, one per temperature and prompt, cut into shards. Each job's seed depends on the run's seed, the
prompt's id and the temperature alone, so neither sharding nor resuming changes what is sampled.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from peagle.config import EngineConfig, PrepareConfig
from peagle.errors import PeagleError
from peagle.files import open_output
from peagle.meter import Meter, say
from peagle.models.fingerprint import file_sha256, template_sha256, weights_fingerprint
from peagle.models.hub import resolve_model
from peagle.models.target import read_spec
from peagle.models.tokenizer import load_tokenizer
from peagle.prompt_file import read_prompts
from peagle.sampling import SamplingParams
from peagle.training.conversations import Conversation, Dialogue, Response, conversation_from_row, encode_all
from peagle.training.dataset import read_shard
from peagle.training.shards import (
    MANIFEST_NAME,
    Manifest,
    ShardRecord,
    ShardRow,
    read_manifest,
    shard_name,
    shard_records,
    write_manifest,
    write_shard,
)
from peagle.training.show import print_document
from peagle.waiting import said_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from peagle.engine.engine import LLM, RequestOutput

PROMPT_TOO_LONG = "prompt_too_long"
LATER_TURN_TOO_LONG = "later_turn_too_long"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareResult:
    """What the data set in `out` holds now. `kept_shards` were there before this run."""

    out: Path
    shards: int
    kept_shards: int
    documents: int
    tokens: int
    supervised_tokens: int
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Job:
    conversation: Conversation
    params: SamplingParams


def prepare(
    model: str, prompts: Path | Sequence[Path], out: Path, config: PrepareConfig, console: Console
) -> PrepareResult:
    """Have the target answer all prompts and write the data set to `out`; finished shards of an earlier run are kept.

    Raises PeagleError for input that cannot be used and KeyboardInterrupt after Ctrl-C; finished shards stay in both
    cases.
    """
    for temperature in config.temperatures:
        _sampling(config, temperature, "")  # raises for what nobody can sample with
    files = [prompts] if isinstance(prompts, Path) else list(prompts)
    conversations = _read_conversations(files, config.limit)
    path = resolve_model(model)
    tokenizer = load_tokenizer(path)
    prompt_limit = _prompt_limit(config, read_spec(path).max_position_embeddings)
    Dialogue(conversations[0]).open_turn(tokenizer)  # a template that cannot render is found before the model loads
    shards = _cut_into_shards(conversations, config)
    with said_if_slow(f"hashing {model} and {len(conversations):,} prompts"):
        manifest = Manifest(
            settings=_settings(model, path, tokenizer, files, config),
            prompt_files=[{"name": file.name, "sha256": file_sha256(file)} for file in files],
            sources=_sources(conversations),
            num_shards=len(shards),
        )
    open_data_set(out, manifest)
    kept = len(manifest.shards)
    if kept == len(shards):
        say(console, f"{out} is complete already ({kept} shards): nothing to do")
        return _result(out, manifest, kept)
    if kept:
        say(console, f"Resuming {out}: {kept} of {len(shards)} shards are there")
    llm = load_engine(model, config, prompt_limit + config.max_tokens)
    _regenerate_missing(llm, shards, prompt_limit, out, manifest, console)
    result = _result(out, manifest, kept)
    _report(result, tokenizer, console)
    return result


def load_engine(model: str, config: PrepareConfig, max_model_len: int) -> "LLM":
    """The engine without drafts, large enough for `config.max_num_seqs` requests at once."""
    with said_if_slow(f"loading {model}"):
        from peagle.engine.engine import LLM

        return LLM(
            model,
            dtype=config.dtype,
            device=config.device,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(EngineConfig().max_num_batched_tokens, config.max_num_seqs),
        )


# Before the model is loaded


def _prompt_limit(config: PrepareConfig, context: int) -> int:
    """Longest prompt in tokens that leaves room for a whole answer."""
    room = context - config.max_tokens
    if room < 1:
        raise PeagleError(
            f"max_tokens is {config.max_tokens}: it must be below the model's context of {context} tokens"
        )
    return min(config.max_prompt_tokens, room)


def _read_conversations(files: Sequence[Path], limit: int | None) -> list[Conversation]:
    conversations = [conversation_from_row(row) for file in files for row in read_prompts(file)]
    if not conversations:
        raise PeagleError("no prompts file was given: expected at least one with --prompts")
    return conversations[:limit]


def _cut_into_shards(conversations: Sequence[Conversation], config: PrepareConfig) -> list[list[_Job]]:
    jobs = [
        _Job(conversation, _sampling(config, temperature, conversation.id))
        for temperature in config.temperatures
        for conversation in conversations
    ]
    return [jobs[start : start + config.shard_size] for start in range(0, len(jobs), config.shard_size)]


def _sampling(config: PrepareConfig, temperature: float, prompt_id: str) -> SamplingParams:
    key = f"{config.seed}\n{float(temperature)!r}\n{prompt_id}".encode()
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1  # below 2^63
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=temperature, top_p=config.top_p, top_k=config.top_k, seed=seed
    )


def _settings(
    model: str, path: Path, tokenizer: "PreTrainedTokenizerFast", files: Sequence[Path], config: PrepareConfig
) -> dict[str, Any]:
    """Everything the data depend on, as JSON values; the device and the number of concurrent requests are not in it."""
    return {
        "model": model,
        "target_config_sha256": file_sha256(path / "config.json"),
        "target_weights_fingerprint": weights_fingerprint(path),
        "tokenizer_sha256": file_sha256(path / "tokenizer.json"),
        "chat_template_sha256": template_sha256(tokenizer),
        "prompts_sha256": [file_sha256(file) for file in files],
        "limit": config.limit,
        "max_prompt_tokens": config.max_prompt_tokens,
        "max_tokens": config.max_tokens,
        "temperatures": [float(temperature) for temperature in config.temperatures],
        "top_p": float(config.top_p),
        "top_k": config.top_k,
        "seed": config.seed,
        "dtype": config.dtype,
        "shard_size": config.shard_size,
    }


def _sources(conversations: Sequence[Conversation]) -> dict[str, dict[str, Any]]:
    """source -> its licences and number of prompts."""
    prompts = Counter(conversation.source for conversation in conversations)
    licences: dict[str, set[str]] = {source: set() for source in prompts}
    for conversation in conversations:
        licences[conversation.source].add(conversation.license)
    return {source: {"licenses": sorted(licences[source]), "prompts": prompts[source]} for source in sorted(prompts)}


def open_data_set(out: Path, manifest: Manifest) -> None:
    """Take over the finished shards that `out` holds, if it was made with the same settings, and prove it writable.

    Raises PeagleError when the folder holds other data or cannot be written.
    """
    if (out / MANIFEST_NAME).exists():
        manifest.shards = _finished_shards(out, manifest.settings)
    elif any(out.glob("shard-*.parquet")):
        raise PeagleError(f"{out} holds shards but no {MANIFEST_NAME}: choose another --out or delete the folder")
    if len(manifest.shards) == manifest.num_shards:
        return
    open_output(out)
    write_manifest(out, manifest)


def _finished_shards(out: Path, settings: dict[str, Any]) -> list[ShardRecord]:
    """Records of the shards that the folder's manifest lists and that are there."""
    earlier = read_manifest(out)
    records = shard_records(earlier, out / MANIFEST_NAME)
    if records:
        _check_same_settings(out, earlier.get("settings"), settings)
    return [record for record in records if (out / record.file).exists()]


def _check_same_settings(out: Path, earlier: Any, present: dict[str, Any]) -> None:
    earlier = earlier if isinstance(earlier, dict) else {}
    for name, value in present.items():
        if earlier.get(name) != value:
            raise PeagleError(
                f"{out} was prepared with {name} {earlier.get(name)!r}, this run has {value!r}: "
                "choose another --out or delete the folder"
            )


# Generation


def _regenerate_missing(
    llm: "LLM", shards: Sequence[Sequence[_Job]], prompt_limit: int, out: Path, manifest: Manifest, console: Console
) -> None:
    finished = {record.index for record in manifest.shards}
    missing = [index for index in range(len(shards)) if index not in finished]
    answers = sum(len(job.conversation.steps) for index in missing for job in shards[index])
    say(console, f"{answers:,} answers to write; shards to finish: {len(missing):,}")
    try:
        with Meter(console, "answers", answers) as meter:
            for index in missing:
                rows, splits, skipped = _regenerate_shard(llm, shards[index], prompt_limit, meter)
                record = write_shard(out, index, rows, splits=splits, skipped=skipped)
                manifest.shards.append(record)
                write_manifest(out, manifest)
                if not console.is_terminal:
                    documents = f"{record.documents} documents, {record.tokens} tokens"
                    say(console, f"shard {index + 1} of {len(shards)}: {documents}")
    except KeyboardInterrupt:
        done = len(manifest.shards)
        say(console, f"Stopped: {done} of {len(shards)} shards are in {out}. Run the same command again to go on.")
        raise


def _regenerate_shard(
    llm: "LLM", jobs: Sequence[_Job], prompt_limit: int, meter: Meter
) -> tuple[list[ShardRow], int, dict[str, int]]:
    """(rows in job order, splits, skipped by reason). All dialogues advance together, one turn at a time."""
    dialogues = [Dialogue(job.conversation) for job in jobs]
    skipped: Counter[str] = Counter()
    active = list(range(len(jobs)))
    while active:
        active = _open_turns(llm.tokenizer, dialogues, active, prompt_limit, skipped, meter)
        _answer(llm, jobs, dialogues, active, meter)
        active = [index for index in active if dialogues[index].turns_left]
    rows = []
    for job, dialogue in zip(jobs, dialogues, strict=True):
        dialogue.close()
        for document in dialogue.documents:
            rows.append(ShardRow(conversation=job.conversation, temperature=job.params.temperature, document=document))
    return rows, sum(dialogue.splits for dialogue in dialogues), dict(skipped)


def _open_turns(
    tokenizer: "PreTrainedTokenizerFast",
    dialogues: Sequence[Dialogue],
    active: Sequence[int],
    prompt_limit: int,
    skipped: Counter[str],
    meter: Meter,
) -> list[int]:
    """Open the next turn of the active dialogues; those whose prompt is too long end and are counted."""
    texts = [dialogues[index].open_turn(tokenizer) for index in active]
    fitting = []
    for index, token_ids in zip(active, encode_all(tokenizer, texts), strict=True):
        dialogue = dialogues[index]
        dialogue.add_prompt(token_ids)
        if len(dialogue.token_ids) <= prompt_limit:
            fitting.append(index)
            continue
        is_first = dialogue.turns_left == len(dialogue.conversation.steps)
        skipped[PROMPT_TOO_LONG if is_first else LATER_TURN_TOO_LONG] += 1
        meter.advance(dialogue.turns_left)  # which will not be answered
        dialogue.drop_turn()
    return fitting


def _answer(
    llm: "LLM", jobs: Sequence[_Job], dialogues: Sequence[Dialogue], active: Sequence[int], meter: Meter
) -> None:
    """Let the target answer the open turn of the active dialogues, longest prompts first."""
    if not active:
        return
    order = sorted(active, key=lambda index: -len(dialogues[index].token_ids))
    prompts = [dialogues[index].token_ids for index in order]

    def finish(_: int, output: "RequestOutput") -> None:
        meter.advance(tokens=len(output.token_ids))

    outputs = llm.generate(prompts, [jobs[index].params for index in order], on_finish=finish)
    end_texts = {token_id: str(llm.tokenizer.decode([token_id])) for token_id in llm.target.spec.eos_token_ids}
    for index, output in zip(order, outputs, strict=True):
        response = Response(text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason)
        dialogues[index].add_response(response, end_texts.get(output.token_ids[-1], ""))


# After the run


def _result(out: Path, manifest: Manifest, kept: int) -> PrepareResult:
    totals = manifest.totals
    if totals["documents"] == 0:
        raise PeagleError(
            f"no prompt was answered, all were left out ({totals['skipped']}): raise max_prompt_tokens or shorten the "
            f"prompts, and delete {out}"
        )
    return PrepareResult(
        out=out,
        shards=len(manifest.shards),
        kept_shards=kept,
        documents=totals["documents"],
        tokens=totals["tokens"],
        supervised_tokens=totals["supervised_tokens"],
        skipped=totals["skipped"],
    )


def _report(result: PrepareResult, tokenizer: "PreTrainedTokenizerFast", console: Console) -> None:
    share = result.supervised_tokens / result.tokens
    say(
        console,
        f"{result.out}: {result.documents:,} documents, {result.tokens:,} tokens, {share:.0%} of them supervised",
    )
    for reason, count in result.skipped.items():
        say(console, f"left out, {reason}: {count:,}")
    for index in range(result.shards):
        documents = read_shard(result.out / shard_name(index))
        if documents:
            print_document(console, tokenizer, documents[0])
            return
