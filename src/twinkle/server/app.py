"""The HTTP application: routers by area under ``/api/v1``, error handlers, and a count of bodies on their way in."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

import twinkle
from twinkle.server.routes import (
    billing,
    futures,
    native_gateway,
    native_model,
    native_processor,
    native_sampler,
    openai,
    rest,
    sampling,
    sessions,
    system,
    training,
)
from twinkle.server.routes.http import install_error_handlers
from twinkle.server.routes.uploads import UploadCounter


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
        billing,
        native_model,
        native_processor,
        native_sampler,
        native_gateway,
    ):
        app.router.routes.extend(area.router.routes)
    install_error_handlers(app)
    app.add_middleware(UploadCounter)
    return app
