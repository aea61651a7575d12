"""JSON schemas: what cannot be enforced while text is generated is refused by name, never ignored."""

from collections.abc import Iterator, Mapping
from typing import Any

from peagle.errors import PeagleError

MAX_DEPTH = 64  # of schemas in schemas
_NOT_ENFORCED = (
    "uniqueItems", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "if", "then", "else", "not", "unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_HARMLESS = {"uniqueItems": False, "additionalItems": True, "unevaluatedProperties": True}
_FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "uuid", "uri", "ipv4", "ipv6", "hostname", "json-pointer"}
)
_OF_TYPES: Mapping[str, tuple[str, ...]] = {  # what says nothing about other types, and is not enforced without one
    "minimum": ("integer", "number"), "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"), "exclusiveMaximum": ("integer", "number"),
    "multipleOf": ("integer",),
    "minLength": ("string",), "maxLength": ("string",), "pattern": ("string",), "format": ("string",),
}  # fmt: skip
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = frozenset(_OF_TYPES) | {
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "items", "prefixItems", "minItems", "maxItems", "enum", "const",
}  # fmt: skip
_OF_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems")  # keywords that hold a schema,
_OF_MANY = ("properties", "patternProperties", "$defs", "definitions")  # some by name,
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")  # and a list of them


def check_schema(schema: object, path: str = "json", depth: int = 0) -> None:
    """PeagleError for the first thing in a schema that is damaged or would not be enforced; `path` says where."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise PeagleError(f"{path} is {schema!r:.60}: a JSON schema is an object, true or false")
    if depth > MAX_DEPTH:
        raise PeagleError(f"{path:.200} is nested deeper than {MAX_DEPTH} schemas: use a flatter one")
    for name in _NOT_ENFORCED:
        if name in schema and schema[name] != _HARMLESS.get(name, schema):
            raise PeagleError(f"{path} has {name}: it cannot be enforced while text is generated, leave it out")
    _check_of_types(schema, path)
    _check_combined(schema, path)
    for inner_path, inner in inner_schemas(schema, path):
        check_schema(inner, inner_path, depth + 1)


def inner_schemas(schema: Mapping[str, Any], path: str = "json") -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with their paths. PeagleError where a keyword does not hold what it must."""
    for name in _OF_ONE:
        if name in schema:
            yield f"{path}.{name}", schema[name]
    for name in _OF_MANY:
        if name in schema:
            if not isinstance(schema[name], Mapping):
                raise PeagleError(f"{path}.{name} is {schema[name]!r:.60}: expected an object of schemas")
            yield from ((f"{path}.{name}.{key:.60}", inner) for key, inner in schema[name].items())
    for name in _LISTS:
        if name in schema:
            if not isinstance(schema[name], list) or not schema[name]:
                raise PeagleError(f"{path}.{name} is {schema[name]!r:.60}: expected a list of at least one schema")
            yield from ((f"{path}.{name}[{at}]", inner) for at, inner in enumerate(schema[name]))


def opened(schema: Any) -> Any:
    """The schema with `additionalProperties` true wherever an object does not say, which is what JSON Schema means."""
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for name in _OF_ONE:
        if name in copy:
            copy[name] = opened(copy[name])
    for name in _OF_MANY:
        if name in copy:
            copy[name] = {key: opened(inner) for key, inner in copy[name].items()}
    for name in _LISTS:
        if name in copy:
            copy[name] = [opened(inner) for inner in copy[name]]
    if "properties" in copy or "object" in _types(copy):
        copy.setdefault("additionalProperties", True)
    return copy


def _types(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    kind = schema.get("type", ())
    return tuple(kind) if isinstance(kind, list) else (kind,) if isinstance(kind, str) else ()


def _check_of_types(schema: Mapping[str, Any], path: str) -> None:
    types = _types(schema)
    for name, ours in _OF_TYPES.items():
        if name not in schema:
            continue
        if not any(kind in ours for kind in types):
            raise PeagleError(f"{path} has {name} without the type it is for: say type {' or '.join(ours)}")
    if "multipleOf" in schema and "number" in types:
        raise PeagleError(f"{path} has multipleOf for the type number: only that of the type integer can be enforced")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        raise PeagleError(f"{path} has pattern beside minLength or maxLength: say the length in the pattern")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise PeagleError(
            f"{path} has format {schema['format']!r:.60}: only {', '.join(sorted(_FORMATS))} can be enforced; "
            "leave it out"
        )
    if ("enum" in schema or "const" in schema) and (others := _CONSTRAINTS & schema.keys() - {"enum", "const"}):
        raise PeagleError(f"{path} has enum or const beside {min(others)}: leave one of them out")


def _check_combined(schema: Mapping[str, Any], path: str) -> None:
    """Of a combination, what stands beside it is not enforced."""
    combined = [name for name in _COMBINED if name in schema]
    if not combined:
        return
    name = combined[0]
    beside = sorted(_CONSTRAINTS & schema.keys()) + combined[1:]
    branches = schema[name] if isinstance(schema[name], list) else []
    if "type" in schema and not (branches and all(isinstance(b, Mapping) and "type" in b for b in branches)):
        beside.append("type")
    if beside:
        raise PeagleError(f"{path} has {name} beside {beside[0]}: move it into what {name} names")
    if name == "allOf" and len(branches) > 1:
        raise PeagleError(f"{path} has allOf of {len(branches)} schemas: only one can be enforced, merge them")
    if name == "$ref" and not str(schema[name]).startswith("#"):
        raise PeagleError(f"{path} has $ref {schema[name]!r:.60}: only references into the same schema, '#/...', work")
