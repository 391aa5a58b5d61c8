"""The HTTP application: routers by area under ``/api/v1``, error handlers, and around it what counts and measures."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

import twinkle
from twinkle.server.openapi import describe_bodies
from twinkle.server.routes import (
    api_page,
    archives,
    audit,
    auth,
    billing,
    checkpoint_actions,
    custom_losses,
    dashboard,
    downloads,
    futures,
    health,
    metrics,
    native_gateway,
    native_metrics,
    native_model,
    native_overview,
    native_processor,
    native_sampler,
    openai,
    rest,
    sampling,
    session_search,
    sessions,
    system,
    training,
    unloading,
)
from twinkle.server.routes.http import RefuseRebinding, install_error_handlers
from twinkle.server.routes.uploads import UploadCounter
from twinkle.server.telemetry.http_requests import ObservedRequests
from twinkle.server.telemetry.start import Telemetry


def make_app(
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]], telemetry: Telemetry | None = None
) -> FastAPI:
    """``lifespan`` puts a gateway into ``app.state.gateway`` before the first request."""
    telemetry = telemetry or Telemetry()
    # FastAPI's own pages at /docs and /redoc run scripts of a foreign host in our origin: api_page is in their place.
    app = FastAPI(
        title="Twinkle",
        version=twinkle.__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    # One flat list, the busiest first: routes are tried in order, and an included router would be searched as a whole.
    for area in (
        futures,
        training,
        sampling,
        openai,
        sessions,
        system,
        health,
        custom_losses,
        rest,
        billing,
        session_search,
        checkpoint_actions,
        downloads,
        archives,
        unloading,
        auth,
        audit,
        native_model,
        native_processor,
        native_sampler,
        native_gateway,
        native_metrics,
        native_overview,
        dashboard,
        api_page,
        metrics,
    ):
        app.router.routes.extend(area.router.routes)
    install_error_handlers(app)
    app.state.telemetry = telemetry
    app.add_middleware(RefuseRebinding)
    app.add_middleware(ObservedRequests, metrics=telemetry.metrics, tracing=telemetry.tracing)
    describe_bodies(app)
    app.add_middleware(UploadCounter)
    return app
