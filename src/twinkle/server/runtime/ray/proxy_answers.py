"""Middleware for Serve's HTTP proxies: it answers 503 while the server's applications start or stop.

It also refuses requests for most of Serve's own paths (``/-/``) that may come from a DNS rebinding attack.

A proxy listens before anything is deployed and by itself answers 404 until then. The SDKs take 404 to mean that what
they asked for is gone, and give up; after 503 they try again. Serve's proxies find :func:`middlewares` by an
environment variable, which :mod:`~twinkle.server.runtime.ray.running` sets for clusters that it starts.
"""

from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinkle.server.config.sections import leads_to_this_machine, names_this_machine

PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
PROXY_CALLBACK = f"{__name__}.middlewares"

_HEALTH = "/-/healthz"
_TYPE = b"content-type"
_OTHER_NAME = JSONResponse({"detail": "Host header: allowed here: localhost or 127.0.0.1"}, 400)
_AWAY = JSONResponse({"detail": "the server is starting or stopping: try again"}, 503, {"Retry-After": "1"})


def middlewares() -> list[Middleware]:
    return [Middleware(NotServed)]


class NotServed:
    """Replaces a 404 that is not JSON by 503: it is Serve's own. A 404 of our application is JSON and is passed on.

    Answers for paths below ``/-/`` are not replaced. Except for the health check, such a request is refused with 400 if
    it may come from a DNS rebinding attack.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Serve's own paths
            refused = scope["type"] == "http" and scope["path"] != _HEALTH and _is_rebound(scope)
            await (_OTHER_NAME if refused else self._app)(scope, receive, send)
            return
        is_replaced = False

        async def answer(message: Message) -> None:
            nonlocal is_replaced
            if message["type"] == "http.response.start" and _is_serves(message):
                is_replaced = True
                await _AWAY(scope, receive, send)
            elif not is_replaced:
                await send(message)

        await self._app(scope, receive, answer)


def _is_serves(start: Message) -> bool:
    types = [value for name, value in start["headers"] if bytes(name).lower() == _TYPE]
    return start["status"] == 404 and not any(bytes(value).startswith(b"application/json") for value in types)


def _is_rebound(scope: Scope) -> bool:
    """Return whether a request over the loopback address may be DNS rebinding: its Host does not name this machine.

    The proxy does not know ``auth.mode`` or ``public_url``, with which another host might be right; then Serve's own
    paths are refused nevertheless.
    """
    here = (scope.get("server") or ("",))[0]
    host = next((value.decode("latin-1") for name, value in scope["headers"] if bytes(name).lower() == b"host"), "")
    try:
        named = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        named = ""
    return names_this_machine(here) and not leads_to_this_machine(named)
