"""The routes of this server on one page, made of /openapi.json. It has no scripts, its own or others'."""

from collections.abc import Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from twinkle.server.protocols.operator.dashboard_routes import PAGE_HEADERS

router = APIRouter()

_POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": _POLICY}


@router.get("/docs")
async def api_page(request: Request) -> Response:
    """Return this page."""
    app: FastAPI = request.app
    return Response(_page(app.openapi()), headers=_HEADERS, media_type="text/html")


@router.get("/redoc")
async def same_page(request: Request) -> Response:
    """Return the page of /docs."""
    return await api_page(request)


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
