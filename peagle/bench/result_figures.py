"""The figures of any result file, each with what the file has to say how sure it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from peagle.bench.groups import unpack_requests
from peagle.bench.statistics import (
    FEWEST_REQUESTS,
    Interval,
    interval_difference,
    mean_difference,
    ratio_difference,
    repeats_difference,
)

Json = Mapping[str, Any]
Key = tuple[str, ...]

# Numbers that say which row it is; texts and switches do too, but for the ones that were measured.
_IDENTIFYING = frozenset(
    {"num_speculative_tokens", "temperature", "concurrency", "batch_size", "k", "positions", "chunk_rows", "segments",
     "max_tokens", "request_rate"}
)  # fmt: skip
_MEASURED = frozenset(
    {"verdict", "per_request", "tokens_from", "source", "partial", "explained", "out_of_memory", "paired", "failure"}
)
_NO_ROWS = frozenset(
    {"requests", "questions", "divergences", "card"}
)  # lists of single cases, and what compares already
_HIGHER = frozenset(
    {"second", "throughput", "goodput", "ratio", "speedup", "acceptance", "accepted", "conditional", "position",
     "accuracy", "correct", "identical", "equal", "utilisation"}
)  # fmt: skip
_LOWER = frozenset({"ms", "seconds", "gib", "latency", "failed", "unfinished", "floor", "gap", "loss", "wait"})
_NEUTRAL = frozenset({"std", "floor_ms", "prompts", "rounds", "tokens", "draft_tokens", "accepted_tokens"})
_SUFFIXES = ("_interval", "_repeats")
_FEW = 3  # repeats from which Student's t says something
# Figures that are sums over the work done, and the settings that say how much work that is.
_SUMS = frozenset(
    {"seconds", "prompts", "requests", "rounds", "tokens", "draft_tokens", "accepted_tokens", "prompt_tokens",
     "output_tokens", "total_tokens", "asked", "completed", "failed", "failures", "unfinished", "not_sent", "good",
     "correct", "outcomes", "equal", "equal_answers", "identical", "tokens_compared", "answers"}
)  # fmt: skip
_AMOUNTS = frozenset(
    {"repeats", "prompts", "num_prompts", "prompts_per_client", "min_prompts", "limit", "max_tokens",
     "accuracy_tokens", "lossless_prompts", "ignore_eos", "steps", "minutes", "output_len", "random_input_len"}
)  # fmt: skip
TOO_FEW = f"fewer than {FEWEST_REQUESTS} prompts"
NO_SPREAD = f"the files have no interval and fewer than {_FEW} repeats of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a result. `pairs` are accepted drafts and rounds by request, `sample` a latency by request,
    `prompts` the hash of the prompts if the file has it. `few`: of so few prompts that they say nothing of others."""

    value: float
    interval: Interval | None = None
    repeats: Sequence[float] = ()
    pairs: tuple[list[int], list[int]] | None = None
    sample: Sequence[float] = ()
    prompts: str | None = None
    few: bool = False

    def why_unsure(self, other: "Figure") -> str:
        """What stands in the way where `difference` is None."""
        handful = 0 < min(len(self.sample), len(other.sample)) < FEWEST_REQUESTS
        return TOO_FEW if handful or self.few or other.few else NO_SPREAD

    def difference(self, other: "Figure") -> Interval | None:
        """`other` less this with its interval; None where the files do not say how sure they are."""
        if self.pairs is not None and other.pairs is not None:
            same = self.prompts is not None and self.prompts == other.prompts
            if same and len(self.pairs[0]) == len(other.pairs[0]):
                return ratio_difference(self.pairs, other.pairs, paired=True)
            return ratio_difference(self.pairs, other.pairs)
        if min(len(self.repeats), len(other.repeats)) >= _FEW:
            return repeats_difference(self.repeats, other.repeats)
        if self.interval is not None and other.interval is not None:
            return interval_difference(self.interval, other.interval)
        if min(len(self.sample), len(other.sample)) >= FEWEST_REQUESTS:
            return mean_difference(self.sample, other.sample)
        return None


def direction(name: str) -> int:
    """1 where more is better, -1 where less is, 0 where neither is known."""
    base = name.split("[")[0]
    words = set(base.replace(".", "_").split("_"))
    if base.rsplit(".", 1)[-1] in _NEUTRAL or base in _NEUTRAL:
        return 0
    return 1 if words & _HIGHER else -1 if words & _LOWER else 0


