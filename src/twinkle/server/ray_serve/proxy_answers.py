"""What Serve's HTTP proxies answer while the server's applications are not there: not yet, or not any more.

A proxy listens before anything is deployed and answers 404 until it is. The SDKs take that for the end of whatever they
asked about; 503 they take as it is meant. Serve's proxies find :func:`middlewares` by an environment variable, which
:mod:`~twinkle.server.ray_serve.running` sets for clusters that it starts.
"""

import json

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = f"{__name__}.middlewares"

_TYPE = b"content-type"
_BODY = json.dumps({"detail": "the server is starting or stopping: try again"}).encode()


def middlewares() -> list[Middleware]:
    return [Middleware(NotServed)]


class NotServed:
    """ASGI middleware. Our own 404s are JSON and come from an application at ``/``, which answers every path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # those are Serve's own
            await self._app(scope, receive, send)
            return
        is_replaced = False

        async def answer(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start" and _is_serves(message):
                is_replaced = True
                await _send_unavailable(send)
            elif not is_replaced:
                await send(message)

        await self._app(scope, receive, answer)


def _is_serves(start: Message) -> bool:
    types = [value for name, value in start["headers"] if bytes(name).lower() == _TYPE]
    return start["status"] == 404 and not any(bytes(value).startswith(b"application/json") for value in types)


async def _send_unavailable(send: Send) -> None:
    headers = [(_TYPE, b"application/json"), (b"content-length", str(len(_BODY)).encode()), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY, "more_body": False})
