"""Replicas in other processes, by Serve handle, and how a call ends when one is gone."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from twinkle.server.gateway.fleet import ModelReport, TenantReport
from twinkle.server.http.asgi_relay import HttpHead, HttpReply, HttpRequest
from twinkle.server.runtime.ray.layout import ReplicaAddress
from twinkle.server.runtime.ray.replica import ReplicaGoneError, raised
from twinkle.server.types import RunRecord, SessionRecord


class RemoteReplica:
    """One replica. Its handle is made at the first use: applications start in any order."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self._made: DeploymentHandle[Any] | None = None

    @property
    def _handle(self) -> DeploymentHandle[Any]:
        if self._made is None:
            self._made = serve.get_deployment_handle(self.address.deployment, self.address.application)
        return self._made

    async def answer(self, request: HttpRequest) -> HttpReply:
        return cast("HttpReply", await self._asked("answer", request))

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

    async def metrics(self) -> Sequence[Metric]:
        return cast("Sequence[Metric]", await self._asked("metrics"))

    async def report(self) -> ModelReport:
        return cast("ModelReport", await self._asked("report"))

    async def of_tenant(self, tenant_id: str) -> TenantReport:
        return cast("TenantReport", await self._asked("of_tenant", tenant_id))

    async def release_session(self, session: SessionRecord, state: str) -> None:
        await self._asked("release_session", session, state)

    async def park_run(self, run: RunRecord, why: str) -> None:
        await self._asked("park_run", run, why)

    async def batch(self, tenant_id: str, session_id: str, processor_id: str, number: int) -> list[dict[str, Any]]:
        return cast(
            "list[dict[str, Any]]", raised(await self._asked("batch", tenant_id, session_id, processor_id, number))
        )

    async def end_session(self, session_id: str) -> None:
        await self._asked("end_session", session_id)

    async def _asked(self, method: str, *arguments: object) -> Any:
        response = None
        try:
            response = getattr(self._handle, method).remote(*arguments)
            return await response
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            raise
        except (RayError, RayServeException) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> Exception:
        """Return the error to raise: that the replica is away, if that is what it means. The rest is a bug, a 500."""
        if isinstance(error, RayActorError | RayServeException):
            return ReplicaGoneError(f"{self.address.deployment} is being replaced")
        return error
