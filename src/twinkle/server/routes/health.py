"""Health: is it alive, is it ready, is everything in it all right. Nobody here waits for the compute thread."""

from fastapi import APIRouter, Request, Response

from twinkle.server.gateway import Gateway, Services
from twinkle.server.routes.http import PREFIX, gateway_of, json_response

router = APIRouter(prefix=PREFIX)


@router.get("/healthz")
async def live() -> Response:
    """Whether the process answers: one that does not is to be restarted."""
    return json_response({"status": "ok"})


@router.get("/healthz/ready")
async def ready(request: Request) -> Response:
    """Whether to send clients here: not while adapters are brought back after a restart, nor while it ends."""
    gateway = gateway_of(request)
    if gateway.stopping:
        return json_response({"ready": False, "detail": "the server is shutting down"}, 503)
    recovering = [name for name, entry in gateway.services.items() if entry.training.recovering]
    if recovering:
        return json_response({"ready": False, "detail": f"recovering: {', '.join(recovering)}"}, 503)
    return json_response({"ready": True, "detail": "serving"})


@router.get("/healthz/deep")
async def deep(request: Request) -> Response:
    """Of every model: whether its loops run, and whether its device is stuck."""
    models = models_health(gateway_of(request))
    healthy = all(model["healthy"] for model in models.values())
    return json_response({"healthy": healthy, "models": models}, 200 if healthy else 503)


def models_health(gateway: Gateway) -> dict[str, dict[str, object]]:
    longest = gateway.config.telemetry.stuck_step_seconds
    return {name: model_health(entry, longest) for name, entry in gateway.services.items()}


def model_health(entry: Services, longest_step: float) -> dict[str, object]:
    seconds = entry.training.step_seconds
    if not entry.training.alive:
        return {"healthy": False, "detail": "training has stopped"}
    if entry.sampling is not None and not entry.sampling.alive:
        return {"healthy": False, "detail": "sampling has stopped"}
    if seconds > longest_step:
        return {"healthy": False, "detail": f"a step has been running for {seconds:.0f} s"}
    return {"healthy": True, "detail": "trains" if entry.sampling is None else "trains and samples"}
