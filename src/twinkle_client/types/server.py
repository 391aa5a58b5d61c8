"""What a server says of itself."""

from typing import Any

from twinkle_client.protocol.base import Wire


class SupportedModel(Wire):
    model_name: str


class GetServerCapabilitiesResponse(Wire):
    supported_models: list[SupportedModel]


class HealthResponse(Wire):
    status: str


class DeepHealthResponse(Wire):
    healthy: bool
    models: dict[str, dict[str, Any]]


class CapacityInfoResponse(Wire):
    """Adapters that the asking tenant may have, has, and may still create."""

    max_loras: int
    used_loras: int
    free_loras: int


class ServerWeightsInfoResponse(Wire):
    """For programs that name it: ``weights_info`` answers with a :class:`WeightsInfoResponse`."""

    weights_info: Any


class ErrorResponse(Wire):
    detail: str
