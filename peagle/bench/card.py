"""Whether a head accepts what its card says: `acceptance.json` in its folder, the result file of an earlier run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.eval_rows import CardRow, GroupRow
from peagle.bench.groups import unpack_requests
from peagle.bench.report import read_result
from peagle.bench.statistics import FEWEST_REQUESTS, LEVEL, Interval, acceptance_length_interval, ratio_difference
from peagle.errors import PeagleError

CARD_NAME = "acceptance.json"
TOLERANCE = 0.01  # of the card's figure; less is nothing a user would notice, however sure it is
AS_SAID, BELOW, ABOVE = "as the card says", "below the card", "above the card"
_DRAWS = 10_000  # intervals of many figures at once need the far ends of the distribution

Json = Mapping[str, Any]
Key = tuple[str, int, float]


def read_card(head: Path, given: Path | None) -> Json | None:
    """The card to compare with: `given`, or the head's own; None if there is none. Raises PeagleError."""
    path = given if given is not None else head / CARD_NAME
    if given is None and not path.is_file():
        return None
    card = read_result(path)
    try:  # now, not after hours of measuring
        usable = card["results"]["rows"] and all(map(_is_comparable, card["results"]["rows"]))
        usable = usable and all(isinstance(about, dict) for about in card["settings"].get("datasets", {}).values())
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        usable = False
    if not usable:
        raise PeagleError(f"{path} holds no acceptance per prompt set: give what `peagle eval` wrote")
    return card


def _is_comparable(row: Json) -> bool:
    """Whether a card's row has all that a comparison reads of it. Raises what reading anything else raises."""
    numbers = [row[name] for name in ("num_speculative_tokens", "temperature", "acceptance_length", "prompts")]
    packed = row.get("per_request")
    finite = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    return (
        finite and isinstance(row["suite"], str) and (packed is None or len(unpack_requests(packed)[0]) == numbers[3])
    )


def compare_with_card(
    rows: Sequence[GroupRow], settings: Json, card: Json, head_name: str
) -> tuple[list[CardRow], list[str]]:
    """(a row for every figure that both have, why the other figures of the card were not compared)."""
    said = {_key(row): row for row in card["results"]["rows"] if row.get("head") in (None, head_name)}
    length, own = card["settings"].get("max_tokens"), settings["max_tokens"]
    if length != own:
        return [], [f"the card's answers have up to {length} tokens, these {own}: use --max-tokens {length}"]
    pairs, notes = [], []
    for row in rows:
        other = said.get((row.suite, row.num_speculative_tokens, row.temperature))
        where = f"{row.suite} K = {row.num_speculative_tokens} T = {row.temperature:g}"
        if other is None:
            notes.append(f"the card does not have {where}")
        elif other["prompts"] != row.prompts or _other_prompts(row.suite, settings, card["settings"]):
            notes.append(f"{where}: the card's prompts are others ({other['prompts']}, here {row.prompts})")
        elif row.acceptance_length is None:
            notes.append(f"{where}: no draft was verified here")
        elif row.prompts < FEWEST_REQUESTS:
            notes.append(f"{where}: {row.prompts} prompts are too few to tell a difference from noise")
        else:
            pairs.append((row, other))
    return [_compare(row, other, 1 - (1 - LEVEL) / len(pairs)) for row, other in pairs], notes


def verdict(compared: Sequence[CardRow], card: Json) -> str:
    """One line over all figures; where none was compared, with the flags that compare some."""
    if not compared:
        return f"the card was NOT CHECKED: this run has none of its figures. To check it: {_flags_for(card)}"
    below = [row for row in compared if row.verdict == BELOW]
    if not below:
        above = sum(row.verdict == ABOVE for row in compared)
        return f"{AS_SAID}, within noise ({len(compared)} figures{f', {above} of them above it' if above else ''})"
    named = [
        f"{r.suite} K = {r.num_speculative_tokens} T = {r.temperature:g} {r.measured:.2f} against {r.card:.2f}"
        for r in below
    ]
    return f"{BELOW}: {', '.join(named)}"


def _compare(row: GroupRow, other: Json, level: float) -> CardRow:
    accepted, rounds = here = unpack_requests(row.per_request or "")
    card = float(other["acceptance_length"])
    paired = other.get("per_request") is not None
    if paired:
        there = unpack_requests(other["per_request"])
        difference = ratio_difference(there, here, paired=True, level=level, draws=_DRAWS)
    else:
        difference = acceptance_length_interval(*here, level=level, draws=_DRAWS).shifted(-card)
    return CardRow(
        suite=row.suite,
        num_speculative_tokens=row.num_speculative_tokens,
        temperature=row.temperature,
        card=card,
        measured=round(1 + sum(accepted) / sum(rounds), 4),
        difference_interval=difference.rounded(),
        paired=paired,
        verdict=_judge(difference, TOLERANCE * card),
    )


def _flags_for(card: Json) -> str:
    """The flags of `peagle eval` that measure what the card says. `--limit` shows only where the card has it too."""
    rows, settings = card["results"]["rows"], card["settings"]
    flags = {
        "--sets": dict.fromkeys(row["suite"] for row in rows),
        "--k": sorted({row["num_speculative_tokens"] for row in rows}),
        "--temperature": [f"{t:g}" for t in sorted({row["temperature"] for row in rows})],
        "--max-tokens": [settings["max_tokens"]] if "max_tokens" in settings else [],
        "--limit": [settings["limit"]] if settings.get("limit") else [],
    }
    text = " ".join(f"{flag} {','.join(map(str, values))}" for flag, values in flags.items() if values)
    return f"{text} (or fewer sets, k and temperatures{'' if flags['--limit'] else '; without --limit'})"


def _judge(difference: Interval, tolerance: float) -> str:
    if difference.high < -tolerance:
        return BELOW
    return ABOVE if difference.low > tolerance else AS_SAID


def _other_prompts(suite: str, settings: Json, card_settings: Json) -> bool:
    """Whether the hashes of the prompts differ; a card without hashes is one of whole sets."""
    here, there = (part.get("datasets", {}).get(suite, {}) for part in (settings, card_settings))
    if there.get("sha256") is None:
        return "ids" in here
    return here.get("sha256") not in (None, there["sha256"])


def _key(row: Json) -> Key:
    return row["suite"], row["num_speculative_tokens"], float(row["temperature"])
