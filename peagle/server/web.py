"""The page at `/`: static files that are read once, when the server starts, and never by a name from a request."""

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from fastapi import APIRouter, Response

# URL path -> (file, content type). Nothing in them is secret: they are served without the API key, which the page asks
# for and sends with what it requests.
FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/page.css": ("page.css", "text/css; charset=utf-8"),
        "/page.js": ("page.js", "text/javascript; charset=utf-8"),
        "/stream.js": ("stream.js", "text/javascript; charset=utf-8"),
        "/tokens.js": ("tokens.js", "text/javascript; charset=utf-8"),
    }
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        # Only its own files and its own server; no inline script or style, no frame around it.
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)


def page() -> APIRouter:
    """The page's files as endpoints. They are no part of the API, so its description leaves them out."""
    router, folder = APIRouter(include_in_schema=False), files("peagle.server") / "page"
    for path, (name, kind) in FILES.items():
        _add(router, path, (folder / name).read_bytes(), kind)
    return router


def _add(router: APIRouter, path: str, content: bytes, kind: str) -> None:
    @router.get(path)
    async def _() -> Response:
        return Response(content, media_type=kind, headers=dict(HEADERS))
