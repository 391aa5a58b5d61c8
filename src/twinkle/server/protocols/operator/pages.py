"""Pages for a browser: a page of links, the dashboard, and a page without scripts that lists the routes of this server.

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

import twinkle
from twinkle.errors import NotFoundError
from twinkle.server.http.owners import anybody
from twinkle.server.http.routes import Call, Routes

routes = Routes()

_PAGE = "index.html"
_FILES = files("twinkle.server.protocols.operator.dashboard")
_PART_TYPES: Mapping[str, str] = {".js": "text/javascript", ".svg": "image/svg+xml", ".css": "text/css"}
# The page loads only files of this server, and shows pictures that the user chose (data:). It creates no markup from
# text, and cannot be embedded in another page.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
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
# For pages without scripts.
_PLAIN_POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PLAIN_HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": _PLAIN_POLICY}
# Relative, so that they also work behind a proxy that serves this server under a path of its own.
_LINKS: Mapping[str, str] = {
    "dashboard": "runs with their curves, adapters, sessions, checkpoints, and a playground to sample in",
    "docs": "all routes of this server",
    "openapi.json": "the same with all types, for tools",
    "api/v1/status": "uptime, memory, disk, and the load of each model",
}


@routes.get("/", anybody, public=True)
async def start_page(_call: Call[bytes]) -> Response:
    """Return a page with links to the other pages, for someone who opens the server's address in a browser."""
    links = "".join(f'<li><a href="{path}">{path}</a>: {escape(text)}</li>' for path, text in _LINKS.items())
    about = (
        "<p>Clients use the address of this page: the Tinker protocol is under api/v1, OpenAI's under v1, Anthropic's "
        "under anthropic.</p>"
    )
    return _plain_page(f"Twinkle {twinkle.__version__}", f"<ul>{links}</ul>{about}")


@routes.get("/favicon.ico", anybody, public=True, traced=False)
async def icon(_call: Call[bytes]) -> Response:
    """Return the icon of all pages: browsers ask for this path on their own, also for answers that are not pages."""
    return Response(_content("icon.svg"), headers=_PLAIN_HEADERS, media_type=_PART_TYPES[".svg"])


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
    document = app.openapi()
    routes = [
        _route(method, path, operation)
        for path, operations in sorted(document["paths"].items())
        for method, operation in operations.items()
    ]
    about = '<p>All routes. The same with all types, for tools: <a href="openapi.json">openapi.json</a></p>'
    return _plain_page(f"{document['info']['title']} {document['info']['version']}: routes", about + "".join(routes))


def _plain_page(title: str, body: str) -> Response:
    """Return a page that has no scripts and loads only files of this server. ``body`` is markup."""
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        'content="light dark"><link rel="icon" href="dashboard/icon.svg"><link rel="stylesheet" '
        f'href="dashboard/style.css"></head><body><header><h1>{escape(title)}</h1></header><main>{body}</main>'
        "</body></html>"
    )
    return Response(text, headers=_PLAIN_HEADERS, media_type="text/html")


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
