"""The HTTP application: the routes of all areas, error handlers, middleware that measures, and the OpenAPI document."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

import twinkle
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.body_limits import UploadCounter
from twinkle.server.http.older_paths import OlderPaths, RewriteOlderPaths
from twinkle.server.http.requests import RefuseRebinding, install_error_handlers
from twinkle.server.http.routes import RouteTable
from twinkle.server.protocols.anthropic import routes as anthropic
from twinkle.server.protocols.native import gateway_routes as native_gateway
from twinkle.server.protocols.native import model_routes as native_model
from twinkle.server.protocols.native import sampler_routes as native_sampler
from twinkle.server.protocols.openai import routes as openai
from twinkle.server.protocols.operator import accounts, pages, system
from twinkle.server.protocols.tinker import futures, runs, sampling, sessions, training
from twinkle.server.telemetry.http import ObservedRequests

# One flat list, the busiest areas first: routes are tried in order.
ROUTES = RouteTable(
    (
        futures.routes,
        training.routes,
        sampling.routes,
        openai.routes,
        anthropic.routes,
        sessions.routes,
        system.routes,
        runs.routes,
        accounts.routes,
        native_model.routes,
        native_sampler.routes,
        native_gateway.routes,
        pages.routes,
    )
)
OLDER_PATHS = OlderPaths(ROUTES)


def make_app(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None, telemetry: Telemetry | None = None
) -> FastAPI:
    """Return the application. ``lifespan`` puts a gateway into ``app.state.gateway``; if None, the caller must."""
    telemetry = telemetry or Telemetry()
    # FastAPI's own pages at /docs and /redoc run scripts from a foreign host in our origin, so they are off;
    # ``pages.routes`` serves pages of our own.
    app = FastAPI(
        title="Twinkle",
        version=twinkle.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.router.routes.extend(route.endpoint for route in ROUTES.routes)
    install_error_handlers(app)
    app.state.telemetry = telemetry
    app.add_middleware(RefuseRebinding, for_any_host=ROUTES.for_any_host)
    app.add_middleware(
        ObservedRequests, metrics=telemetry.metrics, tracing=telemetry.tracing, is_traced=ROUTES.is_traced
    )
    _describe_bodies(app)
    app.add_middleware(UploadCounter)
    app.add_middleware(RewriteOlderPaths, paths=OLDER_PATHS)  # the last one added is the first to see a request
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Replace FastAPI's OpenAPI document, which lacks request bodies: our handlers read and decode bodies themselves.

    The document is built when a client first asks for it.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents


def _described(document: dict[str, Any]) -> dict[str, Any]:
    """Add the body of each route to the document: the schema of the type that the route declares, or its media type."""
    models = {route.facts.schema for route in ROUTES.routes if isinstance(route.facts.schema, type)}
    references, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__qualname__)],
        ref_template="#/components/schemas/{model}",
    )
    for route in ROUTES.routes:
        schema = route.facts.schema
        for method in route.methods:
            operation = document["paths"][route.endpoint.path_format][method.lower()]
            if isinstance(schema, str):
                _add(operation, schema, {"type": "string", "format": "binary"})
            elif schema is not None:
                _add(operation, "application/json", references[schema, "validation"])
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    document["components"]["schemas"] = {**schemas, **definitions.get("$defs", {})}
    return document


def _add(operation: dict[str, Any], media_type: str, schema: Mapping[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
