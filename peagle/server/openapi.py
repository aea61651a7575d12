"""The description at /openapi.json: what FastAPI cannot see, because endpoints answer with bodies they made themselves.

Bodies of requests are described by their models in `protocol`, limits of numbers are added here: the models leave them
to `SamplingParams`. Schemas of responses allow further fields.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI

from peagle.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from peagle.server.guard import OPEN_PATHS

Json = dict[str, Any]

_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        400: "Something about the body is wrong; `param` names the field.",
        401: "The API key is missing or wrong.",
        403: "Pages of this origin may not use the server.",
        404: "No such model.",
        408: "The body took too long to arrive.",
        413: "The body is too large.",
        415: "The body is not application/json.",
        429: "Too many requests wait.",
        500: "A fault of the server; its log says more.",
        503: "The server is shutting down, has failed, or had no time for the request.",
    }
)
_RETRY = (429, 503)  # these say when to come back
_READ = (400, 404, 408, 413, 415, 500)  # what every request with a body can meet
_GENERATED = (*_READ, 429, 503)


def _object(**properties: Json) -> Json:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _choices(**properties: Json) -> Json:
    reason = {"type": "string", "enum": ["stop", "length", "tool_calls", "abort"]}
    stop = {"type": ["string", "integer", "null"]}
    return _list(_object(index=_COUNT, **properties, finish_reason=reason, stop_reason=stop))


def _generated(kind: str, choices: Json) -> Json:
    """A body of completions or chat."""
    usage = _object(
        prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    )  # fmt: skip
    drafts = _object(
        acceptance_length={"type": "number", "minimum": 1}, rounds=_COUNT, draft_tokens=_COUNT, accepted_tokens=_COUNT,
        accepted_per_position=_list(_COUNT),
    )  # fmt: skip
    return _object(
        id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices, usage=usage, peagle=drafts
    )


_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
_COMPLETION = _generated("text_completion", _choices(text=_TEXT))
_CHAT = _generated("chat.completion", _choices(message=_object(role={"const": "assistant"}, content=_TEXT_OR_NULL)))


@dataclass(frozen=True, slots=True)
class _Operation:
    """One endpoint: its name in generated clients, what it does, and what it answers."""

    name: str
    summary: str
    answer: Mapping[str, Json] = field(default_factory=dict)  # media type -> schema; empty: an answer without a body
    refusals: Sequence[int] = (500,)


_OPERATIONS: Mapping[tuple[str, str], _Operation] = MappingProxyType(
    {
        ("post", "/v1/completions"): _Operation(
            "create_completion", "Complete a prompt.",
            {"application/json": _COMPLETION, "text/event-stream": {}}, _GENERATED,
        ),
        ("post", "/v1/chat/completions"): _Operation(
            "create_chat_completion", "Answer a conversation.",
            {"application/json": _CHAT, "text/event-stream": {}}, _GENERATED,
        ),
        ("get", "/v1/models"): _Operation(
            "list_models", "The model that is served.",
            {"application/json": _object(object={"const": "list"}, data=_list(_MODEL))},
        ),
        ("get", "/v1/models/{name}"): _Operation(
            "retrieve_model", "The model, if this is its name.", {"application/json": _MODEL}, (404, 500)
        ),
        ("post", "/tokenize"): _Operation(
            "tokenize", "Text or a conversation to token ids.",
            {"application/json": _object(tokens=_list(_COUNT), count=_COUNT, max_model_len=_COUNT)}, _READ,
        ),
        ("post", "/detokenize"): _Operation(
            "detokenize", "Token ids to text.", {"application/json": _object(prompt=_TEXT)}, _READ
        ),
        ("get", "/health"): _Operation("health", "Whether a request would be answered now.", refusals=(500, 503)),
        ("get", "/ping"): _Operation("ping", "The same as /health.", refusals=(500, 503)),
        ("get", "/load"): _Operation(
            "load", "Answers under way or waiting.", {"application/json": _object(server_load=_COUNT)}
        ),
        ("get", "/version"): _Operation(
            "version", "The server's version.", {"application/json": _object(version=_TEXT)}
        ),
        ("get", "/metrics"): _Operation("metrics", "Numbers for Prometheus.", {"text/plain": _TEXT}),
    }
)  # fmt: skip


_PENALTY: Json = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
_LIMITS: Mapping[str, Json] = MappingProxyType(
    {
        "max_tokens": {"minimum": 1},
        "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**31 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
        "logit_bias": {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        },
    }
)


def describe(app: FastAPI, *, has_key: bool) -> None:
    """Complete the app's description; nothing about how requests are served changes."""
    generate = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            _complete(generate(), has_key)
        return generate()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: Json, has_key: bool) -> None:
    """Fill in what is known; an endpoint that `_OPERATIONS` lacks keeps FastAPI's description."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of errors, which is not used
        schemas.pop(name, None)
    prompts_alone = {**_LIMITS, "max_tokens": {"minimum": 0}}  # 0 with echo and logprobs
    for body, each in (("CompletionBody", prompts_alone), ("ChatBody", _LIMITS)):
        for name, limits in each.items():
            described = schemas[body]["properties"][name]
            described.get("anyOf", [described])[0].update(limits)
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        locked = has_key and path not in OPEN_PATHS
        for method, described in methods.items():
            operation = _OPERATIONS.get((method, path))
            if operation is None:
                continue
            described |= {"operationId": operation.name, "summary": operation.summary}
            described["responses"] = _responses(operation, locked)
            if locked:
                described["security"] = [{"key": []}]


def _responses(operation: _Operation, locked: bool) -> Json:
    answer: Json = {"description": "The answer."}
    if operation.answer:
        answer["content"] = {media: {"schema": schema} for media, schema in operation.answer.items()}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {
        str(status): {"description": _STATUSES[status], "content": error}
        | ({"headers": {"Retry-After": {"schema": {"type": "integer"}}}} if status in _RETRY else {})
        for status in sorted([*operation.refusals, 401 if locked else 403])
    }
    return {"200": answer, **refusals}
