"""What a request must pass before anything reads it: the API key, the type of its body, its size."""

import asyncio
import hmac
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.errors import ApiError, shown
from peagle.server.web import FILES

MAX_BODY_BYTES = 8 * 2**20  # a context of a million token ids
# What probes, scrapers and browsers ask without a key. The page's files are as public as the source they come from.
OPEN_PATHS = frozenset({"/health", "/ping", "/load", "/version", "/metrics", *FILES})


class Guard:
    """ASGI middleware: refuses early, and hands on the whole body at once."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, host: str, allowed_origins: Sequence[str], body_seconds: float
    ) -> None:
        """`host` is where the server listens, `allowed_origins` are the pages of others that may use it, `body_seconds`
        is what a body has to arrive in."""
        self._app, self._body_seconds = app, body_seconds
        self._key = None if api_key is None else api_key.encode()
        self._is_private = api_key is None and is_loopback(host) and "*" not in allowed_origins
        self._allowed_origins = frozenset(origin.encode() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope, headers)
            if scope["method"] == "HEAD":  # whatever can be got
                scope, send = {**scope, "method": "GET"}, _without_body(send)
            self._check_origin(headers)
            if scope["method"] == "POST":
                _check_type(headers)
                receive = await _with_body(headers, receive, self._body_seconds)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope, headers: MutableMapping[bytes, bytes]) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # In time that does not depend on how much of the key is right.
        if not hmac.compare_digest(key.strip(), self._key) or scheme.lower() != b"bearer":
            message = "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _check_origin(self, headers: MutableMapping[bytes, bytes]) -> None:
        """Refuse pages from elsewhere where no key does. A page whose name is made to lead to this machine passes for
        the server's own in a browser, which then asks nobody."""
        origin = headers.get(b"origin")
        if origin is None or not self._is_private or origin in self._allowed_origins:
            return
        text = origin.decode("latin-1")
        try:
            host = urlsplit(text).hostname or ""
        except ValueError:
            host = ""
        if not is_loopback(host):
            message = f"pages of {shown(text)} may not use this server: allow them with --allowed-origins, or set a key"
            raise ApiError(403, message, code="origin_not_allowed")


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def _without_body(send: Send) -> Send:
    """A `send` for HEAD: status and headers alone."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _check_type(headers: MutableMapping[bytes, bytes]) -> None:
    """Only JSON: a browser asks before it sends that across sites, unlike forms and plain text."""
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, f"the content type is {kind.decode('latin-1')!r}: send application/json")


async def _with_body(headers: MutableMapping[bytes, bytes], receive: Receive, seconds: float) -> Receive:
    """Read the body and return a `receive` that begins with all of it."""
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message: MutableMapping[str, Any] = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the connection was closed before the body was complete: send it again")
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        late = f"the body took more than {seconds:g} seconds: send it again"
        raise ApiError(408, late, headers={"Connection": "close"}) from None  # what comes now is no request
    whole: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay
