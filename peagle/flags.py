"""Command line flags made from a config dataclass, so that types and defaults are written once, in the dataclass."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from peagle.errors import PeagleError

# panel title -> field name -> help text
Panels = Mapping[str, Mapping[str, str]]
Names = Mapping[str, str]  # field name -> what is said of its flag
_NONE: Names = MappingProxyType({})

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face directory, .gguf file, Hub id, or smollm2-135m.")
]


def with_flags(
    config_class: type, panels: Panels, aliases: Names = _NONE, *, metavars: Names = _NONE, parameter: str = "config"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb one flag per field of `config_class` in `panels`, in place of `parameter`.

    `panels` hold the help texts, and group the flags on the help page; fields that are not there keep their default. A
    field without a default becomes a required flag, one that holds a tuple a comma-separated list. `aliases` are second
    names of flags; one that begins with a slash is the name that turns a switch off. `metavars` say what a flag takes.
    """
    panel_of = {name: (panel, text) for panel, texts in panels.items() for name, text in texts.items()}
    hints = {name: hint for name, hint in get_type_hints(config_class).items() if name in panel_of}
    elements = {name: element for name, hint in hints.items() if (element := _tuple_element(hint)) is not None}
    filled = {field.name: bool(field.default) for field in fields(config_class)}  # who leaves a list out has something
    flags = []
    for field in (field for field in fields(config_class) if field.name in panel_of):
        name, (panel, text) = field.name, panel_of[field.name]
        switch = hints[name] is bool
        metavar = "" if switch else metavars.get(name) or _list_metavar(elements.get(name))
        panel += ": switches" * switch  # their second names would leave the others no room
        option = typer.Option(*_names(name, aliases), help=text, rich_help_panel=panel, metavar=metavar)
        hint: Any = (str | None) if name in elements else hints[name]
        kind = inspect.Parameter.KEYWORD_ONLY
        flags.append(inspect.Parameter(name, kind, default=_default(field), annotation=Annotated[hint, option]))

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(verb).parameters.values() if p.name != parameter]
        parameters = [*own, *flags]

        @functools.wraps(verb)
        def command(**values: Any) -> None:
            chosen = {flag.name: values.pop(flag.name) for flag in flags}
            lists = {name: _parse_list(name, chosen[name], element) for name, element in elements.items()}
            empty = [name for name, value in lists.items() if value is None and chosen[name] == "" and filled[name]]
            if empty:
                raise PeagleError(f"--{empty[0].replace('_', '-')} is empty: give at least one, or leave it out")
            # A list left out keeps the dataclass's own default, which may be empty and has no spelling here.
            chosen = {name: value for name, value in (chosen | lists).items() if name not in lists or value is not None}
            verb(**values, **{parameter: config_class(**chosen)})

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def keep_names_whole() -> None:
    """Let texts, not names of flags, be what help pages make narrower on a narrow terminal."""
    from typer import rich_utils

    class WholeNames(rich_utils.Table):  # typer has a setting for the padding alone
        def add_row(self, *cells: Any, **styles: Any) -> None:
            super().add_row(*cells, **styles)
            for column in self.columns[:-1]:
                column.no_wrap = True

    rich_utils.Table = WholeNames  # type: ignore[misc]
    rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]


def _default(field: Field[Any]) -> Any:
    """A field's default as its flag has it: nothing where the flag is required, one text for a list."""
    if field.default is MISSING:
        return inspect.Parameter.empty
    return (",".join(map(_shown, field.default)) or None) if isinstance(field.default, tuple) else field.default


def _list_metavar(element: Callable[[str], Any] | None) -> str | None:
    """What a list of such elements is called on a help page; None for no list: typer names the type."""
    return None if element is None else "NAME,..." if element is str else "N,N,..."


def _names(field: str, aliases: Names) -> tuple[str, ...]:
    """Names of a flag that has a second one; none for the others, which typer names."""
    if field not in aliases:
        return ()
    name, alias = "--" + field.replace("_", "-"), aliases[field]
    return (name + alias,) if alias.startswith("/") else (name, alias)


def _tuple_element(hint: Any) -> Callable[[str], Any] | None:
    """int of `tuple[int, ...]` and of `tuple[int, ...] | None`; None for anything else."""
    tuples = [member for member in (hint, *get_args(hint)) if get_origin(member) is tuple]
    return get_args(tuples[0])[0] if tuples else None


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parse_list(name: str, text: str | None, element: Callable[[str], Any]) -> tuple[Any, ...] | None:
    if not text:
        return None
    try:
        return tuple(element(part.strip()) for part in text.split(","))
    except ValueError:
        flag = "--" + name.replace("_", "-")
        raise PeagleError(f"{flag} is {text!r:.80}: write numbers separated by commas, for example 1,2") from None
