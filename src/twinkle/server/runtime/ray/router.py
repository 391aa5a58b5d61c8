"""The HTTP entrance of every process that Serve's proxies talk to: it sends each request to the replica it concerns.

Requests that concern this process, or no replica in particular, are answered by the process's own application.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twinkle.errors import QuotaError, TwinkleError
from twinkle.server.app import OLDER_PATHS, ROUTES
from twinkle.server.http import asgi_relay as relay
from twinkle.server.http.asgi_relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.http.body_limits import BodyUpload, read_body
from twinkle.server.http.requests import SMALL_BODY, gateway_of, json_response, key_of, refuse_rebinding, status_of
from twinkle.server.http.routes import RouteFacts
from twinkle.server.http.streams import unless_gone
from twinkle.server.runtime.ray.directory import Directory, destination_of
from twinkle.server.runtime.ray.replica import Replica, ReplicaGoneError
from twinkle.server.state.errors import DatabaseUnavailableError
from twinkle.server.telemetry import instruments
from twinkle.server.types import Tally
from twinkle.server.wire.errors import BodyTooLargeError

logger = logging.getLogger(__name__)

# The longest wait for a replica that is being replaced: about that for a result. Then the client asks again.
_WAIT_SECONDS = 30.0


async def answered(app: ASGIApp, request: HttpRequest) -> HttpReply:
    """Answer a request that another process sent here.

    The work is finished even if the client disconnects, unless the route says that it ends with its client.
    """
    work = relay.answer(app, request)
    facts, _ = ROUTES.find(request.method, request.path)
    return await (work if facts.ends_with_client else relay.shielded(work))


class Router:
    """The ASGI application of a process: it answers a request itself or sends it to the replica that it concerns."""

    def __init__(
        self,
        app: FastAPI,
        directory: Directory,
        replicas: Mapping[str, Replica],
        *,
        max_body_bytes: int,
        own: str = "",
    ) -> None:
        """Route requests of one process. ``own``: the name of its replica; empty for a gateway."""
        self._app = app
        self._directory = directory
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes
        self._own = own
        self._uploading = Tally()  # bytes of long bodies that are not answered yet, by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            whole = _from_the_root(scope)
            whole = OLDER_PATHS.in_todays_form(whole, lambda name: self._app.state.gateway.is_served(name))
            await self._http(whole, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Until then, a body that may exceed 16 KiB counts among its tenant's uploads."""
        upload = BodyUpload(self._uploading)
        try:
            await self._counted(scope, receive, send, upload)
        finally:
            upload.end()

    async def _counted(self, scope: Scope, receive: Receive, send: Send, upload: BodyUpload) -> None:
        facts, _ = ROUTES.find(scope["method"], scope["path"])
        most = self._max_body_bytes if facts.limit is None else min(facts.limit, self._max_body_bytes)
        limit = sys.maxsize
        try:
            if _announced(scope) > SMALL_BODY:
                tenant_id = await self._tenant(scope)
                if tenant_id is None:
                    await self._app(scope, receive, send)  # it refuses the request, unless the route is public
                    return
                upload.belongs_to(tenant_id)
                limit = self._app.state.gateway.tenants.limits(tenant_id).max_uploading_bytes_per_tenant
            body = await read_body(Request(scope, receive), most, lambda size: upload.grow_to(size, limit))
            request = HttpRequest.from_scope(scope, body)
            replica, streams = await self._replica_for(request)
        except ClientDisconnect:
            return
        except (BodyTooLargeError, QuotaError, DatabaseUnavailableError) as error:
            if not isinstance(error, DatabaseUnavailableError):
                self._count(error.key)
            await _send(send, _refusal(status_of(error), str(error)))
            return
        if replica is None:
            own = self._app(scope, relay.replayed(body, receive), send)
            await (own if facts.ends_with_client else relay.shielded(own))
        else:
            work = self._stream(request, replica, send) if streams else self._whole(request, facts, replica, send)
            with suppress(ClientDisconnect):  # there is no client left to answer
                await unless_gone(receive, work)

    def _count(self, limit: str) -> None:
        """Count a refusal in /metrics, as the application does for its own refusals."""
        self._app.state.telemetry.metrics.counter(instruments.REFUSALS, limit).inc()

    async def _tenant(self, scope: Scope) -> str | None:
        """Return the tenant of a request with a long body; None if its key or its Host header is refused."""
        request = Request({**scope, "app": self._app})
        try:
            refuse_rebinding(request)
            return (await gateway_of(request).identity.identify(key_of(request), prefix="")).tenant_id
        except TwinkleError:
            return None

    async def _replica_for(self, request: HttpRequest) -> tuple[Replica | None, bool]:
        """Return the replica that answers, None for this process, and whether its answer is a stream."""
        if len(request.body) < SMALL_BODY:
            to = destination_of(request, self._max_body_bytes)
        else:
            to = await asyncio.to_thread(destination_of, request, self._max_body_bytes)
        name = None if to.address is None else await self._directory.find(to.address)
        return None if name is None or name == self._own else self._replicas[name], to.streams

    async def _whole(self, request: HttpRequest, facts: RouteFacts, replica: Replica, send: Send) -> None:
        try:
            async with asyncio.timeout(_WAIT_SECONDS if facts.soon else None):
                reply = await replica.answer(request)
        except (ReplicaGoneError, TimeoutError) as error:
            logger.info("%s %s: %s", request.method, request.path, error)
            reply = _refusal(503, "the model is being brought back after a failure: accepted ops are kept, try again")
        await _send(send, reply)

    async def _stream(self, request: HttpRequest, replica: Replica, send: Send) -> None:
        started = False
        try:
            async with aclosing(replica.stream(request)) as parts:
                async for part in parts:
                    await send(_message(part))
                    started = True
        except ReplicaGoneError:
            if started:
                raise  # the connection breaks, so that the client notices the failure
            await _send(send, _refusal(503, "the model is being brought back after a failure: try again"))
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _from_the_root(scope: Scope) -> Scope:
    """Return the scope with its path from the server's root: Serve mounts an application below its route_prefix."""
    prefix, path = scope.get("root_path", ""), scope["path"]
    return {**scope, "root_path": "", "path": path if path.startswith(prefix) else prefix + path}


def _announced(scope: Scope) -> int:
    """Return the announced length of a body: 0 without a body, ``sys.maxsize`` if the length is not announced."""
    headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
    if b"transfer-encoding" in headers:
        return sys.maxsize
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else sys.maxsize


def _message(part: HttpHead | bytes) -> Message:
    if isinstance(part, HttpHead):
        return {"type": "http.response.start", "status": part.status, "headers": list(part.headers)}
    return {"type": "http.response.body", "body": part, "more_body": True}


async def _send(send: Send, reply: HttpReply) -> None:
    await send(_message(reply.head))
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


def _refusal(status: int, detail: str) -> HttpReply:
    answer = json_response({"detail": detail}, status, {"Retry-After": "1"} if status in (429, 503) else None)
    return HttpReply(HttpHead(status, tuple(answer.raw_headers)), bytes(answer.body))
