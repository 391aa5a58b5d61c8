"""Pages for a browser: the dashboard, and a page without scripts that lists the routes of this server.

The dashboard's files are the same for everyone and need no key. Its scripts fetch the data from the API with the
user's key.
"""

from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse

from twinkle.errors import NotFoundError
from twinkle.server.http.owners import anybody
from twinkle.server.http.routes import Call, Routes

routes = Routes()

_PAGE = "index.html"
_FILES = files("twinkle.server.protocols.operator.dashboard")
_PART_TYPES: Mapping[str, str] = {".js": "text/javascript", ".svg": "image/svg+xml", ".css": "text/css"}
# The page loads only files of this server, creates no markup from text, and cannot be embedded in another page.
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
_POLICY_OF_ROUTES = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS_OF_ROUTES = {**PAGE_HEADERS, "Content-Security-Policy": _POLICY_OF_ROUTES}


@routes.get("/dashboard", anybody, public=True)
async def dashboard_page(_call: Call[bytes]) -> Response:
    return Response(_content(_PAGE), headers=PAGE_HEADERS, media_type="text/html")


@routes.get("/dashboard/", anybody, public=True)
async def page_with_slash(_call: Call[bytes]) -> Response:
    # With the slash, the relative paths of the page's files would be wrong.
    return RedirectResponse("../dashboard", headers=PAGE_HEADERS)


@routes.get("/dashboard/{part}", anybody, public=True)
async def page_part(_call: Call[bytes], part: str) -> Response:
    if part not in _parts():
        raise NotFoundError("file", part)
    return Response(_content(part), headers=PAGE_HEADERS, media_type=_PART_TYPES[PurePath(part).suffix])


@cache
def _parts() -> frozenset[str]:
    return frozenset(file.name for file in _FILES.iterdir() if PurePath(file.name).suffix in _PART_TYPES)


@cache
def _content(name: str) -> bytes:
    return _FILES.joinpath(name).read_bytes()


@routes.get("/redoc", anybody, public=True)
@routes.get("/docs", anybody, public=True)
async def api_page(call: Call[bytes]) -> Response:
    """Return a page that lists all routes of this server."""
    app: FastAPI = call.request.app
    return Response(_page(app.openapi()), headers=_HEADERS_OF_ROUTES, media_type="text/html")


def _page(document: Mapping[str, Any]) -> str:
    routes = [
        _route(method, path, operation)
        for path, operations in sorted(document["paths"].items())
        for method, operation in operations.items()
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: routes</title>'
        f'<link rel="stylesheet" href="dashboard/style.css"></head><body><header><h1>{title}</h1></header><main>'
        f'<p>All routes. The same with all types, for tools: <a href="openapi.json">openapi.json</a></p>'
        f"{''.join(routes)}</main></body></html>"
    )


def _route(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parameters = ", ".join(f"{one['name']} ({one['in']})" for one in operation.get("parameters", ()))
    body = ", ".join(
        f"{media_type} {content.get('schema', {}).get('$ref', '').rpartition('/')[2]}".strip()
        for media_type, content in operation.get("requestBody", {}).get("content", {}).items()
    )
    facts = "".join(
        f"<p>{escape(name)}: <code>{escape(value)}</code></p>"
        for name, value in (("parameters", parameters), ("body", body))
        if value
    )
    return (
        f"<section><h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
        f"<p>{escape(operation.get('description', ''))}</p>{facts}</section>"
    )
