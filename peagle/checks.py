"""Checks of settings and of JSON: each raises a PeagleError that says the setting, its value and what it may be."""

import json
import math
from collections.abc import Callable
from typing import Any

from peagle.errors import PeagleError


def check_choice(config: object, name: str, *choices: str) -> None:
    """One of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise PeagleError(f"{name} {value!r} is not known: use {', '.join(choices[:-1])} or {choices[-1]}")


def _check(config: object, names: tuple[str, ...], holds: Callable[[Any], bool], expected: str) -> None:
    """None stands for a setting left out. Conditions are of numbers, and such that a NaN fulfils none."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and holds(value)):
            raise PeagleError(f"{name} is {_shown(value)}: it must be {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A number as it is written; a text in quotes, cut off where it is long."""
    return f"{value!r:.80}" if isinstance(value, str) else str(value)


def check_switches(config: object, *names: str) -> None:
    """True or False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise PeagleError(f"{name} is {_shown(value)}: it must be true or false")


def check_at_least(config: object, least: int, *names: str) -> None:
    """Whole numbers, `least` or more."""
    _check(
        config, names, lambda value: isinstance(value, int) and value >= least, f"a whole number of at least {least}"
    )


def check_between(config: object, least: int, most: int, *names: str) -> None:
    """Numbers from `least` to `most`."""
    _check(config, names, lambda value: least <= value <= most, f"in {least} .. {most}")


def check_positive(config: object, *names: str) -> None:
    """Finite numbers above 0."""
    _check(config, names, lambda value: 0 < value < math.inf, "finite and above 0")


def check_share(config: object, interval: str, *names: str) -> None:
    """Numbers in an interval of 0 and 1, such as "(0, 1]"."""
    ends = (0,) * (interval[0] == "[") + (1,) * (interval[-1] == "]")
    _check(config, names, lambda value: 0 < value < 1 or value in ends, f"in {interval}")


def parse_object(text: str, where: str, expected: str = "an object") -> dict[str, Any]:
    """One JSON object, which errors call `where` and describe as `expected`. Raises PeagleError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise PeagleError(
            f"{where}: not valid JSON at character {error.pos + 1} ({error.msg}); write {expected}"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a thousand brackets
        raise PeagleError(f"{where}: JSON that cannot be read ({error}); shorten it") from None
    if not isinstance(value, dict):
        raise PeagleError(f"{where}: a JSON {json_kind(value)}, expected {expected}")
    return value


def json_kind(value: object) -> str:
    """What JSON calls a value that was read from it."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]
