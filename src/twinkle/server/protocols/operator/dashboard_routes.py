"""The dashboard: a page and its parts, the same for everyone. What it shows it asks of the API, with the user's key."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from twinkle.errors import NotFoundError

router = APIRouter()

_PAGE = "index.html"
_PARTS: Mapping[str, str] = {
    "api.js": "text/javascript",
    "app.js": "text/javascript",
    "chart.js": "text/javascript",
    "checkpoints.js": "text/javascript",
    "dom.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "overview.js": "text/javascript",
    "playground.js": "text/javascript",
    "runs.js": "text/javascript",
    "style.css": "text/css",
}
# Nothing but our own files, no markup made of texts, and no page around ours.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@router.get("/dashboard")
async def page() -> Response:
    return Response(_content(_PAGE), headers=PAGE_HEADERS, media_type="text/html")


@router.get("/dashboard/")
async def page_with_slash() -> Response:
    # With the slash the page would look elsewhere for its parts.
    return RedirectResponse("../dashboard", headers=PAGE_HEADERS)


@router.get("/dashboard/{part}")
async def page_part(part: str) -> Response:
    if part not in _PARTS:
        raise NotFoundError("file", part)
    return Response(_content(part), headers=PAGE_HEADERS, media_type=_PARTS[part])


@cache
def _content(name: str) -> bytes:
    return files("twinkle.server.protocols.operator.dashboard").joinpath(name).read_bytes()
