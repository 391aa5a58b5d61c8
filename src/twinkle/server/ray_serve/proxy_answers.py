"""The module that ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` named in earlier versions."""

from twinkle.server.runtime.ray.proxy_answers import middlewares

__all__ = ["middlewares"]
