"""Compatibility path: the types of a server's reports about itself; see :mod:`twinkle_client.protocol.sessions`."""

from twinkle_client.protocol.base import ErrorResponse
from twinkle_client.protocol.sessions import (
    CapacityInfoResponse,
    DeepHealthResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    ServerWeightsInfoResponse,
    SupportedModel,
)

__all__ = [
    "CapacityInfoResponse",
    "DeepHealthResponse",
    "ErrorResponse",
    "GetServerCapabilitiesResponse",
    "HealthResponse",
    "ServerWeightsInfoResponse",
    "SupportedModel",
]
