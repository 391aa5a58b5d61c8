"""Health: is it alive, is it ready, is everything in it all right. Nobody here waits for the compute thread."""

from fastapi import APIRouter, Request, Response

from twinkle.server.gateway.fleet import ModelReport, stopped_in
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.requests import PREFIX, gateway_of, json_response

router = APIRouter(prefix=PREFIX)


@router.get("/healthz")
async def live(request: Request) -> Response:
    """Whether the process answers and its loops run: one that does not, or whose do not, is to be restarted."""
    failure = failure_of(gateway_of(request))
    if failure is not None:
        return json_response({"status": "failed", "detail": failure}, 503)
    return json_response({"status": "ok"})


@router.get("/healthz/ready")
async def ready(request: Request) -> Response:
    """Whether to send clients here: not while adapters are brought back after a restart, nor while it ends."""
    gateway = gateway_of(request)
    if gateway.stopping:
        return json_response({"ready": False, "detail": "the server is shutting down"}, 503)
    reports = await gateway.fleet.reports()
    recovering = [name for name, report in reports.items() if report.recovering]
    if recovering:
        return json_response({"ready": False, "detail": f"recovering: {', '.join(recovering)}"}, 503)
    return json_response({"ready": True, "detail": "serving"})


@router.get("/healthz/deep")
async def deep(request: Request) -> Response:
    """Of every model: whether its loops run, and whether its device is stuck."""
    models = await models_health(gateway_of(request))
    healthy = all(model["healthy"] for model in models.values())
    return json_response({"healthy": healthy, "models": models}, 200 if healthy else 503)


def failure_of(gateway: Gateway) -> str | None:
    """What in this process does not run though it should, and will not until it is restarted."""
    stopped = {name: stopped_in(entry, ending=gateway.stopping) for name, entry in gateway.services.items()}
    return "; ".join(f"{name}: {what}" for name, what in stopped.items() if what is not None) or None


async def models_health(gateway: Gateway) -> dict[str, dict[str, object]]:
    return {name: health_of(report) for name, report in (await gateway.fleet.reports()).items()}


def health_of(report: ModelReport) -> dict[str, object]:
    return {"healthy": report.healthy, "detail": report.detail}
