"""What the application says of itself at /openapi.json: handlers read their bodies themselves, so theirs are added.

The schemas are those of the types that the handlers parse with. Bodies that are not JSON are named by their media type.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from twinkle.server.http.requests import PREFIX
from twinkle.server.protocols.openai.requests import ChatRequest, CompletionRequest
from twinkle.server.wire import requests, sample_requests
from twinkle.server.wire.custom_losses import CreateCustomLossRequest
from twinkle_client import types

__all__ = ["describe_bodies"]

# By path; all of them are posted.
_BODIES: Mapping[str, type[BaseModel]] = {
    f"{PREFIX}/asample": sample_requests.AsampleRequest,
    f"{PREFIX}/cancel_future": sample_requests.CancelFutureRequest,
    f"{PREFIX}/chat/completions": ChatRequest,
    f"{PREFIX}/client/config": requests.ClientConfigRequest,
    f"{PREFIX}/client/dynamic_config": requests.ClientConfigRequest,
    f"{PREFIX}/completions": CompletionRequest,
    f"{PREFIX}/create_custom_loss": CreateCustomLossRequest,
    f"{PREFIX}/create_model": requests.CreateModelRequest,
    f"{PREFIX}/create_sampling_session": sample_requests.CreateSamplingSessionRequest,
    f"{PREFIX}/create_session": requests.CreateSessionRequest,
    f"{PREFIX}/get_info": requests.GetInfoRequest,
    f"{PREFIX}/join_sampling_session": sample_requests.JoinSamplingSessionRequest,
    f"{PREFIX}/load_weights": requests.LoadWeightsRequest,
    f"{PREFIX}/model/{{model}}/twinkle/add_adapter_to_model": types.AddAdapterRequest,
    f"{PREFIX}/model/{{model}}/twinkle/remove_adapter": types.RemoveAdapterRequest,
    f"{PREFIX}/optim_step": requests.OptimStepRequest,
    f"{PREFIX}/retrieve_future": sample_requests.RetrieveFutureRequest,
    f"{PREFIX}/retrieve_futures": sample_requests.RetrieveFuturesRequest,
    f"{PREFIX}/save_weights": requests.SaveWeightsRequest,
    f"{PREFIX}/save_weights_for_sampler": requests.SaveWeightsForSamplerRequest,
    f"{PREFIX}/session_heartbeat": requests.SessionHeartbeatRequest,
    f"{PREFIX}/sessions/{{session_id}}/finish": requests.FinishSessionRequest,
    f"{PREFIX}/twinkle/finish_session": types.FinishSessionRequest,
    f"{PREFIX}/twinkle/session_heartbeat": types.SessionHeartbeatRequest,
    f"{PREFIX}/twinkle/weights_info": types.WeightsInfoRequest,
    f"{PREFIX}/unload_model": requests.UnloadModelRequest,
    f"{PREFIX}/weights_info": requests.WeightsInfoRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
_PROTOBUF = (f"{PREFIX}/forward_backward",)


def describe_bodies(app: FastAPI) -> None:
    """Takes the place of FastAPI's own description, which is made when somebody first asks for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents


def _described(document: dict[str, Any]) -> dict[str, Any]:
    """Only paths that there are: areas may be left out of an application."""
    paths = document["paths"]
    types_used = sorted({_BODIES[path] for path in paths if path in _BODIES}, key=lambda model: model.__qualname__)
    references, definitions = models_json_schema(
        [(model, "validation") for model in types_used], ref_template="#/components/schemas/{model}"
    )
    for path, operations in paths.items():
        if path in _BODIES:
            _add(operations["post"], "application/json", references[_BODIES[path], "validation"])
        elif path in _PROTOBUF:
            _add(operations["post"], "application/x-protobuf", {"type": "string", "format": "binary"})
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    document["components"]["schemas"] = {**schemas, **definitions.get("$defs", {})}
    return document


def _add(operation: dict[str, Any], media_type: str, schema: Mapping[str, Any]) -> None:
    operation["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
