"""Data sets in the formats of others: the Hub's, with or without its library, and ShareGPT's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peagle.bench.prompt_sets import shipped_set
from peagle.bench.settings import BenchServeConfig
from peagle.checks import parse_object
from peagle.errors import PeagleError, one_line
from peagle.prompt_file import PromptRow, parse_row, read_prompts

# Columns that hold what a user says, the likeliest first.
COLUMNS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")
# Data sets of the Hub whose prompts the project ships word for word.
_SHIPPED = {
    "philschmid/mt-bench": "mt-bench",
    "huggingfaceh4/mt_bench_prompts": "mt-bench",
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
}
_SUBSETS = {"openai/gsm8k": "main", "gsm8k": "main"}  # where the Hub asks for one
_FILE_KINDS = (".parquet", ".jsonl", ".json")
_ROLES = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}

Row = tuple[str, Mapping[str, Any]]  # what errors call it, and its columns


def sharegpt_rows(path: Path) -> list[PromptRow]:
    """The first user turn of every conversation of a ShareGPT file; those in which nobody asks first are left out."""
    rows = [row for where, columns in _read_json(path) if (row := _prompt(columns, where, "conversations")) is not None]
    if not rows:
        raise PeagleError(f"{path}: no conversation begins with a turn of a user; give a ShareGPT file")
    return rows


def hub_rows(config: BenchServeConfig) -> tuple[list[PromptRow], str]:
    """The rows of a data set of the Hub and where they are from: a local copy, the project itself, or the Hub."""
    name = config.dataset_path
    if name is None:
        raise PeagleError("data set hf needs --dataset-path: an id such as philschmid/mt-bench, or a local copy")
    local, shipped = Path(name), _SHIPPED.get(name.lower())
    if local.exists():
        rows = list(_local_rows(local, config.hf_split))
    elif shipped is not None and config.hf_split in (None, "train" if shipped == "mt-bench" else "test"):
        file = shipped_set(shipped)
        return read_prompts(file), f"{name}, from {file.name} of peagle"
    else:
        rows = list(_downloaded(name, config))
    prompts = [_prompt(columns, where, _column(columns, where)) for where, columns in rows]
    found = [prompt for prompt in prompts if prompt is not None]
    if not found:
        raise PeagleError(f"data set {name} holds no prompts: choose another one, or another --hf-split")
    return found, name


def _column(columns: Mapping[str, Any], where: str) -> str:
    for name in COLUMNS:
        if columns.get(name):
            return name
    raise PeagleError(
        f"{where}: has none of the columns {', '.join(COLUMNS)}, only {', '.join(columns) or 'none'}; rename one of "
        "them, or use --dataset-name custom"
    )


def _prompt(columns: Mapping[str, Any], where: str, column: str) -> PromptRow | None:
    """The row of a prompts file that says the same; None for a conversation that no user begins."""
    value = columns.get(column)
    if value is None:
        raise PeagleError(f"{where}: has no {column!r}, only {', '.join(columns) or 'none'}; give a file that has it")
    key = "turns" if isinstance(value, list) else "prompt"
    if column in ("messages", "conversations"):
        key, value = "messages", _first_turn(value, where)
        if not value:
            return None
    names = ("id", "question_id", "task_id", "prompt_id")
    identity = next((columns[name] for name in names if columns.get(name) is not None), None)
    return parse_row({key: value, "id": identity, "category": columns.get("category")}, where, where.rsplit("/", 1)[-1])


def _first_turn(turns: Any, where: str) -> list[dict[str, str]]:
    """The messages up to the first of a user; none where somebody else speaks first."""
    messages: list[dict[str, str]] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        said = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
        if not isinstance(turn, Mapping) or not isinstance(said, str):
            raise PeagleError(f"{where}: every turn needs 'from' and 'value', or 'role' and 'content', as text")
        role = _ROLES.get(str(turn.get("from", turn.get("role"))), "assistant")
        if role == "assistant" or not said.strip():
            return []
        messages.append({"role": role, "content": said})
        if role == "user":
            return messages
    return []


def _read_json(path: Path) -> Iterator[Row]:
    """The objects of a JSON list or of JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PeagleError(f"cannot read the data set {path}: {one_line(error)}; check the path") from None
    if path.suffix == ".jsonl" or not text.lstrip().startswith("["):
        lines = enumerate(text.split("\n"), 1)
        yield from ((f"{path}:{n}", parse_object(line, f"{path}:{n}")) for n, line in lines if line.strip())
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeagleError(f"{path}: not valid JSON ({one_line(error)}); a data set is a list of objects") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise PeagleError(f"{path}, row {number}: a JSON {type(row).__name__}, expected an object")
        yield f"{path}, row {number}", row


def _local_rows(path: Path, split: str | None) -> Iterator[Row]:
    for file in _data_files(path, split):
        if file.suffix == ".parquet":
            if find_spec("pyarrow") is None:
                raise PeagleError(f"{file} needs pyarrow to be read: pip install pyarrow, or convert it to .jsonl")
            import pyarrow.parquet as parquet

            try:
                rows: Sequence[Mapping[str, Any]] = parquet.read_table(file).to_pylist()
            except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
                raise PeagleError(f"cannot read {file}: {one_line(error)}; copy it again") from None
            yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, 1))
        else:
            yield from _read_json(file)


def _data_files(path: Path, split: str | None) -> list[Path]:
    """The files of one kind and one split: the one asked for, else `test` if some are of it, else all."""
    if path.is_file():
        return [path]
    for kind in _FILE_KINDS:
        files = sorted(path.rglob(f"*{kind}"))
        chosen = [file for file in files if file.stem.startswith(split or "test")]
        if chosen or (files and split is None):
            return chosen or files
    wanted = f" of split {split!r}" if split else ""
    raise PeagleError(f"{path} holds no data files{wanted} ({', '.join(_FILE_KINDS)}): check --dataset-path")


def _downloaded(name: str, config: BenchServeConfig) -> Iterator[Row]:
    """Rows by way of the library `datasets`, from its cache or the Hub."""
    if find_spec("datasets") is None:
        raise PeagleError(
            f"data set {name} is neither a local file nor one that peagle ships ({', '.join(sorted(_SHIPPED))}): "
            "pip install datasets, or download it and give its folder as --dataset-path"
        )
    import datasets

    try:
        loaded = datasets.load_dataset(name, config.hf_subset or _SUBSETS.get(name.lower()), split=config.hf_split)
    except Exception as error:  # a dozen kinds, and of several libraries
        raise PeagleError(
            f"cannot load data set {name} ({one_line(error)}): check its id, --hf-subset, --hf-split and the network, "
            "or give a local copy"
        ) from None
    if isinstance(loaded, Mapping):
        if len(loaded) > 1 and "test" not in loaded:
            raise PeagleError(f"data set {name} has the splits {', '.join(loaded)}: choose one with --hf-split")
        loaded = loaded["test"] if "test" in loaded else next(iter(loaded.values()))
    for number, row in enumerate(loaded, 1):
        yield f"{name}, row {number}", row
