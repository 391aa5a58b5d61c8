"""Calls of replicas in other processes through Serve handles, and the error when a replica is gone."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from twinkle.server.http.asgi_relay import HttpHead, HttpRequest
from twinkle.server.runtime.ray.layout import ServeAddress
from twinkle.server.runtime.ray.replica import Replica, ReplicaGoneError, raised

P = ParamSpec("P")
T = TypeVar("T")


def _there(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["RemoteReplica", P], Coroutine[Any, Any, T]]:
    """Return a method that calls the method of the same name in the replica's process."""

    async def call(self: "RemoteReplica", /, *arguments: P.args, **options: P.kwargs) -> T:
        answer: T = raised(await self._asked(method.__name__, *arguments, **options))
        return answer

    return call


class RemoteReplica:
    """One replica in another process. Its handle is made at the first call, because applications start in any order."""

    def __init__(self, name: str, address: ServeAddress) -> None:
        self._name = name
        self._address = address

    answer = _there(Replica.answer)
    metrics = _there(Replica.metrics)
    report = _there(Replica.report)
    of_tenant = _there(Replica.of_tenant)
    release_session = _there(Replica.release_session)
    evict_run = _there(Replica.evict_run)
    batch = _there(Replica.batch)
    end_session = _there(Replica.end_session)

    async def stream(self, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
        parts = None
        try:
            parts = self._handle.options(stream=True).stream.remote(request)
            async for part in parts:
                yield part
        except (RayError, RayServeException) as error:
            raise self._gone(error) from error
        finally:
            if parts is not None:
                parts.cancel()

    @cached_property
    def _handle(self) -> DeploymentHandle[Any]:
        return serve.get_deployment_handle(self._address.deployment, self._address.application)

    async def _asked(self, method: str, *arguments: object, **options: object) -> Any:
        response = None
        try:
            response = getattr(self._handle, method).remote(*arguments, **options)
            return await response
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            raise
        except (RayError, RayServeException) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> Exception:
        """Return ReplicaGoneError if the error means that; any other error is a bug, and is returned unchanged."""
        if isinstance(error, RayActorError | RayServeException):
            return ReplicaGoneError(f"{self._name} is being replaced")
        return error
