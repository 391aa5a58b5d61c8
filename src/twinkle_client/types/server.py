"""Compatibility path: the types of a server's reports about itself; see :mod:`twinkle_client.protocol.sessions`."""

from twinkle_client.protocol.base import ErrorResponse
from twinkle_client.protocol.runs import CheckpointPathResponse
from twinkle_client.protocol.sessions import (
    CapacityInfoResponse,
    DeepHealthResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    ModelInfoResponse,
    ServerWeightsInfoResponse,
    SupportedModel,
)

__all__ = [
    "CapacityInfoResponse",
    "CheckpointPathResponse",
    "DeepHealthResponse",
    "ErrorResponse",
    "GetServerCapabilitiesResponse",
    "HealthResponse",
    "ModelInfoResponse",
    "ServerWeightsInfoResponse",
    "SupportedModel",
]
