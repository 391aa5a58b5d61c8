"""Metrics for operators, in the form that Prometheus reads. Tenants' keys open nothing here."""

from functools import partial

from fastapi import APIRouter, Request, Response

from twinkle.errors import NotFoundError, UnauthorizedError
from twinkle.server.config.sections import names_this_machine
from twinkle.server.gateway.reporting import Telemetry
from twinkle.server.http.requests import bearer_of, gateway_of, is_loopback
from twinkle.server.telemetry.metrics import render

router = APIRouter()

# Whoever passes a request on for somebody else says so in one of these.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


def telemetry_of(request: Request) -> Telemetry:
    telemetry: Telemetry = request.app.state.telemetry
    return telemetry


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    telemetry = telemetry_of(request)
    _check_reader(request, telemetry)
    gateway = gateway_of(request)
    families = await telemetry.families(gateway)
    rendered = partial(render, families, request.headers.get("accept", ""))
    body, content_type = await gateway.tenants.pools.monitoring.in_thread("", rendered)
    return Response(body, headers={"Content-Type": content_type})


def _check_reader(request: Request, telemetry: Telemetry) -> None:
    """The token always does; without it callers on this machine, where nobody stands in between."""
    who = telemetry.config.metrics
    if who == "off":
        raise NotFoundError("page", "/metrics")
    if telemetry.has_token(bearer_of(request)):
        return
    if who == "local" and _is_local(request):
        return
    raise UnauthorizedError("the token in telemetry.metrics_token_file, as Authorization: Bearer")


def _is_local(request: Request) -> bool:
    """A proxy on this machine also calls from here: a server that has a public_url trusts no address."""
    if gateway_of(request).config.public_url is not None or any(name in request.headers for name in _FORWARDED):
        return False
    return is_loopback(request) and names_this_machine(request.url.hostname or "")