def depends_on_amount(name: str) -> bool:
    """Whether a figure is a sum, which says nothing where more or less was done."""
    path = name.split("[")[0].split(".")
    return path[0] in _SUMS or path[-1] in _SUMS


def other_amounts(before: Json, after: Json) -> list[str]:
    """The settings that set the amount of work and differ."""
    names = (name for name in {**before, **after} if name in _AMOUNTS or name.endswith("_output_len"))
    return [name for name in names if before.get(name) != after.get(name)]


def figures_by_row(result: Json) -> dict[Key, dict[str, Figure]]:
    """The figures of every row of a result file, by what identifies the row."""
    found: dict[Key, dict[str, Figure]] = {}
    lists = {name: rows for name, rows in result["results"].items() if name not in _NO_ROWS}
    for name, rows in lists.items():
        table = rows if isinstance(rows, list) else [rows]
        for row in table:
            if not isinstance(row, dict):
                continue
            key = (*(() if name == "rows" else (name,)), *_identity(row))
            while key in found:  # rows that nothing tells apart: by their place
                key = (*key, "again")
            found[key] = dict(_figures(row, result))
    return found


def _identity(row: Json) -> Iterator[str]:
    for name, value in row.items():
        if name in _MEASURED or value is None:
            continue
        if isinstance(value, str | bool):
            yield value if isinstance(value, str) else f"{name}={value}"
        elif name in _IDENTIFYING and isinstance(value, int | float):
            short = {"num_speculative_tokens": "K", "temperature": "T"}.get(name, name)
            yield f"{short}={value:g}"


def _figures(row: Json, result: Json) -> Iterator[tuple[str, Figure]]:
    flat = dict(_flatten(row))
    sets = result["settings"].get("datasets")
    described = sets.get(str(row.get("suite"))) if isinstance(sets, dict) else None
    enough = not any(0 < count < FEWEST_REQUESTS for count in _numbers([row.get("prompts")]))
    for name, value in flat.items():
        ending = name.rsplit(".", 1)[-1].split("[")[0]
        if ending in _IDENTIFYING or ending.endswith(_SUFFIXES):
            continue
        pairs = None
        if name == "acceptance_length" and isinstance(row.get("per_request"), str) and enough:
            with suppress(ValueError):
                pairs = unpack_requests(row["per_request"])
        yield (
            name,
            Figure(
                value=value,
                interval=_interval(name, row, value) if enough else None,
                repeats=_numbers(row.get(f"{name}_repeats")),
                pairs=pairs,
                sample=_sample(name, result),
                prompts=described.get("sha256") if isinstance(described, dict) else None,
                few=not enough,
            ),
        )


def _flatten(row: Json, before: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a row with its path; of lists of numbers every place, counted from 1."""
    for name, value in row.items():
        path = before + name
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            yield path, float(value)
        elif isinstance(value, dict):
            yield from _flatten(value, f"{path}.")
        elif isinstance(value, list):
            numbers = {f"{path}[{place}]": item for place, item in enumerate(value, 1)}
            yield from ((p, float(n)) for p, n in numbers.items() if isinstance(n, int | float))


def _interval(name: str, row: Json, value: float) -> Interval | None:
    """That of the field NAME_interval; of a place of a list, NAME_interval has one for each."""
    base, _, place = name.partition("[")
    given = as_list(row.get(f"{base}_interval"))
    ends = _numbers(next(iter(given[int(place.rstrip("]")) - 1 :]), None) if place else given)
    return Interval(value, *ends) if len(ends) == 2 else None


def _sample(name: str, result: Json) -> list[float]:
    """A latency by request, for its mean: load tests keep their requests."""
    parts = name.split(".")
    if parts[0] != "latency_ms" or parts[-1] != "mean":
        return []
    requests = as_list(result["results"].get("requests"))
    return _numbers([request.get(f"{parts[1]}_ms") for request in requests if isinstance(request, dict)])


def as_list(value: object) -> list[Any]:
    """The value, or an empty list in place of what is none."""
    return value if isinstance(value, list) else []


def _numbers(value: object) -> list[float]:
    """The numbers of a list: what is none, as after an edit by hand, says nothing of how sure a figure is."""
    return [float(item) for item in as_list(value) if isinstance(item, int | float)]
