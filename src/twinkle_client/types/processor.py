"""Compatibility path: the types of processors; see :mod:`twinkle_client.protocol.sessions`."""

from twinkle_client.protocol.sessions import (
    ProcessorCallRequest,
    ProcessorCallResponse,
    ProcessorCreateRequest,
    ProcessorCreateResponse,
    ProcessorHeartbeatRequest,
    ProcessorHeartbeatResponse,
    ProcessorType,
)

__all__ = [
    "ProcessorCallRequest",
    "ProcessorCallResponse",
    "ProcessorCreateRequest",
    "ProcessorCreateResponse",
    "ProcessorHeartbeatRequest",
    "ProcessorHeartbeatResponse",
    "ProcessorType",
]
