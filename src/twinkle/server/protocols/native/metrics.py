"""Curves of training runs, of all protocols: what the server measured, and what clients log beside it."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.errors import InvalidInputError
from twinkle.server.http.requests import JSON_BYTES, PREFIX, body_of, gateway_of
from twinkle.server.metric_points import MetricPoint
from twinkle.server.protocols.native.gateway_routes import wire_response
from twinkle.server.protocols.native.http import native_tenant_of
from twinkle.server.wire import fields
from twinkle_client import types

router = APIRouter(prefix=f"{PREFIX}/twinkle/training_runs/{{run_id}}/metrics")

Since = Annotated[int, Query(ge=0, lt=2**63)]
Limit = Annotated[int, Query(ge=1, le=4096)]


@router.get("")
async def metrics(request: Request, run_id: str, since: Since = 0, limit: Limit = 1024) -> Response:
    """Points after number ``since``, oldest first."""
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    run = await gateway.run(run_id, tenant_id)
    points = await gateway.store.run_metrics.since(run.run_id, since, limit + 1)
    answer = partial(_response, points[:limit], since, len(points) > limit)
    return await gateway.reading.in_thread(tenant_id, answer)


@router.post("")
async def log_metrics(request: Request, run_id: str) -> Response:
    """Values of the client's own, of a run that may have ended."""
    tenant_id = await native_tenant_of(request)
    gateway = gateway_of(request)
    run = await gateway.run(run_id, tenant_id)
    logged = fields.parse(types.LogMetricsRequest, await body_of(request, JSON_BYTES))
    for name in logged.values:
        if not name.isprintable():
            raise InvalidInputError("values", name, "names of printable characters")
    training = gateway.services[run.model_name].training if run.model_name in gateway.services else None
    if logged.step is None and training is not None:
        await training.write_metrics()  # the newest step may not be on record yet
    point = await gateway.store.run_metrics.log(run.run_id, logged.step, logged.values, time.time())
    return wire_response(_point(point))


def _response(points: Sequence[MetricPoint], since: int, more: bool) -> Response:
    last = points[-1].number if points else since
    return wire_response(types.RunMetricsResponse(points=[_point(each) for each in points], next=last, more=more))


def _point(point: MetricPoint) -> types.MetricPoint:
    return types.MetricPoint(
        number=point.number, time=point.time, source=point.source, step=point.step, values=dict(point.values)
    )
