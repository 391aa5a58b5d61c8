"""Sessions: a client's sign of life."""

from typing import Any

from twinkle_client.protocol.base import Wire


class CreateSessionRequest(Wire):
    metadata: dict[str, Any] | None = None


class CreateSessionResponse(Wire):
    session_id: str


class SessionHeartbeatRequest(Wire):
    session_id: str


class SessionHeartbeatResponse(Wire):
    pass


class FinishSessionRequest(Wire):
    """Its adapters leave the device and are kept as checkpoints; its processors end."""

    session_id: str


class FinishSessionResponse(Wire):
    pass
