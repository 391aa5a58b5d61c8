"""The HTTP application: routers by area under ``/api/v1``, error handlers, nothing in between."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

import twinkle
from twinkle.server.routes import (
    audit,
    auth,
    checkpoint_actions,
    downloads,
    futures,
    native_gateway,
    native_model,
    native_processor,
    native_sampler,
    openai,
    rest,
    sampling,
    session_search,
    sessions,
    system,
    training,
)
from twinkle.server.routes.http import install_error_handlers


def make_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """``lifespan`` puts a gateway into ``app.state.gateway`` before the first request."""
    app = FastAPI(title="Twinkle", version=twinkle.__version__, lifespan=lifespan, redirect_slashes=False)
    # One flat list, the busiest first: routes are tried in order, and an included router would be searched as a whole.
    for area in (
        futures,
        training,
        sampling,
        openai,
        sessions,
        system,
        rest,
        session_search,
        checkpoint_actions,
        downloads,
        auth,
        audit,
        native_model,
        native_processor,
        native_sampler,
        native_gateway,
    ):
        app.router.routes.extend(area.router.routes)
    install_error_handlers(app)
    return app
