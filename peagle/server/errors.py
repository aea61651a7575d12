"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, whatever went wrong."""

import logging
import re
from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from peagle.errors import PeagleError
from peagle.server.engine_thread import Draining, Overloaded

_log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499  # nobody reads it; a proxy's log does
_CODES: Mapping[int, str] = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 429: "overloaded"}
_MOST_SHOWN = 80  # characters of a value that an error repeats


class ApiError(Exception):
    """What a client did wrong, or what keeps the server from answering; `param` names the field of the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, as_unicode(message), dict(headers or {})
        self.param = None if param is None else as_unicode(param)
        self.code = code or _CODES.get(status)

    def body(self) -> dict[str, Any]:
        """The error as it is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as the whole answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def api_error(error: Exception) -> ApiError:
    """Any exception as an `ApiError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), headers={"Retry-After": f"{error.retry_after:.0f}"})
    if isinstance(error, Draining):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, PeagleError):
        return ApiError(400, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request: its log says why", code="internal_error")


def as_unicode(text: str) -> str:
    """What a client sent may hold lone surrogates, which no response can."""
    return text.encode("utf-8", "replace").decode()


class _JsonRepr(Repr):
    """The beginning of a value, its constants spelled as in JSON."""

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _value: None, _level: int) -> str:  # the name that Repr looks for
        return "null"


def shown(value: object) -> str:
    """A value of the client's as an error repeats it."""
    short = _JsonRepr()  # looks at the beginning alone: a value can have millions of parts
    short.maxlist = short.maxdict = short.maxtuple = 20
    short.maxstring = short.maxlong = short.maxother = 2 * _MOST_SHOWN
    text = short.repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a body, by pydantic's errors: the first field that has any."""
    first = errors[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON at character {place[0]}: {first['ctx']['error']}")
    if not place:
        found = "empty or null" if first["input"] is None else shown(first["input"])
        return ApiError(400, f"the body is {found}: it must be a JSON object, sent as application/json")
    name = str(place[0])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not a known field: leave it out", param=name, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is missing: the request needs it", param=name)
    same = [error for error in errors if name in error["loc"]]
    if len(same) > 1:  # of a union, whose places are no paths in the body
        where = name
    expected = " or ".join(dict.fromkeys(_expected(error["msg"]) for error in same))
    return ApiError(400, f"{where} is {shown(first['input'])}: it should {expected}", param=name)


def _expected(message: str) -> str:
    """What a value should be, from pydantic's "Input should be a valid integer" and its like, in the words of JSON."""
    text = re.sub(r"^\w+ should ", "", message).split(" after validation")[0]
    text = re.sub(
        r"a valid dictionary( or (an )?(object|instance)( of \w+| to extract fields from)?)?", "an object", text
    )
    return text.replace("a valid list", "an array")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's form, those of the framework included."""

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # the one that FastAPI raises, where its JSON decoder gives up
            message = "the body cannot be read: send JSON in UTF-8, without brackets or numbers thousands deep or long"
            return ApiError(400, message).response()
        remedy = {404: "no such path", 405: f"{request.method} is not for this path"}
        message = f"{request.url.path}: {remedy.get(error.status_code, error.detail)}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(ClientGone)
    async def _(_: Request, __: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    @app.exception_handler(ApiError)
    @app.exception_handler(PeagleError)
    @app.exception_handler(Exception)
    async def _(_: Request, error: Exception) -> Response:
        return api_error(error).response()
