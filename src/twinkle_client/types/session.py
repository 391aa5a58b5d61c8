"""Compatibility path: the types of sessions; see :mod:`twinkle_client.protocol.sessions`."""

from twinkle_client.protocol.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    FinishSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)

__all__ = [
    "CreateSessionRequest",
    "CreateSessionResponse",
    "FinishSessionRequest",
    "FinishSessionResponse",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
]
