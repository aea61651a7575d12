"""Settings of a verb from a TOML, YAML or JSON file: the fields of its config dataclass, checked one by one.

The file only replaces defaults: what stands on the command line wins. Defaults themselves stay in the dataclass.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from peagle.errors import PeagleError, one_line

# What a run writes into its recipe.json beside the settings: what it was trained for and on, nothing to set.
RECORDED_KEYS = frozenset({"base_model", "data_hash"})
# Numbers such as 2e-3, which PyYAML, keeping to YAML 1.1, would read as text.
_YAML_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "nothing (null)"}


def read_recipe(path: Path, config_class: type, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings in `path` as the command line would spell them: lists as comma-separated text, nulls left out.

    Keys are fields of `config_class` and `arguments`, which hold text. A recipe.json that a run wrote will do too.
    Raises PeagleError for a file that cannot be read, an unknown key (with the nearest known one) and a wrong type.
    """
    hints: dict[str, Any] = get_type_hints(config_class)
    known = {field.name: hints[field.name] for field in fields(config_class)} | dict.fromkeys(arguments, str)
    settings: dict[str, Any] = {}
    for key, value in _read(path).items():
        if key in RECORDED_KEYS:
            continue
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise PeagleError(f"recipe {path}: unknown key {key!r}: the nearest known one is {near[0]!r}")
        if not _fits(value, known[key]):
            raise PeagleError(f"recipe {path}: {key} is {value!r}: expected {_describe(known[key])}")
        if value is not None:
            settings[key] = ",".join(map(str, value)) if isinstance(value, list) else value
    return settings


def _read(path: Path) -> dict[str, Any]:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise PeagleError(f"recipe {path} ends in {path.suffix!r}: expected one of {', '.join(_PARSERS)}")
    try:
        values = parse(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except OSError as error:
        raise PeagleError(f"cannot read recipe {path} ({error.strerror}): check the path") from None
    except (ValueError, RecursionError) as error:
        raise PeagleError(f"recipe {path} cannot be understood ({one_line(error)}): correct it") from None
    if not isinstance(values, dict):
        raise PeagleError(f"recipe {path} holds {type(values).__name__}, expected lines of the form key: value")
    return values


def _parse_yaml(text: str) -> Any:
    """YAML and JSON. Raises ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader with YAML 1.2's numbers."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            doubled = [key for key in keys if keys.count(key) > 1]
            if doubled:
                raise ValueError(f"{doubled[0]!r} stands in it twice")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return mapping

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"^(?:{_YAML_FLOAT.pattern})$"), [*"-+.0123456789"]
    )
    try:
        return yaml.load(text, Loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_yaml,
}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a parsed value may stand for a field of type `hint`; an integer may stand for a number."""
    if isinstance(hint, UnionType):
        return any(_fits(value, member) for member in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _describe(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(_describe(member) for member in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each {_describe(get_args(hint)[0])}"
    return _NAMES[hint]
