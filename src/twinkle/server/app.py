"""The HTTP application: routers by area under ``/api/v1``, error handlers, and around it what counts and measures."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

import twinkle
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.body_limits import UploadCounter
from twinkle.server.http.requests import RefuseRebinding, install_error_handlers
from twinkle.server.openapi import describe_bodies
from twinkle.server.protocols.native import gateway_routes as native_gateway
from twinkle.server.protocols.native import model_routes as native_model
from twinkle.server.protocols.native import overview as native_overview
from twinkle.server.protocols.native import sampler_routes as native_sampler
from twinkle.server.protocols.openai import routes as openai
from twinkle.server.protocols.operator import accounts, pages, system
from twinkle.server.protocols.tinker import checkpoints, futures, runs, sampling, sessions, training
from twinkle.server.telemetry.http import ObservedRequests


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
    for router in (
        futures.router,
        training.router,
        sampling.router,
        openai.router,
        sessions.router,
        system.router,
        runs.router,
        checkpoints.router,
        accounts.router,
        accounts.billing_router,
        native_model.router,
        native_model.processor_router,
        native_sampler.router,
        native_gateway.router,
        native_gateway.metrics_router,
        native_overview.router,
        pages.router,
    ):
        app.router.routes.extend(router.routes)
    install_error_handlers(app)
    app.state.telemetry = telemetry
    app.add_middleware(RefuseRebinding)
    app.add_middleware(ObservedRequests, metrics=telemetry.metrics, tracing=telemetry.tracing)
    describe_bodies(app)
    app.add_middleware(UploadCounter)
    return app
